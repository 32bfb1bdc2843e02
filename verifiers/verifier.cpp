#include "verifiers/verifier.h"

#include <algorithm>
#include <atomic>
#include <cctype>

#include "common/json.h"
#include "common/strings.h"

namespace temper::verifiers {
namespace {

constexpr double kSetupS = 60;
constexpr size_t kLogBytes = 4096;

Verdict Failure(const std::string& reason, const std::string& message, const sandbox::ExecResult* result = nullptr) {
  json::object evidence{{"reason", reason}, {"message", message}};
  if (result) {
    // The end of what it printed: that is where a crash explains itself.
    std::string log = result->out.bytes + result->err.bytes;
    if (log.size() > kLogBytes) log = log.substr(log.size() - kLogBytes);
    JsonWriter w;  // for what is not UTF-8
    auto text = ParseJson(w.String(log).text());
    evidence["log"] = text.ok() ? *text : json::value("");
  }
  Verdict v;
  v.evidence_json = PrintJson(evidence);
  return v;
}

// Runs the command in a sandbox of its own, which the agent never touched, made from what the agent left.
class CommandVerifier final : public Verifier {
 public:
  CommandVerifier(const CommandOptions& options, sandbox::SandboxService* service) : options_(options), service_(*service) {}

  Verdict Verify(const Case& c) override {
    sandbox::CreateRequest create;
    create.id = "verifier-" + IdPart(options_.name) + "-" + std::to_string(next_.fetch_add(1));
    create.limits = options_.limits;
    create.limits.wall_s = options_.timeout_s;
    create.rootfs = options_.rootfs;
    create.mounts = options_.mounts;
    create.files = c.files;
    create.ttl_s = options_.timeout_s + kSetupS;
    // What the agent left has to fit, with room for the verifier's own work.
    int64_t bytes = 16 << 20, files = 1024;
    for (const sandbox::File& f : c.files) {
      bytes += static_cast<int64_t>(f.bytes.size() + 8191) / 4096 * 4096;
      files += 2;
    }
    create.limits.disk_bytes = std::max(create.limits.disk_bytes, bytes);
    create.limits.files = std::max(create.limits.files, files);
    auto made = service_.Create(create);
    // A process that verified before and died may have left the same number behind.
    for (int tries = 0; !made.ok() && made.status().code() == StatusCode::kAlreadyExists && tries < 1000; ++tries) {
      create.id = "verifier-" + IdPart(options_.name) + "-" + std::to_string(next_.fetch_add(1));
      made = service_.Create(create);
    }
    if (!made.ok()) return Failure("sandbox", made.status().ToString());
    Verdict verdict = Run(create.id, c);
    Status destroyed = service_.Destroy(create.id);
    (void)destroyed;  // the verdict is there; the lease removes what could not be
    return verdict;
  }

 private:
  Verdict Run(const std::string& id, const Case& c) {
    sandbox::ExecRequest exec;
    exec.id = id;
    exec.argv = options_.command;
    exec.env = options_.env;
    exec.stdin_bytes = CaseToJson(c) + "\n";
    exec.capture_fd3 = true;
    exec.timeout_s = options_.timeout_s;
    auto result = service_.Exec(exec);
    if (!result.ok()) return Failure("sandbox", result.status().ToString());
    using sandbox::ExecOutcome;
    // Before how it ended: that may be what the broken pipe did.
    if (result->fd3_dropped && result->outcome != ExecOutcome::kInfra) {
      return Failure("verdict", "more than " + FormatSize(sandbox::kFd3BytesMax) + " on file descriptor 3", &*result);
    }
    switch (result->outcome) {
      case ExecOutcome::kInfra:
        return Failure("sandbox", result->message, &*result);
      case ExecOutcome::kTimeout:
        return Failure("deadline", "no verdict within " + FormatDouble(options_.timeout_s) + " s", &*result);
      case ExecOutcome::kLimit:
        return Failure("limit", "the verifier met its limit of " + result->limit, &*result);
      case ExecOutcome::kSignaled:
        return Failure("signal", "the verifier died of signal " + std::to_string(result->signal), &*result);
      case ExecOutcome::kExited:
        break;
    }
    if (result->exit_code != 0) {
      return Failure("exit", "the verifier ended with exit code " + std::to_string(result->exit_code), &*result);
    }
    auto verdict = ParseVerdict(result->fd3);
    return verdict.ok() ? *verdict : Failure("verdict", verdict.status().message(), &*result);
  }

  // Sandbox ids take fewer characters than names of verifiers.
  static std::string IdPart(const std::string& name) {
    std::string part = name.substr(0, 40);
    for (char& ch : part) {
      if (!std::isalnum(static_cast<unsigned char>(ch))) ch = '_';
    }
    return part;
  }

  const CommandOptions options_;
  sandbox::SandboxService& service_;
  std::atomic<int64_t> next_{1};
};

// The task's "answer", which a job keeps in its "hidden" object.
Result<json::value> AnswerOf(const Case& c) {
  ASSIGN_OR_RETURN(const json::value task, ParseJson(c.task_json));
  const JsonRef ref(task, "task");
  if (!ref.Has("hidden")) {
    ASSIGN_OR_RETURN(JsonRef answer, ref.Field("answer"));
    return answer.value();
  }
  ASSIGN_OR_RETURN(JsonRef hidden, ref.Field("hidden"));
  ASSIGN_OR_RETURN(JsonRef answer, hidden.Field("answer"));
  return answer.value();
}

Verdict Scored(bool right) {
  Verdict v;
  v.outcome = VerdictOutcome::kScored;
  v.reward = right ? 1 : 0;
  return v;
}

// Reward 1 when the final text is the task's answer.
class ExactVerifier final : public Verifier {
 public:
  Verdict Verify(const Case& c) override {
    auto answer = AnswerOf(c);
    if (!answer.ok()) return Failure("task", answer.status().message());
    auto text = JsonRef(*answer, "answer").String();
    if (!text.ok()) return Failure("task", text.status().message());
    return Scored(Trim(c.final_text) == Trim(*text));
  }
};

// Reward 1 when the first integer of the final text is the task's answer.
class FirstIntegerVerifier final : public Verifier {
 public:
  Verdict Verify(const Case& c) override {
    auto answer = AnswerOf(c);
    if (!answer.ok()) return Failure("task", answer.status().message());
    auto number = JsonRef(*answer, "answer").Int();
    if (!number.ok()) return Failure("task", number.status().message());
    const std::string& text = c.final_text;
    auto digit = [&](size_t i) { return i < text.size() && text[i] >= '0' && text[i] <= '9'; };
    size_t begin = 0;
    while (begin < text.size() && !digit(begin)) ++begin;
    size_t end = begin;
    while (digit(end)) ++end;
    if (begin > 0 && end > begin && text[begin - 1] == '-') --begin;
    int64_t said = 0;
    const bool is_number = end > begin && ParseInt(text.substr(begin, end - begin), &said);
    Verdict verdict = Scored(is_number && said == *number);
    verdict.evidence_json = PrintJson(json::object{{"answer", *number}, {"said", is_number ? json::value(said) : json::value()}});
    return verdict;
  }
};

}  // namespace

std::unique_ptr<Verifier> MakeCommandVerifier(const CommandOptions& options, sandbox::SandboxService* service) {
  TEMPER_CHECK(service != nullptr);
  return std::make_unique<CommandVerifier>(options, service);
}

std::vector<std::string> BuiltinNames() { return {"exact", "first_integer"}; }

Result<std::unique_ptr<Verifier>> MakeBuiltinVerifier(const std::string& name) {
  if (name == "exact") return std::unique_ptr<Verifier>(std::make_unique<ExactVerifier>());
  if (name == "first_integer") return std::unique_ptr<Verifier>(std::make_unique<FirstIntegerVerifier>());
  return NotFound("no built-in verifier '" + name + "'; there are: " + Join(BuiltinNames(), ", "));
}

}  // namespace temper::verifiers
