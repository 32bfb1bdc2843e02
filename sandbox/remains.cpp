#include "sandbox/remains.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <utility>

#include "common/clock.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "sandbox/cgroup.h"

namespace temper::sandbox {
namespace {

std::string Take(const std::string& path) {
  auto text = ReadFile(path, 16 << 20);
  return text.ok() ? *text : std::string();
}

std::string LinkTarget(const std::string& path) {
  char target[4096];
  ssize_t n = readlink(path.c_str(), target, sizeof target);
  return n > 0 ? std::string(target, static_cast<size_t>(n)) : std::string();
}

bool Contains(const std::string& text, const std::string& what) { return !what.empty() && text.find(what) != std::string::npos; }

// A folder's name ends there or a part follows, so that /runs/a is not found in /runs/ab.
bool NamesFolder(const std::string& text, const std::string& folder) {
  if (folder.empty()) return false;
  for (size_t at = text.find(folder); at != std::string::npos; at = text.find(folder, at + 1)) {
    char next = at + folder.size() < text.size() ? text[at + folder.size()] : '\0';
    if (next == '\0' || next == '/' || next == ' ' || next == ':' || next == ',' || next == '"' || next == '\n') return true;
  }
  return false;
}

// "DIR" of "temper serve ROLE --run DIR"; "" for any other command line.
std::string RunOfRole(const std::string& cmdline) {
  const std::vector<std::string> words = Split(cmdline, '\0');
  return words.size() >= 5 && words[1] == "serve" && words[3] == "--run" ? words[4] : "";
}

// Which jobs are still supervised.
struct LiveJobs {
  std::set<int64_t> owners;          // processes that forked a janitor and live: supervisors, doors
  std::vector<std::string> job_ids;  // of them, as far as they are told

  bool Names(const std::string& text) const {
    return std::any_of(job_ids.begin(), job_ids.end(), [&](const std::string& id) { return Contains(text, id); });
  }
  bool Owns(int64_t pid) const {
    for (int depth = 0; pid > 1 && depth < 64; ++depth, pid = Parent(pid)) {
      if (owners.count(pid)) return true;
    }
    return false;
  }
  static int64_t Parent(int64_t pid) {
    const std::string stat = Take("/proc/" + std::to_string(pid) + "/stat");
    const size_t name_end = stat.rfind(')');  // pid (comm) state ppid …
    int64_t parent = 0;
    if (name_end == std::string::npos) return 0;
    const std::vector<std::string> fields = Split(stat.substr(name_end + 1), ' ');
    return fields.size() > 2 && ParseInt(fields[2], &parent) ? parent : 0;
  }
};

LiveJobs FindLiveJobs(const RemainsQuery& q) {
  LiveJobs live;
  std::set<std::string> runs;
  if (!q.run_folder.empty()) runs.insert(q.run_folder);
  auto names = ListDir("/proc");
  for (const std::string& name : names.ok() ? *names : std::vector<std::string>()) {
    int64_t pid;
    if (!ParseInt(name, &pid)) continue;
    const std::string proc = "/proc/" + name;
    if (const std::string run = RunOfRole(Take(proc + "/cmdline")); !run.empty()) runs.insert(run);
    if (Trim(Take(proc + "/comm")) != "temper-janitor") continue;
    // It was forked, not executed: a parent of another program is the one that adopts orphans.
    const int64_t parent = LiveJobs::Parent(pid);
    const std::string program = LinkTarget(proc + "/exe");
    if (parent <= 1 || program.empty() || LinkTarget("/proc/" + std::to_string(parent) + "/exe") != program) continue;
    live.owners.insert(parent);
    live.job_ids.push_back("temper-" + std::to_string(parent) + "." + PidNamespaceTag() + "-");
  }
  for (const std::string& run : runs) {
    if (!Exists(run + "/lock") || !LockHeld(run + "/lock")) continue;
    auto state = ParseJson(Take(run + "/state.json"));
    if (!state.ok()) continue;
    if (auto pid = JsonRef(*state).IntOr("pid", 0); pid.ok() && *pid > 0) live.owners.insert(*pid);
    if (auto job = JsonRef(*state).StringOr("sandbox_job", ""); job.ok() && !job->empty()) live.job_ids.push_back(*job);
  }
  return live;
}

// A process that a job started says so in its environment, or is one of our own programs at a job's work; `temper top RUN` is
// not at one.
bool StartedByAJob(const std::string& cmdline, const std::string& environment, const std::string& comm) {
  if (comm == "temper-janitor" || cmdline.compare(0, 19, "temper-sandbox-init") == 0) return true;
  const std::vector<std::string> words = Split(cmdline, '\0');
  if (words.size() > 1 && BaseName(words[0]) == "temper" && (words[1] == "run" || words[1] == "serve")) return true;
  return Contains(std::string(1, '\0') + environment, std::string("\0TEMPER_INCARNATION=", 20));
}

void FindProcesses(const RemainsQuery& q, const LiveJobs& live, std::vector<Remain>* out) {
  const bool any_job = q.job_id == "temper-";
  auto names = ListDir("/proc");
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    int64_t pid;
    if (!ParseInt(name, &pid) || pid == getpid()) continue;
    std::string proc = "/proc/" + name;
    std::string command = Take(proc + "/cmdline"), comm(Trim(Take(proc + "/comm")));
    std::string environment = Take(proc + "/environ");
    bool init = command.compare(0, 19, "temper-sandbox-init") == 0;
    bool ours = !q.job_id.empty() && Contains(Take(proc + "/cgroup"), "/" + q.job_id);
    ours |= (!any_job && Contains(command, q.job_id)) || (any_job && (init || comm == "temper-janitor"));
    const bool names_run = NamesFolder(command, q.run_folder) || NamesFolder(environment, q.run_folder) ||
                           NamesFolder(LinkTarget(proc + "/cwd"), q.run_folder);
    // A zombie has no command line any more; its parent has to be found, not it.
    if ((!ours && !names_run) || command.empty()) continue;
    const bool doubtful = !ours && !StartedByAJob(command, environment, comm);
    std::replace(command.begin(), command.end(), '\0', ' ');
    const std::string what = name + " " + std::string(Trim(command)).substr(0, 200);
    out->push_back(Remain{init ? "sandbox" : "process", what, live.Owns(pid), doubtful});
  }
}

void FindCgroups(const std::string& dir, const std::string& job_id, const LiveJobs& live, int depth, std::vector<Remain>* out) {
  DIR* d = opendir(dir.c_str());
  if (!d) return;
  std::vector<std::string> subs;
  while (dirent* e = readdir(d)) {
    if (e->d_type == DT_DIR && e->d_name[0] != '.') subs.emplace_back(e->d_name);
  }
  closedir(d);
  for (const std::string& sub : subs) {
    if (sub.compare(0, job_id.size(), job_id) == 0) {
      out->push_back(Remain{"cgroup", dir + "/" + sub, live.Names(sub)});
    } else if (depth > 0) {
      FindCgroups(dir + "/" + sub, job_id, live, depth - 1, out);
    }
  }
}

void FindMountsAndCgroups(const RemainsQuery& q, const LiveJobs& live, std::vector<Remain>* out) {
  for (const std::string& line : Split(Take("/proc/self/mountinfo"), '\n')) {
    std::vector<std::string> f = Split(line, ' ');
    size_t dash = 0;
    while (dash < f.size() && f[dash] != "-") ++dash;
    if (f.size() < 5 || dash + 2 >= f.size()) continue;
    const std::string &point = f[4], &type = f[dash + 1], &source = f[dash + 2];
    const bool names_job = Contains(point, q.job_id) || NamesFolder(point, q.run_folder);
    if (source == "temper" || names_job) {
      out->push_back(Remain{"mount", point + " (" + type + ")", live.Names(point), !names_job && q.job_id != "temper-"});
    }
    if ((type == "cgroup" || type == "cgroup2") && !q.job_id.empty()) FindCgroups(point, q.job_id, live, 8, out);
  }
}

void FindEntries(const std::string& folder, const char* kind, const RemainsQuery& q, const LiveJobs& live, const char* prefix,
                 std::vector<Remain>* out) {
  auto names = ListDir(folder);
  if (!names.ok()) return;
  const bool any_job = q.job_id == "temper-";
  for (const std::string& name : *names) {
    if (Contains(name, q.job_id) || (any_job && name.rfind(prefix, 0) == 0)) {
      out->push_back(Remain{kind, folder + "/" + name, live.Names(name)});
    }
  }
}

void FindPorts(const RemainsQuery& q, const LiveJobs& live, std::vector<Remain>* out) {
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    for (const std::string& line : Split(Take(table), '\n')) {
      // SL LOCAL:PORT REMOTE:PORT STATE …; 0A = listening
      std::vector<std::string> f;
      for (std::string& word : Split(line, ' ')) {
        if (!word.empty()) f.push_back(std::move(word));
      }
      if (f.size() < 4 || f[3] != "0A") continue;
      int port = static_cast<int>(std::strtol(f[1].substr(f[1].rfind(':') + 1).c_str(), nullptr, 16));
      if (std::find(q.ports.begin(), q.ports.end(), port) != q.ports.end()) out->push_back(Remain{"port", std::to_string(port)});
    }
  }
  for (const std::string& line : Split(Take("/proc/net/unix"), '\n')) {
    size_t at = line.find('@');
    if (at == std::string::npos) continue;
    std::string name = line.substr(at);
    if (Contains(name, q.job_id) || NamesFolder(name, q.run_folder)) {
      out->push_back(Remain{"port", "unix-abstract:" + name.substr(1), live.Names(name)});
    }
  }
}

}  // namespace

std::vector<Remain> FindRemains(const RemainsQuery& query) {
  const LiveJobs live = FindLiveJobs(query);
  std::vector<Remain> found;
  FindProcesses(query, live, &found);
  FindMountsAndCgroups(query, live, &found);
  FindEntries("/dev/shm", "shared_memory", query, live, "temper", &found);
  FindEntries("/tmp", "temporary_folder", query, live, "temper-", &found);
  FindPorts(query, live, &found);
  // The kernel's tables have a line for each connection of a listening name, and for each family of a port.
  std::set<std::pair<std::string, std::string>> seen;
  std::erase_if(found, [&](const Remain& r) { return !seen.emplace(r.kind, r.what).second; });
  return found;
}

std::string JobOfRun(const std::string& run_folder) {
  auto state = ParseJson(Take(run_folder + "/state.json"));
  if (!state.ok()) return "";
  auto job = JsonRef(*state).StringOr("sandbox_job", "");
  return job.ok() ? *job : "";
}

std::vector<Remain> WaitForNoRemains(const RemainsQuery& query, double timeout_s) {
  Clock& clock = SystemClock::Get();
  for (double end = clock.NowS() + timeout_s;;) {
    std::vector<Remain> found = FindRemains(query);
    if (found.empty() || clock.NowS() >= end) return found;
    clock.SleepS(0.05);
  }
}

}  // namespace temper::sandbox
