// The gateway: HTTP requests of agents in, model calls out, every token recorded in the session of the key.
//
// Three kinds of thread meet here: HTTP workers (authorise, parse, plan the prompt), the task loop (owns running calls, commits),
// and callers of the control plane. A session is guarded by its own lock; a running call is touched on the loop only.
// Order of locks: sessions_mutex_ before a session's.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/metrics.h"
#include "gateway/client.h"
#include "gateway/http/server.h"
#include "gateway/policy_text.h"
#include "gateway/session.h"
#include "gateway/session_log.h"
#include "gateway/task_loop.h"
#include "rollout/client.h"

namespace temper::gateway {

struct GatewayOptions {
  std::string log_dir = {};  // "" = memory only
  std::string model_name = "policy";
  int context_tokens = 0;
  // Of the kept sets of one session's tokens: beyond it a call ends as by its length and none begins. A trajectory must fit into a
  // message.
  size_t kept_bytes_max = size_t{64} << 20;
  double worker_patience_s = 60;  // how long a call is repeated while the worker is away
  double call_s_max = 600;        // of one generation
  double ping_s = 5;              // a streamed answer without news gets a comment this often
  // Any key opens a session of its own: no limits, the client chooses sampling (`temper gateway try`).
  bool open_on_use = false;
};

class Gateway : public GatewayControl {
 public:
  // `text` and `rollout` must outlive the gateway.
  Gateway(GatewayOptions options, const PolicyText& text, rollout::RolloutClient& rollout, Clock& clock, Metrics& metrics);
  ~Gateway() override;

  // Recovers the sessions of the log.
  Status Start();
  // Ends every wait of the control plane. Before Stop, while Handle and the control plane may still be called.
  void Interrupt();
  // Cancels what is running; sessions stay open in the log. Idempotent. No Handle may be running or come.
  void Stop();
  // Set before the first Open.
  void SetBaseUrl(std::string base_url) { base_url_ = std::move(base_url); }

  // The handler of the agent plane.
  void Handle(http::Request request, std::shared_ptr<http::Responder> out);
  // The body of the HTTP server's own refusals.
  static std::string RefusalBody(int status, const std::string& message);

  Result<Opened> Open(const OpenOptions& options) override;
  Result<Sealed> Seal(const std::string& session, int drain_ms) override;
  Status Abort(const std::string& session, const std::string& reason) override;
  Result<GatewayStatus> GetStatus() override;

 private:
  struct Entry;
  struct Call;
  using EntryPtr = std::shared_ptr<Entry>;
  using CallPtr = std::shared_ptr<Call>;

  EntryPtr FindByKey(const std::string& key);
  EntryPtr FindByName(const std::string& session);
  Result<EntryPtr> OpenEntry(const OpenOptions& options, const std::string& key);
  void Forget(const EntryPtr& entry);
  void HandleChat(const EntryPtr& entry, const http::Request& request, const std::shared_ptr<http::Responder>& out);
  void Refuse(const std::shared_ptr<http::Responder>& out, const Refusal& refusal);
  void Deliver(const Call& call, const Answer& answer);

  // On the loop.
  void Launch(const CallPtr& call);
  void OnChunk(const CallPtr& call, int attempt, size_t choice, const rollout::Chunk& chunk);
  void OnDone(const CallPtr& call, int attempt, size_t choice, const Status& status);
  void Cancel(const CallPtr& call, const std::string& note);
  void Settle(const CallPtr& call);
  void Show(const CallPtr& call, size_t choice);
  void Ping();

  Result<Sealed> CloseEntry(const EntryPtr& entry, const std::string& state, const std::string& reason, int drain_ms);
  void Write(Session& session);  // its new records, to the log; the session's lock is held
  double Since(const Entry& entry) const;  // seconds since its session was opened
  void Retain(const std::string& session);

  // Constant after Start.
  const GatewayOptions options_;
  const PolicyText& text_;
  rollout::RolloutClient& rollout_;
  Clock& clock_;
  Metrics& metrics_;
  std::string base_url_;
  std::unique_ptr<SessionLog> log_;  // null: memory only

  std::mutex sessions_mutex_;
  std::map<std::string, EntryPtr> by_name_;  // guarded by sessions_mutex_, like the two below
  std::map<std::string, EntryPtr> by_key_;
  std::deque<std::string> closed_;           // oldest first; the newest kClosedMax are kept
  int opened_on_use_ = 0;

  std::map<const Call*, CallPtr> running_;   // on the loop only
  std::atomic<bool> interrupted_{false};
  bool stopped_ = false;
  std::unique_ptr<TaskLoop> loop_;
};

}  // namespace temper::gateway
