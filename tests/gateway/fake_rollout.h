// A worker without a model: answers what a script says, token by token, on a thread of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "rollout/client.h"

namespace temper::gateway {

struct Script {
  std::string text = {};       // drawn byte by byte, then `end` (unless finish is "length")
  std::string finish = "stop";
  Status status = {};          // of on_done; not OK: instead of the last chunk
  size_t fail_after = 0;       // with a status: tokens drawn before it
  int token_ms = 0;
  size_t swap_at = 0;          // > 0: from this token on version {1, 2}
  bool lie_about_hash = false;
  std::function<std::string(int32_t id)> kept = {};  // the kept set sent with each token
  bool lose_a_kept_set = false;
  bool wait_for_cancel = false;  // draws nothing until cancelled
  int linger_ms = 0;             // from its cancellation to its last word
};

class FakeRollout : public rollout::RolloutClient {
 public:
  using Answerer = std::function<Script(const rollout::GenerateRequest&)>;
  explicit FakeRollout(int32_t end_id, Answerer answer) : end_id_(end_id), answer_(std::move(answer)) {}

  std::unique_ptr<rollout::Call> Generate(rollout::GenerateRequest request, rollout::Callbacks callbacks) override {
    {
      std::lock_guard lock(mutex_);
      requests_.push_back(request);
    }
    const Script script = answer_(request);
    auto call = std::make_unique<FakeCall>();
    call->thread = std::thread([this, request = std::move(request), callbacks = std::move(callbacks), script, c = call.get()] {
      Run(request, callbacks, script, *c);
    });
    return call;
  }

  std::vector<rollout::GenerateRequest> requests() const {
    std::lock_guard lock(mutex_);
    return requests_;
  }
  int cancelled() const { return cancelled_; }

 private:
  struct FakeCall : rollout::Call {
    std::mutex mutex;
    std::condition_variable changed;
    bool cancel = false;
    std::thread thread;
    void Cancel() override {
      std::lock_guard lock(mutex);
      cancel = true;
      changed.notify_all();
    }
    bool Wait(int ms) {
      std::unique_lock lock(mutex);
      return changed.wait_for(lock, std::chrono::milliseconds(ms), [&] { return cancel; });
    }
    ~FakeCall() override {
      Cancel();
      thread.join();
    }
  };

  void Run(const rollout::GenerateRequest& request, const rollout::Callbacks& callbacks, const Script& script, FakeCall& call) {
    std::vector<int32_t> ids;
    for (unsigned char c : script.text) ids.push_back(c);
    if (script.finish == "stop") ids.push_back(end_id_);
    std::string finish = script.finish;
    if (ids.size() > request.sampling.max_tokens) {
      ids.resize(request.sampling.max_tokens);
      finish = "length";
    }
    if (!script.status.ok()) ids.resize(std::min(ids.size(), script.fail_after));
    uint64_t hash = rollout::IdsHash(request.prompt_ids);
    rollout::Chunk chunk;
    const bool merge = request.coalesce_ms == rollout::kOneChunk;
    if (script.wait_for_cancel && call.Wait(20'000)) {
      ++cancelled_;
      std::this_thread::sleep_for(std::chrono::milliseconds(script.linger_ms));
      return callbacks.on_done(Cancelled("cancelled"));
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      if (call.Wait(script.token_ms)) {
        ++cancelled_;
        return callbacks.on_done(Cancelled("cancelled"));
      }
      const engine::Version version{1, script.swap_at > 0 && i >= script.swap_at ? 2 : 1};
      if (!chunk.ids.empty() && (version != chunk.version || !merge)) {
        callbacks.on_chunk(chunk);
        chunk = {};
      }
      chunk.version = version;
      chunk.ids.push_back(ids[i]);
      chunk.logprobs.push_back(-0.25f * static_cast<float>(i % 4));
      if (script.kept && !(script.lose_a_kept_set && i == 1)) chunk.kept.push_back(script.kept(ids[i]));
      hash = rollout::IdsHash({&ids[i], 1}, hash);
      chunk.ids_hash = script.lie_about_hash ? hash + 1 : hash;
      chunk.prompt_tokens = static_cast<uint32_t>(request.prompt_ids.size());
      chunk.cached_tokens = 3;
    }
    if (!script.status.ok()) {
      if (!chunk.ids.empty()) callbacks.on_chunk(chunk);
      return callbacks.on_done(script.status);
    }
    chunk.finish = finish;
    chunk.ids_hash = script.lie_about_hash ? hash + 1 : hash;
    callbacks.on_chunk(chunk);
    callbacks.on_done(Status::Ok());
  }

  const int32_t end_id_;
  const Answerer answer_;
  mutable std::mutex mutex_;
  std::vector<rollout::GenerateRequest> requests_;
  std::atomic<int> cancelled_{0};
};

}  // namespace temper::gateway
