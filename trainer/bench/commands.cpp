#include "trainer/bench/commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
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

// What of a command line is not of what is measured.
struct Call {
  engine::EngineOptions with;
  std::string environments = TEMPER_PEERS_DIR;
  bool as_json = false, help = false;
};

Status ReadCount(const std::string& arg, const std::string& value, int least, int most, int* out) {
  int64_t number = 0;
  if (!ParseInt(value, &number) || number < least || number > most) return InvalidArgument(arg + ": '" + value + "' is out of range");
  *out = static_cast<int>(number);
  return Status::Ok();
}

Status ReadWords(const std::string& arg, const std::string& value, const std::vector<std::string>& known, std::vector<std::string>* out) {
  out->clear();
  for (const std::string& word : Split(value, ',')) {
    if (std::find(known.begin(), known.end(), word) == known.end()) {
      return InvalidArgument(arg + ": '" + word + "' is not one of " + Join(known, ", "));
    }
    out->push_back(word);
  }
  return Status::Ok();
}

// Whether the value is the second of two words, the first being the other.
Result<bool> ReadEither(const std::string& arg, const std::string& value, const std::string& no, const std::string& yes) {
  if (value != no && value != yes) return InvalidArgument(arg + ": '" + value + "' is neither " + no + " nor " + yes);
  return value == yes;
}

// The options that both benches have; false: it is none of them.
template <typename Options>
Result<bool> ReadShared(const std::string& arg, const std::string& value, const std::vector<std::string>& modes, Options& options, Call& call) {
  if (arg == "--clock") {
    ASSIGN_OR_RETURN(const bool cpu, ReadEither(arg, value, "wall", "cpu"));
    options.clock = cpu ? bench::Clock::kCpu : bench::Clock::kWall;
  } else if (arg == "--modes") {
    RETURN_IF_ERROR(ReadWords(arg, value, modes, &options.modes));
  } else if (arg == "--peers") {
    call.environments = value;
  } else if (arg == "--peers-use") {
    ASSIGN_OR_RETURN(options.best_peers, ReadEither(arg, value, "alike", "best"));
  } else if (arg == "--numerics") {
    const Result<engine::Profile> profile = engine::ParseProfile(value);
    if (!profile.ok()) return profile.status().WithContext(arg);
    options.profile = *profile;
  } else if (arg == "--cpu") {
    const Result<engine::CpuPath> path = engine::ParseCpuPath(value);
    if (!path.ok()) return path.status().WithContext(arg);
    call.with.cpu = *path;
  } else if (arg == "--threads") {
    RETURN_IF_ERROR(ReadCount(arg, value, 0, 1024, &call.with.threads));
  } else if (arg == "--samples") {
    RETURN_IF_ERROR(ReadCount(arg, value, 1, 1000, &options.samples));
  } else if (arg == "--layers") {
    RETURN_IF_ERROR(ReadCount(arg, value, 1, 30, &options.layers));
  } else {
    return false;
  }
  return true;
}

// `own` reads an option of this bench alone, or (with no value) an argument that is none; false: there is no such one.
template <typename Options>
Status ReadCall(int argc, char** argv, const std::vector<std::string>& modes, Options& options, Call& call,
                const std::function<Result<bool>(const std::string& arg, const std::string& value)>& own) {
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--help" || arg == "-h") {
      call.help = true;
      return Status::Ok();
    }
    if (arg == "--json") {
      call.as_json = true;
      continue;
    }
    const bool option = arg.starts_with("--");
    if (option && i + 1 == argc) return InvalidArgument("'" + arg + "' needs a value");
    const std::string value = option ? argv[++i] : "";
    ASSIGN_OR_RETURN(bool known, ReadShared(arg, value, modes, options, call));
    if (!known) {
      ASSIGN_OR_RETURN(known, own(arg, value));
    }
    if (!known) return InvalidArgument((option ? "unknown option '" : "unexpected argument '") + arg + "'");
  }
  if (options.clock == bench::Clock::kCpu && call.with.threads != 1) return InvalidArgument("--clock cpu measures one thread: --threads 1");
  return Status::Ok();
}

int BadUsage(const char* bench, const Status& what, const char* usage) {
  std::fprintf(stderr, "temper bench %s: %s\n%s", bench, what.message().c_str(), usage);
  return 2;
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

using Print = std::function<void(const bench::Row&, const std::optional<bench::Sharing>&)>;

// Makes the engine, says what it is, and has `measure` print its rows.
template <typename Options>
int Measure(const char* bench, const Options& options, const Call& call, const std::function<Status(engine::Engine&, const Print&)>& measure) {
  const auto fail = [&](const Status& status) {
    std::fprintf(stderr, "temper bench %s: %s\n", bench, status.message().c_str());
    return status.code() == StatusCode::kInvalidArgument || status.code() == StatusCode::kNotFound ? 2 : 1;
  };
  auto engine = engine::Engine::Create(call.with);
  if (!engine.ok()) return fail(engine.status());
  const std::string cpu = CpuModel();
  const char* path = engine::CpuPathName((*engine)->path());
  if (!call.as_json) {
    std::printf("%s, path %s, %d threads, %s, medians of %d%s\n", cpu.c_str(), path, (*engine)->threads().count(),
                engine::ProfileName(options.profile), options.samples, options.clock == bench::Clock::kCpu ? ", time of the core" : "");
  }
  const Status status = measure(**engine, [&](const bench::Row& row, const std::optional<bench::Sharing>& sharing) {
    PrintRow(bench, row, sharing, cpu, path, call.as_json);
  });
  return status.ok() ? 0 : fail(status);
}

int RunEngine(int argc, char** argv) {
  bench::Options options;
  options.peer_script = TEMPER_PEERS;
  Call call;
  const Status read = ReadCall(argc, argv, bench::Modes(), options, call, [&](const std::string& arg, const std::string& value) -> Result<bool> {
    if (arg == "--only") {
      RETURN_IF_ERROR(ReadWords(arg, value, bench::Works(), &options.works));
    } else if (arg == "--against") {
      RETURN_IF_ERROR(ReadWords(arg, value, bench::Peers(), &options.peers));
    } else if (arg == "--batches") {
      options.batches.clear();
      for (const std::string& word : Split(value, ',')) RETURN_IF_ERROR(ReadCount(arg, word, 1, 64, &options.batches.emplace_back()));
    } else if (arg == "--rows") {
      RETURN_IF_ERROR(ReadCount(arg, value, 1, 4096, &options.step_rows));
    } else if (arg == "--length") {
      RETURN_IF_ERROR(ReadCount(arg, value, 2, 32768, &options.step_length));
    } else if (arg == "--context") {
      RETURN_IF_ERROR(ReadCount(arg, value, 1024, 32768, &options.growth_tokens));
    } else {
      return false;
    }
    return true;
  });
  if (call.help) {
    std::printf(
        "%sMeasures the engine beside what this machine can do (read bandwidth, multiply-adds) and beside peers, in turn, and\n"
        "prints the median of the ratios. Peers run in the environments DIR/NAME that tests/setup_peers.sh makes (build/peers), capped\n"
        "to the instructions that ours uses, or with --peers-use best to none; what was reached: docs/engine_speed.md.\n",
        kUsage);
    return 0;
  }
  if (!read.ok()) return BadUsage("engine", read, kUsage);
  if (options.layers) options.expected = nullptr;  // known of the whole model only
  for (const std::string& peer : bench::Peers()) options.interpreters[peer] = call.environments + "/" + peer + "/bin/python3";
  return Measure("engine", options, call, [&](engine::Engine& engine, const Print& print) {
    return bench::RunEngineBench(engine, options, [&](const bench::Row& row) { print(row, std::nullopt); });
  });
}

int RunTree(int argc, char** argv) {
  static const std::vector<std::string> modes = {"float32",          "autocast",          "bfloat16",
                                                 "compiled float32", "compiled autocast", "compiled bfloat16"};
  bench::TreeOptions options;
  options.peer_script = TEMPER_PEERS;
  Call call;
  std::vector<std::string> sets = bench::TreeSetNames();
  sets.push_back("budget");
  Status read = ReadCall(argc, argv, modes, options, call, [&](const std::string& arg, const std::string& value) -> Result<bool> {
    if (arg == "--only") {
      RETURN_IF_ERROR(ReadWords(arg, value, sets, &options.sets));
    } else if (arg == "--rows") {
      options.rows = value;
    } else if (arg == "--against") {
      if (value != "torch") return InvalidArgument(arg + ": '" + value + "' is not torch");
      options.torch = true;
    } else if (!arg.starts_with("--") && options.model.empty()) {
      options.model = arg;
    } else {
      return false;
    }
    return true;
  });
  if (call.help) {
    std::printf(
        "%sMeasures a forward and backward pass over rollouts merged into trees beside the same rollouts as separate rows, ours and PyTorch's, in\n"
        "turn, beside what was predicted from rates that are measured first. MODEL: weights to take (default: of SmolLM2-135M's shape, drawn\n"
        "from a seed). --rows: a file of `temper pool export`, measured step by step in place of the sets; needs MODEL. What was reached:\n"
        "docs/tree_speed.md.\n",
        kTreeUsage);
    return 0;
  }
  if (read.ok() && !options.rows.empty() && options.model.empty()) read = InvalidArgument("--rows needs the MODEL whose tokens they are");
  if (read.ok() && !options.rows.empty() && (!options.sets.empty() || options.torch)) {
    read = InvalidArgument("--rows takes the place of the sets and has no peers");
  }
  if (read.ok() && !options.model.empty() && options.layers) read = InvalidArgument("--layers is of the model that is drawn from a seed");
  if (!read.ok()) return BadUsage("tree", read, kTreeUsage);
  options.interpreter = call.environments + "/torch/bin/python3";
  return Measure("tree", options, call, [&](engine::Engine& engine, const Print& print) { return bench::RunTreeBench(engine, options, print); });
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
