#include "trainer/bench/roofline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "engine/buffer.h"
#include "engine/kv_pool.h"
#include "engine/paged_forward.h"
#include "engine/parameters.h"
#include "engine/train_pass.h"
#include "engine/tree_batch.h"
#include "engine/weights.h"
#include "trainer/adamw.h"
#include "trainer/bench/counted_kernels.h"
#include "trainer/bench/floors.h"

namespace temper::trainer::bench {
namespace {

using engine::ModelConfig;

engine::TreeBatch Rows(int rows, int length, int vocab) {
  engine::TreeBuilder builder;
  const float t = 1;
  for (int r = 0; r < rows; ++r) {
    std::vector<int32_t> ids(length);
    for (int i = 0; i < length; ++i) ids[i] = (i * 7919 + r * 104729 + 3) % vocab;
    builder.AddRow(ids, std::span(&t, 1));
  }
  return builder.Build(nullptr);
}

// What a part did, sample by sample, and the machine's rates in the same samples.
struct Samples {
  double operations = 0, bytes = 0;  // the same in every sample
  std::vector<double> seconds, peak, bandwidth;
  // The least that it could take, by its arithmetic or by its bytes.
  double ArithmeticSeconds(size_t i) const { return operations / peak[i]; }
  double MemorySeconds(size_t i) const { return bytes / bandwidth[i]; }
  double LeastSeconds(size_t i) const { return std::max(ArithmeticSeconds(i), MemorySeconds(i)); }
};

Row RowOf(const Samples& s, const std::string& work, const std::string& name) {
  const bool arithmetic = s.ArithmeticSeconds(0) > s.MemorySeconds(0);
  Row row{.work = work, .name = name, .unit = arithmetic ? "GFLOP/s" : "GB/s"};
  row.reference = arithmetic ? "peak of fp32 multiply-adds" : "read bandwidth of cold memory";
  const double done = arithmetic ? s.operations : s.bytes;
  std::vector<double> ratios;
  for (size_t i = 0; i < s.seconds.size(); ++i) {
    row.samples.push_back(done / s.seconds[i] / 1e9);
    ratios.push_back(s.LeastSeconds(i) / s.seconds[i]);
  }
  row.ours = Median(row.samples);
  row.theirs = Median(arithmetic ? s.peak : s.bandwidth) / 1e9;
  row.ratio = Median(ratios);
  return row;
}

// A part that no kernel counts: its time is taken as a whole.
struct Whole {
  const char* name;
  double bytes;
};

// Where the time of `run` goes. `run` gets what times its whole parts, by their place in `wholes`, and may fill in their bytes.
using TimeWhole = std::function<void(size_t whole, const std::function<void()>& body)>;
Status RunParts(engine::Engine& engine, const Options& options, const std::string& name, double tokens, std::vector<Whole>& wholes,
                const std::function<Status(const TimeWhole&)>& run, const std::function<void(const Row&)>& emit) {
  const std::string work = "roofline";
  const int threads = engine.threads().count();
  engine::Buffer cold;
  constexpr size_t kCold = size_t{160} << 20;
  std::fill_n(cold.Get<std::byte>(kCold), kCold, std::byte{1});
  // The parts that kernels count, those timed as a whole, and the rest.
  const size_t rest = kParts + wholes.size(), all = rest + 1;
  std::vector<Samples> parts(all);
  std::vector<double> total, least;
  for (int sample = -1; sample < options.samples; ++sample) {  // the first warms up
    const double peak = PeakFlops(engine, options.clock);
    const double bandwidth = ReadBandwidth(engine, {cold.as<std::byte>(), kCold}, options.clock);
    std::vector<double> ticks(all, 0);
    (void)CountedKernels::Take();
    const double begin = Now(options.clock), begin_ticks = CountedKernels::Ticks();
    RETURN_IF_ERROR(run([&](size_t whole, const std::function<void()>& body) {
      const double from = CountedKernels::Ticks();
      body();
      ticks[kParts + whole] = CountedKernels::Ticks() - from;
    }));
    const double all_ticks = CountedKernels::Ticks() - begin_ticks, seconds = Now(options.clock) - begin;
    const auto counts = CountedKernels::Take();
    if (sample < 0) continue;
    for (int i = 0; i < kParts; ++i) {
      ticks[i] = counts[i].ticks / threads;
      parts[i].operations = counts[i].operations;
      parts[i].bytes = counts[i].bytes;
    }
    for (size_t i = 0; i < wholes.size(); ++i) parts[kParts + i].bytes = wholes[i].bytes;
    ticks[rest] = all_ticks;
    for (size_t i = 0; i < rest; ++i) ticks[rest] -= ticks[i];
    double sum = 0;
    for (size_t i = 0; i < all; ++i) {
      Samples& part = parts[i];
      part.seconds.push_back(seconds * ticks[i] / all_ticks);
      part.peak.push_back(peak);
      part.bandwidth.push_back(bandwidth);
      sum += part.LeastSeconds(part.seconds.size() - 1);
    }
    total.push_back(seconds);
    least.push_back(sum);
  }
  const double whole = Median(total);
  for (size_t i = 0; i < rest; ++i) {
    const Samples& part = parts[i];
    if (part.bytes == 0) continue;
    const char* of = i < kParts ? PartName(static_cast<Part>(i)) : wholes[i - kParts].name;
    emit(RowOf(part, work,
               fmt::format("{}, {}: {:.1f} %, {:.2f} GFLOP, {:.2f} GB", name, of, 100 * Median(part.seconds) / whole, part.operations / 1e9,
                           part.bytes / 1e9)));
  }
  Row row{.work = work, .name = "", .unit = "ms", .reference = "all of it"};
  row.name = fmt::format("{}, the rest (copies, pages, waiting): {:.1f} %", name, 100 * Median(parts[rest].seconds) / whole);
  for (const double s : parts[rest].seconds) row.samples.push_back(s * 1e3);
  row.ours = Median(row.samples);
  row.theirs = whole * 1e3;
  row.ratio = row.ours / row.theirs;
  emit(row);
  std::vector<double> reached, limits;
  for (size_t i = 0; i < total.size(); ++i) {
    reached.push_back(tokens / total[i]);
    limits.push_back(tokens / least[i]);
  }
  emit(Beside(work, name, "tokens/s", "every part at its limit, one after the other", reached, limits));
  return Status::Ok();
}

}  // namespace

Status RunRoofline(engine::Engine& engine, const Options& options, const ModelConfig& c,
                   const std::function<void(const Row&)>& emit) {
  const auto counted = CountedKernels::MakeEngine(engine, c.vocab);
  engine::Parameters params = engine::InitParameters(c, 1);
  {
    engine::Buffer memory;
    const engine::ComputeWeights weights = engine::Repack(params, options.profile, counted->threads(), memory);
    CountedKernels::Enter(/*backward=*/false);
    const auto run = [&](int batch, int start, int tokens) {
      const int pages_each = (start + tokens + engine::kPagePositions - 1) / engine::kPagePositions;
      engine::KvPool pool(c, options.profile, batch * pages_each);
      engine::PagedForward pass(*counted, pool);
      std::vector<int32_t> ids(tokens);
      for (int i = 0; i < tokens; ++i) ids[i] = (i * 7919 + 3) % c.vocab;
      std::vector<int32_t> pages(static_cast<size_t>(batch) * pages_each);
      for (int32_t& page : pages) page = pool.Allocate();
      const int32_t last[] = {tokens - 1};
      std::vector<engine::PagedSequence> sequences;
      for (int b = 0; b < batch; ++b) {
        sequences.push_back({ids, start, std::span(pages).subspan(static_cast<size_t>(b) * pages_each, pages_each), last, 1});
      }
      std::vector<Whole> none;
      const std::string name = tokens > 1 ? fmt::format("prefill, {} tokens", tokens) : fmt::format("decode, batch {}", batch);
      return RunParts(engine, options, name, static_cast<double>(batch) * tokens, none, [&](const TimeWhole&) {
        pass.Run(weights, sequences);
        return Status::Ok();
      }, emit);
    };
    RETURN_IF_ERROR(run(1, 0, options.prefill_tokens));
    for (const int batch : options.batches) RETURN_IF_ERROR(run(batch, kDecodeContext, 1));
  }
  engine::Gradients grads(c);
  AdamW adamw(c);
  const AdamWOptions adam;
  const engine::TreeBatch tree = Rows(options.step_rows, options.step_length, c.vocab);
  const std::vector<float> coef(tree.size(), 1.0f / static_cast<float>(tree.size()));
  engine::TrainPass pass(*counted);
  engine::Buffer memory;
  const auto numbers = static_cast<double>(params.flat().size());
  enum { kRepack, kZero };
  std::vector<Whole> wholes = {{"weights rounded to panels", 0}, {"gradients set to zero", numbers * 4}};
  return RunParts(engine, options, fmt::format("the step, {} rows of {} tokens", options.step_rows, options.step_length),
                  tree.size(), wholes, [&](const TimeWhole& timed) -> Status {
    engine::ComputeWeights weights;
    timed(kRepack, [&] { weights = engine::Repack(params, options.profile, counted->threads(), memory); });
    wholes[kRepack].bytes = numbers * 4 + static_cast<double>(weights.bytes().size());
    CountedKernels::Enter(/*backward=*/false);
    RETURN_IF_ERROR(pass.Forward(weights, tree).status());
    timed(kZero, [&] { grads.SetZero(); });
    CountedKernels::Enter(/*backward=*/true);
    pass.Backward(coef, grads);
    return adamw.Step(*counted, adam, grads, params).status();
  }, emit);
}

Status RunHead(engine::Engine& engine, const Options& options, const ModelConfig& model,
               const std::function<void(const Row&)>& emit) {
  struct Case {
    int vocab, tokens;
  };
  // One thin layer below the head; the memory of the same with next to no vocabulary is not the head's.
  const auto config = [&](int vocab) {
    ModelConfig c = model;
    c.layers = 1;
    c.ffn = 32;
    c.vocab = vocab;
    return c;
  };
  struct Run {
    std::array<Count, kParts> counts;
    double seconds_a_tick;
    size_t bytes;
  };
  const auto run = [&](const ModelConfig& c, int tokens, int samples) -> Result<std::vector<Run>> {
    const auto counted = CountedKernels::MakeEngine(engine, c.vocab);
    const auto weights = engine::ComputeWeights::FromParameters(engine::InitParameters(c, 1), options.profile);
    const engine::TreeBatch tree = Rows(1, tokens, c.vocab);
    const std::vector<float> coef(tree.size(), 1.0f / static_cast<float>(tree.size()));
    engine::TrainPass pass(*counted);
    engine::Gradients grads(c);
    std::vector<Run> runs;
    for (int i = -1; i < samples; ++i) {  // the first warms up
      (void)CountedKernels::Take();
      const double begin = Now(options.clock), begin_ticks = CountedKernels::Ticks();
      CountedKernels::Enter(/*backward=*/false);
      RETURN_IF_ERROR(pass.Forward(weights, tree).status());
      CountedKernels::Enter(/*backward=*/true);
      pass.Backward(coef, grads);
      const double ticks = CountedKernels::Ticks() - begin_ticks;
      if (i >= 0 || samples == 0) runs.push_back({CountedKernels::Take(), (Now(options.clock) - begin) / ticks, pass.bytes()});
    }
    return runs;
  };
  std::vector<Case> cases;  // a longer row for a smaller vocabulary; of each a short one, whose logits are kept
  for (const int vocab : options.head_vocabs) {
    const int most = vocab > 65536 ? options.head_tokens / 2 : options.head_tokens;
    cases.push_back({vocab, most / 4});
    cases.push_back({vocab, most});
  }
  for (const Case& at : cases) {
    ASSIGN_OR_RETURN(const std::vector<Run> without, run(config(64), at.tokens, 0));
    ASSIGN_OR_RETURN(const std::vector<Run> runs, run(config(at.vocab), at.tokens, options.samples));
    for (const bool backward : {false, true}) {
      Samples samples;
      std::vector<double> a_token;
      for (const Run& r : runs) {
        const Count& count = r.counts[static_cast<size_t>(backward ? Part::kHeadBackward : Part::kHeadForward)];
        samples.operations = count.operations;
        samples.bytes = count.bytes;
        samples.seconds.push_back(count.ticks * r.seconds_a_tick / engine.threads().count());
        samples.peak.push_back(PeakFlops(engine, options.clock));
        samples.bandwidth.push_back(1e12);  // its arithmetic takes far longer than its bytes
        a_token.push_back(samples.seconds.back() / at.tokens);
      }
      emit(RowOf(samples, "head",
                 fmt::format("V {}, {} tokens, {}: {:.0f} us a token, {:.0f} MFLOP", at.vocab, at.tokens,
                             backward ? "backward" : "forward", Median(a_token) * 1e6, samples.operations / at.tokens / 1e6)));
    }
    Row row{.work = "head", .name = fmt::format("V {}, {} tokens, memory", at.vocab, at.tokens), .unit = "MiB"};
    row.reference = "fp32 logits of all tokens (less is better)";
    row.ours = static_cast<double>(runs.back().bytes - without.back().bytes) / (1 << 20);
    row.theirs = 4.0 * at.tokens * at.vocab / (1 << 20);
    row.ratio = row.ours / row.theirs;
    row.samples = {row.ours};
    emit(row);
  }
  return Status::Ok();
}

}  // namespace temper::trainer::bench
