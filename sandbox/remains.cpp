#include "sandbox/remains.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "common/clock.h"
#include "common/file.h"
#include "common/strings.h"

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

void FindProcesses(const RemainsQuery& q, std::vector<Remain>* out) {
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
    bool ours = Contains(Take(proc + "/cgroup"), "/" + q.job_id) || (!any_job && Contains(command, q.job_id));
    ours |= any_job && (init || comm == "temper-janitor");
    ours |= NamesFolder(command, q.run_folder) || NamesFolder(environment, q.run_folder) || NamesFolder(LinkTarget(proc + "/cwd"), q.run_folder);
    // A zombie has no command line any more; its parent has to be found, not it.
    if (!ours || command.empty()) continue;
    std::replace(command.begin(), command.end(), '\0', ' ');
    out->push_back(Remain{init ? "sandbox" : "process", name + " " + std::string(Trim(command)).substr(0, 200)});
  }
}

void FindCgroups(const std::string& dir, const std::string& job_id, int depth, std::vector<Remain>* out) {
  DIR* d = opendir(dir.c_str());
  if (!d) return;
  std::vector<std::string> subs;
  while (dirent* e = readdir(d)) {
    if (e->d_type == DT_DIR && e->d_name[0] != '.') subs.emplace_back(e->d_name);
  }
  closedir(d);
  for (const std::string& sub : subs) {
    if (sub.compare(0, job_id.size(), job_id) == 0) {
      out->push_back(Remain{"cgroup", dir + "/" + sub});
    } else if (depth > 0) {
      FindCgroups(dir + "/" + sub, job_id, depth - 1, out);
    }
  }
}

void FindMountsAndCgroups(const RemainsQuery& q, std::vector<Remain>* out) {
  for (const std::string& line : Split(Take("/proc/self/mountinfo"), '\n')) {
    std::vector<std::string> f = Split(line, ' ');
    size_t dash = 0;
    while (dash < f.size() && f[dash] != "-") ++dash;
    if (f.size() < 5 || dash + 2 >= f.size()) continue;
    const std::string &point = f[4], &type = f[dash + 1], &source = f[dash + 2];
    if (source == "temper" || Contains(point, q.job_id) || NamesFolder(point, q.run_folder)) {
      out->push_back(Remain{"mount", point + " (" + type + ")"});
    }
    if (type == "cgroup" || type == "cgroup2") FindCgroups(point, q.job_id, 8, out);
  }
}

void FindEntries(const std::string& folder, const char* kind, const RemainsQuery& q, const char* prefix, std::vector<Remain>* out) {
  auto names = ListDir(folder);
  if (!names.ok()) return;
  const bool any_job = q.job_id == "temper-";
  for (const std::string& name : *names) {
    if (Contains(name, q.job_id) || (any_job && name.rfind(prefix, 0) == 0)) out->push_back(Remain{kind, folder + "/" + name});
  }
}

void FindPorts(const RemainsQuery& q, std::vector<Remain>* out) {
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
    if (Contains(name, q.job_id) || NamesFolder(name, q.run_folder)) out->push_back(Remain{"port", "unix-abstract:" + name.substr(1)});
  }
}

}  // namespace

std::vector<Remain> FindRemains(const RemainsQuery& query) {
  std::vector<Remain> found;
  FindProcesses(query, &found);
  FindMountsAndCgroups(query, &found);
  FindEntries("/dev/shm", "shared_memory", query, "temper", &found);
  FindEntries("/tmp", "temporary_folder", query, "temper-", &found);
  FindPorts(query, &found);
  return found;
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
