#include "trainer/bench/commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>

#include "common/json.h"
#include "common/process.h"
#include "common/strings.h"
#include "trainer/bench/engine_bench.h"
#include "trainer/bench/tree_bench.h"
#include "trainer/bench/tree_sets.h"

namespace temper::trainer {
namespace {

constexpr char kUsage[] =
    "usage: temper bench engine [--json] [--only gemm,decode,prefill,attention,head,step,roofline,growth] [--samples N]\n"
    "                           [--clock wall|cpu] [--numerics bf16|f32] [--cpu auto|avx2|avx512|amx] [--threads N]\n"
    "                           [--batches 1,4,16,64] [--rows N] [--length N] [--context N] [--layers N]\n"
    "                           [--against torch,vllm,llama.cpp] [--peers DIR] [--modes float32,bfloat16,...] [--peers-use alike|best]\n";

constexpr char kTreeUsage[] =
    "usage: temper bench tree [MODEL] [--json] [--only grpo_short,grpo_long,think_dropped,row_per_call,compaction,sub_agents,nothing,budget]\n"
    "                         [--rows FILE] [--samples N] [--layers N] [--clock wall|cpu] [--numerics bf16|f32]\n"
    "                         [--cpu auto|avx2|avx512|amx] [--threads N] [--against torch] [--peers DIR] [--modes float32,bfloat16,...]\n"
    "                         [--peers-use alike|best]\n";

int BadUsage(const std::string& what, bool tree = false) {
  std::fprintf(stderr, "temper bench %s: %s\n%s", tree ? "tree" : "engine", what.c_str(), tree ? kTreeUsage : kUsage);
  return 2;
}

bool ParseCount(const char* text, int least, int most, int* out) {
  int64_t value = 0;
  if (!ParseInt(text, &value) || value < least || value > most) return false;
  *out = static_cast<int>(value);
  return true;
}

bool ParseWords(const std::string& text, const std::vector<std::string>& known, std::vector<std::string>* out, std::string* bad) {
  for (const std::string& word : Split(text, ',')) {
    if (std::find(known.begin(), known.end(), word) == known.end()) {
      *bad = word;
      return false;
    }
    out->push_back(word);
  }
  return true;
}

// "", or whether the ratio is what it is to be.
std::string Verdict(const bench::Row& row) {
  if (row.target == 0 || !row.note.empty()) return "";
  if (row.unit == "s") {
    const double apart = row.target - 1;
    return fmt::format("within {:.0f} %: {}", apart * 100, std::abs(row.ratio - 1) <= apart ? "met" : "missed");
  }
  const bool most = row.unit == "MiB";
  const bool met = most ? row.ratio <= row.target : row.ratio >= row.target;
  return fmt::format("{} {:.3g}: {}", most ? "at most" : "at least", row.target, met ? "met" : "missed");
}

void PrintRow(const char* bench, const bench::Row& row, const std::optional<bench::Sharing>& sharing, const std::string& cpu, const char* path,
              bool as_json) {
  if (!as_json) {
    if (sharing) {
      const std::string silent = sharing->silent_tokens ? fmt::format(", {} of them scored only", sharing->silent_tokens) : "";
      std::printf("%s: %lld tokens as rows%s, %lld as a tree (%.2fx); %.0f attention pairs, %.0f (%.2fx); predicted speed-up %.2f\n", row.name.c_str(),
                  static_cast<long long>(sharing->logical_tokens), silent.c_str(), static_cast<long long>(sharing->tree_tokens),
                  static_cast<double>(sharing->logical_tokens) / static_cast<double>(sharing->tree_tokens), sharing->logical_pairs,
                  sharing->tree_pairs, sharing->logical_pairs / sharing->tree_pairs, sharing->predicted);
    }
    std::string line = fmt::format("{:<10} {:<52} ", row.work, row.name);
    const int digits = row.unit == "s" ? 3 : 1;
    if (row.theirs > 0) {
      line += fmt::format("{:>10.{}f} {:<9} {:>10.{}f}  x{:.2f}  {}", row.ours, digits, row.unit, row.theirs, digits, row.ratio, row.reference);
    } else {
      line += row.reference;
    }
    for (const std::string& more : {row.peer.empty() ? "" : "(" + row.peer + ")", row.note, Verdict(row)}) {
      if (!more.empty()) line += "  " + more;
    }
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
    return;
  }
  JsonWriter w;
  w.BeginObject().Key("bench").String(bench).Key("case").String(row.work + ": " + row.name).Key("ours").Double(row.ours);
  w.Key("unit")
      .String(row.unit)
      .Key("reference")
      .String(row.reference)
      .Key("theirs")
      .Double(row.theirs)
      .Key("ratio")
      .Double(row.ratio);
  w.Key("samples").Doubles(row.samples).Key("cpu").String(cpu).Key("path").String(path);
  if (!row.peer.empty()) w.Key("peer").String(row.peer);
  if (!row.note.empty()) w.Key("note").String(row.note);
  if (row.target > 0) w.Key("target").Double(row.target);
  if (sharing) {
    w.Key("logical_tokens").Int(sharing->logical_tokens).Key("tree_tokens").Int(sharing->tree_tokens);
    w.Key("silent_tokens").Int(sharing->silent_tokens);
    w.Key("logical_pairs").Double(sharing->logical_pairs).Key("tree_pairs").Double(sharing->tree_pairs);
    w.Key("predicted").Double(sharing->predicted);
  }
  w.EndObject();
  std::printf("%s\n", w.text().c_str());
  std::fflush(stdout);
}

int RunEngine(int argc, char** argv) {
  bench::Options options;
  engine::EngineOptions with;
  bool as_json = false;
  std::string environments = TEMPER_PEERS_DIR;
  options.peer_script = TEMPER_PEERS;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--help" || arg == "-h") {
      std::printf(
          "%sMeasures the engine beside what this machine can do (read bandwidth, multiply-adds) and beside peers, in turn, and\n"
          "prints the median of the ratios. Peers run in the environments DIR/NAME that tests/setup_peers.sh makes (build/peers), capped\n"
          "to the instructions that ours uses, or with --peers-use best to none; what was reached: docs/engine_speed.md.\n",
          kUsage);
      return 0;
    }
    if (arg == "--json") {
      as_json = true;
      continue;
    }
    if (i + 1 == argc) return BadUsage("'" + arg + "' needs a value");
    const char* value = argv[++i];
    std::string bad;
    const auto count = [&](int least, int most, int* out) { return ParseCount(value, least, most, out); };
    bool good = true;
    if (arg == "--only") {
      if (!ParseWords(value, bench::Works(), &options.works, &bad)) {
        return BadUsage("--only: '" + bad + "' is not one of " + Join(bench::Works(), ", "));
      }
    } else if (arg == "--against") {
      if (!ParseWords(value, bench::Peers(), &options.peers, &bad)) {
        return BadUsage("--against: '" + bad + "' is not one of " + Join(bench::Peers(), ", "));
      }
    } else if (arg == "--clock") {
      if (std::string(value) != "wall" && std::string(value) != "cpu")
        return BadUsage("--clock: '" + std::string(value) + "' is neither wall nor cpu");
      options.clock = std::string(value) == "cpu" ? bench::Clock::kCpu : bench::Clock::kWall;
    } else if (arg == "--modes") {
      if (!ParseWords(value, bench::Modes(), &options.modes, &bad)) {
        return BadUsage("--modes: '" + bad + "' is not one of " + Join(bench::Modes(), ", "));
      }
    } else if (arg == "--batches") {
      options.batches.clear();
      for (const std::string& word : Split(value, ',')) {
        int batch = 0;
        if (!ParseCount(word.c_str(), 1, 64, &batch)) return BadUsage("--batches: '" + word + "' is not 1 to 64");
        options.batches.push_back(batch);
      }
    } else if (arg == "--peers") {
      environments = value;
    } else if (arg == "--peers-use") {
      if (std::string(value) != "alike" && std::string(value) != "best")
        return BadUsage("--peers-use: '" + std::string(value) + "' is neither alike nor best");
      options.best_peers = std::string(value) == "best";
    } else if (arg == "--numerics") {
      const auto parsed = engine::ParseProfile(value);
      if (!parsed.ok()) return BadUsage("--numerics: " + parsed.status().message());
      options.profile = *parsed;
    } else if (arg == "--cpu") {
      const auto parsed = engine::ParseCpuPath(value);
      if (!parsed.ok()) return BadUsage("--cpu: " + parsed.status().message());
      with.cpu = *parsed;
    } else if (arg == "--threads") {
      good = count(0, 1024, &with.threads);
    } else if (arg == "--samples") {
      good = count(1, 1000, &options.samples);
    } else if (arg == "--rows") {
      good = count(1, 4096, &options.step_rows);
    } else if (arg == "--length") {
      good = count(2, 32768, &options.step_length);
    } else if (arg == "--context") {
      good = count(1024, 32768, &options.growth_tokens);
    } else if (arg == "--layers") {
      good = count(1, 30, &options.layers);
    } else {
      return BadUsage("unknown option '" + arg + "'");
    }
    if (!good) return BadUsage(arg + ": '" + value + "' is out of range");
  }
  if (options.clock == bench::Clock::kCpu && with.threads != 1) return BadUsage("--clock cpu measures one thread: --threads 1");
  if (options.layers) options.expected = nullptr;  // known of the whole model only
  for (const std::string& peer : bench::Peers()) options.interpreters[peer] = environments + "/" + peer + "/bin/python3";
  auto engine = engine::Engine::Create(with);
  if (!engine.ok()) {
    std::fprintf(stderr, "temper bench engine: %s\n", engine.status().message().c_str());
    return 1;
  }
  const std::string cpu = CpuModel();
  const char* path = engine::CpuPathName((*engine)->path());
  if (!as_json) {
    std::printf("%s, path %s, %d threads, %s, medians of %d%s\n", cpu.c_str(), path, (*engine)->threads().count(),
                engine::ProfileName(options.profile), options.samples,
                options.clock == bench::Clock::kCpu ? ", time of the core" : "");
  }
  const Status status =
      bench::RunEngineBench(**engine, options, [&](const bench::Row& row) { PrintRow("engine", row, std::nullopt, cpu, path, as_json); });
  if (!status.ok()) {
    std::fprintf(stderr, "temper bench engine: %s\n", status.message().c_str());
    return 1;
  }
  return 0;
}

int RunTree(int argc, char** argv) {
  bench::TreeOptions options;
  engine::EngineOptions with;
  bool as_json = false;
  std::string environments = TEMPER_PEERS_DIR;
  options.peer_script = TEMPER_PEERS;
  const auto bad_usage = [](const std::string& what) { return BadUsage(what, /*tree=*/true); };
  std::vector<std::string> sets = bench::TreeSetNames();
  sets.push_back("budget");
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--help" || arg == "-h") {
      std::printf(
          "%sMeasures a forward and backward pass over rollouts merged into trees beside the same rollouts as separate rows, ours and PyTorch's, in\n"
          "turn, beside what was predicted from rates that are measured first. MODEL: weights to take (default: of SmolLM2-135M's shape, drawn\n"
          "from a seed). --rows: a file of `temper pool export`, measured step by step in place of the sets; needs MODEL. What was reached:\n"
          "docs/tree_speed.md.\n",
          kTreeUsage);
      return 0;
    }
    if (arg == "--json") {
      as_json = true;
      continue;
    }
    if (!arg.starts_with("--")) {
      if (!options.model.empty()) return bad_usage("unexpected argument '" + arg + "'");
      options.model = arg;
      continue;
    }
    if (i + 1 == argc) return bad_usage("'" + arg + "' needs a value");
    const std::string value = argv[++i];
    std::string bad;
    bool good = true;
    if (arg == "--only") {
      if (!ParseWords(value, sets, &options.sets, &bad)) return bad_usage("--only: '" + bad + "' is not one of " + Join(sets, ", "));
    } else if (arg == "--rows") {
      options.rows = value;
    } else if (arg == "--clock") {
      if (value != "wall" && value != "cpu") return bad_usage("--clock: '" + value + "' is neither wall nor cpu");
      options.clock = value == "cpu" ? bench::Clock::kCpu : bench::Clock::kWall;
    } else if (arg == "--against") {
      if (value != "torch") return bad_usage("--against: '" + value + "' is not torch");
      options.torch = true;
    } else if (arg == "--modes") {
      static const std::vector<std::string> modes = {"float32",          "autocast",          "bfloat16",
                                                     "compiled float32", "compiled autocast", "compiled bfloat16"};
      options.modes.clear();
      if (!ParseWords(value, modes, &options.modes, &bad)) return bad_usage("--modes: '" + bad + "' is not one of " + Join(modes, ", "));
    } else if (arg == "--peers") {
      environments = value;
    } else if (arg == "--peers-use") {
      if (value != "alike" && value != "best") return bad_usage("--peers-use: '" + value + "' is neither alike nor best");
      options.best_peers = value == "best";
    } else if (arg == "--numerics") {
      const auto parsed = engine::ParseProfile(value);
      if (!parsed.ok()) return bad_usage("--numerics: " + parsed.status().message());
      options.profile = *parsed;
    } else if (arg == "--cpu") {
      const auto parsed = engine::ParseCpuPath(value);
      if (!parsed.ok()) return bad_usage("--cpu: " + parsed.status().message());
      with.cpu = *parsed;
    } else if (arg == "--threads") {
      good = ParseCount(value.c_str(), 0, 1024, &with.threads);
    } else if (arg == "--samples") {
      good = ParseCount(value.c_str(), 1, 1000, &options.samples);
    } else if (arg == "--layers") {
      good = ParseCount(value.c_str(), 1, 30, &options.layers);
    } else {
      return bad_usage("unknown option '" + arg + "'");
    }
    if (!good) return bad_usage(arg + ": '" + value + "' is out of range");
  }
  if (options.clock == bench::Clock::kCpu && with.threads != 1) return bad_usage("--clock cpu measures one thread: --threads 1");
  if (!options.rows.empty() && options.model.empty()) return bad_usage("--rows needs the MODEL whose tokens they are");
  if (!options.rows.empty() && (!options.sets.empty() || options.torch)) return bad_usage("--rows takes the place of the sets and has no peers");
  if (!options.model.empty() && options.layers) return bad_usage("--layers is of the model that is drawn from a seed");
  options.interpreter = environments + "/torch/bin/python3";
  auto engine = engine::Engine::Create(with);
  if (!engine.ok()) {
    std::fprintf(stderr, "temper bench tree: %s\n", engine.status().message().c_str());
    return 1;
  }
  const std::string cpu = CpuModel();
  const char* path = engine::CpuPathName((*engine)->path());
  if (!as_json) {
    std::printf("%s, path %s, %d threads, %s, medians of %d%s\n", cpu.c_str(), path, (*engine)->threads().count(),
                engine::ProfileName(options.profile), options.samples,
                options.clock == bench::Clock::kCpu ? ", time of the core" : "");
  }
  const Status status = bench::RunTreeBench(**engine, options, [&](const bench::Row& row, const std::optional<bench::Sharing>& sharing) {
    PrintRow("tree", row, sharing, cpu, path, as_json);
  });
  if (!status.ok()) {
    std::fprintf(stderr, "temper bench tree: %s\n", status.message().c_str());
    return status.code() == StatusCode::kInvalidArgument || status.code() == StatusCode::kNotFound ? 2 : 1;
  }
  return 0;
}

}  // namespace

const std::vector<Command>& BenchCommands() {
  static const std::vector<Command> commands = {
      {"bench", "engine", "measure the engine beside what this machine can do, and beside peers", RunEngine},
      {"bench", "tree", "measure training on trees of merged prefixes beside separate rows, and beside what was predicted", RunTree},
  };
  return commands;
}

}  // namespace temper::trainer
