#include "agents/scaffold.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <set>
#include <utility>

#include "agents/chat_client.h"
#include "common/clock.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace temper::agents {
namespace {

constexpr char kTaskFileInside[] = "/opt/temper/task.json";
constexpr char kBuildInside[] = "/opt/temper";
constexpr size_t kToolOutputBytesMax = 2000;
constexpr size_t kLastWordsBytes = 2000;

std::string Replace(std::string text, const std::string& what, const std::string& with) {
  for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += with.size()) text.replace(at, what.size(), with);
  return text;
}

std::string LastWords(const std::string& text) {
  return text.size() <= kLastWordsBytes ? text : text.substr(text.size() - kLastWordsBytes);
}

// Signals that another process sends; the others a program raises by its own fault.
bool SentBySomebody(int signal) {
  static const std::set<int> kSent = {SIGKILL, SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGSTOP, SIGUSR1, SIGUSR2};
  return kSent.count(signal) != 0;
}

AgentEnd EndOf(const sandbox::ExecResult& result) {
  const std::string words = LastWords(result.err.bytes.empty() ? result.out.bytes : result.err.bytes);
  switch (result.outcome) {
    case sandbox::ExecOutcome::kExited:
      if (result.exit_code == 0) return {AgentEnd::Kind::kDone, ""};
      return {AgentEnd::Kind::kExit, "exit code " + std::to_string(result.exit_code) + ": " + words};
    case sandbox::ExecOutcome::kSignaled:
      return {SentBySomebody(result.signal) ? AgentEnd::Kind::kKilled : AgentEnd::Kind::kExit,
              "signal " + std::to_string(result.signal) + ": " + words};
    case sandbox::ExecOutcome::kTimeout: return {AgentEnd::Kind::kTimeout, words};
    case sandbox::ExecOutcome::kLimit: return {AgentEnd::Kind::kLimit, result.limit};
    case sandbox::ExecOutcome::kInfra: return {AgentEnd::Kind::kInfra, result.message};
  }
  return {};
}

std::vector<std::pair<std::string, std::string>> ModelEnvironment(const std::string& openai_base_url, const std::string& key,
                                                                  const std::string& task_file) {
  const std::string root = openai_base_url.substr(0, openai_base_url.rfind("/v1"));
  return {{"OPENAI_BASE_URL", openai_base_url}, {"OPENAI_API_KEY", key},       {"ANTHROPIC_BASE_URL", root},
          {"ANTHROPIC_AUTH_TOKEN", key},        {"TEMPER_TASK_FILE", task_file}};
}

// A call to one of our own parts failed.
AgentEnd EndOf(const Status& status) {
  const bool gone = status.code() == StatusCode::kUnavailable || status.code() == StatusCode::kNotFound;
  return {gone ? AgentEnd::Kind::kGone : AgentEnd::Kind::kInfra, status.ToString()};
}

// Any program inside the attempt's sandbox.
class SandboxCommand : public Scaffold {
 public:
  explicit SandboxCommand(const ScaffoldOptions& options) : options_(options) {
    for (const std::string& word : options.command) {
      std::string inside = Replace(Replace(word, "{task}", kTaskFileInside), "{run}", "/opt/temper");
      // Only the files named are shown, not the whole folder.
      if (inside.rfind("{build}/", 0) == 0) programs_.push_back(inside.substr(8));
      argv_.push_back(Replace(inside, "{build}", kBuildInside));
    }
  }

  std::vector<sandbox::Mount> Mounts(const std::string& task_file) const override {
    std::vector<sandbox::Mount> mounts{{task_file, kTaskFileInside}};
    for (const std::string& program : programs_) {
      mounts.push_back({options_.build_dir + "/" + program, std::string(kBuildInside) + "/" + program});
    }
    return mounts;
  }
  bool NeedsRelay() const override { return true; }

  AgentEnd Play(const AttemptContext& context) const override {
    sandbox::ExecRequest exec;
    exec.id = context.sandbox_id;
    exec.argv = argv_;
    exec.env = ModelEnvironment(std::string("http://") + sandbox::kRelayAddress + "/v1", context.api_key, kTaskFileInside);
    exec.timeout_s = options_.timeout_s;
    Result<sandbox::ExecResult> result = context.sandbox.Exec(exec);
    if (!result.ok()) return EndOf(result.status());
    return EndOf(*result);
  }

 private:
  const ScaffoldOptions options_;
  std::vector<std::string> argv_;
  std::vector<std::string> programs_;
};

// Any program on the host, beside the sandbox: for agents that bring a sandbox of their own.
class HostCommand : public Scaffold {
 public:
  explicit HostCommand(const ScaffoldOptions& options) : options_(options) {}
  std::vector<sandbox::Mount> Mounts(const std::string&) const override { return {}; }
  bool NeedsRelay() const override { return false; }

  AgentEnd Play(const AttemptContext& context) const override {
    std::vector<std::string> argv;
    for (const std::string& word : options_.command) {
      argv.push_back(Replace(Replace(Replace(word, "{task}", context.task_file), "{run}", options_.run_dir), "{build}",
                             options_.build_dir));
    }
    std::vector<std::string> env;
    for (char** e = environ; *e; ++e) env.push_back(*e);
    for (const auto& [name, value] : ModelEnvironment(context.base_url, context.api_key, context.task_file)) {
      env.push_back(name + "=" + value);
    }
    env.push_back("TEMPER_SANDBOX_ID=" + context.sandbox_id);
    std::vector<char*> argv_p, env_p;
    for (std::string& word : argv) argv_p.push_back(word.data());
    for (std::string& word : env) env_p.push_back(word.data());
    argv_p.push_back(nullptr);
    env_p.push_back(nullptr);

    int err[2];
    if (pipe2(err, O_CLOEXEC) != 0) return {AgentEnd::Kind::kInfra, "pipe: out of descriptors"};
    Fd err_read(err[0]), err_write(err[1]);
    const pid_t pid = fork();
    if (pid < 0) return {AgentEnd::Kind::kInfra, "fork failed"};
    if (pid == 0) {
      setpgid(0, 0);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int null = open("/dev/null", O_RDWR);
      dup2(null, 0);
      dup2(err[1], 1);
      dup2(err[1], 2);
      execvpe(argv_p[0], argv_p.data(), env_p.data());
      _exit(127);
    }
    err_write.Reset();
    return Wait(pid, err_read.get(), context);
  }

 private:
  AgentEnd Wait(pid_t pid, int output_fd, const AttemptContext& context) const {
    Clock& clock = SystemClock::Get();
    const double end_s = clock.NowS() + options_.timeout_s;
    std::string output;
    AgentEnd end{AgentEnd::Kind::kDone, ""};
    bool killed = false;
    for (;;) {
      pollfd p{output_fd, POLLIN, 0};
      if (poll(&p, 1, 100) > 0) {
        char buffer[4096];
        const ssize_t n = read(output_fd, buffer, sizeof buffer);
        if (n > 0) output = LastWords(output + std::string(buffer, static_cast<size_t>(n)));
        else clock.SleepS(0.01);
      }
      int status = 0;
      if (waitpid(pid, &status, WNOHANG) == pid) {
        kill(-pid, SIGKILL);
        if (killed) return end;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {AgentEnd::Kind::kDone, ""};
        return {AgentEnd::Kind::kExit, (WIFEXITED(status) ? "exit code " + std::to_string(WEXITSTATUS(status))
                                                          : "signal " + std::to_string(WTERMSIG(status))) + ": " + output};
      }
      if (killed) continue;
      if (context.stopped) end = {AgentEnd::Kind::kStopped, ""};
      else if (clock.NowS() > end_s) end = {AgentEnd::Kind::kTimeout, output};
      else continue;
      kill(-pid, SIGKILL);
      killed = true;
    }
  }

  const ScaffoldOptions options_;
};

// The built-in loop: ask, run the `shell` calls in the sandbox, answer, until the model speaks without a call.
class ToolLoop : public Scaffold {
 public:
  explicit ToolLoop(const ScaffoldOptions& options) : options_(options) {}
  std::vector<sandbox::Mount> Mounts(const std::string&) const override { return {}; }
  bool NeedsRelay() const override { return false; }

  AgentEnd Play(const AttemptContext& context) const override {
    Clock& clock = SystemClock::Get();
    const double end_s = clock.NowS() + options_.timeout_s;
    ChatClient chat(context.base_url, context.api_key);
    json::array messages{json::object{{"role", "user"}, {"content", context.spec.task.instruction}}};
    static const json::value kTools = json::parse(
        R"([{"type":"function","function":{"name":"shell","description":"Run a shell command.","parameters":{"type":"object","properties":{"command":{"type":"string"}},"required":["command"]}}}])");
    for (;;) {
      if (context.stopped) return {AgentEnd::Kind::kStopped, ""};
      const double left_s = end_s - clock.NowS();
      if (left_s <= 0) return {AgentEnd::Kind::kTimeout, ""};
      const json::object request{{"model", "policy"}, {"messages", messages}, {"tools", kTools}};
      Result<ChatClient::Answer> answer = chat.Post("/chat/completions", PrintJson(request), left_s);
      if (!answer.ok()) {
        return answer.status().code() == StatusCode::kDeadlineExceeded
                   ? AgentEnd{AgentEnd::Kind::kTimeout, ""}
                   : EndOf(answer.status());
      }
      // A limit of the rollout is a normal end here; the gateway's flag says which.
      if (answer->status == 400) return {AgentEnd::Kind::kDone, ""};
      if (answer->status != 200) {
        return {AgentEnd::Kind::kInfra, "HTTP " + std::to_string(answer->status) + ": " + LastWords(answer->body)};
      }
      Result<json::value> reply = ParseJson(answer->body);
      if (!reply.ok()) return {AgentEnd::Kind::kInfra, reply.status().ToString()};
      Result<bool> done = Turn(*reply, context, &messages, end_s - clock.NowS());
      if (!done.ok()) return EndOf(done.status());
      if (*done) return {AgentEnd::Kind::kDone, ""};
    }
  }

 private:
  // Appends the model's message and the outputs of its calls; true when there were no calls.
  Result<bool> Turn(const json::value& reply, const AttemptContext& context, json::array* messages, double left_s) const {
    ASSIGN_OR_RETURN(JsonRef choices, JsonRef(reply).Field("choices"));
    ASSIGN_OR_RETURN(std::vector<JsonRef> items, choices.Items());
    if (items.empty()) return choices.Error("no choice");
    ASSIGN_OR_RETURN(JsonRef message, items[0].Field("message"));
    messages->push_back(message.value());
    if (!message.Has("tool_calls")) return true;
    ASSIGN_OR_RETURN(JsonRef calls_ref, message.Field("tool_calls"));
    if (calls_ref.is_null()) return true;
    ASSIGN_OR_RETURN(std::vector<JsonRef> calls, calls_ref.Items());
    for (const JsonRef& call : calls) {
      ASSIGN_OR_RETURN(JsonRef function, call.Field("function"));
      ASSIGN_OR_RETURN(JsonRef text_ref, function.Field("arguments"));
      ASSIGN_OR_RETURN(std::string text, text_ref.String());
      ASSIGN_OR_RETURN(JsonRef id, call.Field("id"));
      Result<json::value> arguments = ParseJson(text);
      std::string output = "bad arguments";
      if (arguments.ok() && JsonRef(*arguments).Has("command")) {
        ASSIGN_OR_RETURN(std::string command, JsonRef(*arguments).StringOr("command", ""));
        sandbox::ExecRequest exec;
        exec.id = context.sandbox_id;
        exec.argv = {"sh", "-c", command + "\n"};
        exec.role = sandbox::Role::kTool;
        exec.timeout_s = std::max(1.0, left_s);
        ASSIGN_OR_RETURN(sandbox::ExecResult result, context.sandbox.Exec(exec));
        if (result.outcome == sandbox::ExecOutcome::kInfra) return Internal(result.message);
        output = result.out.bytes + result.err.bytes;
        if (output.size() > kToolOutputBytesMax) output.resize(kToolOutputBytesMax);
        while (!output.empty() && output.back() == '\n') output.pop_back();
        if (!IsUtf8(output)) output = "(not text)";
      }
      messages->push_back(json::object{{"role", "tool"}, {"tool_call_id", id.value()}, {"content", output}});
    }
    return calls.empty();
  }

  const ScaffoldOptions options_;
};

}  // namespace

std::vector<std::string> ScaffoldKinds() { return {"command", "builtin"}; }

Result<std::unique_ptr<Scaffold>> MakeScaffold(const ScaffoldOptions& options) {
  if (options.kind == "builtin") {
    if (options.name != "tool-loop") return InvalidArgument("scaffold.name: no built-in scaffold '" + options.name + "'; there is: tool-loop");
    return std::unique_ptr<Scaffold>(std::make_unique<ToolLoop>(options));
  }
  if (options.kind != "command") return InvalidArgument("scaffold.kind: '" + options.kind + "' is not built; there are: command, builtin");
  if (options.command.empty()) return InvalidArgument("scaffold.command: must name the program to run");
  if (options.host) return std::unique_ptr<Scaffold>(std::make_unique<HostCommand>(options));
  return std::unique_ptr<Scaffold>(std::make_unique<SandboxCommand>(options));
}

}  // namespace temper::agents
