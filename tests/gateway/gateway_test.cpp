#include "gateway/gateway.h"

#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "common/json.h"
#include "common/rpc.h"
#include "engine/kept_set.h"
#include "temper/v1/types.pb.h"
#include "tests/gateway/fake_policy.h"
#include "tests/gateway/fake_rollout.h"
#include "tests/gateway/http_client.h"

namespace temper::gateway {
namespace {

constexpr const char* kCall = "look <tool_call>{\"name\":\"shell\",\"arguments\":{\"c\":\"ls the tool\"}}</tool_call>";
constexpr const char* kTools = "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"shell\"}}]";

std::string Body(const std::string& messages, const std::string& fields = kTools) {
  return "{\"model\":\"m\",\"messages\":[" + messages + "]" + (fields.empty() ? "" : "," + fields) + "}";
}
std::string User(const std::string& text) { return "{\"role\":\"user\",\"content\":\"" + text + "\"}"; }

// A gateway with its HTTP server on a port of its own, over a scripted worker.
class GatewayTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = ::testing::TempDir() + "gateway-" + std::to_string(::getpid()) + "-" +
           ::testing::UnitTest::GetInstance()->current_test_info()->name();
    ASSERT_TRUE(RemoveAll(dir_).ok());
    script_ = [](const rollout::GenerateRequest&) { return Script{.text = kCall}; };
  }
  void TearDown() override {
    StopAll();
    ASSERT_TRUE(RemoveAll(dir_).ok());
  }

  void Start(GatewayOptions options = {}) {
    options.log_dir = dir_;
    options.context_tokens = 4000;
    rollout_ = std::make_unique<FakeRollout>(FakePolicy::kEnd, [this](const auto& request) { return script_(request); });
    gateway_ = std::make_unique<Gateway>(options, policy_, *rollout_, SystemClock::Get(), metrics_);
    const Status status = gateway_->Start();
    ASSERT_TRUE(status.ok()) << status.ToString();
    gateway_->SetBaseUrl("http://x/v1");
    http_ = std::make_unique<http::Server>(
        http::ServerOptions{.body_bytes_max = 100'000, .refuse = &Gateway::RefusalBody},
        [this](http::Request r, std::shared_ptr<http::Responder> out) { gateway_->Handle(std::move(r), std::move(out)); });
    auto fd = ListenTcp("127.0.0.1", 0);
    ASSERT_TRUE(fd.ok());
    port_ = *BoundPort(fd->get());
    ASSERT_TRUE(http_->AddListener(fd->Release()).ok());
    http_->Start();
  }
  void StopAll() {
    if (http_) http_->Stop();
    if (gateway_) gateway_->Stop();
    http_.reset();
    gateway_.reset();
    rollout_.reset();
  }

  OpenOptions Options(const std::string& name = "0.0.1") {
    OpenOptions o;
    o.session = name;
    o.sampling = SamplingPolicy{};
    o.training = true;
    o.key_space = {7, 0, 4, 5};
    return o;
  }
  std::string Key(const OpenOptions& options) {
    auto opened = gateway_->Open(options);
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    return opened.ok() ? opened->api_key : "";
  }
  HttpAnswer Chat(const std::string& key, const std::string& body, const std::string& extra = "") {
    return Exchange(port_, "POST", "/v1/chat/completions", key, body, extra);
  }
  v1::Trajectory Sealed(const std::string& name = "0.0.1", int drain_ms = 0) {
    auto sealed = gateway_->Seal(name, drain_ms);
    EXPECT_TRUE(sealed.ok()) << sealed.status().ToString();
    return sealed.ok() ? *sealed->trajectory : v1::Trajectory();
  }
  // Waits for `done` at most 10 s.
  static bool Eventually(const std::function<bool()>& done) {
    for (int i = 0; i < 2000; ++i) {
      if (done()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  std::string dir_;
  FakePolicy policy_;
  Metrics metrics_;
  FakeRollout::Answerer script_;
  std::unique_ptr<FakeRollout> rollout_;
  std::unique_ptr<Gateway> gateway_;
  std::unique_ptr<http::Server> http_;
  int port_ = 0;
};

std::string Code(const HttpAnswer& answer) {
  auto json = ParseJson(answer.body);
  if (!json.ok()) return "no JSON: " + answer.body;
  const auto& code = json->at("error").at("code");
  return std::to_string(answer.status) + " " + (code.is_null() ? "null" : std::string(code.as_string()));
}

// The whole way of a turn with a tool: what the worker got and drew must be, id for id, what the trajectory holds.
TEST_F(GatewayTest, RecordsAToolTurnTokenForToken) {
  Start();
  const std::string key = Key(Options());
  HttpAnswer first = Chat(key, Body(User("go")));
  ASSERT_EQ(first.status, 200) << first.body;
  auto json = *ParseJson(first.body);
  const auto& choice = json.at("choices").at(0);
  EXPECT_EQ(choice.at("finish_reason"), "tool_calls");
  EXPECT_EQ(choice.at("message").at("content"), "look ");
  const std::string id(choice.at("message").at("tool_calls").at(0).at("id").as_string());
  script_ = [](const auto&) { return Script{.text = "done", .swap_at = 2}; };
  HttpAnswer second = Chat(key, Body(User("go") + ",{\"role\":\"assistant\",\"content\":\"look \",\"tool_calls\":[{\"id\":\"" + id +
                                     "\",\"type\":\"function\",\"function\":{\"name\":\"shell\",\"arguments\":\"{ \\\"c\\\": \\\"ls the tool\\\"}\"}}]}," +
                                     "{\"role\":\"tool\",\"tool_call_id\":\"" + id + "\",\"content\":\"a.txt\"}"));
  ASSERT_EQ(second.status, 200) << second.body;
  EXPECT_EQ(ParseJson(second.body)->at("usage").at("completion_tokens"), 5);
  v1::Trajectory t = Sealed();
  ASSERT_EQ(t.runs_size(), 5);
  const auto requests = rollout_->requests();
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_EQ(requests[1].key, (engine::SampleKey{7, 0, 4, 5, 1, 0}));
  EXPECT_EQ(requests[0].coalesce_ms, rollout::kOneChunk);
  std::vector<int32_t> path;
  for (int run : {0, 1, 2}) path.insert(path.end(), t.runs(run).ids().begin(), t.runs(run).ids().end());
  EXPECT_EQ(path, requests[1].prompt_ids);
  EXPECT_EQ(t.runs(2).provenance(), v1::CONTEXT);
  EXPECT_EQ(t.runs(3).version().step(), 1);
  EXPECT_EQ(t.runs(4).version().step(), 2);
  EXPECT_EQ(t.runs(4).parent(), 3);
  EXPECT_EQ(t.runs(4).logprobs_size(), t.runs(4).ids_size());
  EXPECT_TRUE(t.runs(4).trainable());
  EXPECT_EQ(t.calls_size(), 2);
  EXPECT_EQ(t.flags_size(), 0);
}

// Every error must reach the client in OpenAI's shape and with the status that its SDK understands.
TEST_F(GatewayTest, ErrorShapes) {
  Start();
  OpenOptions o = Options();
  o.max_turns = 1;
  const std::string key = Key(o);
  EXPECT_EQ(Code(Chat("", Body(User("x")))), "401 invalid_api_key");
  EXPECT_EQ(Code(Chat("sk-wrong", Body(User("x")))), "401 invalid_api_key");
  EXPECT_EQ(Code(Chat(key, "{")), "400 null");
  EXPECT_EQ(Code(Chat(key, Body(User("x"), "\"tool_choice\":\"required\""))), "400 unsupported_parameter");
  EXPECT_EQ(Code(Chat(key, Body(User(std::string(5000, 'y'))))), "400 context_length_exceeded");
  EXPECT_EQ(Code(Chat(key, std::string(200'000, ' '))), "413 request_too_large");
  EXPECT_EQ(Code(Exchange(port_, "GET", "/v1/chat/completions", key)), "405 null");
  EXPECT_EQ(Code(Exchange(port_, "POST", "/v1/responses", key, "{}")), "404 unknown_url");
  EXPECT_EQ(Code(Exchange(port_, "GET", "/v1/models/other", key)), "404 model_not_found");
  EXPECT_EQ(Exchange(port_, "GET", "/v1/models/policy", key).status, 200);
  EXPECT_EQ(Exchange(port_, "GET", "/models", key).status, 200);
  EXPECT_EQ(Exchange(port_, "GET", "/", "").status, 200);
  EXPECT_EQ(Exchange(port_, "HEAD", "/", "").status, 200);
  EXPECT_EQ(Exchange(port_, "POST", "/r/0.0.1/v1/v1/chat/completions", key, Body(User("x"))).status, 200);
  EXPECT_EQ(Code(Exchange(port_, "POST", "/r/0.0.2/v1/chat/completions", key, Body(User("x")))), "401 invalid_api_key");
  HttpAnswer over = Chat(key, Body(User("x")));
  EXPECT_EQ(Code(over), "400 rollout_limit:turns");
  EXPECT_NE(over.head.find("x-should-retry: false"), std::string::npos);
  v1::Trajectory t = Sealed();
  EXPECT_EQ(t.flags_size(), 2);
  HttpAnswer sealed = Chat(key, Body(User("x")));
  EXPECT_EQ(Code(sealed), "410 session_closed");
  EXPECT_NE(sealed.head.find("x-should-retry: false"), std::string::npos);
  EXPECT_EQ(t.SerializeAsString(), Sealed().SerializeAsString());
}

// The pieces of a stream, put together as SDKs do it.
struct Assembled {
  std::string content, finish, tool_name, tool_arguments, tool_id, logprob_tokens;
  int frames = 0;
  bool done = false;
};
Assembled Assemble(const std::string& body) {
  Assembled out;
  size_t at = 0;
  while (at < body.size()) {
    const size_t end = body.find("\n\n", at);
    if (end == std::string::npos) break;
    const std::string frame = body.substr(at, end - at);
    at = end + 2;
    if (!frame.starts_with("data: ")) continue;
    if (frame == "data: [DONE]") {
      out.done = true;
      continue;
    }
    ++out.frames;
    auto json = ParseJson(frame.substr(6));
    EXPECT_TRUE(json.ok()) << frame;
    if (!json.ok() || json->at("choices").as_array().empty()) continue;
    const auto& choice = json->at("choices").at(0).as_object();
    const auto& delta = choice.at("delta").as_object();
    if (delta.contains("content")) out.content += delta.at("content").as_string();
    if (delta.contains("tool_calls")) {
      const auto& call = delta.at("tool_calls").at(0);
      out.tool_id = std::string(call.at("id").as_string());
      out.tool_name = std::string(call.at("function").at("name").as_string());
      out.tool_arguments += call.at("function").at("arguments").as_string();
    }
    if (!choice.at("finish_reason").is_null()) out.finish = std::string(choice.at("finish_reason").as_string());
    if (choice.at("logprobs").is_object()) {
      for (const auto& token : choice.at("logprobs").at("content").as_array()) {
        for (const auto& byte : token.at("bytes").as_array()) out.logprob_tokens += static_cast<char>(byte.to_number<int>());
      }
    }
  }
  return out;
}

TEST_F(GatewayTest, StreamsAndWholeAnswersAgree) {
  // What could go wrong: a client sees another answer in stream mode, or acts before the tokens are in the log.
  Start();
  const std::string key = Key(Options());
  for (const std::string& text : {std::string(kCall), std::string("caf\xc3\xa9 \xf0\x9f\x98\x80"), std::string("a <tool_call>{"), std::string("")}) {
    script_ = [&](const auto&) { return Script{.text = text, .token_ms = 1}; };
    HttpAnswer whole = Chat(key, Body(User("x"), std::string(kTools) + ",\"logprobs\":true"));
    HttpAnswer stream = Chat(key, Body(User("x"), std::string(kTools) + ",\"logprobs\":true,\"stream\":true"));
    ASSERT_EQ(whole.status, 200);
    ASSERT_EQ(stream.status, 200);
    EXPECT_NE(stream.head.find("text/event-stream"), std::string::npos);
    auto json = *ParseJson(whole.body);
    const auto& choice = json.at("choices").at(0);
    const auto& message = choice.at("message").as_object();
    Assembled got = Assemble(stream.body);
    EXPECT_TRUE(got.done);
    EXPECT_EQ(got.content, message.at("content").is_null() ? "" : std::string(message.at("content").as_string()));
    EXPECT_EQ(got.finish, choice.at("finish_reason").as_string());
    if (message.contains("tool_calls")) {
      EXPECT_EQ(got.tool_arguments, message.at("tool_calls").at(0).at("function").at("arguments").as_string());
      EXPECT_FALSE(got.tool_id.empty());
    }
    EXPECT_EQ(got.logprob_tokens, text);
  }
}

// A marked retry must never draw again: neither while the first is running nor after it ended.
TEST_F(GatewayTest, RetriesAreOneCall) {
  Start();
  const std::string key = Key(Options());
  script_ = [](const auto&) { return Script{.text = kCall, .token_ms = 5}; };
  const std::string body = Body(User("x"));
  HttpAnswer a, b;
  std::thread first([&] { a = Chat(key, body, "x-stainless-retry-count: 0\r\n"); });
  ASSERT_TRUE(Eventually([&] { return rollout_->requests().size() == 1; }));
  b = Chat(key, body, "x-stainless-retry-count: 1\r\n");
  first.join();
  EXPECT_EQ(a.status, 200);
  EXPECT_EQ(a.body, b.body);
  EXPECT_EQ(Chat(key, body, "x-stainless-retry-count: 2\r\n").body, a.body);
  EXPECT_EQ(rollout_->requests().size(), 1u);
  EXPECT_NE(Chat(key, body).body, a.body);  // unmarked: a new sample
  EXPECT_EQ(rollout_->requests().size(), 2u);
  EXPECT_EQ(Sealed().calls_size(), 2);
}

// Tokens drawn for a client that left are a waste, and must not be trained.
TEST_F(GatewayTest, ADisconnectCancelsTheWorker) {
  Start();
  const std::string key = Key(Options());
  script_ = [](const auto&) { return Script{.text = std::string(1000, 'x'), .token_ms = 5}; };
  {
    RawClient client(port_);
    client.Say(HttpRequest("POST", "/v1/chat/completions", key, Body(User("x"), "\"stream\":true")));
    client.Hear("\"content\":\"x\"");
  }
  EXPECT_TRUE(Eventually([&] { return rollout_->cancelled() == 1; }));
  EXPECT_TRUE(Eventually([&] { return metrics_["calls_in_flight"].value() == 0; }));
  v1::Trajectory t = Sealed();
  ASSERT_EQ(t.runs_size(), 2);
  EXPECT_FALSE(t.runs(1).trainable());
  EXPECT_EQ(t.calls(0).finish(), "abort");
  EXPECT_EQ(t.calls(0).note(), "client_gone");
}

// A client that gave up waiting and asks again while its first call is being cancelled was told that its session is closed.
TEST_F(GatewayTest, ARetryOfACancelledCallIsAskedToComeAgain) {
  Start();
  const std::string key = Key(Options());
  script_ = [](const auto&) { return Script{.wait_for_cancel = true, .linger_ms = 500}; };
  {
    RawClient client(port_);
    client.Say(HttpRequest("POST", "/v1/chat/completions", key, Body(User("x"))));
    ASSERT_TRUE(Eventually([&] { return rollout_->requests().size() == 1; }));
  }
  ASSERT_TRUE(Eventually([&] { return rollout_->cancelled() == 1; }));
  script_ = [](const auto&) { return Script{.text = "done"}; };
  const HttpAnswer early = Chat(key, Body(User("x")), "x-stainless-retry-count: 1\r\n");
  EXPECT_EQ(Code(early), "503 overloaded") << early.body;
  EXPECT_NE(early.head.find("retry-after-ms"), std::string::npos) << early.head;
  ASSERT_TRUE(Eventually([&] { return metrics_["calls_in_flight"].value() == 0; }));
  EXPECT_EQ(Chat(key, Body(User("x")), "x-stainless-retry-count: 2\r\n").status, 200);
}

// A worker that dies must cost the client time, not an error; one that lies must not be trained.
TEST_F(GatewayTest, WorkerFailures) {
  Start({.worker_patience_s = 0.6});
  const std::string key = Key(Options());
  std::atomic<int> failures{2};
  script_ = [&](const auto&) {
    if (failures-- > 0) return Script{.text = "half", .status = Unavailable("died"), .fail_after = 2};
    return Script{.text = "whole"};
  };
  HttpAnswer answer = Chat(key, Body(User("x")));
  EXPECT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(metrics_["calls_repeated"].value(), 2);
  failures = 1000;
  answer = Chat(key, Body(User("x")));
  EXPECT_EQ(Code(answer), "503 overloaded");
  EXPECT_NE(answer.head.find("retry-after-ms"), std::string::npos);
  script_ = [](const auto&) { return Script{.text = "whole", .lie_about_hash = true}; };
  EXPECT_EQ(Code(Chat(key, Body(User("x")))), "502 worker_protocol");
  script_ = [](const auto&) { return Script{.text = "abcdef", .status = Unavailable("died"), .fail_after = 3, .token_ms = 5}; };
  HttpAnswer stream = Chat(key, Body(User("x"), "\"stream\":true"));
  EXPECT_EQ(stream.status, 200);
  EXPECT_NE(stream.body.find("data: {\"error\""), std::string::npos) << stream.body;
  EXPECT_EQ(stream.body.find("[DONE]"), std::string::npos);
  v1::Trajectory t = Sealed();
  EXPECT_EQ(t.runs_size(), 2);  // the one good answer
  EXPECT_EQ(t.flags(0), "worker_error");
}

TEST_F(GatewayTest, StopStringsAndChoices) {
  // What could go wrong: text after the stop is shown, or the tokens drawn for it count as the policy's.
  Start();
  OpenOptions o = Options();
  o.sampling.reset();
  o.training = false;
  const std::string key = Key(o);
  script_ = [](const auto& request) { return Script{.text = request.key.choice == 0 ? "one STOP two" : "twin", .token_ms = 2}; };
  HttpAnswer answer = Chat(key, Body(User("x"), "\"stop\":[\"STOP\"],\"n\":2,\"seed\":11"));
  ASSERT_EQ(answer.status, 200) << answer.body;
  auto json = *ParseJson(answer.body);
  EXPECT_EQ(json.at("choices").at(0).at("message").at("content"), "one ");
  EXPECT_EQ(json.at("choices").at(0).at("finish_reason"), "stop");
  EXPECT_EQ(json.at("choices").at(1).at("message").at("content"), "twin");
  EXPECT_EQ(rollout_->requests()[0].key.seed, 11u);
  v1::Trajectory t = Sealed();
  ASSERT_EQ(t.runs_size(), 3);
  EXPECT_EQ(t.runs(1).ids_size(), 8);  // up to the last letter of STOP
  EXPECT_EQ(t.runs(2).parent(), 0);
  EXPECT_EQ(t.runs(2).choice(), 1);
}

// A token's kept set could be lost, stand beside another token, or be lost with the gateway.
TEST_F(GatewayTest, KeptSetsStandBesideTheirTokens) {
  Start();
  const auto set_of = [](int32_t id) {
    return id % 2 ? engine::EncodeKept(std::vector<int32_t>{id, id + 1, 300}, 400) : std::string();
  };
  script_ = [&](const auto&) { return Script{.text = "abcdef", .swap_at = 3, .kept = set_of}; };
  const std::string key = Key(Options()), plain = Key(Options("plain"));
  ASSERT_EQ(Chat(key, Body(User("x"))).status, 200);
  script_ = [&](const auto&) { return Script{.text = "gh", .token_ms = 2, .kept = set_of}; };
  ASSERT_EQ(Chat(key, Body(User("y"), "\"stop\":[\"none\"]")).status, 200);  // token by token
  script_ = [&](const auto&) { return Script{.text = "gh"}; };
  ASSERT_EQ(Chat(plain, Body(User("x"))).status, 200);
  StopAll();
  Start();
  const v1::Trajectory t = Sealed();
  int tokens = 0, sets = 0;
  for (const auto& run : t.runs()) {
    EXPECT_TRUE(run.provenance() == v1::SAMPLED || run.kept_size() == 0);
    for (int i = 0; run.provenance() == v1::SAMPLED && i < run.ids_size(); ++i, ++tokens) {
      ASSERT_EQ(run.kept_size(), run.ids_size());
      EXPECT_EQ(run.kept(i), set_of(static_cast<int32_t>(run.ids(i))));
      sets += !run.kept(i).empty();
    }
  }
  EXPECT_EQ(tokens, 10);
  EXPECT_GT(sets, 3);
  const v1::Trajectory whole = Sealed("plain");
  for (const auto& run : whole.runs()) EXPECT_EQ(run.kept_size(), 0) << "nothing was cut";
}

// What is no kept set of its token would be trained on.
TEST_F(GatewayTest, BadKeptSetsAreAWorkersFault) {
  Start();
  const std::string key = Key(Options());
  for (const auto& [set, lose] : std::vector<std::pair<std::string, bool>>{{"", true}, {"x", false}, {std::string("\1\3", 2), false}}) {
    script_ = [set = set, lose = lose](const auto&) { return Script{.text = "abc", .kept = [set](int32_t) { return set; }, .lose_a_kept_set = lose}; };
    EXPECT_EQ(Code(Chat(key, Body(User("x")))), "502 worker_protocol") << set;
  }
  script_ = [](const auto&) { return Script{.text = "abc", .kept = [](int32_t) { return std::string(); }}; };
  EXPECT_EQ(Chat(key, Body(User("x"))).status, 200);
}

// Kept sets without bound would make a trajectory that no message holds.
TEST_F(GatewayTest, KeptSetsAreBounded) {
  Start({.kept_bytes_max = 20});
  const std::string key = Key(Options());
  script_ = [](const auto&) {
    return Script{.text = "abcdefghijkl", .kept = [](int32_t id) { return engine::EncodeKept(std::vector<int32_t>{id, id + 1, id + 2}, 400); }};
  };
  const HttpAnswer cut = Chat(key, Body(User("x")));
  ASSERT_EQ(cut.status, 200);
  EXPECT_EQ(ParseJson(cut.body)->at("choices").at(0).at("finish_reason"), "length");
  EXPECT_EQ(ParseJson(cut.body)->at("choices").at(0).at("message").at("content"), "abcde");  // of four bytes each
  EXPECT_EQ(Code(Chat(key, Body(User("y")))), "400 rollout_limit:kept_sets");
  StopAll();
  Start({.kept_bytes_max = 20});
  EXPECT_EQ(Code(Chat(key, Body(User("y")))), "400 rollout_limit:kept_sets") << "after a restart";
  const v1::Trajectory t = Sealed();
  ASSERT_EQ(t.runs_size(), 2);
  EXPECT_EQ(t.runs(1).ids_size(), 5);
  EXPECT_NE(std::find(t.flags().begin(), t.flags().end(), "rollout_limit:kept_sets"), t.flags().end());
}

// A client could be told of an end that its library does not know, or nobody told that the stop fired.
TEST_F(GatewayTest, ARepetitionStopIsALengthToTheClientAndAFlagToUs) {
  Start();
  const std::string key = Key(Options());
  script_ = [](const auto&) { return Script{.text = "aaaa", .finish = "repetition"}; };
  for (const char* extra : {"", "\"stream\":true"}) {
    const HttpAnswer answer = Chat(key, Body(User(*extra ? "x" : "y"), extra));
    ASSERT_EQ(answer.status, 200);
    EXPECT_NE(answer.body.find("\"finish_reason\":\"length\""), std::string::npos) << answer.body;
  }
  const v1::Trajectory t = Sealed();
  EXPECT_EQ(t.calls(0).finish(), "length");
  EXPECT_NE(std::find(t.flags().begin(), t.flags().end(), "repetition_stop"), t.flags().end());
  EXPECT_EQ(t.runs(1).ids_size(), 4);
  EXPECT_TRUE(t.runs(1).trainable());
}

// Seal waits for a call that is about to end, cancels one that is not, and nothing changes afterwards.
TEST_F(GatewayTest, SealDrainsThenCancels) {
  Start();
  const std::string quick = Key(Options("q.0.1")), stuck = Key(Options("s.0.1"));
  script_ = [](const auto&) { return Script{.text = "abcdefgh", .token_ms = 10}; };
  HttpAnswer answer;
  std::thread client([&] { answer = Chat(quick, Body(User("x"))); });
  ASSERT_TRUE(Eventually([&] { return rollout_->requests().size() == 1; }));
  EXPECT_EQ(Sealed("q.0.1", 5000).runs_size(), 2);
  client.join();
  EXPECT_EQ(answer.status, 200);
  script_ = [](const auto&) { return Script{.wait_for_cancel = true}; };
  std::thread hung([&] { answer = Chat(stuck, Body(User("x"))); });
  ASSERT_TRUE(Eventually([&] { return rollout_->requests().size() == 2; }));
  v1::Trajectory t = Sealed("s.0.1", 20);
  hung.join();
  EXPECT_EQ(Code(answer), "410 session_closed");
  EXPECT_EQ(t.calls_size(), 1);
  EXPECT_EQ(t.flags(0), "empty");
  EXPECT_EQ(gateway_->Open(Options("q.0.1")).status().code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(gateway_->Seal("none", 0).status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(gateway_->Abort("q.0.1", "late").ok());  // stays sealed
  EXPECT_EQ(gateway_->Seal("q.0.1", 0)->state, "sealed");
}

TEST_F(GatewayTest, OpenIsIdempotentAndStrict) {
  // What could go wrong: an attempt gets another's key, or trains tokens that could not have been others.
  Start();
  EXPECT_EQ(Key(Options()), Key(Options()));
  OpenOptions other = Options();
  other.max_turns = 3;
  EXPECT_EQ(gateway_->Open(other).status().code(), StatusCode::kAlreadyExists);
  other = Options("x");
  for (const char* key : {"top_k", "min_p"}) {
    other.sampling = SamplingPolicy{};
    if (key == std::string("top_k")) other.sampling->top_k = 1;
    if (key == std::string("min_p")) other.sampling->min_p = 1;
    const Status status = gateway_->Open(other).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(key), std::string::npos);
  }
  other.training = false;
  EXPECT_TRUE(gateway_->Open(other).ok());
  other = Options("z");
  other.sampling = SamplingPolicy{.top_p = 0.9f, .top_k = 5, .min_p = 0.1f, .repetition_stop = 30};
  const std::string key = Key(other);
  ASSERT_EQ(Chat(key, Body(User("x"), "\"top_p\":0.5")).status, 200);
  const engine::Sampling& sampled = rollout_->requests().back().sampling;
  EXPECT_EQ(sampled.top_p, 0.9f);
  EXPECT_EQ(sampled.top_k, 5u);
  EXPECT_EQ(sampled.min_p, 0.1f);
  EXPECT_EQ(sampled.repetition_stop, 30u);
  other.session = "has space";
  EXPECT_EQ(gateway_->Open(other).status().code(), StatusCode::kInvalidArgument);
  other = Options("y");
  other.sampling.reset();
  EXPECT_EQ(gateway_->Open(other).status().code(), StatusCode::kInvalidArgument);
}

// An evaluation that is played again must not go on in the half-played session of the first try, nor use up its turns.
TEST_F(GatewayTest, FreshBeginsAnew) {
  Start();
  OpenOptions o = Options("e0.1.1");
  o.training = false;
  o.fresh = true;
  const std::string first = Key(o);
  EXPECT_EQ(Key(o), first);  // not used yet
  ASSERT_EQ(Chat(first, Body(User("x"))).status, 200);
  const std::string second = Key(o);
  EXPECT_NE(second, first);
  EXPECT_EQ(Code(Chat(first, Body(User("x")))), "401 invalid_api_key");
  ASSERT_EQ(Chat(second, Body(User("x"))).status, 200);
  EXPECT_EQ(rollout_->requests()[0].key, rollout_->requests()[1].key);  // the same draws
  EXPECT_EQ(Sealed("e0.1.1").calls_size(), 1);
  const std::string third = Key(o);
  StopAll();
  Start();
  EXPECT_EQ(Key(o), third);
  EXPECT_EQ(Sealed("e0.1.1").calls_size(), 0);
}

// Ctrl-C must not wait for a seal that waits for a call.
TEST_F(GatewayTest, StopEndsAWaitingSeal) {
  Start();
  script_ = [](const auto&) { return Script{.wait_for_cancel = true}; };
  const std::string key = Key(Options());
  std::thread client([&] { Chat(key, Body(User("x"))); });
  ASSERT_TRUE(Eventually([&] { return rollout_->requests().size() == 1; }));
  Status status;
  std::thread seal([&] { status = gateway_->Seal("0.0.1", 60'000).status(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double start_s = SystemClock::Get().NowS();
  gateway_->Interrupt();
  seal.join();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_LT(SystemClock::Get().NowS() - start_s, 5);
  StopAll();
  client.join();
}

// A killed gateway must come back with every committed turn, the same keys, and nothing half there.
TEST_F(GatewayTest, RecoversFromItsLogAtAnyCut) {
  Start();
  const std::string key = Key(Options()), closed = Key(Options("c.0.1"));
  HttpAnswer first = Chat(key, Body(User("go")));
  ASSERT_EQ(first.status, 200);
  ASSERT_EQ(Chat(closed, Body(User("go"))).status, 200);
  const std::string sealed = Sealed("c.0.1").SerializeAsString();
  script_ = [](const auto&) { return Script{.wait_for_cancel = true}; };
  std::thread hung([&] { Chat(key, Body(User("never"))); });
  ASSERT_TRUE(Eventually([&] { return rollout_->requests().size() == 3; }));
  const std::string log = *ReadFile(dir_ + "/sessions.log");  // as kill -9 would leave it
  StopAll();
  hung.join();

  ASSERT_TRUE(WriteFile(dir_ + "/sessions.log", log + "torn").ok());
  script_ = [](const auto&) { return Script{.text = "done"}; };
  Start();
  EXPECT_EQ(Sealed("c.0.1").SerializeAsString(), sealed);
  EXPECT_EQ(Code(Chat(closed, Body(User("go")))), "410 session_closed");
  const std::string id(ParseJson(first.body)->at("choices").at(0).at("message").at("tool_calls").at(0).at("id").as_string());
  HttpAnswer next = Chat(key, Body(User("go") + ",{\"role\":\"assistant\",\"content\":\"look \",\"tool_calls\":[{\"id\":\"" + id +
                                   "\",\"type\":\"function\",\"function\":{\"name\":\"shell\",\"arguments\":\"{\\\"c\\\":\\\"ls the tool\\\"}\"}}]}," +
                                   "{\"role\":\"tool\",\"tool_call_id\":\"" + id + "\",\"content\":\"a.txt\"}"));
  ASSERT_EQ(next.status, 200) << next.body;
  EXPECT_EQ(Chat(key, Body(User("go")), "x-stainless-retry-count: 1\r\n").body, first.body);
  v1::Trajectory t = Sealed();
  ASSERT_EQ(t.calls_size(), 3);
  EXPECT_EQ(t.calls(1).note(), "gateway_restart");
  EXPECT_EQ(t.flags(0), "gateway_restart");
  EXPECT_EQ(t.flags(1), "recovered");
  EXPECT_EQ(t.runs_size(), 4);
  StopAll();

  // Every prefix of the log, and every damaged byte, gives a gateway that starts.
  std::mt19937 rng(1);
  for (int i = 0; i < 60; ++i) {
    std::string bytes = log.substr(0, rng() % (log.size() + 1));
    if (i % 2 && !bytes.empty()) bytes[rng() % bytes.size()] ^= static_cast<char>(1 + rng() % 255);
    ASSERT_TRUE(WriteFile(dir_ + "/sessions.log", bytes).ok());
    Gateway gateway({.log_dir = dir_, .context_tokens = 4000}, policy_, *std::make_unique<FakeRollout>(0, script_), SystemClock::Get(), metrics_);
    const Status status = gateway.Start();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
}

// `temper gateway try`: an agent's own key is enough.
TEST_F(GatewayTest, OpenOnUse) {
  Start({.open_on_use = true});
  EXPECT_EQ(Chat("any-key", Body(User("x"), "\"temperature\":0.5")).status, 200);
  EXPECT_EQ(Chat("another", Body(User("x"))).status, 200);
  EXPECT_EQ(rollout_->requests()[0].sampling.temperature, 0.5f);
  EXPECT_EQ(Code(Chat("", Body(User("x")))), "401 invalid_api_key");
  EXPECT_EQ(Sealed("try.2").calls_size(), 1);
}

// Many agents at once: every call is answered and recorded once.
TEST_F(GatewayTest, ManySessionsAtOnce) {
  Start();
  script_ = [](const auto&) { return Script{.text = "ok", .token_ms = 1}; };
  std::vector<std::thread> agents;
  std::atomic<int> good{0};
  for (int a = 0; a < 8; ++a) {
    agents.emplace_back([&, a] {
      const std::string name = "m." + std::to_string(a) + ".1", key = Key(Options(name));
      for (int i = 0; i < 10; ++i) good += Chat(key, Body(User(std::to_string(i)))).status == 200;
      good += Sealed(name, 100).calls_size() == 10 ? 100 : 0;
    });
  }
  for (auto& agent : agents) agent.join();
  EXPECT_EQ(good, 8 * 110);
  EXPECT_EQ(metrics_["calls"].value(), 80);
  EXPECT_EQ(metrics_["calls_in_flight"].value(), 0);
  EXPECT_EQ(metrics_["tokens_sampled"].value(), 240);
}

}  // namespace
}  // namespace temper::gateway
