// What a client has heard is in the log. A gateway in a process of its own is killed at the log, before and after a write.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/faults.h"
#include "common/json.h"
#include "common/rpc.h"
#include "gateway/gateway.h"
#include "temper/v1/types.pb.h"
#include "tests/gateway/fake_policy.h"
#include "tests/gateway/fake_rollout.h"
#include "tests/gateway/http_client.h"

namespace temper::gateway {
namespace {

constexpr const char* kSession = "0.0.1";
constexpr const char* kDrawn = "look <tool_call>{\"name\":\"shell\",\"arguments\":{\"c\":\"ls\"}}</tool_call>";
constexpr const char* kRetry = "x-stainless-retry-count: 1\r\n";
// What the session writes before its first answer: the opening, the call's begin, then the turn.
constexpr int kTurnWrite = 3;

std::string Body(bool stream) {
  return std::string("{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"go\"}],") +
         "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"shell\"}}],\"stream\":" + (stream ? "true" : "false") + "}";
}

struct Serving {
  explicit Serving(const std::string& dir)
      : rollout(FakePolicy::kEnd, [](const auto&) { return Script{.text = kDrawn}; }),
        gateway({.log_dir = dir, .context_tokens = 4000}, policy, rollout, SystemClock::Get(), metrics),
        http({.refuse = &Gateway::RefusalBody},
             [this](http::Request r, std::shared_ptr<http::Responder> out) { gateway.Handle(std::move(r), std::move(out)); }) {
    const Status status = gateway.Start();
    EXPECT_TRUE(status.ok()) << status.ToString();
    Result<Fd> listener = ListenTcp("127.0.0.1", 0);
    EXPECT_TRUE(listener.ok());
    port = *BoundPort(listener->get());
    EXPECT_TRUE(http.AddListener(listener->Release()).ok());
    http.Start();
  }
  ~Serving() {
    http.Stop();
    gateway.Stop();
  }
  Result<Opened> Open() {
    OpenOptions options;
    options.session = kSession;
    options.sampling = SamplingPolicy{};
    options.training = true;
    return gateway.Open(options);
  }
  HttpAnswer Chat(const std::string& key, bool stream, const std::string& extra = "") const {
    return Exchange(port, "POST", "/v1/chat/completions", key, Body(stream), extra);
  }

  FakePolicy policy;
  Metrics metrics;
  FakeRollout rollout;
  Gateway gateway;
  http::Server http;
  int port = 0;
};

// A child that serves one session until something kills it.
class KilledGateway {
 public:
  KilledGateway(const std::string& dir, const std::string& point, const std::string& action) {
    int pipe_fds[2];
    EXPECT_EQ(::pipe(pipe_fds), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(pipe_fds[0]);
      const rlimit no_core{0, 0};
      ::setrlimit(RLIMIT_CORE, &no_core);
      if (!point.empty()) Faults::Get().Arm(point, action, kTurnWrite);
      Serving serving(dir);
      const std::string line = std::to_string(serving.port) + " " + serving.Open()->api_key + "\n";
      (void)WriteAll(pipe_fds[1], line);
      while (true) ::pause();
    }
    ::close(pipe_fds[1]);
    std::string line;
    for (char c; ::read(pipe_fds[0], &c, 1) == 1 && c != '\n';) line += c;
    ::close(pipe_fds[0]);
    port_ = std::atoi(line.c_str());
    key = line.substr(line.find(' ') + 1);
  }
  ~KilledGateway() { Kill(); }
  HttpAnswer Chat(bool stream) const { return Exchange(port_, "POST", "/v1/chat/completions", key, Body(stream)); }
  // By a signal, as the fault or Kill() sent it.
  bool Ended() {
    int status = 0;
    for (int i = 0; i < 2000 && pid_ > 0; ++i) {
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        return WIFSIGNALED(status);
      }
      ::usleep(5000);
    }
    return false;
  }
  void Kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  std::string key;

 private:
  pid_t pid_ = -1;
  int port_ = 0;
};

class DurableTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    dir_ = ::testing::TempDir() + "gateway-durable-" + std::to_string(::getpid());
    ASSERT_TRUE(RemoveAll(dir_).ok());
  }
  void TearDown() override { ASSERT_TRUE(RemoveAll(dir_).ok()); }
  // Nothing that an agent could act on: a part of a stream may be out, its end and its tool calls may not.
  static void ExpectNothingToActOn(const HttpAnswer& answer) {
    if (!GetParam()) {
      EXPECT_EQ(answer.status, 0) << answer.body;
    }
    for (const char* sign : {"\"tool_calls\"", "\"finish_reason\":\"", "[DONE]"}) {
      EXPECT_EQ(answer.body.find(sign), std::string::npos) << answer.body;
    }
  }
  std::string dir_;
};
INSTANTIATE_TEST_SUITE_P(Answers, DurableTest, ::testing::Values(false, true),
                         [](const auto& p) { return p.param ? "streamed" : "whole"; });

// An agent could act on an answer that the record does not have: its next turn would hang on a past that never was.
TEST_P(DurableTest, ATurnThatIsNotLoggedIsNotAnswered) {
  for (const char* action : {"fail", "exit"}) {
    ASSERT_TRUE(RemoveAll(dir_).ok());
    KilledGateway first(dir_, "gateway.log_write", action);
    ExpectNothingToActOn(first.Chat(GetParam()));
    EXPECT_TRUE(first.Ended()) << "a gateway that cannot write its log lives on";

    Serving again(dir_);
    EXPECT_EQ(again.Chat(first.key, GetParam(), kRetry).status, 200);
    EXPECT_EQ(again.rollout.requests().size(), 1u) << "an answer from nowhere";
    Result<Sealed> sealed = again.gateway.Seal(kSession, 0);
    ASSERT_TRUE(sealed.ok()) << sealed.status().ToString();
    const v1::Trajectory& t = *sealed->trajectory;
    ASSERT_EQ(t.calls_size(), 2);
    EXPECT_EQ(t.calls(0).note(), "gateway_restart");
    EXPECT_EQ(t.calls(0).completion_tokens(), 0);
    ASSERT_EQ(t.runs_size(), 2) << "context and one turn: that of the repetition";
    EXPECT_EQ(t.runs(1).call(), 1);
  }
}

// A turn that was logged and not answered could be drawn again, so that the tree has two where the agent saw one.
TEST_P(DurableTest, ATurnThatIsLoggedIsGivenToTheRetry) {
  KilledGateway first(dir_, "gateway.log_written", "exit");
  ExpectNothingToActOn(first.Chat(GetParam()));
  EXPECT_TRUE(first.Ended());
  Serving again(dir_);
  const HttpAnswer answer = again.Chat(first.key, GetParam(), kRetry);
  EXPECT_EQ(answer.status, 200);
  EXPECT_NE(answer.body.find("\"tool_calls\""), std::string::npos) << answer.body;
  EXPECT_TRUE(again.rollout.requests().empty());
  EXPECT_EQ(again.gateway.Seal(kSession, 0)->trajectory->calls_size(), 1);
}

// A gateway that is killed right after an answer could have lost what it answered.
TEST_P(DurableTest, ATurnThatWasAnsweredIsThereAfterAKill) {
  KilledGateway first(dir_, "", "");
  const HttpAnswer answer = first.Chat(GetParam());
  first.Kill();
  ASSERT_EQ(answer.status, 200);
  Serving again(dir_);
  Result<Sealed> sealed = again.gateway.Seal(kSession, 0);
  ASSERT_TRUE(sealed.ok()) << sealed.status().ToString();
  const v1::Trajectory& t = *sealed->trajectory;
  ASSERT_EQ(t.runs_size(), 2);
  std::string said;
  for (uint32_t id : t.runs(1).ids()) said += again.policy.TokenBytes(static_cast<int32_t>(id));
  EXPECT_EQ(said, std::string(kDrawn) + "<|im_end|>");
  EXPECT_EQ(t.runs(1).logprobs_size(), t.runs(1).ids_size());
}

}  // namespace
}  // namespace temper::gateway
