// An agent that misbehaves in the way its first argument names. The mode `as-told` takes the way from the task's metadata
// ({"mode":"…"}); a second argument `some` lets about every third attempt misbehave, by its key, and the others be good. The mode
// `told`, for an agent on the host, takes it from rules in the second argument (tests/harness/told.h), as does `sleeps:SECONDS`.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/harness/misbehave.h"
#include "tests/harness/told.h"

namespace {

using temper::SleepForEver;
using temper::Daemon;

std::string Env(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// A connection to the model's address; -1 when there is none.
int Connect() {
  const std::string base = Env("OPENAI_BASE_URL");  // http://HOST:PORT/v1
  const size_t host = base.find("//") + 2, colon = base.find(':', host);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::atoi(base.c_str() + colon + 1)));
  inet_pton(AF_INET, base.substr(host, colon - host).c_str(), &address.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

bool Send(int fd, const std::string& bytes) {
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
    if (n <= 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}

// The status of the answer, read to its end by its length; 0 when the connection went first.
int Answer(int fd) {
  std::string text;
  char bytes[1 << 16];
  size_t whole = std::string::npos;
  while (whole == std::string::npos || text.size() < whole) {
    const ssize_t n = recv(fd, bytes, sizeof bytes, 0);
    if (n <= 0) break;
    text.append(bytes, static_cast<size_t>(n));
    const size_t head = text.find("\r\n\r\n");
    if (whole != std::string::npos || head == std::string::npos) continue;
    const std::string length = "content-length: ";
    whole = head + 4 + static_cast<size_t>(std::atoll(text.c_str() + text.find(length) + length.size()));
  }
  return text.size() < 12 ? 0 : std::atoi(text.c_str() + 9);
}

std::string Head(size_t length, const std::string& key = Env("OPENAI_API_KEY")) {
  return "POST /v1/chat/completions HTTP/1.1\r\nHost: model\r\nAuthorization: Bearer " + key +
         "\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(length) + "\r\n\r\n";
}

std::string Body(const std::string& content = "say something") {
  std::string body = "{\"model\":\"policy\",\"messages\":[{\"role\":\"user\",\"content\":\"";
  body.reserve(content.size() + 100);
  return body.append(content).append("\"}]}");
}

// Who is refused before the end of a body finds the refusal although the rest cannot be sent any more.
int Ask(int fd, const std::string& body = Body()) {
  if (body.size() < 4096) {
    Send(fd, Head(body.size()) + body);
  } else if (Send(fd, Head(body.size()))) {
    Send(fd, body);
  }
  return Answer(fd);
}

// One call on a connection of its own.
int Call(const std::string& body = Body()) {
  const int fd = Connect();
  const int status = fd < 0 ? 0 : Ask(fd, body);
  close(fd);
  return status;
}

// What a good agent does; `refused` says how it takes a refusal.
void GoodCall() {
  const int status = Call();
  if (status == 200) return;
  std::fprintf(stderr, "bad-agent: HTTP %d\n", status);
  _exit(9);
}

void ForkStorm(double seconds) {
  const time_t end = time(nullptr) + static_cast<time_t>(seconds);
  while (time(nullptr) < end) {
    const pid_t pid = fork();
    if (pid == 0) SleepForEver();
    if (pid < 0) usleep(1000);
  }
}

std::string Words(size_t bytes) {
  std::string text;
  text.reserve(bytes + 8);
  while (text.size() < bytes) text += "w" + std::to_string(text.size() % 9973) + " ";
  return text;
}

const std::map<std::string, std::function<void()>>& Modes() {
  static const std::map<std::string, std::function<void()>> modes = {
      {"good", [] { GoodCall(); }},
      // Ends that come too soon.
      {"exits-at-once", [] {}},
      {"exits-3", [] { std::fprintf(stderr, "no model for me\n"); _exit(3); }},
      {"calls-and-exits-3", [] { GoodCall(); std::fprintf(stderr, "had enough\n"); _exit(3); }},
      {"crashes", [] { GoodCall(); raise(SIGSEGV); }},
      {"kills-itself", [] { GoodCall(); kill(0, SIGKILL); SleepForEver(); }},
      {"kills-its-session", [] {
         if (fork() == 0) {
           setsid();
           SleepForEver();
         }
         GoodCall();
         kill(-1, SIGKILL);
         kill(1, SIGKILL);
       }},
      // No end.
      {"hangs", [] { SleepForEver(); }},
      {"calls-and-hangs", [] { GoodCall(); SleepForEver(); }},
      {"never-exits", [] { for (int s = 1; s < 32; ++s) signal(s, SIG_IGN); GoodCall(); for (;;) (void)getppid(); }},
      {"half-a-request", [] { GoodCall(); Send(Connect(), Head(1000) + "{"); SleepForEver(); }},
      {"drips", [] { const int fd = Connect(); Send(fd, Head(1 << 20)); for (;;) { Send(fd, " "); usleep(20000); } }},
      // Too much.
      {"10000-calls", [] { const int fd = Connect(); for (int i = 0; i < 10000; ++i) if (Ask(fd) == 0) _exit(8); }},
      {"2000-connections", [] { for (int i = 0; i < 2000; ++i) if (Call() == 0) _exit(8); }},
      {"calls-for-ever", [] { for (;;) Call(); }},
      {"500-at-once", [] {
         GoodCall();
         std::vector<int> fds;
         for (int i = 0; i < 500; ++i) fds.push_back(Connect());
         for (int fd : fds) Send(fd, Head(1000));
       }},
      {"body-over-the-bound", [] { GoodCall(); Call(Body(std::string(80u << 20, 'x'))); }},
      {"only-bodies-over-the-bound", [] { for (int i = 0; i < 3; ++i) Call(Body(std::string(80u << 20, 'x'))); }},
      {"giant-body", [] { GoodCall(); Call(Body(Words(60u << 20))); }},
      {"large-body", [] { GoodCall(); Call(Body(Words(256u << 10))); }},
      {"giant-word", [] { GoodCall(); Call(Body(std::string(60u << 20, 'x'))); }},
      {"giant-bodies-for-ever", [] { for (;;) Call(Body(Words(60u << 20))); }},
      {"many-messages", [] {
         std::string body = "{\"model\":\"policy\",\"messages\":[";
         for (int i = 0; i < 100000; ++i) body += "{\"role\":\"user\",\"content\":\"x\"},";
         GoodCall();
         Call(body + "{\"role\":\"user\",\"content\":\"x\"}]}");
       }},
      {"deep-body", [] { GoodCall(); Call("{\"messages\":" + std::string(1 << 20, '[')); }},
      {"giant-head", [] { GoodCall(); const int fd = Connect(); Send(fd, "GET /" + std::string(1 << 20, 'x')); Answer(fd); }},
      {"rubbish", [] { GoodCall(); const int fd = Connect(); Send(fd, std::string(4096, '\xff')); Answer(fd); }},
      {"floods-output", [] {
         GoodCall();
         const std::string block(1 << 16, 'x');
         for (int i = 0; i < 8192; ++i) if (write(1, block.data(), block.size()) < 0) _exit(7);
       }},
      {"fork-storm", [] { GoodCall(); ForkStorm(1); }},
      {"fork-storm-for-ever", [] { GoodCall(); ForkStorm(1e9); }},
      {"memory", [] {
         GoodCall();
         for (;;) {
           void* more = mmap(nullptr, 8 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
           if (more == MAP_FAILED) SleepForEver();
           memset(more, 1, 8 << 20);
         }
       }},
      {"disk", [] {
         GoodCall();
         const int fd = open("big", O_WRONLY | O_CREAT, 0644);
         const std::string block(1 << 16, 'x');
         while (write(fd, block.data(), block.size()) > 0) {}
       }},
      {"files", [] {
         GoodCall();
         for (int i = 0, fd; (fd = open(("f" + std::to_string(i)).c_str(), O_WRONLY | O_CREAT, 0644)) >= 0; ++i) close(fd);
       }},
      // Somebody stays behind.
      {"daemon-calls-on", [] { GoodCall(); Daemon([] { for (;;) Call(); }); }},
      // Not its own.
      {"wrong-key", [] { const int fd = Connect(); Send(fd, Head(2, "sk-guess") + "{}"); Answer(fd); }},
      {"hangs-up", [] {
         const int fd = Connect();
         const std::string body = Body();
         Send(fd, Head(body.size()) + body);
         close(fd);
         usleep(300000);
         GoodCall();
       }},
  };
  return modes;
}

// Value of a string field; enough for a task file that Temper wrote.
std::string StringOf(const std::string& text, const std::string& name) {
  const size_t at = text.find("\"" + name + "\":\"");
  const size_t begin = at + name.size() + 4;
  return at == std::string::npos ? "" : text.substr(begin, text.find('"', begin) - begin);
}

}  // namespace

int main(int argc, char** argv) {
  std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "as-told") {
    std::stringstream task;
    task << std::ifstream(Env("TEMPER_TASK_FILE")).rdbuf();
    mode = StringOf(task.str(), "mode");
  }
  if (mode == "told" && argc > 2) {
    // On the host the task file is called after the session.
    const std::string file = Env("TEMPER_TASK_FILE");
    std::array<int, 3> attempt{};
    std::sscanf(file.c_str() + file.rfind('/') + 1, "%d.%d.%d", &attempt[0], &attempt[1], &attempt[2]);
    mode = temper::Told(argv[2], attempt, "good");
    if (mode.rfind("sleeps:", 0) == 0) {
      GoodCall();
      usleep(static_cast<useconds_t>(std::atof(mode.c_str() + 7) * 1e6));
      return 0;
    }
  } else if (argc > 2) {
    uint32_t hash = 2166136261u;
    for (char c : Env("OPENAI_API_KEY")) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
    if (hash % 3 != 0) mode = "good";
  }
  const auto found = Modes().find(mode);
  if (found == Modes().end()) {
    std::fprintf(stderr, "bad-agent: no mode '%s'\n", mode.c_str());
    return 64;
  }
  found->second();
  return 0;
}
