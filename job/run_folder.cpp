#include "job/run_folder.h"

#include <fmt/format.h>

#include <cctype>
#include <string_view>

#include "common/clock.h"
#include "common/file.h"
#include "common/json.h"
#include "common/process.h"

namespace temper::job {
namespace {

// Who only looks whether a run is held (Held) holds it himself for an instant.
Result<Fd> TakeLock(const std::string& path) {
  for (int attempt = 0;; ++attempt) {
    auto lock = LockFile(path);
    if (lock.ok() || lock.status().code() != StatusCode::kFailedPrecondition || attempt == 25) return lock;
    SystemClock::Get().SleepS(0.02);
  }
}

}  // namespace

std::string RunState::ToJson() const {
  JsonWriter w;
  w.BeginObject();
  w.Key("phase").String(phase).Key("incarnation").Int(incarnation).Key("pid").Int(pid).Key("sandbox_job").String(sandbox_job);
  w.Key("working_folder").String(working_folder).Key("started_wall_s").Double(started_wall_s).Key("wall_s").Double(wall_s);
  w.Key("sampling_s").Double(sampling_s).Key("began_s").Double(began_s);
  w.Key("endpoints").BeginObject();
  for (const auto& [name, address] : endpoints) w.Key(name).String(address);
  w.EndObject().Key("counters").BeginObject();
  for (const auto& [name, value] : counters) w.Key(name).Double(value);
  w.EndObject().EndObject();
  return w.Take() + "\n";
}

Result<RunState> RunState::FromJson(const std::string& text) {
  ASSIGN_OR_RETURN(const json::value value, ParseJson(text));
  const JsonRef root(value, "state.json");
  RunState state;
  ASSIGN_OR_RETURN(state.phase, root.StringOr("phase", state.phase));
  ASSIGN_OR_RETURN(const JsonRef incarnation, root.Field("incarnation"));
  ASSIGN_OR_RETURN(state.incarnation, incarnation.Int());
  ASSIGN_OR_RETURN(state.pid, root.IntOr("pid", 0));
  ASSIGN_OR_RETURN(state.sandbox_job, root.StringOr("sandbox_job", ""));
  ASSIGN_OR_RETURN(state.working_folder, root.StringOr("working_folder", ""));
  ASSIGN_OR_RETURN(state.started_wall_s, root.DoubleOr("started_wall_s", 0));
  ASSIGN_OR_RETURN(state.wall_s, root.DoubleOr("wall_s", 0));
  ASSIGN_OR_RETURN(state.sampling_s, root.DoubleOr("sampling_s", 0));
  ASSIGN_OR_RETURN(state.began_s, root.DoubleOr("began_s", 0));
  if (root.Has("endpoints")) {
    ASSIGN_OR_RETURN(const JsonRef endpoints, root.Field("endpoints"));
    if (!endpoints.value().is_object()) return endpoints.Error("expected an object");
    for (const auto& member : endpoints.value().get_object()) {
      ASSIGN_OR_RETURN(state.endpoints[member.key_c_str()], JsonRef(member.value(), "endpoints").String());
    }
  }
  if (root.Has("counters")) {
    ASSIGN_OR_RETURN(const JsonRef counters, root.Field("counters"));
    if (!counters.value().is_object()) return counters.Error("expected an object");
    for (const auto& member : counters.value().get_object()) {
      ASSIGN_OR_RETURN(state.counters[member.key_c_str()], JsonRef(member.value(), "counters").Double());
    }
  }
  return state;
}

Status RunFolder::CheckFresh() const {
  if (!Exists(path_)) return Status::Ok();
  if (!IsDirectory(path_)) return FailedPrecondition(path_ + ": exists and is no folder");
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDir(path_));
  if (!names.empty()) return FailedPrecondition(path_ + ": not empty; choose another --out, or --resume it");
  return Status::Ok();
}

Status RunFolder::Create() {
  RETURN_IF_ERROR(MakeDirs(path_));
  ASSIGN_OR_RETURN(lock_, TakeLock(File("lock")));
  for (const char* part : {"checkpoints", "logs", "attempts"}) RETURN_IF_ERROR(MakeDirs(File(part)));
  return Status::Ok();
}

Status RunFolder::Open() {
  if (!Exists(File("state.json"))) return NotFound(path_ + ": no run to resume here (no state.json)");
  auto lock = TakeLock(File("lock"));
  if (!lock.ok() && lock.status().code() != StatusCode::kFailedPrecondition) return lock.status();
  if (!lock.ok()) {
    std::string who;
    if (const auto state = ReadState(); state.ok() && state->pid > 0) {
      who = fmt::format(", as process {0}; end it with: kill -INT {0}", state->pid);
    }
    return FailedPrecondition(fmt::format("{} goes on already{}; look at it with: temper top {}", path_, who, path_));
  }
  lock_ = std::move(*lock);
  for (const char* part : {"checkpoints", "logs", "attempts"}) RETURN_IF_ERROR(MakeDirs(File(part)));
  return Status::Ok();
}

Result<RunState> RunFolder::ReadState() const {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(File("state.json"), 1 << 20));
  return RunState::FromJson(text);
}

Status RunFolder::WriteState(const RunState& state) const { return WriteFileAtomic(File("state.json"), state.ToJson()); }

bool RunFolder::Held() const { return LockHeld(File("lock")); }

std::string ResumeCommand(const std::string& run_path) {
  const std::string path = AbsolutePath(run_path);
  std::string quoted;
  bool plain = true;
  for (const char c : path) {
    const bool sign = std::string_view("/._-+,:@%").find(c) != std::string_view::npos;
    plain = plain && (sign || std::isalnum(static_cast<unsigned char>(c)));
    quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return "temper run --resume --out " + (plain ? path : "'" + quoted + "'");
}

std::string DefaultRunPath(const std::string& name, double wall_s) {
  std::string stamp;
  for (char c : IsoTime(wall_s)) {
    if (c == 'T') stamp += '-';
    else if (c >= '0' && c <= '9') stamp += c;
  }
  return "runs/" + name + "-" + stamp;
}

}  // namespace temper::job
