#include "gateway/session.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdio>

#include "common/check.h"
#include "temper/v1/gateway.pb.h"
#include "temper/v1/types.pb.h"
#include "text/json.h"

namespace temper::gateway {
namespace {

// Far above what a session may have, far below where counting on would overflow; only a damaged log has more.
constexpr int kCallMax = 1 << 30;

const char* RoleName(Role role) {
  switch (role) {
    case Role::kSystem: return "system";
    case Role::kUser: return "user";
    case Role::kAssistant: return "assistant";
    case Role::kTool: return "tool";
  }
  return "user";
}

Refusal Limit(const std::string& which, const std::string& message) {
  return {.code = "rollout_limit:" + which, .message = message};
}

std::string SessionTag(const std::string& session) {
  char hex[20];
  std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(XXH3_64bits(session.data(), session.size())));
  return hex;
}

void ToProto(const engine::Version& version, v1::Version* out) {
  out->set_epoch(version.epoch);
  out->set_step(version.step);
}

void ToProto(const Run& run, v1::TokenRun* out) {
  out->set_id(run.id);
  out->set_parent(run.parent);
  out->set_provenance(run.sampled ? v1::SAMPLED : v1::CONTEXT);
  out->mutable_ids()->Add(run.ids.begin(), run.ids.end());
  out->mutable_logprobs()->Add(run.logprobs.begin(), run.logprobs.end());
  out->mutable_kept()->Add(run.kept.begin(), run.kept.end());
  if (run.sampled) {
    ToProto(run.version, out->mutable_version());
    out->set_temperature(run.temperature);
    out->set_inv_temperature(run.inv_temperature);
  }
  out->set_mixed(run.mixed);
  out->set_call(run.call);
  out->set_choice(run.choice);
  out->set_time_s(run.time_s);
  out->set_trainable(run.trainable);
}

Run FromProto(const v1::TokenRun& in) {
  Run run;
  run.id = in.id();
  run.parent = in.parent();
  run.sampled = in.provenance() == v1::SAMPLED;
  run.ids.assign(in.ids().begin(), in.ids().end());
  run.logprobs.assign(in.logprobs().begin(), in.logprobs().end());
  run.kept.assign(in.kept().begin(), in.kept().end());
  run.version = {in.version().epoch(), in.version().step()};
  run.mixed = in.mixed();
  if (run.sampled) {
    run.temperature = in.temperature();
    run.inv_temperature = in.inv_temperature();
  }
  run.call = in.call();
  run.choice = in.choice();
  run.time_s = in.time_s();
  run.trainable = in.trainable();
  return run;
}

void ToProto(const Turn& turn, v1::GatewayLogMessage* out) {
  out->set_id(turn.id);
  out->set_parent(turn.parent);
  out->set_root(turn.root);
  out->set_hash(turn.hash);
  out->set_loose_hash(turn.loose);
  out->set_run(turn.run);
  out->set_closed(turn.closed);
  out->set_call(turn.call);
  out->set_choice(turn.choice);
  if (turn.run < 0) return;
  out->set_finish(turn.finish);
  out->set_content(turn.message.content);
  for (const ToolCall& call : turn.message.tool_calls) {
    auto* c = out->add_tool_calls();
    c->set_id(call.id);
    c->set_name(call.name);
    c->set_arguments(call.arguments);
  }
}

Turn FromProto(const v1::GatewayLogMessage& in) {
  Turn turn;
  turn.id = in.id();
  turn.parent = in.parent();
  turn.root = in.root();
  turn.hash = in.hash();
  turn.loose = in.loose_hash();
  turn.run = in.run();
  turn.closed = in.closed();
  turn.call = in.call();
  turn.choice = in.choice();
  turn.finish = in.finish();
  turn.message.role = Role::kAssistant;
  turn.message.content = in.content();
  for (const auto& call : in.tool_calls()) turn.message.tool_calls.push_back({call.id(), call.name(), call.arguments()});
  return turn;
}

bool HasText(const Message& message, std::string_view needle) {
  if (message.content.find(needle) != std::string::npos || message.reasoning.find(needle) != std::string::npos) return true;
  return std::any_of(message.tool_calls.begin(), message.tool_calls.end(), [&](const ToolCall& call) {
    return call.name.find(needle) != std::string::npos || call.arguments.find(needle) != std::string::npos;
  });
}

}  // namespace

text::Value TemplateMessages(const std::vector<Message>& messages, size_t count) {
  text::List list;
  list.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const Message& m = messages[i];
    text::Dict dict;
    dict.Set("role", RoleName(m.role));
    dict.Set("content", m.content);
    if (!m.reasoning.empty()) dict.Set("reasoning_content", m.reasoning);
    if (!m.name.empty()) dict.Set("name", m.name);
    if (!m.tool_call_id.empty()) dict.Set("tool_call_id", m.tool_call_id);
    if (!m.tool_calls.empty()) {
      text::List calls;
      for (const ToolCall& c : m.tool_calls) {
        text::Dict function;
        function.Set("name", c.name);
        // Templates want the arguments as an object; a text that is none stays the text the model wrote.
        auto parsed = text::ParseJson(c.arguments);
        function.Set("arguments", parsed.ok() && parsed->is_dict() ? *parsed : text::Value(c.arguments));
        text::Dict call;
        call.Set("id", c.id);
        call.Set("type", "function");
        call.Set("function", std::move(function));
        calls.push_back(std::move(call));
      }
      dict.Set("tool_calls", std::move(calls));
    }
    list.push_back(std::move(dict));
  }
  return list;
}

void Session::CallInfo::ToProto(v1::CallRecord* out) const {
  out->set_call(call);
  out->set_kind(kind);
  out->set_prompt_tokens(prompt_tokens);
  out->set_cached_tokens(cached_tokens);
  out->set_completion_tokens(completion_tokens);
  out->set_finish(finish);
  out->set_start_s(start_s);
  out->set_end_s(end_s);
  out->set_note(note);
}

Session::Session(OpenOptions options, std::string api_key, double opened_at_s, const PolicyText& text, SessionLimits limits)
    : options_(std::move(options)), api_key_(std::move(api_key)), opened_at_s_(opened_at_s), text_(text), limits_(limits) {}

Session::~Session() = default;

std::optional<int> Session::Committed(uint64_t digest) const {
  auto it = committed_.find(digest);
  if (it == committed_.end()) return std::nullopt;
  return it->second;
}

std::string Session::AnswerId(int call) const {
  return "chatcmpl-" + SessionTag(options_.session) + "-" + std::to_string(call);
}

Answer Session::Replay(int call) const {
  Answer answer;
  answer.id = AnswerId(call);
  for (const CallInfo& info : calls_) {
    if (info.call != call) continue;
    answer.created_s = static_cast<int64_t>(opened_at_s_ + info.start_s);
    answer.prompt_tokens = info.prompt_tokens;
    answer.cached_tokens = info.cached_tokens;
  }
  for (const Turn& turn : capture_.turns()) {
    if (turn.call != call || turn.run < 0) continue;
    Choice choice;
    choice.content = turn.message.content;
    choice.tool_calls = turn.message.tool_calls;
    choice.finish = turn.finish;
    std::vector<int> spans;
    int run = turn.run;
    for (; run >= 0; run = capture_.runs()[run].parent) {
      const Run& r = capture_.runs()[run];
      if (!r.sampled || r.call != call || r.choice != turn.choice) break;
      spans.push_back(run);
    }
    for (auto it = spans.rbegin(); it != spans.rend(); ++it) {
      const Run& r = capture_.runs()[*it];
      choice.ids.insert(choice.ids.end(), r.ids.begin(), r.ids.end());
      choice.logprobs.insert(choice.logprobs.end(), r.logprobs.begin(), r.logprobs.end());
      answer.version = r.version;
    }
    if (answer.choices.empty()) answer.prompt_ids = capture_.Path(run);
    answer.choices.push_back(std::move(choice));
  }
  return answer;
}

std::variant<engine::Sampling, Refusal> Session::Decide(const ChatRequest& request, std::string* note) const {
  engine::Sampling s;
  if (options_.sampling) {
    s.temperature = options_.sampling->temperature;
    s.top_p = options_.sampling->top_p;
    s.top_k = options_.sampling->top_k;
    s.min_p = options_.sampling->min_p;
    s.repetition_stop = options_.sampling->repetition_stop;
    std::string overridden;
    auto differs = [&](const char* name, bool yes) {
      if (yes) overridden += std::string(overridden.empty() ? "" : ",") + name;
    };
    differs("temperature", request.temperature && *request.temperature != s.temperature);
    differs("top_p", request.top_p && *request.top_p != s.top_p);
    differs("top_k", request.top_k && *request.top_k != s.top_k);
    differs("min_p", request.min_p && *request.min_p != s.min_p);
    differs("seed", request.seed.has_value());
    for (const std::string& name : request.unsupported_sampling) differs(name.c_str(), true);
    if (!overridden.empty()) *note = "overridden:" + overridden;
    return s;
  }
  if (!request.unsupported_sampling.empty()) {
    return Refusal{.code = "unsupported_parameter",
                   .param = request.unsupported_sampling[0],
                   .message = "'" + request.unsupported_sampling[0] + "' is not supported"};
  }
  s.temperature = request.temperature.value_or(1.0f);
  s.top_p = request.top_p.value_or(1.0f);
  s.top_k = request.top_k.value_or(0);
  s.min_p = request.min_p.value_or(0.0f);
  return s;
}

Refusal Session::TooLong(const std::string& tokens) {
  AddFlag("context_length_exceeded");
  return Refusal{.code = "context_length_exceeded",
                 .param = "messages",
                 .message = "This model's maximum context length is " + std::to_string(limits_.context_tokens) +
                            " tokens. However, your messages resulted in " + tokens +
                            " tokens. Please reduce the length of the messages."};
}

// `whole` is the rendered prompt.
std::vector<int32_t> Session::PromptIds(const std::string& whole, const ChatRequest& request, int anchor_turn,
                                        size_t anchor_index, Plan* plan) const {
  if (anchor_turn >= 0) {
    // The stored ids stand for everything up to the end of the anchor's turn; only what the template writes after that turn's
    // end token is encoded. The turn itself is found in the rendered text, not rendered alone: templates treat a last
    // message differently.
    const Turn& turn = capture_.turns()[anchor_turn];
    const int32_t last = capture_.runs()[turn.run].ids.back();
    const std::string_view end = text_.TokenBytes(last);
    auto before = text_.Render(TemplateMessages(request.messages, anchor_index), request.tools, false, request.variables);
    if (before.ok() && whole.starts_with(*before) && !end.empty() && !HasText(request.messages[anchor_index], end)) {
      const size_t at = whole.find(end, before->size());
      if (at != std::string::npos) {
        std::vector<int32_t> ids = capture_.Path(turn.run);
        const std::vector<int32_t> suffix = text_.EncodeAfter(last, std::string_view(whole).substr(at + end.size()));
        ids.insert(ids.end(), suffix.begin(), suffix.end());
        plan->anchor_run = turn.run;
        return ids;
      }
    }
    plan->flags.insert("template_strip");
  }
  return text_.Encode(whole);
}

std::variant<Plan, Refusal> Session::Begin(const ChatRequest& request, uint64_t digest, double now_s) {
  if (closed()) {
    return Refusal{.status = 410, .code = "session_closed", .message = "the session is " + state_ + "; it takes no further calls"};
  }
  if (options_.deadline_s > 0 && now_s >= options_.deadline_s) {
    AddFlag("rollout_limit:time");
    return Limit("time", "the time of this rollout is over");
  }
  if (options_.max_turns > 0 && turns_ >= options_.max_turns) {
    AddFlag("rollout_limit:turns");
    return Limit("turns", "all " + std::to_string(options_.max_turns) + " model calls of this rollout are used");
  }
  if (static_cast<int>(capture_.runs().size()) >= limits_.runs_max) {
    AddFlag("rollout_limit:branches");
    return Limit("branches", "the session has " + std::to_string(limits_.runs_max) +
                                 " token runs; the agent is probably not replaying its history");
  }
  if (kept_bytes_ >= limits_.kept_bytes_max) {
    AddFlag("rollout_limit:kept_sets");
    return Limit("kept_sets", "the kept sets of this rollout's tokens have " + std::to_string(kept_bytes_) +
                                  " bytes; sample from fewer (sampling.top_p, top_k, min_p)");
  }
  Plan plan;
  auto sampling = Decide(request, &plan.note);
  if (auto* refusal = std::get_if<Refusal>(&sampling)) return *refusal;
  plan.sampling = std::get<engine::Sampling>(sampling);
  plan.root = RootHash(request);

  // Follow the history as far as it is known. The anchor is the deepest turn the policy said and ended itself.
  int turn = -1, anchor = -1;
  size_t matched = 0, anchor_index = 0;
  bool truncated = false;
  for (; matched < request.messages.size(); ++matched) {
    const int next = capture_.Match(plan.root, turn, request.messages[matched]);
    if (next < 0) break;
    turn = next;
    const Turn& t = capture_.turns()[turn];
    if (t.run < 0) continue;
    if (t.closed) {
      anchor = turn;
      anchor_index = matched;
      truncated = false;
    } else {
      truncated = true;
    }
  }
  if (truncated) plan.flags.insert("after_truncation");
  plan.parent_turn = turn;
  plan.tail.assign(request.messages.begin() + static_cast<ptrdiff_t>(matched), request.messages.end());
  for (const Message& m : plan.tail) {
    if (m.role == Role::kAssistant) plan.flags.insert(capture_.turns().empty() ? "foreign_turn" : "edited_history");
  }
  // A turn cut short after the anchor has no end token: it is rendered as context instead of being glued to what follows.
  auto whole = text_.Render(TemplateMessages(request.messages, request.messages.size()), request.tools, true, request.variables);
  if (!whole.ok()) {
    return Refusal{.param = "messages", .message = "the chat template refused the request: " + whole.status().message()};
  }
  // Tokens of megabytes that cannot fit would keep this session, its seal, and a thread of all sessions waiting.
  if (const size_t least = text_.LeastTokens(*whole); least >= static_cast<size_t>(limits_.context_tokens)) {
    return TooLong("at least " + std::to_string(least));
  }
  plan.prompt_ids = PromptIds(*whole, request, anchor, anchor_index, &plan);

  const int prompt = static_cast<int>(plan.prompt_ids.size());
  if (prompt == 0) return Refusal{.param = "messages", .message = "the prompt is empty"};
  if (prompt >= limits_.context_tokens) return TooLong(std::to_string(prompt));
  uint32_t tokens = static_cast<uint32_t>(limits_.context_tokens - prompt);
  if (request.max_tokens) tokens = std::min(tokens, *request.max_tokens);
  if (options_.sampling && options_.sampling->max_tokens > 0) tokens = std::min(tokens, options_.sampling->max_tokens);
  plan.sampling.max_tokens = tokens;

  plan.call = next_call_++;
  plan.digest = digest;
  plan.start_s = now_s;
  plan.n = request.n;
  plan.tools = request.tools;
  plan.stop = request.stop;
  plan.key = {options_.key_space.seed, options_.key_space.domain, options_.key_space.a, options_.key_space.b,
              static_cast<uint32_t>(plan.call), 0};
  if (!options_.sampling && request.seed) plan.key.seed = *request.seed;
  ++turns_;
  in_flight_[plan.call] = {digest, now_s};
  v1::GatewayLogRecord record;
  record.set_session(options_.session);
  record.mutable_call()->set_call(plan.call);
  record.mutable_call()->set_digest(digest);
  record.mutable_call()->set_start_s(now_s);
  record.mutable_call()->set_kind("chat");
  records_.push_back(std::move(record));
  return plan;
}

Answer Session::Commit(const Plan& plan, std::vector<Drawn> drawn, const CallEnd& end) {
  TEMPER_CHECK(in_flight_.count(plan.call)) << "call " << plan.call << " of " << options_.session << " ended twice";
  TEMPER_CHECK(!closed()) << "commit into the closed session " << options_.session;
  v1::GatewayLogRecord record;
  record.set_session(options_.session);
  auto* log = record.mutable_turn();
  const size_t first_run = capture_.runs().size(), first_turn = capture_.turns().size();

  // The prompt: as much as is already there, then one context run.
  int at = capture_.Attach(plan.prompt_ids, plan.anchor_run);
  const size_t known = static_cast<size_t>(capture_.PathLength(at));
  if (known < plan.prompt_ids.size()) {
    Run run;
    run.parent = at;
    run.ids.assign(plan.prompt_ids.begin() + static_cast<ptrdiff_t>(known), plan.prompt_ids.end());
    run.call = plan.call;
    run.time_s = plan.start_s;
    at = capture_.AddRun(std::move(run));
  }
  TEMPER_CHECK(capture_.Path(at) == plan.prompt_ids) << "the recorded prompt is not what was sent";

  int parent = plan.parent_turn;
  for (const Message& message : plan.tail) {
    const int same = capture_.Match(plan.root, parent, message);  // a concurrent call may have brought it
    if (same >= 0) {
      parent = same;
      continue;
    }
    Turn turn;
    turn.parent = parent;
    turn.root = plan.root;
    turn.hash = MessageHash(message, false);
    turn.loose = MessageHash(message, true);
    turn.call = plan.call;
    parent = capture_.AddTurn(std::move(turn));
  }

  CallInfo info{.call = plan.call, .kind = "chat", .prompt_tokens = static_cast<int>(plan.prompt_ids.size()),
                .start_s = plan.start_s, .end_s = end.end_s, .note = plan.note};
  if (!end.note.empty()) info.note += (info.note.empty() ? "" : " ") + end.note;
  std::set<std::string> flags = plan.flags;
  bool complete = true;
  const float inverse = engine::InvTemperature(plan.sampling.temperature);
  for (size_t c = 0; c < drawn.size(); ++c) {
    Drawn& d = drawn[c];
    const bool aborted = d.finish == "abort";
    int run = at;
    int last = -1;
    for (Span& span : d.spans) {
      if (span.ids.empty()) continue;
      Run r;
      r.parent = run;
      r.sampled = true;
      r.ids = std::move(span.ids);
      r.logprobs = std::move(span.logprobs);
      r.kept = std::move(span.kept);
      for (const std::string& set : r.kept) kept_bytes_ += set.size();
      r.version = span.version;
      r.mixed = span.mixed;
      r.temperature = plan.sampling.temperature;
      r.inv_temperature = inverse;
      r.call = plan.call;
      r.choice = static_cast<int>(c);
      r.time_s = end.end_s;
      // At temperature 0 the recorded logprobs are not those of the distribution that was sampled.
      r.trainable = options_.training && !aborted && plan.sampling.temperature > 0;
      info.completion_tokens += static_cast<int>(r.ids.size());
      last = r.ids.back();
      run = capture_.AddRun(std::move(r));
    }
    info.cached_tokens = std::max(info.cached_tokens, d.cached_tokens);
    if (aborted || run == at) {
      complete = false;
      continue;
    }
    if (d.ill_formed) flags.insert("ill_formed");
    if (d.stop_string) flags.insert("stop_string");
    if (d.repetition) flags.insert("repetition_stop");
    if (d.kept_cut) flags.insert("rollout_limit:kept_sets");
    Turn turn;
    turn.parent = parent;
    turn.root = plan.root;
    turn.run = run;
    turn.call = plan.call;
    turn.choice = static_cast<int>(c);
    turn.closed = d.finish == "stop" && !d.stop_string &&
                  std::find(text_.end_ids().begin(), text_.end_ids().end(), last) != text_.end_ids().end();
    turn.message.role = Role::kAssistant;
    turn.message.content = std::move(d.content);
    turn.message.tool_calls = std::move(d.tool_calls);
    for (size_t k = 0; k < turn.message.tool_calls.size(); ++k) {
      turn.message.tool_calls[k].id = "call_" + SessionTag(options_.session).substr(0, 8) + "_" + std::to_string(plan.call) + "_" +
                                      std::to_string(c) + "_" + std::to_string(k);
    }
    turn.finish = d.finish == "stop" && !turn.message.tool_calls.empty() ? "tool_calls" : d.finish;
    turn.hash = MessageHash(turn.message, false);
    turn.loose = MessageHash(turn.message, true);
    info.finish = turn.finish;
    capture_.AddTurn(std::move(turn));
  }
  if (!complete) info.finish = "abort";

  in_flight_.erase(plan.call);
  if (complete) {
    committed_[plan.digest] = plan.call;
  } else {
    --turns_;  // the client got no answer; a repetition is not a further turn
  }
  calls_.push_back(info);
  flags_.insert(flags.begin(), flags.end());

  info.ToProto(log->mutable_call());
  for (size_t i = first_run; i < capture_.runs().size(); ++i) ToProto(capture_.runs()[i], log->add_runs());
  for (size_t i = first_turn; i < capture_.turns().size(); ++i) ToProto(capture_.turns()[i], log->add_messages());
  for (const std::string& flag : flags) log->add_flags(flag);
  log->set_digest(plan.digest);
  records_.push_back(std::move(record));
  return Replay(plan.call);
}

void Session::Abandon(const Plan& plan, const CallEnd& end) {
  TEMPER_CHECK(in_flight_.erase(plan.call) == 1) << "call " << plan.call << " of " << options_.session << " ended twice";
  --turns_;
  CallInfo info{.call = plan.call, .kind = "chat", .prompt_tokens = static_cast<int>(plan.prompt_ids.size()), .finish = "abort",
                .start_s = plan.start_s, .end_s = end.end_s, .note = end.note};
  calls_.push_back(info);
  v1::GatewayLogRecord record;
  record.set_session(options_.session);
  info.ToProto(record.mutable_ended());
  records_.push_back(std::move(record));
}

void Session::AddFlag(const std::string& flag) {
  if (closed() || !flags_.insert(flag).second) return;
  v1::GatewayLogRecord record;
  record.set_session(options_.session);
  record.set_flag(flag);
  records_.push_back(std::move(record));
}

void Session::Close(const std::string& state, const std::string& reason, double now_s) {
  if (closed()) return;
  TEMPER_CHECK(in_flight_.empty()) << in_flight_.size() << " calls in flight at the close of " << options_.session;
  TEMPER_CHECK(!state.empty());
  state_ = state;
  reason_ = reason;
  closed_s_ = now_s;
  v1::GatewayLogRecord record;
  record.set_session(options_.session);
  auto* close = record.mutable_close();
  close->set_state(state);
  close->set_reason(reason);
  close->set_at_s(now_s);
  for (const std::string& flag : flags_) close->add_flags(flag);
  records_.push_back(std::move(record));
}

void Session::ToTrajectory(v1::Trajectory* out) const {
  out->Clear();
  out->set_session(options_.session);
  out->set_group(options_.group);
  out->set_rollout(options_.rollout);
  out->set_attempt(options_.attempt);
  out->set_task_id(options_.task_id);
  out->set_family(options_.family);
  for (const Run& run : capture_.runs()) ToProto(run, out->add_runs());
  bool empty = true;
  for (const CallInfo& info : calls_) {
    info.ToProto(out->add_calls());
    if (info.finish != "abort") empty = false;
  }
  std::sort(out->mutable_calls()->begin(), out->mutable_calls()->end(),
            [](const auto& a, const auto& b) { return a.call() < b.call(); });
  out->set_wall_s(closed_s_);
  for (const std::string& flag : flags_) out->add_flags(flag);
  if (empty) out->add_flags("empty");
  // Calls may overlap: the last one is the one that began last.
  const Turn* last = nullptr;
  for (const Turn& turn : capture_.turns()) {
    if (turn.run >= 0 && turn.choice == 0 && turn.finish != "abort" && (!last || turn.call > last->call)) last = &turn;
  }
  if (last) out->set_final_text(last->message.content);
  if (state_ == "aborted" && !reason_.empty()) out->add_flags("aborted:" + reason_);
}

std::vector<v1::GatewayLogRecord> Session::TakeRecords() { return std::exchange(records_, {}); }

Status Session::Apply(const v1::GatewayLogRecord& record) {
  auto bad = [&](const char* what) { return DataLoss("session log of " + options_.session + ": " + what); };
  switch (record.record_case()) {
    case v1::GatewayLogRecord::kCall: {
      const auto& call = record.call();
      if (call.call() < 0 || call.call() >= kCallMax) return bad("a call has no possible number");
      if (in_flight_.count(call.call())) return bad("a call began twice");
      next_call_ = std::max(next_call_, call.call() + 1);
      in_flight_[call.call()] = {call.digest(), call.start_s()};
      ++turns_;
      return Status::Ok();
    }
    case v1::GatewayLogRecord::kTurn:
    case v1::GatewayLogRecord::kEnded: {
      const bool turn = record.has_turn();
      const v1::CallRecord& call = turn ? record.turn().call() : record.ended();
      if (in_flight_.erase(call.call()) != 1) return bad("a call ended that did not begin");
      calls_.push_back({call.call(), call.kind(), call.prompt_tokens(), call.cached_tokens(), call.completion_tokens(),
                        call.finish(), call.start_s(), call.end_s(), call.note()});
      if (call.finish() == "abort") --turns_;
      if (!turn) return Status::Ok();
      for (const auto& run : record.turn().runs()) {
        if (!capture_.Restore(FromProto(run))) return bad("a run does not fit");
        for (const std::string& set : run.kept()) kept_bytes_ += set.size();
      }
      for (const auto& message : record.turn().messages()) {
        if (!capture_.Restore(FromProto(message))) return bad("a message does not fit");
      }
      flags_.insert(record.turn().flags().begin(), record.turn().flags().end());
      if (call.finish() != "abort") committed_[record.turn().digest()] = call.call();
      return Status::Ok();
    }
    case v1::GatewayLogRecord::kFlag: flags_.insert(record.flag()); return Status::Ok();
    case v1::GatewayLogRecord::kClose:
      state_ = record.close().state();
      reason_ = record.close().reason();
      closed_s_ = record.close().at_s();
      flags_.insert(record.close().flags().begin(), record.close().flags().end());
      return Status::Ok();
    default: return bad("unknown record");
  }
}

void Session::AbandonOrphans(double now_s) {
  const auto flying = in_flight_;
  for (const auto& [call, info] : flying) {
    Plan plan;
    plan.call = call;
    plan.start_s = info.start_s;
    Abandon(plan, {.end_s = now_s, .note = "gateway_restart"});
    AddFlag("gateway_restart");
  }
}

}  // namespace temper::gateway
