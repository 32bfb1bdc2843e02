#include "job/doctor.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "common/clock.h"
#include "common/file.h"
#include "common/json.h"
#include "common/process.h"
#include "common/strings.h"
#include "sandbox/door.h"

namespace temper::job {
namespace {

using sandbox::Need;
using State = sandbox::Need::State;

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr char kNoJob[] = "no job runs here";

int64_t FreeBytes(const std::string& folder, int64_t* all = nullptr) {
  struct statvfs s;
  if (statvfs(folder.c_str(), &s) != 0) return -1;
  if (all) *all = static_cast<int64_t>(s.f_blocks) * static_cast<int64_t>(s.f_frsize);
  return static_cast<int64_t>(s.f_bavail) * static_cast<int64_t>(s.f_frsize);
}

// Cores that the container's quota leaves; 0 without one.
double QuotaCores() {
  auto take = [](const char* path) {
    auto text = ReadFile(path, 100);
    return text.ok() ? std::string(Trim(*text)) : std::string();
  };
  std::vector<std::string> words = Split(take("/sys/fs/cgroup/cpu.max"), ' ');
  if (words.size() != 2) words = {take("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), take("/sys/fs/cgroup/cpu/cpu.cfs_period_us")};
  int64_t quota, period;
  return ParseInt(words[0], &quota) && ParseInt(words[1], &period) && quota > 0 && period > 0
             ? static_cast<double>(quota) / static_cast<double>(period)
             : 0;
}

Need Processor(const Machine& machine) {
  if (machine.cpu_paths.empty()) {
    return {"cpu", State::kMissing, CpuModel() + ": without AVX2 and FMA", kNoJob,
            "a processor with AVX2 and FMA (x86-64 since 2013)"};
  }
  Need need{"cpu", State::kOk,
            fmt::format("{}: kernels {}; {} is used", CpuModel(), Join(machine.cpu_paths, ", "), machine.cpu_paths.back()), "",
            ""};
  if (const char* asked = std::getenv("TEMPER_CPU"))
    need.found += fmt::format(" (the environment's TEMPER_CPU={} where a job says auto)", asked);
  return need;
}

Need Cores(const Machine& machine) {
  const double quota = QuotaCores();
  if (quota == 0 || quota >= machine.cores) return {"cores", State::kOk, std::to_string(machine.cores), "", ""};
  return {"cores", State::kLimited, fmt::format("{}, of which the container's quota leaves {:.1f}", machine.cores, quota),
          "parts start a thread for each core and wait for one another",
          fmt::format("a larger quota (`--cpus {}`), or `rollout.threads` in the job", machine.cores)};
}

Need Memory(const Machine& machine) {
  Need need{"memory", State::kOk, FormatSize(machine.memory_bytes) + " free", "", ""};
  if (machine.memory_bytes >= kGiB) return need;
  need.state = State::kLimited;
  need.cost = "a job of the quickstart's size takes about 1 GiB";
  need.cure = "free some, or a larger limit of the container (`--memory 4g`)";
  return need;
}

Need SharedMemory() {
  const int fd = memfd_create("temper-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const int error = errno;
  if (fd < 0)
    return {"shared_memory", State::kMissing, fmt::format("memfd_create: {}", strerrorname_np(error)), kNoJob,
            "a kernel with memfd_create"};
  close(fd);
  int64_t all = 0;
  const int64_t free = FreeBytes("/dev/shm", &all);
  return {"shared_memory", State::kOk,
          "memory files; /dev/shm " + (free < 0 ? std::string("is not there") : "has " + FormatSize(all)) + " and is not used",
          "", ""};
}

Need OpenFiles() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  Need need{"open_files", State::kOk, limit.rlim_cur == RLIM_INFINITY ? "no limit" : std::to_string(limit.rlim_cur), "", ""};
  if (limit.rlim_cur >= 1024) return need;
  need.state = State::kLimited;
  need.cost = "fewer agents at once: each sandbox takes about ten descriptors";
  need.cure = "`ulimit -n 4096`; in a container `--ulimit nofile=4096`";
  return need;
}

Need Folder(const std::string& field, const std::string& folder, const std::string& cure) {
  std::string file = folder + "/.temper-doctor-XXXXXX";
  const int fd = mkstemp(file.data());
  const int error = errno;
  if (fd < 0)
    return {field, State::kMissing, fmt::format("{} cannot be written: {}", folder, strerrorname_np(error)), kNoJob, cure};
  close(fd);
  unlink(file.c_str());
  const int64_t free = FreeBytes(folder);
  Need need{field, State::kOk, fmt::format("{} has {} free", folder, FormatSize(free / (1 << 20) * (1 << 20))), "", ""};
  if (free >= kGiB) return need;
  need.state = State::kLimited;
  need.cost = "checkpoints and logs of a run may not fit";
  need.cure = cure;
  return need;
}

// Where runs lie by default; --out names another place.
Need Disk() {
  Need need = Folder("disk", ".", "start in another folder, or name one with --out");
  if (need.state == State::kMissing) {
    need.state = State::kLimited;
    need.cost = "no run folder can be made here";
  }
  return need;
}

Need Ports() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool good = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 && listen(fd, 1) == 0;
  const int error = errno;
  // A peer that does not get through shows an interface that is down.
  socklen_t size = sizeof address;
  const int peer = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool reached = good && getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
                       connect(peer, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  const int unreached = errno;
  if (fd >= 0) close(fd);
  if (peer >= 0) close(peer);
  if (reached) return {"ports", State::kOk, "127.0.0.1 can be listened at and reached", "", ""};
  return {"ports", State::kMissing, fmt::format("127.0.0.1: {}", strerrorname_np(good ? unreached : error)), kNoJob,
          "`ip link set lo up`"};
}

Need Models() {
  std::string there;
  auto names = ListDir("models");
  for (const std::string& name : names.ok() ? *names : std::vector<std::string>()) there += (there.empty() ? "" : ", ") + name;
  return {"models", State::kOk,
          there.empty() ? "none fetched: the quickstart makes its own; `./temper model fetch smollm2-135m-instruct` brings one"
                        : there,
          "", ""};
}

std::vector<std::string> FieldsIn(const std::vector<NeedGroup>& groups, State state) {
  std::vector<std::string> fields;
  for (const NeedGroup& group : groups) {
    for (const Need& need : group.needs) {
      if (need.state == state) fields.push_back(need.field);
    }
  }
  return fields;
}

}  // namespace

std::vector<Need> TryMachine(const Machine& machine) {
  const char* temporary = std::getenv("TMPDIR");
  return {Processor(machine),
          Cores(machine),
          Memory(machine),
          SharedMemory(),
          OpenFiles(),
          Folder("temporary_folder", temporary && *temporary ? temporary : "/tmp", "make it writable, or name another in TMPDIR"),
          Disk(),
          Ports(),
          Models()};
}

Need TrySandbox(sandbox::CgroupMode cgroups) {
  Clock& clock = SystemClock::Get();
  auto failed = [](const std::string& why) {
    return Need{"sandbox", State::kMissing, why, kNoJob, "nothing above is missing: please report this with what `dmesg` says"};
  };
  sandbox::JanitorOptions options;
  options.cgroups = cgroups;
  const double start = clock.NowS();
  auto own = sandbox::OwnSandboxes::Start(options);
  if (!own.ok()) return failed(own.status().message());
  sandbox::CreateRequest create;
  create.id = "doctor";
  auto info = (*own)->service().Create(create);
  if (!info.ok()) return failed(info.status().message());
  sandbox::ExecRequest exec;
  exec.id = create.id;
  exec.argv = {"true"};
  auto result = (*own)->service().Exec(exec);
  if (!result.ok()) return failed(result.status().message());
  if (result->outcome != sandbox::ExecOutcome::kExited || result->exit_code != 0) {
    return failed(fmt::format("`true` ended as {} {} {}{}", sandbox::Name(result->outcome), result->exit_code, result->message,
                              result->err.bytes));
  }
  if (Status s = (*own)->service().Destroy(create.id); !s.ok()) return failed(s.message());
  const sandbox::Enforced& e = info->enforced;
  return {"sandbox", State::kOk,
          fmt::format("made, ran a command and was removed in {:.0f} ms; memory by {}, processes by {}, cpu_s by {}, disk by {}",
                      (clock.NowS() - start) * 1e3, e.memory, e.processes, e.cpu_s, e.disk),
          "", ""};
}

std::string PlanOfNeeds(const std::vector<Need>& needs) {
  std::string text;
  for (const Need& need : needs) {
    if (need.state == State::kOk && need.field != "cgroups") continue;
    text += fmt::format("  {:<12} {}\n", need.state == State::kOk ? "limits" : sandbox::Name(need.state), Sentence(need));
  }
  return text;
}

std::vector<std::string> MissingFields(const std::vector<NeedGroup>& groups) { return FieldsIn(groups, State::kMissing); }

std::string PrintNeeds(const std::vector<NeedGroup>& groups) {
  std::string text;
  for (const NeedGroup& group : groups) {
    text += group.title + "\n";
    for (const Need& need : group.needs) {
      const std::string state = need.state == State::kMissing ? "MISSING" : sandbox::Name(need.state);
      text += fmt::format("  {:<17} {:<8} {}\n", need.field, state, need.found);
      if (!need.cost.empty()) text += fmt::format("  {:<17} {:<8} costs: {}\n", "", "", need.cost);
      if (!need.cure.empty()) text += fmt::format("  {:<17} {:<8} cure:  {}\n", "", "", need.cure);
    }
  }
  const std::vector<std::string> missing = MissingFields(groups), limited = FieldsIn(groups, State::kLimited);
  if (!missing.empty()) return text + "no job can run here: " + Join(missing, ", ") + "\n";
  return text + "jobs can run here" + (limited.empty() ? "" : ", with limits: " + Join(limited, ", ")) + "\n";
}

std::string NeedsToJson(const std::vector<NeedGroup>& groups) {
  JsonWriter w;
  auto list = [&](const char* key, const std::vector<std::string>& fields) {
    w.Key(key).BeginArray();
    for (const std::string& field : fields) w.String(field);
    w.EndArray();
  };
  const std::vector<std::string> missing = MissingFields(groups);
  w.BeginObject().Key("can_run").Bool(missing.empty());
  list("missing", missing);
  list("limited", FieldsIn(groups, State::kLimited));
  w.Key("needs").BeginArray();
  for (const NeedGroup& group : groups) {
    for (const Need& need : group.needs) {
      w.BeginObject()
          .Key("group")
          .String(group.title)
          .Key("field")
          .String(need.field)
          .Key("state")
          .String(sandbox::Name(need.state));
      w.Key("found").String(need.found).Key("cost").String(need.cost).Key("cure").String(need.cure).EndObject();
    }
  }
  w.EndArray().EndObject();
  return w.Take();
}

}  // namespace temper::job
