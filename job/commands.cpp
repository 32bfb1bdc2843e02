#include "job/commands.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "common/clock.h"
#include "common/config.h"
#include "common/file.h"
#include "common/log.h"
#include "common/process.h"
#include "common/rpc.h"
#include "common/strings.h"
#include "engine/engine.h"
#include "job/curves.h"
#include "job/doctor.h"
#include "job/eval_change.h"
#include "job/export.h"
#include "job/initial_model.h"
#include "job/references.h"
#include "job/plan.h"
#include "job/plot.h"
#include "job/resume.h"
#include "job/roles.h"
#include "job/run_folder.h"
#include "job/summary.h"
#include "job/supervisor.h"
#include "job/top.h"
#include "sandbox/janitor.h"
#include "sandbox/needs.h"

namespace temper::job {
namespace {

constexpr char kRunUsage[] =
    "usage: temper run JOB.yaml [--set KEY.KEY=VALUE]... [--out DIR] [--dry-run]\n"
    "       temper run [JOB.yaml] --resume --out DIR [--set trainer.steps=MORE]\n"
    "Trains as the job file says (docs/job_file.md). --dry-run prints every value with its source and the plan.\n"
    "Exit code 0 done, 1 the job failed, 2 bad job, 130 stopped by Ctrl-C (--resume continues it).\n";

int Complain(const char* command, const std::string& message, int code) {
  std::fprintf(stderr, "temper %s: %s\n", command, message.c_str());
  return code;
}

struct RunArguments {
  std::string job;
  std::vector<std::string> sets;
  std::string out;
  bool dry_run = false, resume = false, help = false;
};

Result<RunArguments> ParseRunArguments(int argc, char** argv) {
  RunArguments arguments;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    std::optional<std::string> attached;
    if (word.rfind("--set=", 0) == 0 || word.rfind("--out=", 0) == 0) {
      attached = word.substr(6);
      word.resize(5);
    }
    auto value = [&]() -> Result<std::string> {
      if (attached) return *attached;
      if (i + 1 >= argc) return InvalidArgument(word + " needs a value");
      return std::string(argv[++i]);
    };
    if (word == "--help" || word == "-h") {
      arguments.help = true;
    } else if (word == "--dry-run") {
      arguments.dry_run = true;
    } else if (word == "--resume") {
      arguments.resume = true;
    } else if (word == "--set") {
      ASSIGN_OR_RETURN(std::string assignment, value());
      arguments.sets.push_back(std::move(assignment));
    } else if (word == "--out") {
      ASSIGN_OR_RETURN(arguments.out, value());
      if (arguments.out.empty()) return InvalidArgument("--out: the folder's name is empty");
    } else if (word.rfind("-", 0) == 0 && word != "-") {
      return InvalidArgument("unknown option " + word + "; see --help");
    } else if (arguments.job.empty()) {
      arguments.job = word;
    } else {
      return InvalidArgument("one job at a time, got '" + arguments.job + "' and '" + word + "'");
    }
  }
  return arguments;
}

struct Loaded {
  Job job;
  Config config;
  std::vector<ConfigEntry> entries;
  std::string resolved;
};

Result<Loaded> LoadJob(const std::string& path, const std::vector<std::string>& sets) {
  ASSIGN_OR_RETURN(Config config, Config::Load(path));
  for (const std::string& set : sets) RETURN_IF_ERROR(config.Set(set));
  ASSIGN_OR_RETURN(Job job, ReadJob(config));
  return Loaded{std::move(job), config, config.entries(), config.ResolvedYaml()};
}

// The message of a check that knows keys but not the file, "KEY: what", with the key's place in the file.
std::string AtItsPlace(Config config, const Status& status) {
  const std::string& message = status.message();
  const size_t colon = message.find(": ");
  if (colon == std::string::npos || message.find_first_not_of("abcdefghijklmnopqrstuvwxyz_.[]0123456789") < colon) return message;
  config.Fail(message.substr(0, colon), message.substr(colon + 2));
  return config.Finish().message();
}

Machine ThisMachine() {
  Machine machine;
  machine.cores = CpuCount();
  machine.memory_bytes = MemoryAvailableBytes();
  for (engine::CpuPath path : engine::AvailableCpuPaths()) machine.cpu_paths.emplace_back(engine::CpuPathName(path));
  return machine;
}

// Listening sockets keep their numbers in the roles; high ones are free there.
Result<int> HighFd(Fd fd) {
  const int high = fcntl(fd.get(), F_DUPFD_CLOEXEC, 200);
  if (high < 0) return ErrnoStatus("fcntl", errno);
  return high;
}

// Opens every listening socket of the run and describes its roles.
Result<std::vector<RoleSpec>> OpenRoles(const Job& job, const sandbox::Janitor& janitor, RunState* state) {
  std::vector<RoleSpec> roles;
  auto add = [&](const std::string& role, const std::string& name, int index) -> Status {
    RoleSpec spec{name, role, index, "", {}};
    // The janitor's name is unique on the machine and new in each incarnation.
    const std::string socket = janitor.job_id() + "-" + name;
    ASSIGN_OR_RETURN(Fd listening, ListenAbstract(socket));
    ASSIGN_OR_RETURN(const int fd, HighFd(std::move(listening)));
    spec.address = "unix-abstract:" + socket;
    spec.fds.emplace_back("control", fd);
    state->endpoints[name] = spec.address;
    roles.push_back(std::move(spec));
    return Status::Ok();
  };
  RETURN_IF_ERROR(add("pool", "pool", 0));
  RETURN_IF_ERROR(add("sandbox", "sandbox", 0));
  for (int64_t i = 0; i < job.rollout.workers; ++i) RETURN_IF_ERROR(add("rollout", "rollout-" + std::to_string(i), static_cast<int>(i)));
  RETURN_IF_ERROR(add("gateway", "gateway", 0));
  RETURN_IF_ERROR(add("trainer", "trainer", 0));
  RETURN_IF_ERROR(add("agents", "agents", 0));

  auto listening = ListenTcp(job.gateway.bind, job.gateway.port);
  if (!listening.ok()) return listening.status().WithContext("gateway.bind and gateway.port");
  Fd agent_plane = std::move(*listening);
  ASSIGN_OR_RETURN(const int port, BoundPort(agent_plane.get()));
  ASSIGN_OR_RETURN(const int agent_fd, HighFd(std::move(agent_plane)));
  // Sandboxes reach it through a relay on this machine, whatever it is bound to.
  state->endpoints["agent_plane"] = (job.gateway.bind == "0.0.0.0" ? std::string("127.0.0.1") : job.gateway.bind) + ":" + std::to_string(port);
  for (RoleSpec& role : roles) {
    if (role.role == "gateway") role.fds.emplace_back("agent", agent_fd);
    if (role.role == "sandbox") role.fds.emplace_back("janitor", janitor.service_fd());
  }
  return roles;
}

// The last lines of a run.
std::string WhereToGoOn(const JobEnd& end, const std::string& run_path) {
  return "run: " + run_path + "\n" + (end.exit_code == 0 ? "" : "to go on: " + ResumeCommand(run_path) + "\n");
}

int Run(int argc, char** argv) {
  auto arguments = ParseRunArguments(argc, argv);
  if (!arguments.ok()) return Complain("run", arguments.status().message(), 2);
  if (arguments->help) {
    std::fputs(kRunUsage, stdout);
    return 0;
  }
  if (arguments->resume && arguments->out.empty() && IsDirectory(arguments->job)) std::swap(arguments->out, arguments->job);
  if (arguments->resume && arguments->out.empty()) return Complain("run", "--resume needs the run: --out DIR", 2);
  if (!arguments->resume && arguments->job.empty()) return Complain("run", std::string("no job file\n") + kRunUsage, 2);
  if (!arguments->resume && IsDirectory(arguments->job)) {
    return Complain("run", arguments->job + ": a folder, not a job file; a run is continued with --resume", 2);
  }

  // The job, its plan, the folder: every refusal comes before anything is made.
  if (arguments->resume && !Exists(arguments->out + "/job.yaml")) return Complain("run", arguments->out + ": no run to resume here", 2);
  auto loaded = LoadJob(arguments->job.empty() ? arguments->out + "/job.yaml" : arguments->job, arguments->sets);
  if (!loaded.ok()) return Complain("run", loaded.status().message(), 2);
  const Job& job = loaded->job;
  SystemClock& clock = SystemClock::Get();
  RunFolder run(AbsolutePath(arguments->out.empty() ? DefaultRunPath(job.name, clock.WallS()) : arguments->out));
  RunState state;
  if (arguments->resume) {
    if (Status s = CheckResume(run.path(), job, loaded->resolved); !s.ok()) return Complain("run", s.message(), 2);
    auto read = run.ReadState();
    if (!read.ok()) return Complain("run", read.status().message(), 2);
    state = *read;
    // Relative paths of the job, that of the model too, begin where it was first started.
    if (!state.working_folder.empty() && chdir(state.working_folder.c_str()) != 0) {
      return Complain("run", ErrnoStatus(state.working_folder, errno).message(), 1);
    }
  }
  auto model = PolicyConfig(job);
  if (!model.ok()) return Complain("run", AtItsPlace(loaded->config, model.status()), 2);
  if (Status s = CheckReferences(job, BuildFolder()); !s.ok()) return Complain("run", AtItsPlace(loaded->config, s), 2);
  auto others = ReadOtherModels(job, *model);
  if (!others.ok()) return Complain("run", AtItsPlace(loaded->config, others.status()), 2);
  auto plan = MakePlan(job, *model, ThisMachine(), *others);
  if (!plan.ok()) return Complain("run", AtItsPlace(loaded->config, plan.status()), 2);
  const std::vector<sandbox::Need> needs = sandbox::TrySandboxNeeds(job.sandbox.cgroups);
  const std::string printed_plan = PrintPlan(job, *plan) + PlanOfNeeds(needs);
  if (arguments->dry_run) {
    std::printf("values\n%splan\n%s", PrintValues(loaded->entries).c_str(), printed_plan.c_str());
    return 0;
  }
  if (arguments->resume) {
    if (Status s = run.Open(); !s.ok()) return Complain("run", s.message(), 2);
    auto read = run.ReadState();  // again, now that nobody else can write it
    if (!read.ok()) return Complain("run", read.status().message(), 2);
    state = *read;
    state.wall_s = std::max(state.wall_s, LastJobSeconds(run.path()));
    if (state.phase == "done") {
      std::printf("%s: done already\n", run.path().c_str());
      return 0;
    }
    auto stored = ReadFile(run.File("plan.json"));
    Status restored = stored.ok() ? RestorePlan(*stored, &*plan) : stored.status();
    if (!restored.ok()) return Complain("run", restored.message(), 2);
  } else if (Status s = run.CheckFresh(); !s.ok()) {
    return Complain("run", s.message(), 2);
  }

  if (Status s = sandbox::MissingNeeds(needs); !s.ok()) return Complain("run", s.message(), 1);

  // The janitor before any thread, the sockets before the folder.
  sandbox::JanitorOptions janitor_options;
  janitor_options.cgroups = job.sandbox.cgroups;
  auto janitor = sandbox::ForkJanitor(janitor_options);
  if (!janitor.ok()) return Complain("run", janitor.status().message(), 1);
  BlockSupervisorSignals();
  auto roles = OpenRoles(job, *janitor, &state);
  if (!roles.ok()) {
    (void)janitor->Stop();
    return Complain("run", roles.status().message(), 1);
  }
  auto prepare = [&]() -> Status {
    if (!arguments->resume) {
      RETURN_IF_ERROR(run.Create());
      char* folder = getcwd(nullptr, 0);
      state.working_folder = folder ? folder : "";
      std::free(folder);
      state.started_wall_s = clock.WallS();
    }
    // A resumed job is the one that is stored, or has more steps.
    const auto stored = ReadFile(run.File("job.yaml"));
    if (!stored.ok() || *stored != loaded->resolved) {
      RETURN_IF_ERROR(WriteFileAtomic(run.File("job.yaml"), loaded->resolved));
      RETURN_IF_ERROR(WriteFileAtomic(run.File("plan.json"), PlanToJson(job, *plan)));
    }
    if (!arguments->resume) RETURN_IF_ERROR(WriteInitialModel(job, run.path()));
    ++state.incarnation;
    state.pid = getpid();
    state.sandbox_job = janitor->job_id();
    log::Init("supervisor", run.File("logs/supervisor.log"));
    return Status::Ok();
  };
  if (Status s = prepare(); !s.ok()) {
    (void)janitor->Stop();
    return Complain("run", s.message(), 1);
  }

  const bool terminal = isatty(STDOUT_FILENO);
  std::printf("%s -> %s\n%s", job.name.c_str(), run.path().c_str(), printed_plan.c_str());
  std::fflush(stdout);
  JobEnd end;
  {
    Supervisor supervisor(job, *plan, run, state, *janitor, std::move(*roles), terminal);
    end = supervisor.Run();
  }
  // A janitor that died by itself cleaned up nothing.
  pollfd lifeline{janitor->lifeline_fd(), POLLIN, 0};
  const bool died = poll(&lifeline, 1, 0) > 0;
  Status gone = died ? janitor->RemoveLeftovers() : janitor->Stop();
  if (!gone.ok() && !died) gone = janitor->RemoveLeftovers();
  if (!gone.ok()) std::fprintf(stderr, "temper run: %s\n", gone.message().c_str());
  const std::string summary = MakeSummary(job, *plan, run.path(), end);
  if (Status s = WriteFileAtomic(run.File("summary.json"), summary); !s.ok()) {
    return Complain("run", s.message(), 1);
  }
  const auto change = ReadEvalChange(run.path(), job.seed);
  const std::string gain = change ? PrintEvalChange(*change) + "\n" : "";
  std::fprintf(end.exit_code == 0 ? stdout : stderr, "%s: %s\n%s%s%s", end.phase.c_str(), end.reason.c_str(), gain.c_str(),
               summary.c_str(), WhereToGoOn(end, run.path()).c_str());
  return end.exit_code;
}

constexpr char kServeUsage[] = "usage: temper serve pool|sandbox|rollout|gateway|trainer|rank|agents --run RUN [--index N]\nOne role of a run; `temper run` starts them (the trainer its ranks).\n";

int ServeCommand(int argc, char** argv) {
  std::string role, run;
  int64_t index = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--help" || word == "-h") {
      std::fputs(kServeUsage, stdout);
      return 0;
    }
    if (word == "--run" && i + 1 < argc) run = argv[++i];
    else if (word == "--index" && i + 1 < argc && ParseInt(argv[i + 1], &index)) ++i;
    else if (role.empty() && word[0] != '-') role = word;
    else return Complain("serve", "'" + word + "' is not understood\n" + kServeUsage, 2);
  }
  const std::vector<std::string> roles = {"pool", "sandbox", "rollout", "gateway", "trainer", "rank", "agents"};
  if (std::find(roles.begin(), roles.end(), role) == roles.end() || run.empty()) return Complain("serve", kServeUsage, 2);
  // The kernel would call it `exe`, by the name it was started with: ps, top and pgrep shall find it.
  prctl(PR_SET_NAME, ("temper-" + role).c_str(), 0, 0, 0);
  return ServeRole(role, run, static_cast<int>(index));
}

constexpr char kDoctorUsage[] =
    "usage: temper doctor [JOB.yaml] [--json]\n"
    "Tries what jobs need of this machine, and says what is missing, what that costs, and what cures it.\n"
    "Exit code 0 jobs can run here (perhaps with limits), 1 they cannot, 2 bad job.\n";

int Doctor(int argc, char** argv) {
  bool as_json = false;
  std::string path;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--help" || word == "-h") {
      std::fputs(kDoctorUsage, stdout);
      return 0;
    }
    if (word == "--json") as_json = true;
    else if (path.empty() && word[0] != '-') path = word;
    else return Complain("doctor", "'" + word + "' is not understood\n" + kDoctorUsage, 2);
  }
  const Machine machine = ThisMachine();
  std::optional<Plan> plan;
  std::vector<sandbox::Need> job_needs;
  sandbox::CgroupMode cgroups = sandbox::CgroupMode::kAuto;
  auto loaded = path.empty() ? Result<Loaded>(InvalidArgument("no job")) : LoadJob(path, {});
  if (!path.empty()) {
    if (!loaded.ok()) return Complain("doctor", loaded.status().message(), 2);
    cgroups = loaded->job.sandbox.cgroups;
    auto model = PolicyConfig(loaded->job);
    auto others = model.ok() ? ReadOtherModels(loaded->job, *model) : Result<OtherModels>(model.status());
    auto made = others.ok() ? MakePlan(loaded->job, *model, machine, *others) : Result<Plan>(others.status());
    if (made.ok()) plan = std::move(*made);
    job_needs.push_back(made.ok() ? sandbox::Need{"job", sandbox::Need::State::kOk, path + " can be planned", "", ""}
                                  : sandbox::Need{"job", sandbox::Need::State::kMissing, made.status().message(), "this job cannot run here", "change that key"});
  }
  std::vector<NeedGroup> groups = {{"machine", TryMachine(machine)}, {"sandboxes", sandbox::TrySandboxNeeds(cgroups)}};
  // Last, because it starts threads.
  if (sandbox::MissingNeeds(groups[1].needs).ok()) groups[1].needs.push_back(TrySandbox(cgroups));
  if (!path.empty()) groups.push_back({"job", std::move(job_needs)});
  if (as_json) {
    std::printf("%s\n", NeedsToJson(groups).c_str());
  } else {
    std::fputs(PrintNeeds(groups).c_str(), stdout);
    if (plan) std::printf("plan\n%s", PrintPlan(loaded->job, *plan).c_str());
  }
  return MissingFields(groups).empty() ? 0 : 1;
}

constexpr char kPlotUsage[] =
    "usage: temper plot RUN... [--out FILE.svg] [--window 10]\n"
    "Curves of runs as one SVG picture, on standard output or in FILE.svg: mean reward by step and by seconds, with a moving mean\n"
    "over `--window` steps and the evaluations; of one run alone also staleness and tokens per second.\n"
    "A RUN may be called NAME=RUN, and may be a file of lines {\"step\":n,\"reward_mean\":x,\"wall_s\":t} instead of a folder:\n"
    "NAME=FILE.jsonl, to draw another system's curve beside ours.\n"
    "Exit code 0 drawn, 1 FILE.svg cannot be written, 2 bad input.\n";

int Plot(int argc, char** argv) {
  PlotOptions options;
  std::string out;
  std::vector<Curve> curves;
  std::vector<std::string> runs;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (word == "--help" || word == "-h") {
      std::fputs(kPlotUsage, stdout);
      return 0;
    }
    if (word.rfind("--", 0) != 0) {
      runs.push_back(std::move(word));
      continue;
    }
    std::optional<std::string> value;
    if (const size_t equals = word.find('='); equals != std::string::npos) {
      value = word.substr(equals + 1);
      word.resize(equals);
    }
    if (word != "--out" && word != "--window") return Complain("plot", "unknown option " + word + "; see --help", 2);
    if (!value && i + 1 < argc) value = argv[++i];
    if (!value || value->empty()) return Complain("plot", word + " needs a value", 2);
    int64_t window = 0;
    if (word == "--out") {
      // A picture with a name that says something else would open nowhere.
      if (const size_t dot = value->rfind('.'); dot != std::string::npos && value->find('/', dot) == std::string::npos && value->substr(dot) != ".svg") {
        return Complain("plot", "--out " + *value + ": the picture is SVG; call it FILE.svg", 2);
      }
      out = *value;
    }
    else if (ParseInt(*value, &window) && window >= 1 && window <= 1000000) options.window = static_cast<int>(window);
    else return Complain("plot", "--window " + *value + ": a number of steps, from 1", 2);
  }
  if (runs.empty()) return Complain("plot", std::string("no run\n") + kPlotUsage, 2);
  for (const std::string& run : runs) {
    auto curve = ReadCurve(run);
    if (!curve.ok()) return Complain("plot", curve.status().message(), 2);
    curves.push_back(std::move(*curve));
  }
  const std::string svg = PlotSvg(curves, options);
  if (out.empty()) {
    std::fputs(svg.c_str(), stdout);
    return 0;
  }
  if (Status s = WriteFileAtomic(out, svg); !s.ok()) return Complain("plot", s.message(), 1);
  return 0;
}

constexpr char kExportUsage[] =
    "usage: temper pool export RUN\n"
    "Every rollout that was trained, one JSON object a line and a logical sequence: ids, mask, logprobs, versions, advantages. Steps whose\n"
    "records were dropped (pool.retention) have no rows; standard error names them.\n"
    "Exit code 0 whole, 1 the run's records cannot be read, or its advantages are not a function of them, 2 there is no such run.\n";

int PoolExport(int argc, char** argv) {
  if (argc != 2 || argv[1][0] == '-') {
    const bool help = argc == 2 && (std::string_view(argv[1]) == "--help" || std::string_view(argv[1]) == "-h");
    std::fputs(kExportUsage, help ? stdout : stderr);
    return help ? 0 : 2;
  }
  const Status s = ExportRows(
      argv[1],
      [](const std::string& row) {
        std::fwrite(row.data(), 1, row.size(), stdout);
        std::fputc('\n', stdout);
      },
      [](const std::string& dropped) { std::fprintf(stderr, "temper pool export: %s\n", dropped.c_str()); });
  return s.ok() ? 0 : Complain("pool export", s.message(), s.code() == StatusCode::kNotFound ? 2 : 1);
}

}  // namespace

const std::vector<Command>& Commands() {
  static const std::vector<Command> kCommands = {
      {"", "run", "train as a job file says", &Run},
      {"", "serve", "one role of a run", &ServeCommand},
      {"", "top", "the live view of a running job", &Top},
      {"", "plot", "curves of runs as a picture", &Plot},
      {"pool", "export", "a run's trained rollouts as rows that other trainers read", &PoolExport},
      {"", "doctor", "check what a job needs of this machine", &Doctor},
  };
  return kCommands;
}

}  // namespace temper::job
