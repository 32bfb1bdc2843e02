// One session: decides about every call of an attempt and records it token for token. Pure: no clock, thread, socket or disk.
//
// A call goes Begin → (the model draws) → Commit or Abandon. Begin turns the history into prompt ids: where a replayed history
// ends in a turn the policy said, its stored ids stand and only the text after it is encoded (sampled text is never encoded again);
// otherwise the whole prompt is rendered and begins a branch. Calls may overlap. Every change is a record; the same records
// applied to a new Session give the same state (recovery).
//
// Not thread-safe: the gateway holds the session's lock.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "gateway/capture.h"
#include "gateway/client.h"
#include "gateway/policy_text.h"
#include "gateway/types.h"

namespace temper::v1 {
class CallRecord;
class GatewayLogRecord;
class Trajectory;
}

namespace temper::gateway {

// A call in flight, as Begin planned it. Constant afterwards.
struct Plan {
  int call = 0;
  uint64_t digest = 0;
  double start_s = 0;
  std::vector<int32_t> prompt_ids;
  int anchor_run = -1;    // the run after which new ids begin; -1: a new root
  int parent_turn = -1;   // the deepest matched turn
  uint64_t root = 0;
  std::vector<Message> tail;  // the messages after parent_turn
  engine::Sampling sampling;
  engine::SampleKey key;  // choice 0
  int n = 1;
  text::Value tools = nullptr;
  std::vector<std::string> stop;
  std::set<std::string> flags;
  std::string note;
};

// What the model drew for one choice.
struct Drawn {
  std::vector<Span> spans;
  std::string finish;      // stop | length | abort
  std::string content;
  std::vector<ToolCall> tool_calls;  // ids are set by Commit
  bool stop_string = false;  // ended by a stop string of the client
  bool repetition = false;   // ended by the repetition stop; the client is told length
  bool kept_cut = false;     // ended by the bound on kept sets; the client is told length
  bool ill_formed = false;
  int cached_tokens = 0;
};

struct CallEnd {
  double end_s = 0;
  std::string note = {};  // "" | client_gone | sealed | deadline | worker_error…
};

struct SessionLimits {
  int context_tokens = 0;  // prompt + completion
  int runs_max = 8192;
  size_t kept_bytes_max = SIZE_MAX;  // of the tokens' kept sets: beyond it no call begins
};

class Session {
 public:
  // `text` must outlive the session. `opened_at_s` is wall time; every other time is seconds since then.
  Session(OpenOptions options, std::string api_key, double opened_at_s, const PolicyText& text, SessionLimits limits);
  ~Session();

  // A committed call with this digest (for a marked retry), or nullopt.
  std::optional<int> Committed(uint64_t digest) const;
  std::string AnswerId(int call) const;
  // The answer of a committed call again.
  Answer Replay(int call) const;

  // Decides about a new call at `now_s`. A Refusal changes nothing but the flags.
  std::variant<Plan, Refusal> Begin(const ChatRequest& request, uint64_t digest, double now_s);

  // Records what was drawn, one Drawn per choice. Choices with finish "abort" are recorded and not trainable. The answer is what
  // the client may be told once the record is durable.
  Answer Commit(const Plan& plan, std::vector<Drawn> drawn, const CallEnd& end);
  // The call ended without a token worth keeping.
  void Abandon(const Plan& plan, const CallEnd& end);

  // Something worth knowing of the whole attempt (client.h, Sealed).
  void AddFlag(const std::string& flag);

  // No call in flight may be left. Idempotent.
  void Close(const std::string& state, const std::string& reason, double now_s);
  bool closed() const { return !state_.empty(); }
  const std::string& state() const { return state_; }

  // Everything recorded so far.
  void ToTrajectory(v1::Trajectory* out) const;

  // Records since the last call, oldest first, to be made durable in this order.
  std::vector<v1::GatewayLogRecord> TakeRecords();
  // Recovery: applies a record of this session (not `open`). DATA_LOSS when it does not fit.
  Status Apply(const v1::GatewayLogRecord& record);
  // Ends calls that were in flight when the records ended.
  void AbandonOrphans(double now_s);

  const OpenOptions& options() const { return options_; }
  const std::string& api_key() const { return api_key_; }
  double opened_at_s() const { return opened_at_s_; }
  const Capture& capture() const { return capture_; }
  // No call has begun yet.
  bool unused() const { return next_call_ == 0; }
  int calls_in_flight() const { return static_cast<int>(in_flight_.size()); }
  size_t kept_bytes() const { return kept_bytes_; }
  const PolicyText& text() const { return text_; }

 private:
  struct CallInfo {
    int call = 0;
    std::string kind = {};
    int prompt_tokens = 0;
    int cached_tokens = 0;
    int completion_tokens = 0;
    std::string finish = {};
    double start_s = 0;
    double end_s = 0;
    std::string note = {};
    void ToProto(v1::CallRecord* out) const;
  };
  struct Flying {
    uint64_t digest = 0;
    double start_s = 0;
  };

  std::variant<engine::Sampling, Refusal> Decide(const ChatRequest& request, std::string* note) const;
  Refusal TooLong(const std::string& tokens);
  std::vector<int32_t> PromptIds(const std::string& whole, const ChatRequest& request, int anchor_turn, size_t anchor_index,
                                 Plan* plan) const;

  // Constant after construction.
  const OpenOptions options_;
  const std::string api_key_;
  const double opened_at_s_;
  const PolicyText& text_;
  const SessionLimits limits_;

  Capture capture_;
  int next_call_ = 0;
  int turns_ = 0;  // calls in flight or committed; what max_turns counts
  std::map<int, Flying> in_flight_;
  std::vector<CallInfo> calls_;
  std::map<uint64_t, int> committed_;  // digest → call
  size_t kept_bytes_ = 0;  // of the kept sets of what was sampled
  std::set<std::string> flags_;
  std::string state_;  // "" = open
  std::string reason_;
  double closed_s_ = 0;
  std::vector<v1::GatewayLogRecord> records_;
};

// The messages as a chat template takes them: arguments as objects, null content as "".
text::Value TemplateMessages(const std::vector<Message>& messages, size_t count);

}  // namespace temper::gateway
