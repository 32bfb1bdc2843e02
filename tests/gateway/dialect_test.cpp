#include "gateway/dialect/openai_chat.h"

#include <gtest/gtest.h>

#include <random>

#include "gateway/capture.h"
#include "gateway/sampled_text.h"
#include "tests/gateway/fake_policy.h"

namespace temper::gateway::openai {
namespace {

ChatRequest Parsed(const std::string& body) {
  auto parsed = ParseChatRequest(body);
  if (auto* refusal = std::get_if<Refusal>(&parsed)) {
    ADD_FAILURE() << body << ": " << refusal->message;
    return {};
  }
  return std::get<ChatRequest>(parsed);
}

std::string With(const std::string& fields) {
  return "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]" + (fields.empty() ? "" : "," + fields) + "}";
}

// Shapes that real clients send must come out as one canonical form.
TEST(ChatRequest, CanonicalForm) {
  ChatRequest r = Parsed(R"({"model":"gpt","stream":true,"stream_options":{"include_usage":true},"max_tokens":7,
    "max_completion_tokens":9,"temperature":1,"top_k":-1,"stop":"END","store":false,"user":"me","unknown_key":{"x":1},
    "tools":[{"type":"function","function":{"name":"f","parameters":{"b":1,"a":2}}},{"type":"function","name":"g","parameters":{}}],
    "parallel_tool_calls":true,"chat_template_kwargs":{"k":1},
    "messages":[
      {"role":"developer","content":[{"type":"text","text":"sys"},{"type":"text","text":"tem"}]},
      {"role":"user","content":[{"type":"input_text","text":"hi"}]},
      {"role":"assistant","content":null,"refusal":null,"annotations":[],"reasoning":"hm","tool_calls":[
        {"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\": 1}"}},
        {"id":"c2","function":{"name":"g","arguments":{"b":[1.0]}}}]},
      {"role":"tool","tool_call_id":"c1","content":"out"}]})");
  EXPECT_EQ(r.model, "gpt");
  EXPECT_TRUE(r.stream && r.include_usage);
  EXPECT_EQ(r.max_tokens, 9u);
  EXPECT_EQ(r.temperature, 1.0f);
  EXPECT_EQ(r.top_k, 0u);
  EXPECT_EQ(r.stop, std::vector<std::string>{"END"});
  ASSERT_EQ(r.messages.size(), 4u);
  EXPECT_EQ(r.messages[0].role, Role::kSystem);
  EXPECT_EQ(r.messages[0].content, "system");
  EXPECT_EQ(r.messages[1].content, "hi");
  EXPECT_EQ(r.messages[2].reasoning, "hm");
  ASSERT_EQ(r.messages[2].tool_calls.size(), 2u);
  EXPECT_EQ(r.messages[2].tool_calls[0].arguments, "{\"a\": 1}");
  EXPECT_EQ(r.messages[2].tool_calls[1].arguments, "{\"b\":[1.0]}");
  EXPECT_EQ(r.messages[3].tool_call_id, "c1");
  EXPECT_EQ(text::CompactJson(r.tools),
            R"([{"type":"function","function":{"name":"f","parameters":{"b":1,"a":2}}},{"type":"function","function":{"name":"g","parameters":{}}}])");
  EXPECT_EQ(text::CompactJson(r.variables), "{\"k\":1}");
  EXPECT_TRUE(Parsed(With("\"tool_choice\":\"none\",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]")).tools.is_none());
  EXPECT_EQ(Parsed(With("\"presence_penalty\":0.5,\"logit_bias\":{\"5\":1},\"frequency_penalty\":0")).unsupported_sampling,
            (std::vector<std::string>{"presence_penalty", "logit_bias"}));
}

// What cannot be done must be refused by name: an ignored field makes an agent believe in an answer it did not get.
TEST(ChatRequest, RefusalsNameTheField) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", ""},
      {"[]", ""},
      {"{\"messages\":[]}", "model"},
      {"{\"model\":\"m\"}", "messages"},
      {"{\"model\":\"m\",\"messages\":[]}", "messages"},
      {"{\"model\":\"m\",\"messages\":\"hi\"}", "messages"},
      {"{\"model\":\"m\",\"messages\":[{\"role\":\"god\",\"content\":\"x\"}]}", "messages[0].role"},
      {"{\"model\":\"m\",\"messages\":[{\"role\":\"user\"}]}", "messages[0].content"},
      {"{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":7}]}", "messages[0].content"},
      {"{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}", "messages[0].content[0].type"},
      {"{\"model\":\"m\",\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{}]}]}", "messages[0].tool_calls[0].function"},
      {With("\"temperature\":3"), "temperature"},
      {With("\"temperature\":\"1\""), "temperature"},
      {With("\"top_p\":0"), "top_p"},
      {With("\"max_tokens\":0"), "max_tokens"},
      {With("\"max_completion_tokens\":1.5"), "max_completion_tokens"},
      {With("\"n\":9"), "n"},
      {With("\"stop\":[\"a\",\"b\",\"c\",\"d\",\"e\"]"), "stop"},
      {With("\"stop\":5"), "stop"},
      {With("\"tool_choice\":\"required\""), "tool_choice"},
      {With("\"tools\":[{\"type\":\"web_search\"}]"), "tools[0].type"},
      {With("\"tools\":[{\"type\":\"function\",\"function\":{}}]"), "tools[0].function.name"},
      {With("\"functions\":[]"), "functions"},
      {With("\"response_format\":{\"type\":\"json_object\"}"), "response_format"},
      {With("\"response_format\":{\"type\":\"xml\"}"), "response_format"},
      {With("\"logprobs\":true,\"top_logprobs\":2"), "top_logprobs"},
      {With("\"top_logprobs\":0"), "top_logprobs"},
      {With("\"prompt_logprobs\":1"), "prompt_logprobs"},
      {With("\"audio\":{}"), "audio"},
      {With("\"modalities\":[\"audio\"]"), "modalities"},
      {With("\"stream\":1"), "stream"},
      {With("\"chat_template_kwargs\":{\"tools\":1}"), "chat_template_kwargs.tools"},
      {With("\"continue_final_message\":true"), "continue_final_message"},
  };
  for (const auto& [body, param] : cases) {
    auto parsed = ParseChatRequest(body);
    auto* refusal = std::get_if<Refusal>(&parsed);
    ASSERT_NE(refusal, nullptr) << body;
    EXPECT_EQ(refusal->status, 400);
    EXPECT_EQ(refusal->param, param) << body;
    EXPECT_FALSE(refusal->message.empty());
  }
}

// Bodies come from outside: any bytes must end in a request or a refusal.
TEST(ChatRequest, SurvivesMutatedBodies) {
  const std::vector<std::string> seeds = {
      With("\"stop\":[\"a\"],\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"a\":[1,2,{}]}}}],\"n\":2"),
      R"({"model":"m","messages":[{"role":"assistant","content":[{"type":"text","text":"\u00e9\ud83d\ude00"}],"tool_calls":[{"id":"x","function":{"name":"f","arguments":"{\"a\":1e3}"}}]},{"role":"tool","content":"y"}],"chat_template_kwargs":{"z":null},"temperature":0.5,"logit_bias":{}})"};
  std::mt19937 rng(3);
  int requests = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string body = seeds[i % seeds.size()];
    for (int k = 1 + static_cast<int>(rng() % 3); k > 0; --k) {
      const size_t at = rng() % body.size();
      switch (rng() % 4) {
        case 0: body[at] = static_cast<char>(rng()); break;
        case 1: body.erase(at, 1 + rng() % 8); break;
        case 2: body.insert(at, 1, "{}[]\",:0-e\\n"[rng() % 12]); break;
        default: body.insert(at, body.substr(rng() % body.size(), rng() % 30));
      }
      if (body.empty()) body = "{";
    }
    auto parsed = ParseChatRequest(body);
    if (auto* request = std::get_if<ChatRequest>(&parsed)) {
      ++requests;
      EXPECT_FALSE(request->messages.empty());
      RootHash(*request);
    } else {
      EXPECT_FALSE(std::get<Refusal>(parsed).message.empty());
    }
  }
  EXPECT_GT(requests, 500);
  EXPECT_TRUE(std::holds_alternative<Refusal>(ParseChatRequest(std::string(100'000, '['))));
}

Answer TwoCalls() {
  Answer a;
  a.id = "chatcmpl-1";
  a.created_s = 5;
  a.prompt_tokens = 4;
  a.cached_tokens = 2;
  Choice c;
  c.content = "";
  c.finish = "tool_calls";
  c.tool_calls = {{"call_0", "f", "{\"a\":1}"}, {"call_1", "g", "{}"}};
  c.ids = {'x', FakePolicy::kEnd};
  c.logprobs = {-0.5f, -0.25f};
  a.choices = {c};
  return a;
}

// The exact bytes that clients parse.
TEST(ChatAnswer, Body) {
  FakePolicy policy;
  ChatRequest r = Parsed(With("\"logprobs\":true"));
  EXPECT_EQ(ChatBody(r, TwoCalls(), policy),
            R"({"id":"chatcmpl-1","object":"chat.completion","created":5,"model":"m","system_fingerprint":"temper","choices":[{"index":0,)"
            R"("message":{"role":"assistant","content":null,"refusal":null,"tool_calls":[{"id":"call_0","type":"function","function":)"
            R"({"name":"f","arguments":"{\"a\":1}"}},{"id":"call_1","type":"function","function":{"name":"g","arguments":"{}"}}]},)"
            R"("logprobs":{"content":[{"token":"x","logprob":-0.5,"bytes":[120],"top_logprobs":[]}],"refusal":null},"finish_reason":"tool_calls"}],)"
            R"("usage":{"prompt_tokens":4,"completion_tokens":2,"total_tokens":6,"prompt_tokens_details":{"cached_tokens":2},)"
            R"("completion_tokens_details":{"reasoning_tokens":0}}})");
  Refusal refusal{.code = "rollout_limit:turns", .message = "no \"more\""};
  EXPECT_EQ(ErrorBody(refusal),
            R"({"error":{"message":"no \"more\"","type":"invalid_request_error","param":null,"code":"rollout_limit:turns"}})");
  EXPECT_EQ(ModelsBody({{"policy", 0, 64}}),
            R"({"object":"list","data":[{"id":"policy","object":"model","created":0,"owned_by":"temper","max_model_len":64}]})");
}

TEST(ChatAnswer, Stream) {
  // What could go wrong: a chunk that an SDK cannot assemble: a role twice, a call without its name, no finish reason.
  FakePolicy policy;
  ChatRequest r = Parsed(With("\"stream\":true,\"stream_options\":{\"include_usage\":true}"));
  ChatStream stream(r, policy, "chatcmpl-1", 5);
  Answer a = TwoCalls();
  a.choices[0].content = "look: ";
  const std::string head = R"(data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"m","system_fingerprint":"temper","choices":[)";
  const std::string tail = R"(,"logprobs":null,"finish_reason":null}]})" "\n\n";
  EXPECT_EQ(stream.Start(), head + R"({"index":0,"delta":{"role":"assistant","content":""})" + tail);
  EXPECT_EQ(stream.Content(0, "loo", {}, {}), head + R"({"index":0,"delta":{"content":"loo"})" + tail);
  EXPECT_EQ(stream.Finish(a),
            head + R"({"index":0,"delta":{"content":"k: "})" + tail +
            head + R"({"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_0","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]})" + tail +
            head + R"({"index":0,"delta":{"tool_calls":[{"index":1,"id":"call_1","type":"function","function":{"name":"g","arguments":"{}"}}]})" + tail +
            head + R"({"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls"}]})" "\n\n" +
            head + R"(],"usage":{"prompt_tokens":4,"completion_tokens":2,"total_tokens":6,"prompt_tokens_details":{"cached_tokens":2},"completion_tokens_details":{"reasoning_tokens":0}}})" "\n\n" +
            "data: [DONE]\n\n");
  EXPECT_EQ(ChatStream::Error({.status = 503, .type = "server_error", .message = "gone"}),
            "data: {\"error\":{\"message\":\"gone\",\"type\":\"server_error\",\"param\":null,\"code\":null}}\n\n");
}

// A streamed answer must equal the whole one for every cut of the tokens, with split code points, stop strings and tool calls.
TEST(SampledText, AnyCutShowsAPrefixOfTheWhole) {
  FakePolicy policy;
  text::Dict tool;
  tool.Set("name", "f");
  const text::Value tools = text::List{tool};
  const std::vector<std::string> texts = {
      "plain", "caf\xc3\xa9 \xf0\x9f\x98\x80!", "bad \xff\xc3( \xe2\x82", "a <tool_call>{\"name\":\"f\",\"arguments\":{\"x\":\"y\"}}</tool_call>",
      "a <tool_call>{\"name\":", "a <tool_ca", "one STOPtwo", "one STO", "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call> rest"};
  std::mt19937 rng(5);
  for (const std::string& text : texts) {
    for (const bool with_tools : {false, true}) {
      for (int round = 0; round < 30; ++round) {
        SampledText sampled(policy, with_tools ? tools : text::Value(nullptr), {"STOP", "zz"});
        std::string shown;
        bool stopped = false;
        for (unsigned char c : text) {
          stopped = !sampled.Append(c);
          if (rng() % 2 || round == 0) shown += sampled.TakeVisible();
          if (stopped) break;
        }
        const auto said = sampled.Finish(true);
        EXPECT_TRUE(said.content.starts_with(shown)) << said.content << " / " << shown;
        EXPECT_EQ(stopped, text == "one STOPtwo");
        if (text == "one STOPtwo") {
          EXPECT_EQ(said.content, "one ");
        }
        if (text == texts[2]) {
          EXPECT_EQ(said.content, "bad \xef\xbf\xbd\xef\xbf\xbd( \xef\xbf\xbd");
        }
        if (text == texts[3] && with_tools) {
          EXPECT_EQ(said.content, "a ");
          ASSERT_EQ(said.tool_calls.size(), 1u);
        }
        if (text == texts[4] && with_tools) {
          EXPECT_TRUE(said.ill_formed);
        }
      }
    }
  }
}

// A stop string could be missed where it lies across tokens or code points that tokens split, be found late, or be shown in part.
TEST(SampledText, StopStringsAreFoundHoweverTokensCut) {
  FakePolicy policy;
  std::mt19937 rng(9);
  const std::vector<std::string> pieces = {"a", "b", "\xc3\xa9", "\xf0\x9f\x98\x80", "the ", "\n\n", "S", "ST"};
  int stops = 0, whole = 0;
  for (int trial = 0; trial < 6000; ++trial) {
    const auto words = [&](size_t most) {
      std::string out;
      for (size_t n = 1 + rng() % most; n > 0; --n) out += pieces[rng() % pieces.size()];
      return out;
    };
    const std::string text = words(14);
    std::vector<std::string> stop;
    for (size_t n = 1 + rng() % 3; n > 0; --n) stop.push_back(words(3));
    // Tokens of one byte, or longer ones where the vocabulary has them.
    std::vector<int32_t> ids = rng() % 2 ? policy.Encode(text) : std::vector<int32_t>();
    if (ids.empty()) {
      for (unsigned char c : text) ids.push_back(c);
    }
    // The end: the first token with which some stop string is complete, cut where the earliest of those begins.
    std::string said;
    size_t used = ids.size(), cut = std::string::npos;
    for (size_t i = 0; i < ids.size() && cut == std::string::npos; ++i) {
      said += policy.TokenBytes(ids[i]);
      for (const std::string& s : stop) cut = std::min(cut, said.find(s));
      if (cut != std::string::npos) used = i + 1;
    }
    const std::string want = said.substr(0, cut);
    SampledText sampled(policy, nullptr, stop);
    std::string shown;
    size_t taken = 0;
    bool more = true;
    while (more && taken < ids.size()) {
      more = sampled.Append(ids[taken++]);
      if (rng() % 2) shown += sampled.TakeVisible();
      ASSERT_TRUE(want.starts_with(shown)) << trial;
    }
    ASSERT_EQ(taken, used) << trial;
    ASSERT_EQ(!more, cut != std::string::npos) << trial;
    ASSERT_EQ(sampled.Finish(true).content, want) << trial;
    (more ? whole : stops) += 1;
  }
  EXPECT_GT(stops, 1000);
  EXPECT_GT(whole, 1000);
}

}  // namespace
}  // namespace temper::gateway::openai
