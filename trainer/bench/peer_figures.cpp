#include "trainer/bench/peer_figures.h"

#include <algorithm>

namespace temper::trainer::bench {
namespace {

constexpr double kReadBytes = 23e9, kTileFlops = 5.8e12;
constexpr double kFmaFlops = 302e9;  // what a library's fp32 product reaches, twice 151

// Which unit the figure was reached with: a machine without tiles cannot give those of tiles.
enum class Unit { kFma, kTiles };

struct Figure {
  const char* peer;
  const char* work;
  int batch;
  int context;  // tokens already read, decode only
  Unit unit;
  double tokens_s;
};
constexpr Figure kFigures[] = {
    {"torch", "decode", 1, 128, Unit::kTiles, 26},
    {"torch", "decode", 4, 128, Unit::kTiles, 73},
    {"torch", "decode", 16, 128, Unit::kTiles, 230},
    {"torch", "step", 0, 0, Unit::kFma, 184},
    {"llama.cpp", "decode", 1, 512, Unit::kFma, 40},
    {"llama.cpp", "decode", 4, 512, Unit::kFma, 66},
    {"llama.cpp", "decode", 16, 512, Unit::kFma, 90},
    {"llama.cpp", "prefill", 0, 0, Unit::kFma, 586},
    {"vllm", "decode", 4, 128, Unit::kTiles, 170},
    {"vllm", "decode", 16, 128, Unit::kTiles, 515},
    {"vllm", "decode", 64, 128, Unit::kTiles, 905},
    {"vllm", "prefill", 0, 0, Unit::kTiles, 5000},
};

// SmolLM2-135M in bf16.
constexpr double kWeightBytes = 269e6, kCacheBytes = 30 * 2 * 3 * 64 * 2;
constexpr double kFlops = 0.269e9, kHeadFlops = 2.0 * 576 * 49152;  // of one token forward, the head's part of it

double SecondsPerToken(const Figure& figure, double read_bytes_s, double flops_s) {
  const std::string work = figure.work;
  if (work == "step") return 3 * kFlops / flops_s;
  if (work == "prefill") return (kFlops - kHeadFlops) / flops_s;
  const double batch = figure.batch;
  return std::max((kWeightBytes + batch * figure.context * kCacheBytes) / batch / read_bytes_s, kFlops / flops_s);
}

}  // namespace

double ExpectedTokensPerSecond(const std::string& peer, const std::string& work, int batch, const MachineRates& here) {
  for (const Figure& f : kFigures) {
    if (f.peer != peer || f.work != work || (f.batch != 0 && f.batch != batch)) continue;
    const bool tiles = f.unit == Unit::kTiles;
    const double there = SecondsPerToken(f, kReadBytes, tiles ? kTileFlops : kFmaFlops);
    // Tiles are taken to be faster than multiply-adds by as much as there.
    const double flops_s = here.fma_flops_s * (tiles && here.tiles ? kTileFlops / kFmaFlops : 1);
    return f.tokens_s * there / SecondsPerToken(f, here.read_bytes_s, flops_s);
  }
  return 0;
}

}  // namespace temper::trainer::bench
