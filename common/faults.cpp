#include "common/faults.h"

#include <signal.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>

#include "common/clock.h"
#include "common/log.h"
#include "common/strings.h"

namespace temper {

Status Faults::Parse(const std::string& text, Faults* out) {
  for (const std::string& item : Split(text, ';')) {
    if (item.empty()) continue;
    const size_t equals = item.find('=');
    if (equals == std::string::npos || equals == 0) {
      return InvalidArgument("fault '" + item + "': expected name=exit|fail|hang|sleep:S[@N]");
    }
    std::string action = item.substr(equals + 1);
    int at = 1;
    if (const size_t mark = action.find('@'); mark != std::string::npos) {
      const std::string number = action.substr(mark + 1);
      auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), at);
      if (error != std::errc() || end != number.data() + number.size() || at < 1) {
        return InvalidArgument("fault '" + item + "': '" + number + "' is not a count from 1");
      }
      action.resize(mark);
    }
    double seconds = 0;
    const bool sleep = action.rfind("sleep:", 0) == 0 && ParseDouble(action.substr(6), &seconds) && seconds >= 0;
    if (action != "exit" && action != "fail" && action != "hang" && !sleep) {
      return InvalidArgument("fault '" + item + "': unknown action '" + action + "' (exit, fail, hang, sleep:S)");
    }
    out->Arm(item.substr(0, equals), action, at);
  }
  return Status::Ok();
}

Faults& Faults::Get() {
  static Faults* faults = [] {
    auto* made = new Faults;  // Lives as long as the process: fault points are hit during its last moments too.
    if (const char* text = std::getenv("TEMPER_FAULTS")) {
      if (Status s = Parse(text, made); !s.ok()) {
        std::fprintf(stderr, "temper: TEMPER_FAULTS: %s\n", s.message().c_str());
        std::_Exit(2);
      }
    }
    return made;
  }();
  return *faults;
}

void Faults::Arm(const std::string& name, const std::string& action, int at) {
  std::lock_guard lock(mutex_);
  points_[name] = Point{action, at, 0};
}

bool Faults::Armed(const char* name) {
  std::lock_guard lock(mutex_);
  return points_.count(name) > 0;
}

Status Faults::Hit(const char* name) {
  std::string action;
  {
    std::lock_guard lock(mutex_);
    if (points_.empty()) return Status::Ok();
    auto it = points_.find(name);
    if (it == points_.end() || ++it->second.hits != it->second.at) return Status::Ok();
    action = it->second.action;
  }
  if (action == "fail") return Unavailable(std::string("injected fault at ") + name);
  if (action == "exit") kill(getpid(), SIGKILL);
  if (action == "hang") {
    for (;;) pause();
  }
  double seconds = 0;
  log::Info("fault point", {{"name", name}, {"action", action}});  // so that a test knows where the process is
  if (ParseDouble(action.substr(6), &seconds)) SystemClock::Get().SleepS(seconds);
  return Status::Ok();
}

}  // namespace temper
