#include "gateway/session.h"

#include <gtest/gtest.h>

#include <google/protobuf/stubs/logging.h>

#include <random>

#include "engine/kept_set.h"
#include "gateway/sampled_text.h"
#include "gateway/session_log.h"
#include "temper/v1/gateway.pb.h"
#include "temper/v1/types.pb.h"
#include "tests/fuzz/mutate.h"
#include "tests/gateway/fake_policy.h"

namespace temper::gateway {
namespace {

OpenOptions Training() {
  OpenOptions o;
  o.session = "3.1.1";
  o.group = 3;
  o.rollout = 1;
  o.task_id = "task";
  o.sampling = SamplingPolicy{};
  o.training = true;
  o.key_space = {7, 0, 3, 1};
  return o;
}

Message User(const std::string& text) { return {.role = Role::kUser, .content = text}; }
Message Tool(const std::string& text, const std::string& id) {
  return {.role = Role::kTool, .content = text, .tool_call_id = id};
}
ChatRequest Ask(std::vector<Message> messages) {
  ChatRequest r;
  r.model = "m";
  r.messages = std::move(messages);
  text::Dict function, tool;
  function.Set("name", "shell");
  tool.Set("type", "function");
  tool.Set("function", std::move(function));
  r.tools = text::List{tool};
  return r;
}

struct Fixture {
  FakePolicy policy;
  Session session;
  explicit Fixture(OpenOptions options = Training(), bool strip = false, int context = 100000)
      : policy(strip), session(options, "key", 1000, policy, {.context_tokens = context}) {}

  Plan Begin(const ChatRequest& request, uint64_t digest = 1) {
    auto planned = session.Begin(request, digest, 1);
    if (auto* refusal = std::get_if<Refusal>(&planned)) {
      ADD_FAILURE() << refusal->message;
      return {};
    }
    return std::get<Plan>(planned);
  }

  // As if the policy had drawn the bytes of `text` one by one, then its end token.
  Drawn Say(const std::string& text, const text::Value& tools, const std::string& finish = "stop", int step = 1) {
    Drawn d;
    Span span;
    span.version = {1, step};
    for (unsigned char c : text) span.ids.push_back(c);
    if (finish == "stop") span.ids.push_back(FakePolicy::kEnd);
    span.logprobs.assign(span.ids.size(), -0.5f);
    SampledText sampled(policy, tools, {});
    for (int32_t id : span.ids) sampled.Append(id);
    auto said = sampled.Finish(finish == "stop");
    d.spans = {span};
    d.finish = finish;
    d.content = said.content;
    d.tool_calls = said.tool_calls;
    d.ill_formed = said.ill_formed;
    return d;
  }
  Answer Turn(const ChatRequest& request, const std::string& text, const std::string& finish = "stop") {
    Plan plan = Begin(request);
    return session.Commit(plan, {Say(text, request.tools, finish)}, {.end_s = 2});
  }
};

Message Echo(const Answer& answer, int choice = 0) {
  return {.role = Role::kAssistant, .content = answer.choices[choice].content, .tool_calls = answer.choices[choice].tool_calls};
}

constexpr const char* kCall = "look <tool_call>{\"name\":\"shell\",\"arguments\":{\"a\":1,\"c\":\"ls the tool\"}}</tool_call>";

// Re-tokenising what the policy drew is the silent error this part exists to prevent.
TEST(Session, StoredIdsStandInTheNextPrompt) {
  Fixture f;
  ChatRequest r = Ask({User("do the thing")});
  Answer a = f.Turn(r, kCall);
  EXPECT_EQ(a.choices[0].finish, "tool_calls");
  ASSERT_EQ(a.choices[0].tool_calls.size(), 1u);
  r.messages.push_back(Echo(a));
  r.messages.push_back(Tool("a.txt", a.choices[0].tool_calls[0].id));
  f.policy.TakeEncoded();
  Plan plan = f.Begin(r);
  // Only what the template writes after the end token was encoded.
  EXPECT_EQ(f.policy.TakeEncoded(), std::vector<std::string>{"\n<|im_start|>tool\na.txt<|im_end|>\n<|im_start|>assistant\n"});
  EXPECT_EQ(plan.anchor_run, 1);
  const std::vector<int32_t> stored = f.session.capture().Path(1);
  ASSERT_GT(plan.prompt_ids.size(), stored.size());
  EXPECT_TRUE(std::equal(stored.begin(), stored.end(), plan.prompt_ids.begin()));
  EXPECT_EQ(f.policy.Decode(plan.prompt_ids), *f.policy.Render(TemplateMessages(r.messages, 3), r.tools, true, r.variables));
  EXPECT_TRUE(plan.flags.empty());
  f.session.Commit(plan, {f.Say("done", r.tools)}, {.end_s = 3});
  ASSERT_EQ(f.session.capture().runs().size(), 4u);
  EXPECT_EQ(f.session.capture().runs()[2].parent, 1);
}

// Clients reshape what they echo: each of these must still find its turn, or every turn becomes a new root.
TEST(Session, MatchesReshapedEchoes) {
  for (int shape = 0; shape < 5; ++shape) {
    Fixture f;
    ChatRequest r = Ask({User("do the thing")});
    Answer a = f.Turn(r, std::string("  ") + kCall);
    Message echo = Echo(a);
    switch (shape) {
      case 0: echo.tool_calls[0].arguments = "{ \"c\": \"ls the t\\u006fol\" ,\"a\" : 1 }"; break;  // other spacing, order, escapes
      case 1: echo.content = "look"; break;                                                   // trimmed
      case 2: echo.tool_calls[0].id = "call_1"; break;                                        // another id
      case 3: echo.reasoning = "the client's own field"; break;
      default: break;
    }
    r.messages.push_back(echo);
    r.messages.push_back(Tool("a.txt", "x"));
    Plan plan = f.Begin(r);
    EXPECT_EQ(plan.anchor_run, 1) << "shape " << shape;
  }
}

// What the client changed was not said by the policy: it must be context in a branch of its own, never trained.
TEST(Session, EditedHistoryIsANewBranch) {
  Fixture f;
  ChatRequest r = Ask({User("do the thing")});
  Answer a = f.Turn(r, kCall);
  Message echo = Echo(a);
  echo.tool_calls[0].arguments = "{\"a\":2}";
  r.messages.push_back(echo);
  r.messages.push_back(Tool("a.txt", "x"));
  Plan plan = f.Begin(r);
  EXPECT_EQ(plan.anchor_run, -1);
  EXPECT_TRUE(plan.flags.count("edited_history"));
  f.session.Commit(plan, {f.Say("done", r.tools)}, {.end_s = 3});
  v1::Trajectory t;
  f.session.ToTrajectory(&t);
  int sampled = 0;
  for (const auto& run : t.runs()) {
    if (run.provenance() == v1::SAMPLED) ++sampled;
    EXPECT_EQ(run.trainable(), run.provenance() == v1::SAMPLED);
  }
  EXPECT_EQ(sampled, 2);
  EXPECT_EQ(t.final_text(), "done");  // what a verifier of answers judges: the last call's, not the first's
  // A faulty turn that the client drops instead of echoing is a branch too, below the same prompt.
  r.messages = {User("do the thing"), User("that was no call")};
  plan = f.Begin(r);
  f.session.Commit(plan, {f.Say("ok", r.tools)}, {.end_s = 4});
  EXPECT_EQ(f.session.capture().turns().size(), 7u);
}

// Twins with the same words are told apart by the ids of their calls.
TEST(Session, SiblingsAreToldApartByCallIds) {
  Fixture f;
  ChatRequest r = Ask({User("do the thing")});
  r.n = 2;
  Plan plan = f.Begin(r);
  Answer a = f.session.Commit(plan, {f.Say(kCall, r.tools), f.Say(kCall, r.tools)}, {.end_s = 2});
  ASSERT_EQ(a.choices.size(), 2u);
  const auto& runs = f.session.capture().runs();
  ASSERT_EQ(runs.size(), 3u);
  EXPECT_EQ(runs[1].parent, 0);
  EXPECT_EQ(runs[2].parent, 0);
  EXPECT_EQ(runs[2].choice, 1);
  for (int choice : {0, 1}) {
    ChatRequest next = r;
    next.messages.push_back(Echo(a, choice));
    next.messages.push_back(Tool("x", a.choices[choice].tool_calls[0].id));
    Plan then = f.Begin(next);
    EXPECT_EQ(then.anchor_run, 1 + choice);
    // And its tokens go below the right twin, although both have the same ids.
    f.session.Commit(then, {f.Say("done", r.tools)}, {.end_s = 3});
    EXPECT_EQ(runs[runs[runs.size() - 1].parent].parent, 1 + choice);
  }
}

// A turn cut by its length has no end token; gluing a next message to it would show the model a prompt no template makes.
TEST(Session, ATruncatedTurnIsNotContinued) {
  Fixture f;
  ChatRequest r = Ask({User("q")});
  Answer a = f.Turn(r, "half an answ", "length");
  EXPECT_EQ(a.choices[0].finish, "length");
  r.messages.push_back(Echo(a));
  r.messages.push_back(User("go on"));
  Plan plan = f.Begin(r);
  EXPECT_EQ(plan.anchor_run, -1);
  EXPECT_TRUE(plan.flags.count("after_truncation"));
  EXPECT_EQ(f.policy.Decode(plan.prompt_ids), *f.policy.Render(TemplateMessages(r.messages, 3), r.tools, true, r.variables));
  // The turns before the cut one keep their ids.
  Fixture g;
  r = Ask({User("q")});
  r.messages.push_back(Echo(g.Turn(r, "whole")));
  r.messages.push_back(User("next"));
  r.messages.push_back(Echo(g.Turn(r, "half an answ", "length")));
  r.messages.push_back(User("go on"));
  plan = g.Begin(r);
  EXPECT_EQ(plan.anchor_run, 1);
  EXPECT_TRUE(plan.flags.count("after_truncation"));
  EXPECT_EQ(g.policy.Decode(plan.prompt_ids), *g.policy.Render(TemplateMessages(r.messages, 5), r.tools, true, r.variables));
}

// Other tools make another prompt: the history must not be attached to a root it does not have.
TEST(Session, OtherToolsAreAnotherRoot) {
  Fixture f;
  ChatRequest r = Ask({User("q")});
  Answer a = f.Turn(r, "answer");
  r.messages.push_back(Echo(a));
  r.messages.push_back(User("more"));
  ChatRequest bare = r;
  bare.tools = nullptr;
  EXPECT_EQ(f.Begin(bare).anchor_run, -1);
  EXPECT_EQ(f.Begin(r).anchor_run, 1);
}

// A template that rewrites what came before (here: strips reasoning) cannot be continued; the prompt is then what it renders.
TEST(Session, ARewritingTemplateIsRenderedWhole) {
  Fixture f(Training(), true);
  ChatRequest r = Ask({User("q")});
  Answer a = f.Turn(r, "one");
  Message first = Echo(a);
  first.reasoning = "thought";
  r.messages.push_back(first);
  r.messages.push_back(Tool("t", "x"));
  a = f.Turn(r, "two");
  Message second = Echo(a);
  r.messages.push_back(second);
  r.messages.push_back(User("next question"));
  Plan plan = f.Begin(r);
  EXPECT_EQ(plan.anchor_run, -1);
  EXPECT_TRUE(plan.flags.count("template_strip"));
  EXPECT_EQ(f.policy.Decode(plan.prompt_ids), *f.policy.Render(TemplateMessages(r.messages, r.messages.size()), r.tools, true, r.variables));
}

TEST(Session, LimitsAreTypedRefusals) {
  // What could go wrong: an agent over its budget gets an error that its SDK retries, or a call too many.
  OpenOptions o = Training();
  o.max_turns = 2;
  o.deadline_s = 50;
  Fixture f(o, false, 120);
  ChatRequest r = Ask({User("q")});
  auto code = [&](double now_s) {
    auto planned = f.session.Begin(r, 9, now_s);
    auto* refusal = std::get_if<Refusal>(&planned);
    return refusal ? std::to_string(refusal->status) + " " + refusal->code : std::string("ok");
  };
  r.messages[0].content = std::string(200, 'x');
  EXPECT_EQ(code(1), "400 context_length_exceeded");
  r.messages[0].content = "q";
  f.Turn(r, "one");
  Plan gone = f.Begin(r);
  EXPECT_EQ(code(1), "400 rollout_limit:turns");  // one committed, one in flight
  f.session.Abandon(gone, {.end_s = 2, .note = "client_gone"});
  Plan plan = f.Begin(r);  // an abandoned call is no turn
  EXPECT_EQ(plan.call, 2);
  EXPECT_EQ(plan.sampling.max_tokens, 120 - plan.prompt_ids.size());
  f.session.Commit(plan, {f.Say("two", r.tools)}, {.end_s = 3});
  EXPECT_EQ(code(1), "400 rollout_limit:turns");
  EXPECT_EQ(code(50), "400 rollout_limit:time");
  f.session.Close("sealed", "", 51);
  EXPECT_EQ(code(52), "410 session_closed");
  v1::Trajectory t;
  f.session.ToTrajectory(&t);
  const std::vector<std::string> flags(t.flags().begin(), t.flags().end());
  EXPECT_EQ(flags, (std::vector<std::string>{"context_length_exceeded", "rollout_limit:time", "rollout_limit:turns"}));
  EXPECT_EQ(t.calls_size(), 3);
  EXPECT_EQ(t.calls(1).finish(), "abort");
}

// What could go wrong: a prompt of megabytes, which cannot fit, is encoded to its last token while the session, its seal and a
// thread of all sessions wait.
TEST(Session, GiantPromptsAreRefusedUnencoded) {
  Fixture f(Training(), false, 120);
  ChatRequest r = Ask({User("q")});
  f.Turn(r, "one");
  r.messages.push_back(User(std::string(1 << 20, 'x')));
  f.policy.TakeEncoded();
  auto planned = f.session.Begin(r, 9, 1);
  auto* refusal = std::get_if<Refusal>(&planned);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->code, "context_length_exceeded");
  EXPECT_NE(refusal->message.find("at least"), std::string::npos) << refusal->message;
  EXPECT_TRUE(f.policy.TakeEncoded().empty());
  v1::Trajectory t;
  f.session.ToTrajectory(&t);
  EXPECT_EQ(t.flags_size(), 1);
}

// The session's policy is what is trained on: a client's temperature must not get through, and is noted.
TEST(Session, TheSessionsSamplingWins) {
  OpenOptions o = Training();
  o.sampling->max_tokens = 40;
  Fixture f(o);
  ChatRequest r = Ask({User("q")});
  r.temperature = 0.2f;
  r.seed = 99;
  r.max_tokens = 1000;
  r.unsupported_sampling = {"presence_penalty"};
  Plan plan = f.Begin(r);
  EXPECT_EQ(plan.sampling.temperature, 1.0f);
  EXPECT_EQ(plan.sampling.max_tokens, 40u);
  EXPECT_EQ(plan.key.seed, 7u);
  EXPECT_EQ(plan.note, "overridden:temperature,seed,presence_penalty");
  OpenOptions free = Training();
  free.sampling.reset();
  free.training = false;
  Fixture g(free);
  auto planned = g.session.Begin(r, 1, 1);
  ASSERT_TRUE(std::holds_alternative<Refusal>(planned));
  EXPECT_EQ(std::get<Refusal>(planned).param, "presence_penalty");
  r.unsupported_sampling.clear();
  plan = g.Begin(r);
  EXPECT_EQ(plan.sampling.temperature, 0.2f);
  EXPECT_EQ(plan.key.seed, 99u);
  EXPECT_EQ(plan.sampling.max_tokens, 1000u);
}

// A call that spans a weight swap must not be rounded to one version; one that was cancelled must not be trained.
TEST(Session, RunsKeepVersionsAndCancelledTokensAreNotTrained) {
  Fixture f;
  ChatRequest r = Ask({User("q")});
  Plan plan = f.Begin(r);
  Drawn d = f.Say("abcd", r.tools);
  Span late{.ids = {d.spans[0].ids.begin() + 2, d.spans[0].ids.end()}, .logprobs = {-1, -2, -3}, .version = {1, 2}, .mixed = true};
  d.spans[0].ids.resize(2);
  d.spans[0].logprobs.resize(2);
  d.spans.push_back(late);
  Answer a = f.session.Commit(plan, {d}, {.end_s = 2});
  EXPECT_EQ(a.choices[0].ids, (std::vector<int32_t>{'a', 'b', 'c', 'd', FakePolicy::kEnd}));
  EXPECT_EQ(a.completion_tokens(), 5);
  const auto& runs = f.session.capture().runs();
  ASSERT_EQ(runs.size(), 3u);
  EXPECT_EQ(runs[1].version.step, 1);
  EXPECT_EQ(runs[2].version.step, 2);
  EXPECT_EQ(runs[2].parent, 1);
  EXPECT_TRUE(runs[2].mixed);
  plan = f.Begin(r);
  Drawn cut = f.Say("xy", r.tools, "abort");
  f.session.Commit(plan, {cut}, {.end_s = 3, .note = "client_gone"});
  ASSERT_EQ(runs.size(), 4u);  // the prompt is shared
  EXPECT_EQ(runs[3].parent, 0);
  EXPECT_FALSE(runs[3].trainable);
  EXPECT_TRUE(runs[1].trainable);
}

// Random histories: whatever a client does, (I1) every recorded path is what was sent and drawn, (I2, I5) sampled runs alone
// have logprobs, one per id, (I3) an echoed turn is never encoded, (I6) every drawn token is in exactly one run, (I7) nothing
// recorded ever changes, and the records alone give the same session again.
TEST(SessionProperty, AnyHistory) {
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    std::mt19937 rng(seed);
    auto pick = [&](size_t n) { return static_cast<size_t>(rng() % n); };
    Fixture f(Training(), seed % 5 == 0);
    Session copy(Training(), "key", 1000, f.policy, {.context_tokens = 100000});
    struct History {
      std::vector<Message> messages;
      bool plain = true;  // as the policy said it, under the usual tools
    };
    std::vector<History> histories = {{.messages = {User("start")}}};
    std::vector<std::pair<Plan, History>> flying;
    size_t drawn_tokens = 0;
    std::vector<std::vector<int32_t>> frozen;
    auto settle = [&](size_t at) {
      auto [plan, history] = flying[at];
      flying.erase(flying.begin() + static_cast<ptrdiff_t>(at));
      if (pick(8) == 0) {
        f.session.Abandon(plan, {.end_s = 2, .note = "client_gone"});
        return;
      }
      std::vector<Drawn> drawn;
      std::vector<std::vector<int32_t>> said;
      for (int c = 0; c < plan.n; ++c) {
        Drawn d;
        const bool cut = pick(6) == 0;
        std::vector<int32_t> ids;
        if (pick(2) == 0 && !plan.tools.is_none()) {
          for (unsigned char b : std::string(kCall)) ids.push_back(b);
        }
        for (size_t k = pick(12); k > 0; --k) ids.push_back(static_cast<int32_t>(pick(4) ? 'a' + pick(3) : pick(f.policy.size())));
        std::erase(ids, FakePolicy::kEnd);
        if (!cut || ids.empty()) ids.push_back(FakePolicy::kEnd);
        d.finish = ids.back() == FakePolicy::kEnd ? "stop" : "length";
        SampledText sampled(f.policy, plan.tools, {});
        for (int32_t id : ids) {
          if (d.spans.empty() || pick(9) == 0) d.spans.push_back({.ids = {}, .logprobs = {}, .version = {1, static_cast<int64_t>(d.spans.size())}});
          d.spans.back().ids.push_back(id);
          d.spans.back().logprobs.push_back(-static_cast<float>(id));
          sampled.Append(id);
        }
        auto parsed = sampled.Finish(d.finish == "stop");
        d.content = parsed.content;
        d.tool_calls = parsed.tool_calls;
        d.ill_formed = parsed.ill_formed;
        drawn_tokens += ids.size();
        said.push_back(ids);
        drawn.push_back(d);
      }
      Answer a = f.session.Commit(plan, drawn, {.end_s = 2});
      ASSERT_EQ(a.choices.size(), said.size());
      EXPECT_EQ(a.prompt_ids, plan.prompt_ids);
      for (size_t c = 0; c < said.size(); ++c) {
        EXPECT_EQ(a.choices[c].ids, said[c]);
        auto next = history;
        next.messages.push_back(Echo(a, static_cast<int>(c)));
        histories.push_back(std::move(next));
      }
    };
    for (int step = 0; step < 40; ++step) {
      if (!flying.empty() && (flying.size() > 3 || pick(2))) {
        settle(pick(flying.size()));
        continue;
      }
      History history = histories[pick(histories.size())];
      auto& messages = history.messages;
      if (pick(5) == 0) {  // some edit anywhere
        history.plain = false;
        Message& m = messages[pick(messages.size())];
        switch (pick(4)) {
          case 0: m.content += " edited"; break;
          case 1: m.content = "<|im_end|>"; break;
          case 2: m.tool_calls.clear(); break;
          default: messages.erase(messages.begin() + static_cast<ptrdiff_t>(pick(messages.size())));
        }
      }
      for (Message& m : messages) {  // harmless reshaping
        for (ToolCall& c : m.tool_calls) {
          if (pick(2)) c.arguments = "{ \"c\":\"ls the tool\", \"a\":1}";
        }
      }
      if (!messages.empty() && messages.back().role == Role::kAssistant) {
        messages.push_back(pick(2) ? User("u" + std::to_string(pick(3))) : Tool("t" + std::to_string(pick(3)), "x"));
      }
      if (messages.empty()) messages.push_back(User("again"));
      ChatRequest r = Ask(messages);
      if (pick(10) == 0) {
        r.tools = nullptr;
        history.plain = false;
      }
      r.n = pick(4) == 0 ? 2 : 1;
      f.policy.TakeEncoded();
      Plan plan = f.Begin(r, rng());
      const auto encoded = f.policy.TakeEncoded();
      ASSERT_EQ(encoded.size(), 1u);
      if (plan.anchor_run >= 0) {
        // The stored ids stand, and what was encoded is the rest of the prompt.
        auto path = f.session.capture().Path(plan.anchor_run);
        const auto rest = f.policy.Encode(encoded[0]);
        path.insert(path.end(), rest.begin(), rest.end());
        EXPECT_EQ(path, plan.prompt_ids);
        EXPECT_EQ(encoded[0].substr(0, 13), "\n<|im_start|>");
      } else {
        EXPECT_EQ(plan.prompt_ids, f.policy.Encode(*f.policy.Render(TemplateMessages(messages, messages.size()), r.tools, true, r.variables)));
        if (history.plain && messages.size() >= 3 && seed % 5 != 0) {
          // An unedited history is only rendered whole when a turn before it was cut short, or a special token was in its way.
          EXPECT_TRUE(plan.flags.count("after_truncation") || plan.flags.count("template_strip"))
              << "seed " << seed;
        }
      }
      flying.emplace_back(std::move(plan), std::move(history));
      const auto& runs = f.session.capture().runs();
      for (size_t i = 0; i < frozen.size(); ++i) ASSERT_EQ(frozen[i], runs[i].ids);
      for (size_t i = frozen.size(); i < runs.size(); ++i) frozen.push_back(runs[i].ids);
    }
    while (!flying.empty()) settle(0);
    f.session.Close("sealed", "", 10);
    size_t sampled_tokens = 0;
    for (const auto& run : f.session.capture().runs()) {
      EXPECT_LT(run.parent, run.id);
      EXPECT_EQ(run.logprobs.size(), run.sampled ? run.ids.size() : 0);
      if (run.sampled) sampled_tokens += run.ids.size();
    }
    EXPECT_EQ(sampled_tokens, drawn_tokens);
    for (const auto& record : f.session.TakeRecords()) {
      v1::GatewayLogRecord parsed;
      ASSERT_TRUE(parsed.ParseFromString(record.SerializeAsString()));
      ASSERT_TRUE(copy.Apply(parsed).ok());
    }
    v1::Trajectory a, b;
    f.session.ToTrajectory(&a);
    copy.ToTrajectory(&b);
    EXPECT_EQ(a.SerializeAsString(), b.SerializeAsString());
    EXPECT_EQ(copy.state(), "sealed");
  }
}

// A half-read log must never build a session that contradicts itself.
TEST(Session, RecoveryRefusesRecordsThatDoNotFit) {
  Fixture f;
  ChatRequest r = Ask({User("q")});
  f.Turn(r, kCall);
  r.messages.push_back(User("more"));
  Plan plan = f.Begin(r, 5);  // in flight at the crash
  auto records = f.session.TakeRecords();
  ASSERT_EQ(records.size(), 3u);
  for (size_t skip = 0; skip < 2; ++skip) {
    Session copy(Training(), "key", 1000, f.policy, {.context_tokens = 100000});
    Status status;
    for (size_t i = 0; i < records.size() && status.ok(); ++i) {
      if (i != skip) status = copy.Apply(records[i]);
    }
    if (skip == 0) {
      EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    }
  }
  Session copy(Training(), "key", 1000, f.policy, {.context_tokens = 100000});
  for (const auto& record : records) ASSERT_TRUE(copy.Apply(record).ok());
  EXPECT_EQ(copy.calls_in_flight(), 1);
  copy.AbandonOrphans(9);
  EXPECT_EQ(copy.calls_in_flight(), 0);
  v1::Trajectory t;
  copy.ToTrajectory(&t);
  ASSERT_EQ(t.calls_size(), 2);
  EXPECT_EQ(t.calls(1).note(), "gateway_restart");
  EXPECT_EQ(t.flags(0), "gateway_restart");
  // And it goes on: the stored turn is still found.
  Fixture g;
  r.messages = {User("q"), Echo(copy.Replay(0)), Tool("x", "y")};
  auto planned = copy.Begin(r, 6, 10);
  ASSERT_TRUE(std::holds_alternative<Plan>(planned));
  EXPECT_EQ(std::get<Plan>(planned).anchor_run, 1);
  EXPECT_EQ(std::get<Plan>(planned).call, 2);
  EXPECT_EQ(copy.Committed(1), std::optional<int>(0));
}

// Records that a bad disk or an older program wrote must be refused, or give a session that can be asked anything.
TEST(Session, SurvivesMutatedRecords) {
  Fixture f;
  ChatRequest r = Ask({User("q")});
  const Answer first = f.Turn(r, kCall);
  r.messages.push_back(Echo(first));
  r.messages.push_back(Tool("x", first.choices[0].tool_calls[0].id));
  Drawn few = f.Say("done", r.tools);
  for (int32_t id : few.spans[0].ids) few.spans[0].kept.push_back(engine::EncodeKept(std::vector<int32_t>{id, id + 3}, 400));
  f.session.Commit(f.Begin(r), {few}, {.end_s = 2});
  f.Begin(r, 5);  // in flight at the crash
  std::vector<std::string> good;
  for (const auto& record : f.session.TakeRecords()) good.push_back(record.SerializeAsString());
  v1::GatewayLogRecord flag, close;
  flag.set_flag("ill_formed");
  close.mutable_close()->set_state("sealed");
  close.mutable_close()->set_reason("done");
  good.push_back(flag.SerializeAsString());
  good.push_back(close.SerializeAsString());
  const google::protobuf::LogSilencer silence;
  Rng rng(13);
  int whole = 0;
  for (int i = 0; i < 4000; ++i) {
    std::string log;
    for (const std::string& record : good) {
      if (!rng.Chance(0.05)) log += Frame(rng.Chance(0.15) ? Mutated(record, {}, rng) : record);
    }
    if (i % 3 == 0) log = Mutated(log, {}, rng);
    uint64_t used = 0;
    const std::vector<std::string> payloads = Unframe(log, &used);
    ASSERT_LE(used, log.size());
    Session copy(Training(), "key", 1000, f.policy, {.context_tokens = 100000});
    Status status;
    for (const std::string& payload : payloads) {
      v1::GatewayLogRecord record;
      if (status.ok() && record.ParseFromString(payload)) status = copy.Apply(record);
    }
    if (!status.ok()) continue;
    whole += payloads.size() == good.size();
    copy.AbandonOrphans(9);
    v1::Trajectory t;
    copy.ToTrajectory(&t);
    if (!copy.closed()) copy.Begin(r, 77, 10);
  }
  EXPECT_GT(whole, 100);
}

}  // namespace
}  // namespace temper::gateway
