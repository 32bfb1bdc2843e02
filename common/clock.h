// Time, as an object that is passed in: the machine's in a job, one that a test moves by hand.
#pragma once

#include <atomic>

namespace temper {

// Thread-safe. All times are seconds.
class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic, from an arbitrary origin; never goes back while the machine is up.
  virtual double NowS() const = 0;
  // Seconds since 1970, for names and logs; may jump.
  virtual double WallS() const = 0;
  virtual void SleepS(double seconds) = 0;
};

class SystemClock final : public Clock {
 public:
  double NowS() const override;
  double WallS() const override;
  void SleepS(double seconds) override;
  // The one of the process.
  static SystemClock& Get();
};

// Stands still until a test moves it. SleepS advances it and returns at once.
class FakeClock final : public Clock {
 public:
  explicit FakeClock(double now_s = 0, double wall_s = 1.7e9) : now_s_(now_s), wall_offset_s_(wall_s - now_s) {}
  double NowS() const override { return now_s_.load(); }
  double WallS() const override { return now_s_.load() + wall_offset_s_; }
  void SleepS(double seconds) override { Advance(seconds); }
  void Advance(double seconds);

 private:
  std::atomic<double> now_s_;
  const double wall_offset_s_;
};

}  // namespace temper
