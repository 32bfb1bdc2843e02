// Named fault points: places where a test can end the process or make an operation fail.
//
//   TEMPER_FAULTS="trainer.before_commit=exit@3;pool.write=fail"
//
// name=action[@N]: at the N-th hit of the point (1 by default, and only then). Actions: `exit` ends the process at once,
// as `kill -9` would; `fail` makes Hit return an error; `sleep:S` waits S seconds; `hang` never returns.
// Nothing armed costs one uncontended lock a point: not for inner loops.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "common/status.h"

namespace temper {

// Thread-safe.
class Faults {
 public:
  Faults() = default;  // nothing armed
  // Parses a list as above.
  static Status Parse(const std::string& text, Faults* out);
  // The one of the process, armed from TEMPER_FAULTS; a malformed list ends the process with exit code 2.
  static Faults& Get();

  // Marks a fault point. OK unless `fail` is armed here and this is its turn.
  Status Hit(const char* name);
  // Whether Hit(name) may do something: for a point that must first be made possible.
  bool Armed(const char* name);
  // Arms one point, for tests.
  void Arm(const std::string& name, const std::string& action, int at = 1);

 private:
  struct Point {
    std::string action;
    int at = 1;
    int hits = 0;
  };
  std::mutex mutex_;
  std::map<std::string, Point, std::less<>> points_;
};

}  // namespace temper
