#include "datapool/commands.h"

#include <unistd.h>

#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

#include "common/file.h"
#include "common/json.h"
#include "common/status.h"
#include "common/strings.h"
#include "datapool/format.h"
#include "datapool/listing.h"
#include "datapool/picture.h"
#include "datapool/sim.h"
#include "datapool/statistics.h"
#include "datapool/verify.h"
#include "fmt/format.h"

namespace temper::datapool {
namespace {

constexpr char kSimUsage[] =
    "usage: temper pool sim --in FILE [--events OUT] [--plot PNG]\n"
    "       temper pool sim --ledger RUN [--plot PNG]\n"
    "Runs the window machine in virtual time (docs/pool_sim.md). FILE ('-': standard input): a configuration line, then\n"
    "events; or a configuration with a \"world\".\n"
    "  --events OUT   world only: write the world as a script that decides the same\n"
    "  --plot PNG     world only: staleness and waiting by batch, one row a policy\n"
    "  --ledger RUN   tries other windows on the rollouts that a run recorded, and recommends S and W: the least bound on staleness\n"
    "                 within 5 % of the highest throughput. The last line is the recommendation.\n";

int Bad(const std::string& message) {
  std::fprintf(stderr, "temper pool: %s\n", message.c_str());
  return 2;
}

int Failed(const std::string& message) {
  std::fprintf(stderr, "temper pool: %s\n", message.c_str());
  return 1;
}

void Print(const std::string& line) {
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fputc('\n', stdout);
}

// The lines of a text; views into it.
std::vector<std::string_view> Lines(std::string_view text) {
  std::vector<std::string_view> out;
  while (!text.empty()) {
    size_t end = text.find('\n');
    out.push_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return out;
}

int RunWorlds(const SimConfig& sim, const std::string& events_path, const std::string& plot_path) {
  std::vector<PoolConfig> pools;
  for (const WindowConfig& window : sim.policies) {
    PoolConfig one = sim.pool;
    one.window = window;
    for (SourceConfig& source : one.sources) source.window.reset();
    pools.push_back(one);
  }
  if (pools.empty()) pools.push_back(sim.pool);
  if (!events_path.empty() && pools.size() > 1) return Bad("--events writes the world of one policy; leave out \"policies\"");

  std::vector<RecordedRollout> recorded;
  if (sim.world->latency.dist == "ledger") {
    Result<std::string> text = ReadFile(sim.world->latency.path);
    if (!text.ok()) return Bad("world.latency.path: " + text.status().message());
    Result<std::vector<RecordedRollout>> read = ReadRecorded(*text);
    if (!read.ok()) return Bad("world.latency.path: " + read.status().message());
    recorded = *std::move(read);
  }

  std::vector<WorldReport> reports;
  bool complete = true;
  for (const PoolConfig& pool : pools) {
    std::string script = PrintPoolConfig(pool) + "\n";
    Result<WorldReport> report = RunWorld(
        pool, *sim.world, recorded,
        events_path.empty() ? std::function<void(const TimedEvent&)>() : [&](const TimedEvent& e) { script += PrintEvent(e) + "\n"; }, nullptr);
    if (!report.ok()) {
      return report.status().code() == StatusCode::kInvalidArgument ? Bad(report.status().message()) : Failed(report.status().message());
    }
    Print(PrintReport(*report));
    if (report->updates < sim.world->updates) {
      std::fprintf(stderr, "temper pool: %s: only %lld of %lld updates: no task is left, or nothing that runs can fill a batch\n", report->policy.c_str(),
                   static_cast<long long>(report->updates), static_cast<long long>(sim.world->updates));
      complete = false;
    }
    if (!events_path.empty()) {
      Status written = WriteFile(events_path, script);
      if (!written.ok()) return Failed(written.message());
    }
    reports.push_back(*std::move(report));
  }
  std::fputs(PrintTable(reports).c_str(), stderr);
  if (!plot_path.empty()) {
    Status written = WriteFile(plot_path, DrawReports(reports));
    if (!written.ok()) return Failed(written.message());
  }
  return complete ? 0 : 1;
}

Result<SimConfig> ConfigOf(const std::string& run) {
  if (!Exists(run + kConfigFile)) return NotFound(run + ": no run (there is no " + std::string(kConfigFile + 1) + " in it)");
  ASSIGN_OR_RETURN(const std::string text, ReadFile(run + kConfigFile));
  Result<SimConfig> config = ParseSimConfig(text);
  if (!config.ok()) return config.status().WithContext(run + kConfigFile);
  return config;
}

// Enough for the picture to settle, few enough for a second.
constexpr int64_t kAdviceUpdates = 200;

int Recommend(const std::string& run, const std::string& plot_path) {
  Result<SimConfig> config = ConfigOf(run);
  if (!config.ok()) return Bad(config.status().message());
  Result<std::string> ledger = ReadFile(run + kLedgerFile);
  if (!ledger.ok()) return Bad(ledger.status().message());
  // A torn last line is cut off, as at recovery.
  ledger->resize(ledger->rfind('\n') == std::string::npos ? 0 : ledger->rfind('\n') + 1);
  Result<Advice> advice = Advise(config->pool, *ledger, kAdviceUpdates);
  if (!advice.ok()) return Bad(run + kLedgerFile + ": " + advice.status().message());
  for (const WorldReport& report : advice->reports) Print(PrintReport(report));
  Print(PrintAdvice(*advice));
  std::fputs(PrintTable(advice->reports).c_str(), stderr);
  if (plot_path.empty()) return 0;
  Status written = WriteFile(plot_path, DrawReports(advice->reports));
  return written.ok() ? 0 : Failed(written.message());
}

int Sim(int argc, char** argv) {
  std::string in, events, plot, ledger;
  for (int i = 1; i < argc; ++i) {
    std::string_view arg = argv[i];
    if (arg == "--help" || arg == "-h") {
      std::fputs(kSimUsage, stdout);
      return 0;
    }
    std::string* value = arg == "--in" ? &in : arg == "--events" ? &events : arg == "--plot" ? &plot : arg == "--ledger" ? &ledger : nullptr;
    if (value == nullptr) return Bad(fmt::format("sim: unknown argument '{}'\n{}", arg, kSimUsage));
    if (++i == argc) return Bad(fmt::format("sim: {} needs a value", arg));
    *value = argv[i];
  }
  if (!ledger.empty()) {
    if (!in.empty() || !events.empty()) return Bad("sim: --ledger takes its world from the run; leave out --in and --events");
    return Recommend(ledger, plot);
  }
  if (in.empty()) return Bad(std::string("sim: --in is missing\n") + kSimUsage);
  Result<std::string> text = in == "-" ? ReadAll(STDIN_FILENO) : ReadFile(in);
  if (!text.ok()) return Bad(text.status().message());
  const std::string name = in == "-" ? "standard input" : in;

  const std::vector<std::string_view> lines = Lines(*text);
  size_t first = 0;
  while (first < lines.size() && Trim(lines[first]).empty()) ++first;
  if (first == lines.size()) return Bad(name + ": empty; the first line must be the configuration");
  Result<SimConfig> sim = ParseSimConfig(lines[first]);
  if (!sim.ok()) return Bad(fmt::format("{}:{}: {}", name, first + 1, sim.status().message()));

  if (sim->world) {
    for (size_t i = first + 1; i < lines.size(); ++i) {
      if (!Trim(lines[i]).empty()) return Bad(fmt::format("{}:{}: a configuration with a world takes no events", name, i + 1));
    }
    return RunWorlds(*sim, events, plot);
  }
  if (!events.empty() || !plot.empty()) return Bad("sim: --events and --plot have an effect with a world only");
  int64_t bad = RunScript(sim->pool, {lines.begin() + static_cast<std::ptrdiff_t>(first) + 1, lines.end()}, Print);
  return bad == 0 ? 0 : 1;
}

constexpr char kVerifyUsage[] =
    "usage: temper pool verify RUN\n"
    "Checks RUN/ledger.jsonl (docs/pool_sim.md 7): the balance by sets after every line, and that the window machine, given the\n"
    "ledger's events, decides what the ledger says. Exit code 1 if either fails.\n";

int Verify(int argc, char** argv) {
  if (argc == 2 && (std::string_view(argv[1]) == "--help" || std::string_view(argv[1]) == "-h")) {
    std::fputs(kVerifyUsage, stdout);
    return 0;
  }
  if (argc != 2) return Bad(std::string("verify: give one run folder\n") + kVerifyUsage);
  const std::string run = argv[1];
  Result<SimConfig> config = ConfigOf(run);
  if (!config.ok()) return Bad(config.status().message());
  Result<std::string> ledger = ReadFile(run + kLedgerFile);
  if (!ledger.ok()) return Bad(ledger.status().message());
  const VerifyReport report = VerifyLedger(config->pool, *ledger);
  Print(PrintVerify(report));
  return report.ok() ? 0 : 1;
}

Result<std::vector<LedgerRecord>> LedgerOf(const std::string& run) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(run + kLedgerFile));
  Result<std::vector<LedgerRecord>> records = ReadLedger(text);
  if (!records.ok()) return records.status().WithContext(run + kLedgerFile);
  return records;
}

constexpr char kLsUsage[] =
    "usage: temper pool ls RUN\n"
    "One line a group of RUN, in order of admission: its task, version, state, attempts and outcomes.\n";

int Ls(int argc, char** argv) {
  if (argc == 2 && (std::string_view(argv[1]) == "--help" || std::string_view(argv[1]) == "-h")) {
    std::fputs(kLsUsage, stdout);
    return 0;
  }
  if (argc != 2) return Bad(std::string("ls: give one run folder\n") + kLsUsage);
  Result<std::vector<LedgerRecord>> ledger = LedgerOf(argv[1]);
  if (!ledger.ok()) return Bad(ledger.status().message());
  for (const std::string& line : ListGroups(*ledger)) Print(line);
  return 0;
}

constexpr char kExplainUsage[] =
    "usage: temper pool explain RUN GROUP\n"
    "What became of one group, as the ledger has it: admission, every attempt, lease, update, commit or death.\n";

int Explain(int argc, char** argv) {
  if (argc == 2 && (std::string_view(argv[1]) == "--help" || std::string_view(argv[1]) == "-h")) {
    std::fputs(kExplainUsage, stdout);
    return 0;
  }
  int64_t group = 0;
  if (argc != 3 || !ParseInt(argv[2], &group)) return Bad(std::string("explain: give a run folder and the number of a group\n") + kExplainUsage);
  Result<std::vector<LedgerRecord>> ledger = LedgerOf(argv[1]);
  if (!ledger.ok()) return Bad(ledger.status().message());
  Result<std::vector<std::string>> lines = ExplainGroup(*ledger, group);
  if (!lines.ok()) return Failed(lines.status().message());
  for (const std::string& line : *lines) Print(line);
  return 0;
}

constexpr char kTasksUsage[] =
    "usage: temper pool tasks RUN\n"
    "How each task of a run goes, one JSON object a line, the hardest first: groups admitted, trained, without signal and buried, and\n"
    "the rewards of its rollouts.\n";

int Tasks(int argc, char** argv) {
  if (argc == 2 && (std::string_view(argv[1]) == "--help" || std::string_view(argv[1]) == "-h")) {
    std::fputs(kTasksUsage, stdout);
    return 0;
  }
  if (argc != 2) return Bad(std::string("tasks: give one run folder\n") + kTasksUsage);
  const std::string run = argv[1];
  Result<SimConfig> config = ConfigOf(run);
  if (!config.ok()) return Bad(config.status().message());
  std::vector<int64_t> counts;
  if (Exists(run + kTasksFile)) {
    const Result<std::string> listed = ReadFile(run + kTasksFile);
    if (!listed.ok()) return Bad(listed.status().message());
    const Result<json::value> value = ParseJson(*listed);
    if (!value.ok()) return Bad(run + kTasksFile + ": " + value.status().message());
    Result<std::vector<int64_t>> read = JsonRef(*value, run + kTasksFile).Ints();
    if (!read.ok()) return Bad(read.status().message());
    counts = *std::move(read);
  }
  Result<std::vector<LedgerRecord>> ledger = LedgerOf(run);
  if (!ledger.ok()) return Bad(ledger.status().message());
  if (!counts.empty() && counts.size() != std::max<size_t>(1, config->pool.sources.size())) return Bad(run + kTasksFile + ": not one count a source");
  Statistics statistics(config->pool, counts);
  for (const LedgerRecord& record : *ledger) statistics.Add(record.line);
  for (const std::string& line : ListTasks(statistics)) Print(line);
  return 0;
}

}  // namespace

const std::vector<Command>& Commands() {
  static const std::vector<Command> kCommands = {
      {"pool", "sim", "the window machine in virtual time, from a script or a generated world", &Sim},
      {"pool", "verify", "hold a run's ledger to its balance and to the window machine", &Verify},
      {"pool", "ls", "the groups of a run and where they stand", &Ls},
      {"pool", "tasks", "how each task of a run goes", &Tasks},
      {"pool", "explain", "what became of one group of a run", &Explain},
  };
  return kCommands;
}

}  // namespace temper::datapool
