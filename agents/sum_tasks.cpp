#include <memory>
#include <string>

#include "agents/task.h"
#include "common/check.h"
#include "common/rng.h"

namespace temper::agents {
namespace {

constexpr int64_t kLargest = 20;

// A quarter of all pairs, spread evenly over both numbers.
bool HeldOutPair(int64_t a, int64_t b) { return (a * 3 + b * 5) % 4 == 0; }

class SumTasks : public TaskSource {
 public:
  SumTasks(uint64_t seed, int64_t count, Split split) : seed_(seed), count_(count), split_(split) {}
  int64_t size() const override { return count_; }

  Task Get(int64_t index) const override {
    TEMPER_CHECK(index >= 0 && index < count_) << "task " << index << " of " << count_;
    Rng rng = Rng(seed_).Fork(split_ == Split::kHeldOut ? "sums held out" : "sums", static_cast<uint64_t>(index));
    int64_t a, b;
    do {
      a = 1 + static_cast<int64_t>(rng.Below(kLargest));
      b = 1 + static_cast<int64_t>(rng.Below(kLargest));
    } while (HeldOutPair(a, b) != (split_ == Split::kHeldOut));
    Task task;
    task.family = "sum";
    task.id = std::string(split_ == Split::kHeldOut ? "held-" : "train-") + std::to_string(index) + "-sum";
    task.instruction = "What is " + std::to_string(a) + " + " + std::to_string(b) + "? Answer with the number only.";
    task.hidden = "{\"answer\":" + std::to_string(a + b) + "}";
    return task;
  }

 private:
  const uint64_t seed_;
  const int64_t count_;
  const Split split_;
};

}  // namespace

std::unique_ptr<TaskSource> MakeSumTasks(uint64_t seed, int64_t count, Split split) {
  return std::make_unique<SumTasks>(seed, count, split);
}

}  // namespace temper::agents
