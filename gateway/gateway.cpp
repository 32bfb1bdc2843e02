#include "gateway/gateway.h"

#include <sys/random.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include "common/check.h"
#include "common/log.h"
#include "common/strings.h"
#include "engine/kept_set.h"
#include "gateway/convert.h"
#include "gateway/dialect/openai_chat.h"
#include "gateway/sampled_text.h"
#include "temper/v1/gateway.pb.h"
#include "temper/v1/types.pb.h"

namespace temper::gateway {
namespace {

constexpr size_t kClosedMax = 8192;       // closed sessions kept for a repeated Seal
constexpr double kCancelWaitS = 10;       // for cancelled calls to come back
constexpr double kRetryFirstS = 0.05, kRetryLastS = 1;

Refusal Unauthorised(const std::string& message) {
  return {.status = 401, .type = "authentication_error", .code = "invalid_api_key", .message = message};
}
Refusal SessionClosed() {
  return {.status = 410, .code = "session_closed", .message = "the session is closed; it takes no further calls"};
}

std::string NewKey() {
  unsigned char bytes[24];
  TEMPER_CHECK(::getrandom(bytes, sizeof bytes, 0) == static_cast<ssize_t>(sizeof bytes)) << "no random bytes";
  return "sk-temper-" + HexEncode({reinterpret_cast<const char*>(bytes), sizeof bytes});
}

std::string BearerKey(const http::Request& request) {
  const std::string_view header = request.Header("authorization");
  if (header.size() > 7 && (header.starts_with("Bearer ") || header.starts_with("bearer "))) return std::string(Trim(header.substr(7)));
  return std::string(request.Header("x-api-key"));
}

// The operation of a path, whichever of the accepted prefixes it came with, and the session named in it.
struct Route {
  std::string session;
  std::vector<std::string> op;
};
Route ParsePath(const std::string& path) {
  Route route;
  for (std::string& part : Split(path, '/')) {
    if (!part.empty()) route.op.push_back(std::move(part));
  }
  if (route.op.size() >= 2 && route.op[0] == "r") {
    route.session = route.op[1];
    route.op.erase(route.op.begin(), route.op.begin() + 2);
  }
  if (!route.op.empty() && route.op[0] == "openai") route.op.erase(route.op.begin());
  while (!route.op.empty() && route.op[0] == "v1") route.op.erase(route.op.begin());
  return route;
}

// Equal for equal sessions.
std::string Bytes(const OpenOptions& options) {
  v1::GatewayOpenRequest request;
  ToProto(options, &request);
  request.clear_fresh();
  return request.SerializeAsString();
}

// Kept sets as the worker may send them: none, or one per id that has the id in it.
bool KeptFits(const rollout::Chunk& chunk) {
  if (chunk.kept.empty()) return true;
  if (chunk.kept.size() != chunk.ids.size()) return false;
  for (size_t i = 0; i < chunk.ids.size(); ++i) {
    if (!engine::CheckKept(chunk.kept[i], std::numeric_limits<int32_t>::max(), chunk.ids[i]).ok()) return false;
  }
  return true;
}

SessionLimits LimitsOf(const GatewayOptions& o) { return {.context_tokens = o.context_tokens, .kept_bytes_max = o.kept_bytes_max}; }

Status CheckOptions(const OpenOptions& o) {
  if (o.session.empty() || o.session.size() > 200) return InvalidArgument("session: a name of 1 to 200 bytes is needed");
  for (unsigned char c : o.session) {
    if (c <= ' ' || c == '/' || c >= 0x7f) return InvalidArgument("session: '" + o.session + "' has a space, a slash or no ASCII");
  }
  if (o.sampling) {
    const SamplingPolicy& s = *o.sampling;
    if (!(s.temperature >= 0 && s.temperature <= 100)) return InvalidArgument("sampling.temperature: must be from 0 to 100");
    if (!(s.top_p > 0 && s.top_p <= 1)) return InvalidArgument("sampling.top_p: must be above 0, at most 1");
    if (!(s.min_p >= 0 && s.min_p <= 1)) return InvalidArgument("sampling.min_p: must be from 0 to 1");
  }
  if (!o.training) return Status::Ok();
  if (!o.sampling) return InvalidArgument("sampling: a training session needs a sampling policy of its own");
  // Of one token alone the logprob is 0 whatever the weights are: there would be nothing to train.
  if (o.sampling->top_k == 1) return InvalidArgument("sampling.top_k: 1 leaves a training session no choice to learn");
  if (o.sampling->min_p == 1) return InvalidArgument("sampling.min_p: 1 leaves a training session no choice to learn");
  return Status::Ok();
}

}  // namespace

struct Gateway::Entry {
  // Constant after creation.
  OpenOptions options;
  std::string api_key;
  double origin_s = 0;  // monotonic time of the opening

  std::mutex mutex;
  std::condition_variable changed;   // a call ended
  // Guarded by mutex.
  std::unique_ptr<Session> session;  // null once closed
  bool closing = false;
  std::map<int, CallPtr> calls;      // in flight
  std::string state;                 // of a closed session
  std::string trajectory;            // serialised, of a closed session

  // On the loop only.
  size_t kept_bytes = 0;             // of kept sets that its calls have brought
};

struct Gateway::Call {
  struct Waiter {
    std::shared_ptr<http::Responder> out;
    bool live = false;  // streams as tokens come; others get the whole answer at the end
  };
  struct ChoiceState {
    std::unique_ptr<SampledText> text;
    std::vector<Span> spans;
    std::vector<int32_t> ids;      // the spans, flat
    std::vector<float> logprobs;
    uint64_t hash = 0;
    std::string finish;
    int cached_tokens = 0;
    bool stopped = false;  // by a stop string
    bool cut = false;      // by the bound on kept sets
    bool done = false;
    Status status;
  };

  // Constant after creation.
  EntryPtr entry;
  ChatRequest request;
  Plan plan;
  double give_up_at = 0;

  // On the loop only.
  std::vector<Waiter> waiters;
  std::vector<ChoiceState> choices;
  std::vector<std::unique_ptr<rollout::Call>> running;
  std::unique_ptr<openai::ChatStream> stream;  // of the live waiter
  bool begun = false;      // its head is sent
  bool shown = false;      // a token's text is sent: the draw cannot be repeated silently
  double heard_at = 0;     // of the live waiter's last bytes
  int attempt = 0;
  size_t kept_bytes = 0;   // of this attempt
  double backoff_s = kRetryFirstS;
  std::string cancel_note;  // why it is being cancelled
  std::optional<Refusal> fault;
  bool settled = false;
};

Gateway::Gateway(GatewayOptions options, const PolicyText& text, rollout::RolloutClient& rollout, Clock& clock, Metrics& metrics)
    : options_(std::move(options)), text_(text), rollout_(rollout), clock_(clock), metrics_(metrics) {}

Gateway::~Gateway() { Stop(); }

std::string Gateway::RefusalBody(int status, const std::string& message) {
  Refusal refusal{.status = status, .message = message};
  if (status == 413) refusal.code = "request_too_large";
  if (status == 429) {
    refusal.type = "rate_limit_error";
    refusal.code = "queue_full";
  }
  return openai::ErrorBody(refusal);
}

Status Gateway::Start() {
  loop_ = std::make_unique<TaskLoop>(clock_);
  loop_->PostAfter(options_.ping_s, [this] { Ping(); });
  if (options_.log_dir.empty()) return Status::Ok();
  RETURN_IF_ERROR(MakeDirs(options_.log_dir));
  const std::string path = options_.log_dir + "/sessions.log";
  ASSIGN_OR_RETURN(const SessionLog::Recovered recovered, SessionLog::Read(path));

  std::map<std::string, std::vector<const std::string*>> kept;
  std::vector<std::string> order;
  for (const std::string& payload : recovered.payloads) {
    v1::GatewayLogRecord record;
    if (!record.ParseFromString(payload)) return DataLoss(path + ": a record that is no GatewayLogRecord");
    auto found = by_name_.find(record.session());
    if (record.has_open()) {
      if (found != by_name_.end()) {  // begun anew
        kept[record.session()].clear();
        std::erase(order, record.session());
        std::erase(closed_, record.session());
      }
      auto entry = std::make_shared<Entry>();
      entry->options = FromProto(record.open().request());
      entry->api_key = record.open().api_key();
      entry->origin_s = clock_.NowS() - std::max(0.0, clock_.WallS() - record.open().opened_at_s());
      entry->session = std::make_unique<Session>(entry->options, entry->api_key, record.open().opened_at_s(), text_, LimitsOf(options_));
      by_name_[record.session()] = entry;
      order.push_back(record.session());
    } else {
      if (found == by_name_.end()) return DataLoss(path + ": a record of the unknown session " + record.session());
      RETURN_IF_ERROR(found->second->session->Apply(record).WithContext(path));
      if (record.has_close()) closed_.push_back(record.session());
    }
    kept[record.session()].push_back(&payload);
  }
  while (closed_.size() > kClosedMax) {
    by_name_.erase(closed_.front());
    closed_.pop_front();
  }
  std::vector<std::string> payloads;
  for (const std::string& name : order) {
    if (!by_name_.count(name)) continue;
    for (const std::string* payload : kept[name]) payloads.push_back(*payload);
  }
  ASSIGN_OR_RETURN(log_, SessionLog::Create(path, payloads));
  int open = 0;
  for (auto& [name, entry] : by_name_) {
    if (!entry->session->closed()) {
      ++open;
      entry->session->AbandonOrphans(clock_.NowS() - entry->origin_s);
      entry->session->AddFlag("recovered");
      Write(*entry->session);
      by_key_[entry->api_key] = entry;
      entry->kept_bytes = entry->session->kept_bytes();
      continue;
    }
    v1::Trajectory trajectory;
    entry->session->ToTrajectory(&trajectory);
    entry->state = entry->session->state();
    entry->trajectory = trajectory.SerializeAsString();
    entry->closing = true;
    entry->session.reset();
    by_key_[entry->api_key] = entry;
  }
  metrics_["sessions_open"].Set(open);
  if (recovered.lost_bytes > 0) {
    log::Warn("cut a torn end off the session log", {{"path", path}, {"bytes", recovered.lost_bytes}});
  }
  if (!by_name_.empty()) log::Info("sessions recovered", {{"open", open}, {"closed", by_name_.size() - open}});
  return Status::Ok();
}

void Gateway::Interrupt() {
  interrupted_ = true;
  std::lock_guard lock(sessions_mutex_);
  for (const auto& [name, entry] : by_name_) {
    std::lock_guard entry_lock(entry->mutex);
    entry->changed.notify_all();
  }
}

void Gateway::Stop() {
  if (!loop_ || stopped_) return;
  Interrupt();
  stopped_ = true;
  loop_->Stop();
  // The loop is gone, so its state is ours. The responders die with the calls, which closes their connections.
  for (auto& [key, call] : running_) {
    call->running.clear();
    std::lock_guard lock(call->entry->mutex);
    call->entry->calls.clear();
  }
  running_.clear();
}

double Gateway::Since(const Entry& entry) const { return clock_.NowS() - entry.origin_s; }

void Gateway::Write(Session& session) {
  std::vector<std::string> payloads;
  for (const v1::GatewayLogRecord& record : session.TakeRecords()) {
    if (log_) payloads.push_back(record.SerializeAsString());
  }
  if (log_) log_->Append(payloads);
}

// ---- control plane ----

Gateway::EntryPtr Gateway::FindByKey(const std::string& key) {
  std::lock_guard lock(sessions_mutex_);
  auto it = by_key_.find(key);
  return it == by_key_.end() ? nullptr : it->second;
}

Gateway::EntryPtr Gateway::FindByName(const std::string& session) {
  std::lock_guard lock(sessions_mutex_);
  auto it = by_name_.find(session);
  return it == by_name_.end() ? nullptr : it->second;
}

Result<Gateway::EntryPtr> Gateway::OpenEntry(const OpenOptions& options, const std::string& key) {
  auto entry = std::make_shared<Entry>();
  entry->options = options;
  entry->api_key = key;
  entry->origin_s = clock_.NowS();
  const double opened_at_s = clock_.WallS();
  entry->session = std::make_unique<Session>(options, key, opened_at_s, text_, LimitsOf(options_));
  std::lock_guard lock(sessions_mutex_);
  if (by_name_.count(options.session)) return AlreadyExists("session " + options.session + " exists");
  if (log_) {
    v1::GatewayLogRecord record;
    record.set_session(options.session);
    ToProto(options, record.mutable_open()->mutable_request());
    record.mutable_open()->set_api_key(key);
    record.mutable_open()->set_opened_at_s(opened_at_s);
    log_->Append({record.SerializeAsString()});
  }
  by_name_[options.session] = entry;
  by_key_[key] = entry;
  metrics_["sessions_open"].Add(1);
  return entry;
}

Result<Opened> Gateway::Open(const OpenOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  if (EntryPtr entry = FindByName(options.session)) {
    {
      std::lock_guard lock(entry->mutex);
      const bool same = !entry->closing && Bytes(entry->options) == Bytes(options);
      if (same && (!options.fresh || entry->session->unused())) return Opened{entry->api_key, base_url_};
      if (!options.fresh) {
        return AlreadyExists("session " + options.session + (entry->closing ? " was closed" : " is open with other fields"));
      }
    }
    RETURN_IF_ERROR(CloseEntry(entry, "aborted", "begun anew", 0).status());
    Forget(entry);
  }
  auto entry = OpenEntry(options, NewKey());
  if (!entry.ok()) return entry.status();
  return Opened{(*entry)->api_key, base_url_};
}

Result<Sealed> Gateway::Seal(const std::string& session, int drain_ms) {
  EntryPtr entry = FindByName(session);
  if (!entry) return NotFound("no session " + session);
  return CloseEntry(entry, "sealed", "", std::clamp(drain_ms, 0, 600'000));
}

Status Gateway::Abort(const std::string& session, const std::string& reason) {
  EntryPtr entry = FindByName(session);
  if (!entry) return NotFound("no session " + session);
  return CloseEntry(entry, "aborted", reason, 0).status();
}

Result<Sealed> Gateway::CloseEntry(const EntryPtr& entry, const std::string& state, const std::string& reason, int drain_ms) {
  std::unique_lock lock(entry->mutex);
  entry->closing = true;
  if (entry->session) {
    const auto over = [&] { return entry->calls.empty() || !entry->session || interrupted_; };
    entry->changed.wait_for(lock, std::chrono::milliseconds(drain_ms), over);
    if (entry->session && !entry->calls.empty() && !interrupted_) {
      for (const auto& [number, call] : entry->calls) {
        loop_->Post([this, c = call] { Cancel(c, "sealed"); });
      }
      entry->changed.wait_for(lock, std::chrono::duration<double>(kCancelWaitS), over);
    }
    if (interrupted_ && entry->session && !entry->calls.empty()) return Unavailable("the gateway is stopping");
  }
  if (entry->session) {
    // Calls that a dead worker keeps: their results, if any ever come, find the session closed.
    for (const auto& [number, call] : entry->calls) {
      entry->session->Abandon(call->plan, {.end_s = Since(*entry), .note = "sealed"});
    }
    entry->calls.clear();
    entry->session->Close(state, reason, Since(*entry));
    Write(*entry->session);
    v1::Trajectory trajectory;
    entry->session->ToTrajectory(&trajectory);
    entry->trajectory = trajectory.SerializeAsString();
    entry->state = state;
    entry->session.reset();
    entry->changed.notify_all();
    metrics_["sessions_open"].Add(-1);
    metrics_["sessions_" + state].Add(1);
    lock.unlock();
    Retain(entry->options.session);
    lock.lock();
  }
  const std::string bytes = entry->trajectory, final_state = entry->state;
  lock.unlock();
  if (log_) log_->Sync();
  auto trajectory = std::make_shared<v1::Trajectory>();
  TEMPER_CHECK(trajectory->ParseFromString(bytes));
  return Sealed{std::move(trajectory), final_state};
}

void Gateway::Forget(const EntryPtr& entry) {
  std::lock_guard lock(sessions_mutex_);
  auto it = by_name_.find(entry->options.session);
  if (it == by_name_.end() || it->second != entry) return;
  by_name_.erase(it);
  by_key_.erase(entry->api_key);
  std::erase(closed_, entry->options.session);
}

void Gateway::Retain(const std::string& session) {
  std::lock_guard lock(sessions_mutex_);
  closed_.push_back(session);
  while (closed_.size() > kClosedMax) {
    auto it = by_name_.find(closed_.front());
    if (it != by_name_.end()) {
      by_key_.erase(it->second->api_key);
      by_name_.erase(it);
    }
    closed_.pop_front();
  }
}

Result<GatewayStatus> Gateway::GetStatus() { return GatewayStatus{metrics_.Snapshot(), base_url_}; }

// ---- agent plane ----

void Gateway::Refuse(const std::shared_ptr<http::Responder>& out, const Refusal& refusal) {
  metrics_["refusals." + std::to_string(refusal.status)].Add(1);
  http::Headers headers = {{"content-type", "application/json"}};
  if (refusal.retry_after_ms > 0) {
    headers.emplace_back("retry-after-ms", std::to_string(refusal.retry_after_ms));
  } else {
    headers.emplace_back("x-should-retry", "false");
  }
  out->Send(refusal.status, std::move(headers), openai::ErrorBody(refusal));
}

void Gateway::Handle(http::Request request, std::shared_ptr<http::Responder> out) {
  const Route route = ParsePath(request.path);
  const bool read = request.method == "GET" || request.method == "HEAD";
  if (read && (route.op.empty() || (route.op.size() == 1 && (route.op[0] == "health" || route.op[0] == "healthz")))) {
    return out->Send(200, {{"content-type", "application/json"}}, "{\"status\":\"ok\"}");
  }
  const std::string key = BearerKey(request);
  if (key.empty()) {
    return Refuse(out, Unauthorised("no API key: send 'Authorization: Bearer KEY' with the key of the session"));
  }
  EntryPtr entry = FindByKey(key);
  if (!entry && options_.open_on_use) {
    OpenOptions options;
    {
      std::lock_guard lock(sessions_mutex_);
      options.session = "try." + std::to_string(++opened_on_use_);
      options.key_space.b = opened_on_use_;
    }
    options.key_space.domain = 2;
    auto opened = OpenEntry(options, key);
    entry = opened.ok() ? *opened : FindByKey(key);
  }
  if (!entry) return Refuse(out, Unauthorised("unknown API key"));
  if (!route.session.empty() && route.session != entry->options.session) {
    return Refuse(out, Unauthorised("the API key is not that of the session in the path"));
  }
  if (!route.op.empty() && route.op[0] == "models") {
    if (!read) return Refuse(out, {.status = 405, .message = "use GET"});
    const openai::ModelCard card{options_.model_name, 0, options_.context_tokens};
    if (route.op.size() == 1) return out->Send(200, {{"content-type", "application/json"}}, openai::ModelsBody({card}));
    std::string id = route.op[1];
    for (size_t i = 2; i < route.op.size(); ++i) id += "/" + route.op[i];
    if (id == card.id) return out->Send(200, {{"content-type", "application/json"}}, openai::ModelBody(card));
    return Refuse(out, {.status = 404, .type = "not_found_error", .code = "model_not_found", .param = "model",
                        .message = "the model '" + id + "' does not exist; this session serves '" + card.id + "'"});
  }
  if (route.op == std::vector<std::string>{"chat", "completions"}) {
    if (request.method != "POST") return Refuse(out, {.status = 405, .message = "use POST"});
    return HandleChat(entry, request, out);
  }
  Refuse(out, {.status = 404, .type = "not_found_error", .code = "unknown_url",
               .message = "unknown path " + request.path + "; served are /v1/chat/completions and /v1/models"});
}

void Gateway::HandleChat(const EntryPtr& entry, const http::Request& request, const std::shared_ptr<http::Responder>& out) {
  auto parsed = openai::ParseChatRequest(request.body);
  if (auto* refusal = std::get_if<Refusal>(&parsed)) return Refuse(out, *refusal);
  const uint64_t digest = XXH3_64bits(request.body.data(), request.body.size());
  int64_t retry = 0;
  ParseInt(request.Header("x-stainless-retry-count"), &retry);

  auto call = std::make_shared<Call>();
  call->entry = entry;
  call->request = std::move(std::get<ChatRequest>(parsed));
  const bool stream = call->request.stream;
  {
    std::lock_guard lock(entry->mutex);
    if (entry->closing) return Refuse(out, SessionClosed());
    if (retry > 0) {
      // A marked repetition of a call: never drawn twice.
      for (const auto& [number, running] : entry->calls) {
        if (running->plan.digest != digest) continue;
        metrics_["calls_coalesced"].Add(1);
        return loop_->Post([this, running = running, out] {
          // One that is being cancelled, because the client hung up before it asked again, has no answer to share.
          if (!running->settled && running->cancel_note.empty()) {
            running->waiters.push_back({out, false});
            return;
          }
          Refuse(out, {.status = 503, .type = "server_error", .code = "overloaded", .message = "the call just ended; try again",
                       .retry_after_ms = 100});
        });
      }
      if (auto number = entry->session->Committed(digest)) {
        metrics_["calls_replayed"].Add(1);
        call->waiters.push_back({out, false});
        return Deliver(*call, entry->session->Replay(*number));
      }
    }
    auto planned = entry->session->Begin(call->request, digest, Since(*entry));
    Write(*entry->session);
    if (auto* refusal = std::get_if<Refusal>(&planned)) return Refuse(out, *refusal);
    call->plan = std::move(std::get<Plan>(planned));
    entry->calls[call->plan.call] = call;
  }
  call->give_up_at = clock_.NowS() + options_.worker_patience_s;
  call->heard_at = clock_.NowS();
  call->waiters.push_back({out, stream});
  metrics_["calls"].Add(1);
  metrics_["calls_in_flight"].Add(1);
  out->OnGone([this, weak = std::weak_ptr<Call>(call), responder = out.get()] {
    loop_->Post([this, weak, responder] {
      CallPtr c = weak.lock();
      if (!c || c->settled) return;
      std::erase_if(c->waiters, [&](const Call::Waiter& w) { return w.out.get() == responder; });
      if (c->waiters.empty()) Cancel(c, "client_gone");
    });
  });
  loop_->Post([this, call] {
    if (call->settled) return;  // a seal was quicker
    running_[call.get()] = call;
    Launch(call);
  });
}

// ---- running calls: everything below is on the loop ----

void Gateway::Launch(const CallPtr& call) {
  if (call->settled) return;
  ++call->attempt;
  call->entry->kept_bytes -= std::exchange(call->kept_bytes, 0);
  call->running.clear();
  call->choices.clear();
  call->choices.resize(call->plan.n);
  const uint64_t start = rollout::IdsHash(call->plan.prompt_ids);
  double limit_s = options_.call_s_max;
  if (call->entry->options.deadline_s > 0) {
    const double since = clock_.NowS() - call->entry->origin_s;
    limit_s = std::clamp(call->entry->options.deadline_s - since, 0.001, limit_s);
  }
  for (int c = 0; c < call->plan.n; ++c) {
    auto& choice = call->choices[c];
    choice.text = std::make_unique<SampledText>(text_, call->plan.tools, call->plan.stop);
    choice.hash = start;
    rollout::GenerateRequest request;
    request.request_id = call->entry->options.session + "/" + std::to_string(call->plan.call);
    request.prompt_ids = call->plan.prompt_ids;
    request.sampling = call->plan.sampling;
    request.stop_ids = text_.end_ids();
    request.key = call->plan.key;
    request.key.choice = static_cast<uint32_t>(c);
    // A stop string is seen here, not by the worker, so it needs the tokens as they come.
    request.coalesce_ms = call->plan.stop.empty() && !call->request.stream ? rollout::kOneChunk : call->request.stream ? 20 : 0;
    request.deadline_ms = static_cast<int64_t>(limit_s * 1000) + 1;
    rollout::Callbacks callbacks;
    callbacks.on_chunk = [this, call, attempt = call->attempt, c](const rollout::Chunk& chunk) {
      loop_->Post([this, call, attempt, c, chunk] { OnChunk(call, attempt, c, chunk); });
    };
    callbacks.on_done = [this, call, attempt = call->attempt, c](const Status& status) {
      loop_->Post([this, call, attempt, c, status] { OnDone(call, attempt, c, status); });
    };
    call->running.push_back(rollout_.Generate(std::move(request), std::move(callbacks)));
  }
}

void Gateway::OnChunk(const CallPtr& call, int attempt, size_t index, const rollout::Chunk& chunk) {
  auto& choice = call->choices[index];
  if (call->attempt != attempt || call->settled || choice.done || choice.stopped || choice.cut || call->fault) return;
  choice.hash = rollout::IdsHash(chunk.ids, choice.hash);
  if (chunk.ids.size() != chunk.logprobs.size() || chunk.ids_hash != choice.hash || !KeptFits(chunk)) {
    call->fault = Refusal{.status = 502, .type = "upstream_error", .code = "worker_protocol",
                          .message = "the worker's record of the tokens differs from the gateway's"};
    for (auto& running : call->running) running->Cancel();
    return;
  }
  choice.cached_tokens = std::max(choice.cached_tokens, static_cast<int>(chunk.cached_tokens));
  for (size_t i = 0; i < chunk.ids.size(); ++i) {
    if (choice.spans.empty() || choice.spans.back().version != chunk.version || choice.spans.back().mixed != chunk.mixed) {
      choice.spans.push_back({.version = chunk.version, .mixed = chunk.mixed});
    }
    Span& span = choice.spans.back();
    span.ids.push_back(chunk.ids[i]);
    span.logprobs.push_back(chunk.logprobs[i]);
    if (!chunk.kept.empty() || !span.kept.empty()) {
      span.kept.resize(span.ids.size());
      if (!chunk.kept.empty()) span.kept.back() = chunk.kept[i];
      call->kept_bytes += span.kept.back().size();
      call->entry->kept_bytes += span.kept.back().size();
    }
    choice.ids.push_back(chunk.ids[i]);
    choice.logprobs.push_back(chunk.logprobs[i]);
    if (!choice.text->Append(chunk.ids[i])) {
      choice.stopped = true;
      call->running[index]->Cancel();
      break;
    }
    if (call->entry->kept_bytes >= options_.kept_bytes_max) {
      choice.cut = true;
      call->running[index]->Cancel();
      break;
    }
  }
  choice.finish = chunk.finish;
  if (call->request.stream) Show(call, index);
}

void Gateway::Show(const CallPtr& call, size_t index) {
  const auto waiter = std::find_if(call->waiters.begin(), call->waiters.end(), [](const auto& w) { return w.live; });
  if (waiter == call->waiters.end()) return;
  auto& choice = call->choices[index];
  const std::string visible = choice.text->TakeVisible();
  if (visible.empty()) return;
  std::string frames;
  if (!call->begun) {
    call->begun = true;
    waiter->out->Begin(200, {{"content-type", "text/event-stream; charset=utf-8"}, {"cache-control", "no-cache"}, {"x-accel-buffering", "no"}});
  }
  if (!call->stream) {
    std::string id;
    {
      std::lock_guard lock(call->entry->mutex);
      if (!call->entry->session) return;
      id = call->entry->session->AnswerId(call->plan.call);
    }
    call->stream = std::make_unique<openai::ChatStream>(call->request, text_, id, static_cast<int64_t>(clock_.WallS()));
    frames = call->stream->Start();
  }
  frames += call->stream->Content(static_cast<int>(index), visible, choice.ids, choice.logprobs);
  call->shown = true;
  call->heard_at = clock_.NowS();
  waiter->out->Write(std::move(frames));
}

void Gateway::OnDone(const CallPtr& call, int attempt, size_t index, const Status& status) {
  if (call->attempt != attempt || call->settled) return;
  auto& choice = call->choices[index];
  choice.done = true;
  choice.status = status;
  if (std::all_of(call->choices.begin(), call->choices.end(), [](const auto& c) { return c.done; })) Settle(call);
}

void Gateway::Cancel(const CallPtr& call, const std::string& note) {
  if (call->settled || !call->cancel_note.empty()) return;
  call->cancel_note = note;
  for (auto& running : call->running) running->Cancel();
  // Between two attempts nothing runs that could report back.
  if (std::all_of(call->choices.begin(), call->choices.end(), [](const auto& c) { return c.done; })) Settle(call);
}

void Gateway::Settle(const CallPtr& call) {
  std::optional<Refusal> refusal = call->fault;
  std::string note = call->cancel_note;
  bool keep = true;  // what was drawn
  if (refusal) {
    keep = false;
    note = "worker_error";
  } else if (!note.empty()) {
    refusal = SessionClosed();
  } else {
    for (const auto& choice : call->choices) {
      const bool ended = choice.finish == "stop" || choice.finish == "length" || choice.finish == "repetition";
      const bool whole = choice.stopped || choice.cut || (choice.status.ok() && ended);
      if (whole) continue;
      const StatusCode code = choice.status.ok() ? StatusCode::kUnavailable : choice.status.code();
      if (code == StatusCode::kDeadlineExceeded) {
        const bool session = call->entry->options.deadline_s > 0 &&
                             clock_.NowS() - call->entry->origin_s >= call->entry->options.deadline_s - 0.05;
        refusal = session ? Refusal{.code = "rollout_limit:time", .message = "the time of this rollout is over"}
                          : Refusal{.status = 504, .type = "timeout_error", .code = "generation_timeout", .message = "the answer took too long"};
        note = "deadline";
        if (session) {
          std::lock_guard lock(call->entry->mutex);
          if (call->entry->session) call->entry->session->AddFlag("rollout_limit:time");
        }
        break;
      }
      const bool away = code == StatusCode::kUnavailable || code == StatusCode::kResourceExhausted ||
                        code == StatusCode::kAborted || code == StatusCode::kCancelled;
      if (away && !call->shown && clock_.NowS() < call->give_up_at) {
        // The same key draws the same tokens again, so the client need not know.
        metrics_["calls_repeated"].Add(1);
        loop_->PostAfter(call->backoff_s, [this, call] { Launch(call); });
        call->backoff_s = std::min(call->backoff_s * 2, kRetryLastS);
        return;
      }
      log::Warn("a call failed", {{"session", call->entry->options.session}, {"call", call->plan.call}, {"error", choice.status.ToString()}});
      refusal = away ? Refusal{.status = 503, .type = "server_error", .code = "overloaded", .message = "no worker answers", .retry_after_ms = 1000}
                     : Refusal{.status = 502, .type = "upstream_error", .code = "worker_error", .message = choice.status.message()};
      note = "worker_error";
      keep = false;
      break;
    }
  }

  std::vector<Drawn> drawn;
  size_t tokens = 0;
  for (auto& choice : call->choices) {
    Drawn d;
    d.spans = std::move(choice.spans);
    d.stop_string = choice.stopped;
    d.repetition = choice.finish == "repetition";
    d.kept_cut = choice.cut;
    d.finish = refusal ? "abort" : choice.stopped ? "stop" : d.repetition || d.kept_cut ? "length" : choice.finish;
    d.cached_tokens = choice.cached_tokens;
    if (!refusal) {
      SampledText::Said said = choice.text->Finish(d.finish == "stop");
      d.content = std::move(said.content);
      d.tool_calls = std::move(said.tool_calls);
      d.ill_formed = said.ill_formed;
    }
    tokens += choice.ids.size();
    drawn.push_back(std::move(d));
  }
  std::optional<Answer> answer;
  {
    std::lock_guard lock(call->entry->mutex);
    Session* session = call->entry->session.get();
    if (session && call->entry->calls.count(call->plan.call)) {
      const CallEnd end{.end_s = Since(*call->entry), .note = note};
      if (note == "worker_error") session->AddFlag("worker_error");
      if (refusal && (!keep || tokens == 0)) {
        session->Abandon(call->plan, end);
      } else {
        Answer a = session->Commit(call->plan, std::move(drawn), end);
        if (!refusal) answer = std::move(a);
      }
      // Durable before the client can act on it.
      Write(*session);
      call->entry->calls.erase(call->plan.call);
    } else {
      metrics_["late_results"].Add(1);
      refusal = SessionClosed();
      tokens = 0;
    }
    call->entry->changed.notify_all();
  }
  call->settled = true;
  call->running.clear();
  running_.erase(call.get());
  metrics_["calls_in_flight"].Add(-1);
  if (!note.empty()) metrics_["calls_ended." + note].Add(1);
  if (answer) {
    metrics_[call->entry->options.key_space.domain == 1 ? "tokens_sampled_eval" : "tokens_sampled"].Add(static_cast<double>(tokens));
    metrics_["prompt_tokens"].Add(answer->prompt_tokens);
    metrics_["cached_tokens"].Add(answer->cached_tokens);
    Deliver(*call, *answer);
  } else {
    for (const auto& waiter : call->waiters) {
      if (waiter.live && call->begun) {
        waiter.out->Write(openai::ChatStream::Error(*refusal));
        waiter.out->End(false);
      } else {
        Refuse(waiter.out, *refusal);
      }
    }
  }
  call->waiters.clear();
}

void Gateway::Deliver(const Call& call, const Answer& answer) {
  std::string body;
  for (const auto& waiter : call.waiters) {
    if (!call.request.stream) {
      if (body.empty()) body = openai::ChatBody(call.request, answer, text_);
      waiter.out->Send(200, {{"content-type", "application/json"}, {"x-request-id", answer.id}}, body);
      continue;
    }
    const bool live = waiter.live && call.stream;
    if (!(waiter.live && call.begun)) {
      waiter.out->Begin(200, {{"content-type", "text/event-stream; charset=utf-8"}, {"cache-control", "no-cache"},
                              {"x-accel-buffering", "no"}, {"x-request-id", answer.id}});
    }
    std::string frames;
    if (live) {
      frames = call.stream->Finish(answer);
    } else {
      openai::ChatStream whole(call.request, text_, answer.id, answer.created_s);
      frames = whole.Start();
      frames += whole.Finish(answer);
    }
    waiter.out->Write(std::move(frames));
    waiter.out->End(true);
  }
}

void Gateway::Ping() {
  const double now = clock_.NowS();
  for (auto& [key, call] : running_) {
    for (const auto& waiter : call->waiters) {
      if (!waiter.live || now - call->heard_at < options_.ping_s) continue;
      call->heard_at = now;
      if (!call->begun) {
        call->begun = true;
        waiter.out->Begin(200, {{"content-type", "text/event-stream; charset=utf-8"}, {"cache-control", "no-cache"}, {"x-accel-buffering", "no"}});
      }
      waiter.out->Write(": ping\n\n");
    }
  }
  loop_->PostAfter(options_.ping_s, [this] { Ping(); });
}

}  // namespace temper::gateway
