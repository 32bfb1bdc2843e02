#include "rollout/client.h"

#include <condition_variable>
#include <list>
#include <mutex>
#include <unordered_map>

#include "common/check.h"
#include "common/rng.h"

namespace temper::rollout {
namespace {

constexpr size_t kAffinitiesMax = 4096;

class Spread final : public RolloutClient {
 public:
  explicit Spread(std::vector<std::unique_ptr<RolloutClient>> workers)
      : workers_(std::move(workers)), shared_(std::make_shared<Shared>()) {
    shared_->running.resize(workers_.size());
  }

  std::unique_ptr<Call> Generate(GenerateRequest request, Callbacks callbacks) override {
    const size_t index = Choose(request.key);
    callbacks.on_done = [shared = shared_, index, counted = std::make_shared<Counted>(shared_, index),
                         done = std::move(callbacks.on_done)](const Status& status) {
      counted->End();
      if (done) done(status);
    };
    return workers_[index]->Generate(std::move(request), std::move(callbacks));
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::vector<int> running;
    std::list<std::pair<uint64_t, size_t>> recent;  // affinity and its worker, newest first
    std::unordered_map<uint64_t, std::list<std::pair<uint64_t, size_t>>::iterator> index;
  };
  // One call that is counted as running until it ends or is dropped.
  struct Counted {
    Counted(std::shared_ptr<Shared> s, size_t i) : shared(std::move(s)), index(i) {}
    ~Counted() { End(); }
    void End() {
      std::lock_guard lock(shared->mutex);
      if (!ended) --shared->running[index];
      ended = true;
    }
    std::shared_ptr<Shared> shared;
    size_t index;
    bool ended = false;
  };

  size_t Choose(const engine::SampleKey& key) {
    uint64_t affinity = Mix64(key.seed ^ Mix64(key.domain ^ Mix64(key.a ^ Mix64(key.b))));
    std::lock_guard lock(shared_->mutex);
    Shared& s = *shared_;
    size_t worker = 0;
    if (auto it = s.index.find(affinity); it != s.index.end()) {
      worker = it->second->second;
      s.recent.splice(s.recent.begin(), s.recent, it->second);
    } else {
      for (size_t i = 1; i < s.running.size(); ++i) {
        if (s.running[i] < s.running[worker]) worker = i;
      }
      s.recent.emplace_front(affinity, worker);
      s.index[affinity] = s.recent.begin();
      if (s.recent.size() > kAffinitiesMax) {
        s.index.erase(s.recent.back().first);
        s.recent.pop_back();
      }
    }
    ++s.running[worker];
    return worker;
  }

  std::vector<std::unique_ptr<RolloutClient>> workers_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace

std::unique_ptr<RolloutClient> SpreadRollout(std::vector<std::unique_ptr<RolloutClient>> workers) {
  TEMPER_CHECK(!workers.empty());
  return std::make_unique<Spread>(std::move(workers));
}

Result<Generated> GenerateBlocking(RolloutClient& client, GenerateRequest request) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable done;
    std::optional<Status> status;
    Generated generated;
  };
  auto shared = std::make_shared<Shared>();
  Callbacks callbacks;
  callbacks.on_chunk = [shared](const Chunk& chunk) {
    std::lock_guard lock(shared->mutex);
    Generated& g = shared->generated;
    g.ids.insert(g.ids.end(), chunk.ids.begin(), chunk.ids.end());
    g.logprobs.insert(g.logprobs.end(), chunk.logprobs.begin(), chunk.logprobs.end());
    g.kept.insert(g.kept.end(), chunk.kept.begin(), chunk.kept.end());
    g.kept.resize(g.ids.size());
    if (!chunk.finish.empty()) g.finish = chunk.finish;
    g.prompt_tokens = chunk.prompt_tokens;
    g.cached_tokens = chunk.cached_tokens;
    g.chunks.push_back(chunk);
  };
  callbacks.on_done = [shared](const Status& status) {
    std::lock_guard lock(shared->mutex);
    shared->status = status;
    shared->done.notify_all();
  };
  std::unique_ptr<Call> call = client.Generate(std::move(request), std::move(callbacks));
  std::unique_lock lock(shared->mutex);
  shared->done.wait(lock, [&] { return shared->status.has_value(); });
  if (!shared->status->ok()) return *shared->status;
  return std::move(shared->generated);
}

uint64_t IdsHash(std::span<const int32_t> ids, uint64_t hash) {
  for (int32_t id : ids) hash = Mix64(hash ^ static_cast<uint32_t>(id)) + 0x9e3779b97f4a7c15ull;
  return hash;
}

}  // namespace temper::rollout
