// A gateway over a scripted worker, for clients in other languages: prints its port, a port whose queue is always full and a
// key, serves until standard input ends. The script echoes what the last user or tool message says: "call X" is answered by a
// call of the tool `shell`, "calls X" by two, "long" by many tokens, "fail" and "away" by a worker that breaks after 12 tokens or
// is not there.
#include <unistd.h>

#include <cstdio>

#include "common/rpc.h"
#include "gateway/gateway.h"
#include "tests/gateway/fake_policy.h"
#include "tests/gateway/fake_rollout.h"

int main() {
  using namespace temper;
  using namespace temper::gateway;
  FakePolicy policy;
  FakeRollout rollout(FakePolicy::kEnd, [&](const rollout::GenerateRequest& request) {
    const std::string prompt = policy.Decode(request.prompt_ids);
    const size_t end = prompt.rfind("<|im_end|>\n<|im_start|>assistant\n");
    const size_t start = prompt.rfind('\n', end == std::string::npos ? end : end - 1) + 1;
    const std::string said = prompt.substr(start, end - start);
    Script script{.text = "you said: " + said, .token_ms = 1};
    const auto shell = [](const std::string& command) {
      return "<tool_call>{\"name\":\"shell\",\"arguments\":{\"command\":\"" + command + "\"}}</tool_call>";
    };
    if (said.starts_with("call ")) script.text = "caf\xc3\xa9 " + shell(said.substr(5));
    if (said.starts_with("calls ")) script.text = shell(said.substr(6)) + shell("second " + said.substr(6));
    if (said == "long") script = {.text = std::string(100'000, 'x'), .token_ms = 2};
    if (said == "fail") script = {.text = std::string(100, 'x'), .status = Internal("it broke"), .fail_after = 12, .token_ms = 1};
    if (said == "away") script.status = Unavailable("gone");
    return script;
  });
  Metrics metrics;
  Gateway gateway({.context_tokens = 20'000, .worker_patience_s = 0.2}, policy, rollout, SystemClock::Get(), metrics);
  if (!gateway.Start().ok()) return 1;
  OpenOptions o;
  o.session = "0.0.1";
  o.sampling = SamplingPolicy{};
  o.training = true;
  o.max_turns = 60;
  auto opened = gateway.Open(o);
  auto fd = ListenTcp("127.0.0.1", 0), full_fd = ListenTcp("127.0.0.1", 0);
  if (!fd.ok() || !full_fd.ok() || !opened.ok()) return 1;
  const int port = *BoundPort(fd->get()), full_port = *BoundPort(full_fd->get());
  const auto handle = [&](http::Request r, std::shared_ptr<http::Responder> out) { gateway.Handle(std::move(r), std::move(out)); };
  http::Server server({.body_bytes_max = 1 << 20, .refuse = &Gateway::RefusalBody}, handle);
  http::Server full({.queue_max = 0, .refuse = &Gateway::RefusalBody}, handle);
  if (!server.AddListener(fd->Release()).ok() || !full.AddListener(full_fd->Release()).ok()) return 1;
  server.Start();
  full.Start();
  std::printf("%d %d %s\n", port, full_port, opened->api_key.c_str());
  std::fflush(stdout);
  char byte;
  // A line on standard input asks for the facts; its end stops the server.
  while (::read(STDIN_FILENO, &byte, 1) == 1) {
    if (byte == '\n') {
      std::printf("%d %d\n", static_cast<int>(rollout.requests().size()), rollout.cancelled());
      std::fflush(stdout);
    } else if (byte == 's') {
      std::printf("%s\n", gateway.Seal("0.0.1", 100).ok() ? "sealed" : "failed");
      std::fflush(stdout);
    }
  }
  server.Stop();
  full.Stop();
  gateway.Stop();
}
