#include "gateway/trajectory_view.h"

#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include "temper/v1/types.pb.h"
#include "tests/fuzz/mutate.h"

namespace temper::gateway {
namespace {

v1::Trajectory Example() {
  v1::Trajectory t;
  t.set_session("3.1.2");
  t.set_task_id("t9");
  t.set_outcome("scored");
  t.set_reward(0.1);
  (*t.mutable_components())["files"] = 1;
  t.set_evidence(R"({"why":"half"})");
  t.add_flags("ill_formed");
  auto* prompt = t.add_runs();
  prompt->set_id(0);
  prompt->set_parent(-1);
  for (uint32_t id : {72, 105, 10, 27}) prompt->add_ids(id);
  for (int choice : {0, 1}) {
    auto* run = t.add_runs();
    run->set_id(1 + choice);
    run->set_parent(0);
    run->set_provenance(v1::SAMPLED);
    run->add_ids(65 + choice);
    run->add_logprobs(-0.1f);
    run->mutable_version()->set_step(4);
    run->set_temperature(0.7f);
    run->set_choice(choice);
    run->set_trainable(choice == 0);
  }
  return t;
}

// The JSON is a stable format that users parse.
TEST(TrajectoryView, Json) {
  EXPECT_EQ(*TrajectoryJson(Example().SerializeAsString()),
            R"({"session":"3.1.2","task":"t9","outcome":"scored","reason":"","reward":0.1,"components":{"files":1},"evidence":{"why":"half"},"flags":["ill_formed"],"nodes":[)"
            R"({"id":0,"parent":-1,"provenance":"context","ids":[72,105,10,27],"logprobs":[],"version":null,"mixed":false,"temperature":null,"call":0,"choice":0,"trainable":false},)"
            R"({"id":1,"parent":0,"provenance":"sampled","ids":[65],"logprobs":[-0.1],"version":4,"mixed":false,"temperature":0.7,"call":0,"choice":0,"trainable":true},)"
            R"({"id":2,"parent":0,"provenance":"sampled","ids":[66],"logprobs":[-0.1],"version":4,"mixed":false,"temperature":0.7,"call":0,"choice":1,"trainable":false}]})");
}

// Rewards of turns could be lost on the way to who looks for what a rollout was worth.
TEST(TrajectoryView, RewardsOfTurns) {
  v1::Trajectory t = Example();
  t.add_turn_rewards(0.5);
  t.add_turn_rewards(-2);
  EXPECT_NE(TrajectoryJson(t.SerializeAsString())->find(R"("components":{"files":1},"turn_rewards":[0.5,-2],"evidence")"), std::string::npos);
  EXPECT_NE(TrajectoryText(t.SerializeAsString(), {})->find("files=1  turns 0.5 -2\n"), std::string::npos);
}

// Kept sets could be shown beside other tokens, or those of a damaged record shown at all.
TEST(TrajectoryView, KeptSets) {
  v1::Trajectory t = Example();
  t.mutable_runs(1)->add_kept(std::string("\1\x40\1", 3));  // ids 64 and 66, without 65
  EXPECT_EQ(TrajectoryJson(t.SerializeAsString()).status().code(), StatusCode::kDataLoss);
  t.mutable_runs(1)->set_kept(0, std::string("\1\x41\1", 3));
  const std::string shown = *TrajectoryJson(t.SerializeAsString());
  EXPECT_NE(shown.find(R"("ids":[65],"logprobs":[-0.1],"kept":[[65,67]],"version":4)"), std::string::npos) << shown;
  EXPECT_EQ(shown.find("kept", shown.find("kept") + 1), std::string::npos) << "only where something was cut";
  t.mutable_runs(1)->add_kept("");
  EXPECT_EQ(TrajectoryJson(t.SerializeAsString()).status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(TrajectoryText(t.SerializeAsString(), {}).status().code(), StatusCode::kDataLoss);
}

// Text that an agent's tools printed must not reach the terminal as commands to it.
TEST(TrajectoryView, TextShowsControlCharacters) {
  TrajectoryViewOptions options;
  options.decode = [](const std::vector<int32_t>& ids) { return std::string(ids.begin(), ids.end()); };
  const std::string shown = *TrajectoryText(Example().SerializeAsString(), options);
  EXPECT_EQ(shown,
            "3.1.2  scored  reward 0.1  files=1\n"
            "task t9  0 calls  2 tokens sampled  4 context  0.00 s\n"
            "  ill_formed\n"
            "#0 context: prompt  call 0  4 tokens\n    Hi\n    \\x1b\n"
            "    #1 sampled: the policy  call 0  1 tokens  choice 0  version 4  T 0.7  logprob -0.1000, -0.1000 a token\n        A\n"
            "    #2 sampled: the policy  call 0  1 tokens  choice 1  version 4  T 0.7  logprob -0.1000, -0.1000 a token  not trained\n        B\n"
            "ended scored  reward 0.1  evidence {\"why\":\"half\"}\n");
  options.colour = options.tokens = true;
  EXPECT_NE(TrajectoryText(Example().SerializeAsString(), options)->find("\x1b[32mA\x1b[0m"), std::string::npos);
}

// A reader could not tell the policy's words from a tool's, nor how a call and the attempt ended; and what somebody said could close
// the fence of the Markdown file it is pasted into.
TEST(TrajectoryView, AnAttemptFromFirstToLastToken) {
  v1::Trajectory t;
  t.set_session("7.0.1");
  t.set_task_id("t7");
  t.set_family("find");
  t.set_outcome("truncated");
  t.set_reason("turns");
  t.set_reward(0.5);
  t.set_evidence("{\"found\":\"a\\u0007\",\"raw\":\"\x1b\"}");
  auto add = [&](int call, const std::string& text, double step, float logprob) {
    auto* run = t.add_runs();
    run->set_id(t.runs_size() - 1);
    run->set_parent(t.runs_size() - 2);
    run->set_call(call);
    for (const char c : text) run->add_ids(static_cast<unsigned char>(c));
    if (logprob == 0) return;
    run->set_provenance(v1::SAMPLED);
    for (size_t i = 0; i < text.size(); ++i) run->add_logprobs(logprob);
    run->mutable_version()->set_step(static_cast<int64_t>(step));
    run->set_temperature(1);
    run->set_trainable(true);
  };
  add(0, "user: find it\n", 0, 0);
  add(0, "ls", 4, -0.5f);  // the weights change in the middle of the call
  add(0, "\n\n-l", 5, -1);
  add(1, "tool: a b\n```\n", 0, 0);
  add(1, "a", 5, -0.25f);
  for (const char* finish : {"stop", "length"}) {
    auto* call = t.add_calls();
    call->set_call(t.calls_size() - 1);
    call->set_finish(finish);
  }
  TrajectoryViewOptions options;
  options.decode = [](const std::vector<int32_t>& ids) { return std::string(ids.begin(), ids.end()); };
  const std::string shown = *TrajectoryText(t.SerializeAsString(), options);
  EXPECT_EQ(shown,
            "7.0.1  truncated(turns)  reward 0.5\n"
            "task t7 [find]  2 calls  7 tokens sampled  28 context  0.00 s\n"
            "#0 context: prompt  call 0  14 tokens\n    user: find it\n"
            "#1 sampled: the policy  call 0  2 tokens  choice 0  version 4  T 1  logprob -1.0000, -0.5000 a token\n    ls\n"
            "#2 sampled: the policy  call 0  4 tokens  choice 0  version 5  T 1  logprob -4.0000, -1.0000 a token  finish stop\n\n\n    -l\n"
            "#3 context: tool output or next message  call 1  14 tokens\n    tool: a b\n    ```\n"
            "#4 sampled: the policy  call 1  1 tokens  choice 0  version 5  T 1  logprob -0.2500, -0.2500 a token  finish length\n    a\n"
            "ended truncated(turns)  reward 0.5  evidence {\"found\":\"a\\u0007\",\"raw\":\"\\x1b\"}\n");
  EXPECT_EQ(shown.find("\n```"), std::string::npos);
}

// A damaged record must be an error, not an endless walk.
TEST(TrajectoryView, RefusesWhatIsNoTree) {
  EXPECT_EQ(TrajectoryJson("rubbish").status().code(), StatusCode::kDataLoss);
  v1::Trajectory t = Example();
  t.mutable_runs(1)->set_parent(2);
  EXPECT_EQ(TrajectoryText(t.SerializeAsString(), {}).status().code(), StatusCode::kDataLoss);
  t = Example();
  t.mutable_runs(1)->clear_logprobs();
  EXPECT_EQ(TrajectoryJson(t.SerializeAsString()).status().code(), StatusCode::kDataLoss);
}

// Bytes of a store that is damaged must be refused or printed.
TEST(TrajectoryView, SurvivesMutations) {
  const google::protobuf::LogSilencer silence;
  v1::Trajectory example = Example();
  example.mutable_runs(1)->add_kept(std::string("\1\x41\1", 3));
  const std::string good = example.SerializeAsString();
  Rng rng(3);
  int shown = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::string bytes = Mutated(good, {}, rng);
    TrajectoryViewOptions options{.colour = i % 2 == 0, .tokens = i % 3 == 0, .decode = nullptr};
    if (i % 5) options.decode = [](const std::vector<int32_t>& ids) { return std::string(ids.size(), ids.empty() ? 'x' : static_cast<char>(ids[0])); };
    auto text = TrajectoryText(bytes, options);
    EXPECT_EQ(text.ok(), TrajectoryJson(bytes).ok());
    shown += text.ok();
  }
  EXPECT_GT(shown, 1000);
}

}  // namespace
}  // namespace temper::gateway
