// A black-box agent as a user might write it: it knows the OpenAI Chat API and a shell, and nothing of Temper.
//
//   OPENAI_BASE_URL, OPENAI_API_KEY   where the model is
//   TEMPER_TASK_FILE                  JSON with the task's "instruction"
//   TEMPER_TOOL_EXEC                  the program of the sandbox that runs a command under another user id than the agent's
//
// Loop: ask the model; run each `shell` call it makes and send the output back; stop when it answers without a call.
// --blind hides every output from the model (the control job that shows the policy really uses what it sees).
// Exit code: 0 the conversation ended, 1 the service or the task file failed.
#include <curl/curl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/json.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

namespace {

namespace json = boost::json;

constexpr size_t kOutputBytesMax = 2000;
constexpr int kTurnsMax = 32;

size_t Append(char* data, size_t size, size_t count, void* out) {
  static_cast<std::string*>(out)->append(data, size * count);
  return size * count;
}

std::string Env(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// One POST; returns the HTTP status, or 0 when the service could not be reached.
long Post(CURL* curl, const std::string& url, const std::string& key, const std::string& body, std::string* answer) {
  answer->clear();
  curl_slist* headers = curl_slist_append(nullptr, "Content-Type: application/json");
  headers = curl_slist_append(headers, ("Authorization: Bearer " + key).c_str());
  curl_easy_setopt(curl, CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
  curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE, static_cast<long>(body.size()));
  curl_easy_setopt(curl, CURLOPT_POSTFIELDS, body.data());
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, Append);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, answer);
  curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
  const CURLcode code = curl_easy_perform(curl);
  curl_slist_free_all(headers);
  if (code != CURLE_OK) {
    std::fprintf(stderr, "terminal-agent: %s: %s\n", url.c_str(), curl_easy_strerror(code));
    return 0;
  }
  long status = 0;
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
  return status;
}

// Runs `command` in a shell; standard output and error together, without the last newline.
std::string RunShell(const std::string& command) {
  int pipe_fds[2];
  if (pipe(pipe_fds) != 0) return "pipe failed";
  const std::string tool = Env("TEMPER_TOOL_EXEC");
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(pipe_fds[1], 1);
    dup2(pipe_fds[1], 2);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    unsetenv("OPENAI_API_KEY");
    execl(tool.c_str(), tool.c_str(), "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  close(pipe_fds[1]);
  std::string output;
  char buffer[4096];
  for (ssize_t n; (n = read(pipe_fds[0], buffer, sizeof buffer)) > 0;) {
    if (output.size() < kOutputBytesMax) output.append(buffer, static_cast<size_t>(n));
  }
  close(pipe_fds[0]);
  if (pid > 0) waitpid(pid, nullptr, 0);
  if (output.size() > kOutputBytesMax) output.resize(kOutputBytesMax);
  while (!output.empty() && output.back() == '\n') output.pop_back();
  return output;
}

// JSON is UTF-8; a command may print anything. Bytes that are no UTF-8 become '?'.
std::string Printable(const std::string& bytes) {
  std::string out;
  for (size_t i = 0; i < bytes.size();) {
    const auto lead = static_cast<unsigned char>(bytes[i]);
    const size_t length = lead < 0x80 ? 1 : lead >= 0xC2 && lead < 0xE0 ? 2 : lead >= 0xE0 && lead < 0xF0 ? 3 : lead >= 0xF0 && lead < 0xF5 ? 4 : 0;
    bool good = length > 0 && i + length <= bytes.size();
    for (size_t k = 1; good && k < length; ++k) good = (static_cast<unsigned char>(bytes[i + k]) & 0xC0) == 0x80;
    if (good && length == 3) {  // no overlong forms, no surrogates
      const auto second = static_cast<unsigned char>(bytes[i + 1]);
      good = !(lead == 0xE0 && second < 0xA0) && !(lead == 0xED && second >= 0xA0);
    }
    if (good && length == 4) {
      const auto second = static_cast<unsigned char>(bytes[i + 1]);
      good = !(lead == 0xF0 && second < 0x90) && !(lead == 0xF4 && second >= 0x90);
    }
    out += good ? bytes.substr(i, length) : "?";
    i += good ? length : 1;
  }
  return out;
}

json::value ShellTool() {
  return json::parse(R"({"type":"function","function":{"name":"shell","description":"Run a shell command.",
    "parameters":{"type":"object","properties":{"command":{"type":"string"}},"required":["command"]}}})");
}

// The command of a call, or an explanation for the model of what is wrong with it.
bool CommandOf(const json::object& call, std::string* command) {
  const json::object& function = call.at("function").as_object();
  if (function.at("name").as_string() != "shell") {
    *command = "unknown tool";
    return false;
  }
  boost::system::error_code error;
  json::value arguments = json::parse(function.at("arguments").as_string(), error);
  const json::value* value = !error && arguments.is_object() ? arguments.as_object().if_contains("command") : nullptr;
  if (!value || !value->is_string()) {
    *command = "bad arguments";
    return false;
  }
  *command = std::string(value->as_string());
  return true;
}

int Run(bool blind) {
  const std::string base = Env("OPENAI_BASE_URL"), key = Env("OPENAI_API_KEY"), task_path = Env("TEMPER_TASK_FILE");
  if (base.empty() || task_path.empty()) {
    std::fprintf(stderr, "terminal-agent: OPENAI_BASE_URL and TEMPER_TASK_FILE must be set\n");
    return 1;
  }
  std::stringstream text;
  text << std::ifstream(task_path).rdbuf();
  json::object task = json::parse(text.str()).as_object();
  json::array messages{{{"role", "user"}, {"content", task.at("instruction")}}};
  const json::array tools{ShellTool()};
  CURL* curl = curl_easy_init();
  int result = 1;
  for (int turn = 0; turn < kTurnsMax; ++turn) {
    json::object request{{"model", "policy"}, {"messages", messages}, {"tools", tools}};
    std::string answer;
    const long status = Post(curl, base + "/chat/completions", key, json::serialize(request), &answer);
    if (status == 400 && answer.find("rollout_limit") != std::string::npos) {
      result = 0;  // the turns are used up: a normal end for the agent
      break;
    }
    if (status != 200) {
      std::fprintf(stderr, "terminal-agent: HTTP %ld: %.300s\n", status, answer.c_str());
      break;
    }
    json::value reply = json::parse(answer);
    const json::object& message = reply.at("choices").at(0).at("message").as_object();
    messages.push_back(message);
    const json::value* calls = message.if_contains("tool_calls");
    if (!calls || !calls->is_array() || calls->as_array().empty()) {
      result = 0;
      break;
    }
    for (const json::value& call : calls->as_array()) {
      std::string command;
      const bool good = CommandOf(call.as_object(), &command);
      std::string output = good ? Printable(RunShell(command)) : command;
      messages.push_back(json::object{
          {"role", "tool"}, {"tool_call_id", call.at("id")}, {"content", blind ? std::string() : output}});
    }
  }
  curl_easy_cleanup(curl);
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  // What a policy says is run: only where it can break nothing.
  if (Env("TEMPER_TOOL_EXEC").empty()) {
    std::fprintf(stderr, "terminal-agent: TEMPER_TOOL_EXEC is not set: it runs a policy's commands in Temper's sandbox only "
                         "(scaffold.where: sandbox)\n");
    return 1;
  }
  const bool blind = argc > 1 && std::strcmp(argv[1], "--blind") == 0;
  try {
    return Run(blind);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "terminal-agent: %s\n", e.what());
    return 1;
  }
}
