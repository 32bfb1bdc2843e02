#include "common/clock.h"

#include <chrono>
#include <thread>

#include "common/check.h"

namespace temper {

double SystemClock::NowS() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double SystemClock::WallS() const {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void SystemClock::SleepS(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

SystemClock& SystemClock::Get() {
  static SystemClock clock;
  return clock;
}

void FakeClock::Advance(double seconds) {
  TEMPER_CHECK(seconds >= 0) << "time goes forward only, not by " << seconds;
  double now = now_s_.load();
  while (!now_s_.compare_exchange_weak(now, now + seconds)) {
  }
}

}  // namespace temper
