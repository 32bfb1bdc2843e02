#include "sandbox/commands.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/base64.h"
#include "common/clock.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "sandbox/door.h"
#include "sandbox/files.h"
#include "sandbox/remains.h"

namespace temper::sandbox {
namespace {

constexpr char kRunUsage[] =
    "usage: temper sandbox run [OPTIONS] -- COMMAND [ARGUMENT]…\n"
    "\n"
    "Runs one command in a fresh sandbox and prints how it ended as one JSON object.\n"
    "\n"
    "  --limits K=V,…       memory, disk, output (sizes: 64MiB), processes, files (counts), cpu_s, wall_s (seconds)\n"
    "  --files DIR          copied in as the working folder /work; links stay links\n"
    "  --get PATH=FILE      afterwards copies the file PATH of /work to FILE; may be given again\n"
    "  --stdin FILE         standard input (else empty)\n"
    "  --env NAME=VALUE     environment variable; may be given again\n"
    "  --mount SRC:DST      shows a host folder or file read-only at DST; may be given again\n"
    "  --rootfs DIR         system folders from DIR instead of the host's own\n"
    "  --net none           the only network there is: loopback\n"
    "  --as agent|tool      the user that runs the command (agent)\n"
    "  --cgroups MODE       auto, v2, hybrid, none (auto)\n"
    "\n"
    "Exit code: 0 whatever the command did, 1 the sandbox failed (outcome infra), 2 bad usage.\n";

constexpr char kRemainsUsage[] =
    "usage: temper sandbox remains [--job ID] [--run DIR] [--port N]… [--wait S] [--live]\n"
    "\n"
    "Lists what jobs have left behind (processes, sandboxes, mounts, cgroups, shared memory, ports, temporary folders), one\n"
    "JSON object a line; exit code 1 when there is any. --run: of that run only, --job: of the job whose janitor is called ID,\n"
    "else of every job on the machine. What belongs to jobs that are still running is left out; --live lists it too, as\n"
    "\"live\":true, and it does not count for the exit code.\n";

int Bad(const char* door, const std::string& message) {
  std::fprintf(stderr, "temper sandbox %s: %s\n", door, message.c_str());
  return 2;
}

struct RunOptions {
  CreateRequest create;
  ExecRequest exec;
  JanitorOptions janitor;
  std::vector<std::pair<std::string, std::string>> get;
  bool help = false;
};

Result<RunOptions> ParseRun(int argc, char** argv) {
  RunOptions o;
  o.create.id = o.exec.id = "run";
  for (int i = 1; i < argc; ++i) {
    std::string arg = argv[i];
    if (arg == "--help" || arg == "-h") {
      o.help = true;
      return o;
    }
    if (arg == "--") {
      for (++i; i < argc; ++i) o.exec.argv.emplace_back(argv[i]);
      break;
    }
    if (arg.rfind("--", 0) != 0) return InvalidArgument("unexpected '" + arg + "'; the command stands after --");
    static const std::vector<std::string> kOptions = {"--limits", "--files", "--get", "--stdin", "--env", "--mount", "--rootfs", "--net", "--as", "--cgroups"};
    if (std::find(kOptions.begin(), kOptions.end(), arg) == kOptions.end()) {
      std::string near = Nearest(arg, kOptions);
      return InvalidArgument("unknown option '" + arg + "'" + (near.empty() ? "" : "; did you mean '" + near + "'?"));
    }
    if (++i >= argc) return InvalidArgument("option " + arg + " needs a value");
    std::string value = argv[i];
    size_t equals = value.find('=');
    if (arg == "--limits") {
      RETURN_IF_ERROR(ParseLimits(value, &o.create.limits));
    } else if (arg == "--files") {
      auto files = ReadFolder(value);
      if (!files.ok()) return InvalidArgument("--files: " + files.status().message());
      o.create.files = std::move(*files);
    } else if (arg == "--get") {
      if (equals == std::string::npos || equals == 0 || equals + 1 == value.size()) return InvalidArgument("--get '" + value + "' is not PATH=FILE");
      std::string path = value.substr(0, equals);
      if (path.rfind("/work/", 0) == 0) path = path.substr(6);
      o.get.emplace_back(path, value.substr(equals + 1));
    } else if (arg == "--stdin") {
      auto bytes = ReadFile(value, 1 << 30);
      if (!bytes.ok()) return InvalidArgument("--stdin: " + bytes.status().message());
      o.exec.stdin_bytes = std::move(*bytes);
    } else if (arg == "--env") {
      if (equals == std::string::npos || equals == 0) return InvalidArgument("--env '" + value + "' is not NAME=VALUE");
      o.exec.env.emplace_back(value.substr(0, equals), value.substr(equals + 1));
    } else if (arg == "--mount") {
      ASSIGN_OR_RETURN(Mount mount, ParseMount(value));
      o.create.mounts.push_back(std::move(mount));
    } else if (arg == "--rootfs") {
      if (!IsDirectory(value)) return InvalidArgument("--rootfs '" + value + "' is not a folder");
      o.create.rootfs = AbsolutePath(value);
    } else if (arg == "--net") {
      if (value != "none") return InvalidArgument("--net '" + value + "' is not built yet; only none");
    } else if (arg == "--as") {
      if (value != "agent" && value != "tool") return InvalidArgument("--as '" + value + "' is neither agent nor tool");
      o.exec.role = value == "tool" ? Role::kTool : Role::kAgent;
    } else if (arg == "--cgroups") {
      ASSIGN_OR_RETURN(o.janitor.cgroups, ParseCgroupMode(value));
    }
  }
  if (o.exec.argv.empty()) return InvalidArgument("no command; write it after --");
  o.create.ttl_s = o.create.limits.wall_s + 60;
  return o;
}

void WriteStream(JsonWriter* w, const char* name, const Captured& c) {
  if (IsUtf8(c.bytes)) {
    w->Key(name).String(c.bytes);
  } else {
    w->Key(std::string(name) + "_base64").String(Base64Encode(c.bytes));
  }
}

void Print(const ExecResult& r, const Enforced& e) {
  JsonWriter w;
  w.BeginObject().Key("outcome").String(Name(r.outcome));
  w.Key("exit_code");
  if (r.outcome == ExecOutcome::kExited) {
    w.Int(r.exit_code);
  } else {
    w.Null();
  }
  if (r.signal) w.Key("signal").Int(r.signal);
  if (!r.limit.empty()) w.Key("limit").String(r.limit);
  if (!r.message.empty()) w.Key("message").String(r.message);
  WriteStream(&w, "stdout", r.out);
  WriteStream(&w, "stderr", r.err);
  w.Key("truncated").Bool(r.out.dropped || r.err.dropped);
  w.Key("usage").BeginObject().Key("wall_s").Double(r.usage.wall_s).Key("cpu_s").Double(r.usage.cpu_s);
  w.Key("peak_bytes").Int(r.usage.peak_bytes).EndObject();
  w.Key("enforced").BeginObject();
  for (auto [name, value] : {std::pair{"memory", &e.memory}, {"processes", &e.processes}, {"disk", &e.disk}, {"files", &e.files},
                             {"cpu_s", &e.cpu_s}, {"wall_s", &e.wall_s}, {"output", &e.output}}) {
    w.Key(name).String(value->empty() ? "no" : *value);
  }
  w.EndObject().EndObject();
  std::printf("%s\n", w.text().c_str());
}

int Infra(const Status& status) {
  ExecResult r;
  r.message = status.message();
  Print(r, {});
  std::fprintf(stderr, "temper sandbox run: %s\n", status.message().c_str());
  return 1;
}

int Run(int argc, char** argv) {
  auto options = ParseRun(argc, argv);
  if (!options.ok()) return Bad("run", options.status().message());
  if (options->help) return std::fputs(kRunUsage, stdout) < 0;
  auto own = OwnSandboxes::Start(options->janitor);
  if (!own.ok()) return Infra(own.status());
  SandboxService& service = (*own)->service();
  auto info = service.Create(options->create);
  if (!info.ok()) {
    if (info.status().code() == StatusCode::kInvalidArgument) return Bad("run", info.status().message());
    return Infra(info.status());
  }
  auto result = service.Exec(options->exec);
  if (!result.ok()) {
    if (result.status().code() == StatusCode::kInvalidArgument) return Bad("run", result.status().message());
    return Infra(result.status());
  }
  int exit_code = result->outcome == ExecOutcome::kInfra ? 1 : 0;
  for (const auto& [path, file] : options->get) {
    auto got = service.Export("run", ExportOptions{.path = path});
    Status status = got.status();
    if (got.ok() && (got->size() != 1 || (*got)[0].kind != File::Kind::kRegular)) status = InvalidArgument("not a regular file");
    if (status.ok()) status = WriteFile(file, (*got)[0].bytes);
    if (!status.ok()) {
      std::fprintf(stderr, "temper sandbox run: --get %s: %s\n", path.c_str(), status.message().c_str());
      exit_code = 1;
    }
  }
  Print(*result, info->enforced);
  return exit_code;
}

int Remains(int argc, char** argv) {
  RemainsQuery query;
  double wait_s = 0;
  bool show_live = false, job_given = false;
  for (int i = 1; i < argc; ++i) {
    std::string arg = argv[i];
    if (arg == "--help" || arg == "-h") return std::fputs(kRemainsUsage, stdout) < 0;
    if (arg == "--live") {
      show_live = true;
      continue;
    }
    if (i + 1 >= argc) return Bad("remains", "unknown option '" + arg + "', or it needs a value");
    std::string value = argv[++i];
    int64_t port = 0;
    if (arg == "--job") {
      query.job_id = value;
      job_given = true;
    } else if (arg == "--run") {
      query.run_folder = AbsolutePath(value);
    } else if (arg == "--port" && ParseInt(value, &port) && port > 0 && port < 65536) {
      query.ports.push_back(static_cast<int>(port));
    } else if (arg == "--wait" && ParseDouble(value, &wait_s) && wait_s >= 0) {
      continue;
    } else {
      return Bad("remains", arg + " '" + value + "' is not understood");
    }
  }
  if (!query.run_folder.empty() && !job_given) query.job_id = JobOfRun(query.run_folder);

  SystemClock& clock = SystemClock::Get();
  std::vector<Remain> found;
  int64_t left = 0, live = 0;
  for (const double end_s = clock.NowS() + wait_s;; clock.SleepS(0.05)) {
    found = FindRemains(query);
    // A shell that works in the folder is no part of the job.
    std::erase_if(found, [](const Remain& r) { return r.doubtful; });
    live = std::count_if(found.begin(), found.end(), [](const Remain& r) { return r.live; });
    left = static_cast<int64_t>(found.size()) - live;
    if (left == 0 || clock.NowS() >= end_s) break;
  }
  for (const Remain& r : found) {
    if (r.live && !show_live) continue;
    JsonWriter w;
    w.BeginObject().Key("kind").String(r.kind).Key("what").String(r.what);
    if (r.live) w.Key("live").Bool(true);
    w.EndObject();
    std::printf("%s\n", w.text().c_str());
  }
  if (live > 0 && !show_live) {
    std::fprintf(stderr, "left out: %lld of jobs that are still running; --live lists them\n", static_cast<long long>(live));
  }
  return left == 0 ? 0 : 1;
}

}  // namespace

const std::vector<Command>& Commands() {
  static const std::vector<Command> commands = {
      {"sandbox", "run", "run one command in a fresh sandbox", &Run},
      {"sandbox", "remains", "list what jobs left behind on this machine", &Remains},
  };
  return commands;
}

}  // namespace temper::sandbox
