// A verifier that misbehaves in the way its first argument names; `mix` takes another way for each group, of those that give no
// verdict. With a second argument only some attempts meet that:
//   first      the first attempt of rollout 1     always-0   every attempt of rollout 0     never   none
// The mode `told` takes the reward from rules in the second argument (tests/harness/told.h).
// All others are judged honestly: reward = 1 + the number of the rollout, so that a test can tell who entered a mean.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "tests/harness/misbehave.h"
#include "tests/harness/told.h"

namespace {

using temper::SleepForEver;
using temper::Daemon;

void Say(int fd, const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = write(fd, text.data() + at, text.size() - at);
    if (n < 0) _exit(7);
    at += static_cast<size_t>(n);
  }
}

void Verdict(const std::string& text) { Say(3, text); }

// The number behind `"NAME":` in the case; -1 when it is not there. Enough for a case that Temper itself wrote.
int NumberOf(const std::string& text, const std::string& name) {
  const size_t at = text.find("\"" + name + "\":");
  return at == std::string::npos ? -1 : std::atoi(text.c_str() + at + name.size() + 3);
}

std::string StandardInput() {
  std::string all;
  char bytes[1 << 16];
  for (ssize_t n; (n = read(0, bytes, sizeof bytes)) > 0;) all.append(bytes, static_cast<size_t>(n));
  return all;
}

void Flood(int fd, uint64_t bytes) {
  const std::string block(1 << 16, 'x');
  for (uint64_t done = 0; done < bytes; done += block.size()) Say(fd, block);
}

const std::string kGood = "{\"reward\":1}\n";
constexpr uint64_t kGiB = uint64_t{1} << 30;

const std::map<std::string, std::function<void()>>& Modes() {
  static const std::map<std::string, std::function<void()>> modes = {
      {"good", [] { Verdict(kGood); }},
      // Ends that are none.
      {"crash", [] { Verdict(kGood); Say(2, "about to crash\n"); raise(SIGSEGV); }},
      {"abort", [] { Verdict(kGood); abort(); }},
      {"kills-itself", [] { Verdict(kGood); kill(0, SIGKILL); }},
      {"exit-3", [] { Verdict(kGood); Say(2, "not my day\n"); _exit(3); }},
      // No end.
      {"hang", [] { SleepForEver(); }},
      {"verdict-then-hang", [] { Verdict(kGood); SleepForEver(); }},
      {"busy", [] { for (;;) (void)getppid(); }},
      {"stops-itself", [] { raise(SIGSTOP); SleepForEver(); }},
      {"ignores-sigterm", [] { for (int s = 1; s < 32; ++s) signal(s, SIG_IGN); SleepForEver(); }},
      {"writes-slowly", [] { Verdict("{\"reward\":1,\"evidence\":{\"text\":\""); for (;;) { Verdict("x"); usleep(20000); } }},
      {"logs-slowly", [] { Verdict(kGood); for (;;) { Say(2, "still here\n"); usleep(20000); } }},
      {"fork-storm", [] { Verdict(kGood); for (;;) if (fork() < 0) usleep(1000); }},
      // No verdict.
      {"silent", [] {}},
      {"on-stdout", [] { Say(1, kGood); }},
      {"closes-fd3", [] { close(3); Say(1, kGood); }},
      {"rubbish", [] { Verdict("\x01\xff rubbish"); }},
      {"nan", [] { Verdict("{\"reward\":NaN}"); }},
      {"infinity", [] { Verdict("{\"reward\":-Infinity}"); }},
      {"1e999", [] { Verdict("{\"reward\":1e999}"); }},
      {"component-1e999", [] { Verdict("{\"reward\":1,\"components\":{\"a\":-1e999}}"); }},
      {"text", [] { Verdict("{\"reward\":\"1\"}"); }},
      {"null", [] { Verdict("{\"reward\":null}"); }},
      {"list", [] { Verdict("[{\"reward\":1}]"); }},
      {"half", [] { Verdict("{\"reward\":1"); }},
      {"twice", [] { Verdict(kGood); Verdict(kGood); }},
      {"reward-twice", [] { Verdict("{\"reward\":0,\"reward\":1}"); }},
      {"deep", [] { Verdict("{\"reward\":1,\"evidence\":" + std::string(1 << 20, '[')); }},
      {"gigabyte-on-fd3", [] { Flood(3, kGiB); }},
      // Too much of something.
      {"gigabyte-of-log", [] { Flood(1, kGiB / 2); Flood(2, kGiB / 2); Verdict(kGood); }},
      {"memory", [] {
         for (;;) {
           void* more = mmap(nullptr, 8 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
           if (more == MAP_FAILED) _exit(4);
           memset(more, 1, 8 << 20);
         }
       }},
      {"disk", [] { const int fd = open("big", O_WRONLY | O_CREAT, 0644); Flood(fd, kGiB); }},
      // Somebody stays behind.
      {"daemon", [] { Daemon([] { SleepForEver(); }); Verdict(kGood); }},
      {"daemon-judges-later", [] { Daemon([] { usleep(300000); Verdict(kGood); SleepForEver(); }); Verdict(kGood); }},
      {"daemon-judges-instead", [] { Daemon([] { usleep(300000); Verdict(kGood); }); }},
      {"daemon-floods-fd3", [] { Daemon([] { for (;;) Verdict(std::string(1 << 16, 'x')); }); usleep(100000); }},
      // What is allowed.
      {"reads-nothing", [] { close(0); Verdict(kGood); }},
      {"kills-all", [] { kill(-1, SIGKILL); Verdict(kGood); }},
  };
  return modes;
}

constexpr const char* kMix[] = {"crash",     "hang",        "rubbish",   "nan",        "1e999",        "twice",
                                "daemon-judges-instead",    "closes-fd3", "writes-slowly", "ignores-sigterm", "exit-3",
                                "gigabyte-on-fd3",          "silent",    "kills-itself", "fork-storm",  "verdict-then-hang",
                                "on-stdout", "half",        "null",      "memory",     "busy",         "component-1e999"};

}  // namespace

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  std::string name = argc > 1 ? argv[1] : "";
  if (argc > 2) {
    const std::string the_case = StandardInput(), share = argv[2];
    const int group = NumberOf(the_case, "group"), rollout = NumberOf(the_case, "rollout"), attempt = NumberOf(the_case, "attempt");
    if (name == "told") {
      Verdict("{\"reward\":" + temper::Told(share, {group, rollout, attempt}, std::to_string(1 + rollout)) + "}\n");
      return 0;
    }
    const bool bad = share == "first" ? rollout == 1 && attempt == 1 : share == "always-0" && rollout == 0;
    if (!bad) {
      Verdict("{\"reward\":" + std::to_string(1 + rollout) + "}\n");
      return 0;
    }
    if (name == "mix") name = kMix[static_cast<size_t>(group) % (sizeof kMix / sizeof *kMix)];
  }
  const auto mode = Modes().find(name);
  if (mode == Modes().end()) {
    std::fprintf(stderr, "bad-verifier: no such mode\n");
    return 64;
  }
  mode->second();
  return 0;
}
