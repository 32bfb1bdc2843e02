#include "job/live_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "datapool/types.h"

namespace temper::job {
namespace {

void AddWindow(ViewState* view, const std::string& source, const std::string& positions, const std::map<std::string, double>& values) {
  auto set = [&](const std::string& name, double value) { view->pool[datapool::WindowMetric(source, name)] = value; };
  for (const auto& [name, value] : values) set(name, value);
  set("positions", static_cast<double>(positions.size()));
  for (size_t i = 0; i < positions.size(); ++i) set((i < 10 ? "0" : "") + std::to_string(i), positions[i]);
}

ViewState Sample() {
  ViewState view;
  view.name = "quickstart";
  view.phase = "training";
  view.elapsed_s = 3725;
  view.steps = 60;
  view.staleness_bound = 2;
  for (int i = 1; i <= 100; ++i) view.history.push_back({i, 0.01 * i, 1, 8000, 0.5});
  view.sample_tokens_per_s = 5400;
  view.slots = 32;
  view.sources = {{"default", 9}};
  view.pool = {{"in_flight", 30}, {"running", 12}, {"asking", 1}};
  AddWindow(&view, "default", "!#.oooooo#o",
            {{"size", 9}, {"head", 41}, {"head_running", 2}, {"head_wait_s", 63.4}, {"ready_outside", 1}, {"batch_have", 3}, {"batch_need", 16}});
  view.outcomes = {{"scored", 500}, {"infra_failure", 2}};
  view.rollouts_per_step = 128;
  view.rollouts_since_step = 37;
  view.evaluations = {{0, 0.45}};
  return view;
}

size_t Columns(const std::string& text) {
  size_t n = 0;
  for (unsigned char c : text) n += (c & 0xc0) != 0x80;
  return n;
}

// A line longer than the terminal wraps, and the panel then leaves rubbish behind when it is redrawn.
TEST(LiveView, LinesFitTheTerminal) {
  for (size_t width : {20u, 40u, 80u, 200u}) {
    for (const std::string& line : RenderPanel(Sample(), width)) EXPECT_LE(Columns(line), width) << line;
  }
  EXPECT_FALSE(RenderPanel(ViewState{}, 80).empty());
}

// What went wrong must be visible, what went well must not look like a failure.
TEST(LiveView, ShowsFailures) {
  std::string all;
  for (const std::string& line : RenderPanel(Sample(), 120)) all += line + "\n";
  EXPECT_NE(all.find("infra_failure 2"), std::string::npos) << all;
  EXPECT_EQ(all.find("scored 500"), std::string::npos);
  EXPECT_NE(all.find("1/2 updates"), std::string::npos);
  EXPECT_NE(all.find("1:02:05"), std::string::npos);
  EXPECT_NE(all.find("30 of 32 in flight"), std::string::npos);
  EXPECT_NE(all.find("v0 0.450"), std::string::npos);
}

// Each number that a user watches must be there, under its own name.
TEST(LiveView, ShowsWhereTheJobStands) {
  const std::vector<std::string> lines = RenderPanel(Sample(), 130);
  auto line = [&](const std::string& name) {
    for (const std::string& l : lines) {
      if (l.rfind(name, 0) == 0) return l;
    }
    return "no line " + name;
  };
  EXPECT_EQ(line("step "), "step      100 of 60");
  EXPECT_EQ(line("reward").rfind("reward    1.000  ▁", 0), 0u) << line("reward");
  EXPECT_EQ(line("reward").substr(line("reward").size() - 3), "█");
  EXPECT_EQ(line("speed"), "speed     sampling 5400 tokens/s, training 8000 tokens/s, trainer waited 0.5 s");
  EXPECT_EQ(line("staleness"), "staleness 1/2 updates");
  EXPECT_EQ(line("slots"), "slots     30 of 32 in flight, 12 rollouts running");
  EXPECT_EQ(line("window"), "window    W = 9  head 41 !#.oooooo|#o  # ready  o running  ! late  . gone");
  EXPECT_EQ(line("          the"), "          the trainer waits: 3 of 16 groups of its batch; head 41 has 2 rollouts running for 63 s; 1 ready behind the window");
  ViewState busy = Sample();
  busy.pool["asking"] = 0;
  for (const std::string& l : RenderPanel(busy, 120)) EXPECT_EQ(l.find("the trainer waits"), std::string::npos);
  EXPECT_EQ(line("failures"), "failures  infra_failure 2");
  ViewState held = Sample();
  held.pool["held"] = 2;
  held.pool["disk_free_bytes"] = 50e6;
  EXPECT_THAT(RenderPanel(held, 130), testing::Contains("          held: only 50 MB are free on the disk; no new rollouts until there is space"));
  held.pool["held"] = 1;
  held.pool["store_bytes"] = 1e9;
  EXPECT_THAT(RenderPanel(held, 130), testing::Contains(testing::StartsWith("          held: the store is at its bound (1000 MB)")));
  ViewState alarmed = Sample();
  alarmed.pool["alarm.infra_share"] = 1;
  alarmed.pool["alarm.head_wait"] = 0;  // it fell
  EXPECT_THAT(RenderPanel(alarmed, 130), testing::Contains("alarm     infra_share"));
  EXPECT_THAT(RenderProgress(alarmed), testing::HasSubstr("; alarm infra_share ("));
  alarmed.pool["alarm_pauses"] = 1;
  EXPECT_THAT(RenderPanel(alarmed, 130), testing::Contains("alarm     infra_share: paused, no new rollouts until it is cured (Ctrl-C, then run --resume)"));
  EXPECT_THAT(RenderProgress(alarmed), testing::HasSubstr("; alarm infra_share, paused ("));
}

// With several sources one of them would stand for all, and the trainer seem to wait for what it has.
TEST(LiveView, ShowsEachSource) {
  ViewState view = Sample();
  view.sources = {{"math", 2}, {"agents", 1}};
  AddWindow(&view, "math", "#.#", {{"size", 2}, {"head", 40}, {"batch_have", 8}, {"batch_need", 8}, {"ready_inside", 1}, {"ready_outside", 1}});
  AddWindow(&view, "agents", "!oo", {{"size", 1}, {"head", 41}, {"head_running", 2}, {"head_wait_s", 63.4}, {"batch_have", 3}, {"batch_need", 8}, {"running", 9}});
  const std::vector<std::string> lines = RenderPanel(view, 200);
  const auto at = std::find(lines.begin(), lines.end(), "window    math    W = 2  head 40 #.|#  8 of 8 taken, 2 ready, 0 rollouts running");
  ASSERT_NE(at, lines.end()) << lines[5];
  EXPECT_EQ(at[1], "          agents  W = 1  head 41 !|oo  3 of 8 taken, 0 ready, 9 rollouts running  # ready  o running  ! late  . gone");
  EXPECT_EQ(at[2], "          the trainer waits: 11 of 16 groups of its batch; agents lacks 5; head 41 has 2 rollouts running for 63 s");
}

// A curve of equal values has no range to divide by.
TEST(LiveView, Sparklines) {
  EXPECT_EQ(Sparkline({}, 10), "");
  EXPECT_EQ(Sparkline({1, 1, 1}, 10), "▁▁▁");
  EXPECT_EQ(Sparkline({0, 1}, 10), "▁█");
  EXPECT_EQ(Sparkline({9, 0, 1}, 2), "▁█");
}

// Scripts read the plain lines.
TEST(LiveView, PlainLine) {
  const ViewState view = Sample();
  EXPECT_EQ(RenderStep(view, {12, 0.5, 1, 8000, 0.25, 56}),
            "step 12/60 reward 0.500 staleness 1/2 sampling 56 tok/s training 8000 tok/s waited 0.2 s failures infra_failure 2 (1:02:05)");
}

// A run that has ended was shown with slots in flight, and an unknown rate as none.
TEST(LiveView, AnEndedRunHasNothingInFlight) {
  ViewState view = Sample();
  view.ended = true;
  view.phase = "dead";
  view.eval_tasks = 16;
  view.eval_done = 3;
  view.sample_tokens_per_s.reset();
  view.outcomes["truncated"] = 27;
  view.buried = 2;
  std::string all;
  for (const std::string& line : RenderPanel(view, 120)) all += line + "\n";
  EXPECT_EQ(all.rfind("quickstart  dead  1:02:05\n", 0), 0u) << all;
  EXPECT_EQ(all.find("in flight"), std::string::npos) << all;
  EXPECT_EQ(all.find("judged"), std::string::npos) << all;
  EXPECT_NE(all.find("failures  truncated 27, infra_failure 2, 2 groups buried"), std::string::npos) << all;
  EXPECT_NE(all.find("sampling - tokens/s,"), std::string::npos) << all;
  view.sample_tokens_per_s = 56.4;
  view.sample_is_mean = true;
  EXPECT_EQ(RenderPanel(view, 120)[3],
            "speed     sampling 56 tokens/s (mean since the first token), training 8000 tokens/s, trainer waited 0.5 s");
}

// Between the steps a long job said nothing for minutes.
TEST(LiveView, ProgressSaysHowFarEachPhaseIs) {
  ViewState view = Sample();
  view.elapsed_s = 130;
  auto text = [&](const char* phase) {
    view.phase = phase;
    return RenderProgress(view);
  };
  EXPECT_EQ(text("collecting"), "collecting: 37 rollouts ended since step 100 (a step takes 128), 12 running (2:10)");
  EXPECT_EQ(text("training"), "training: step 101 of 60 (2:10)");
  view.history.clear();
  view.warm_up_steps = 12;
  view.warm_up_tokens = 10240;
  view.warm_up_tokens_all = 50000;
  view.warm_up_loss = 2.31;
  EXPECT_EQ(text("starting"), "starting (2:10)");
  EXPECT_EQ(text("warm-up"), "warm-up: step 12, 10240 of 50000 tokens, loss 2.310 (2:10)");
  EXPECT_EQ(text("evaluating"), "evaluating (2:10)");
  view.eval_tasks = 200;
  view.eval_done = 37;
  EXPECT_EQ(text("evaluating"), "evaluating: 37 of 200 tasks judged (2:10)");
  EXPECT_EQ(text("collecting"), "collecting: 37 rollouts ended so far (a step takes 128), 12 running (2:10)");
  EXPECT_EQ(text("proving"), "proving: tree = rows on the batch of step 1 (2:10)");
}

// A thousand groups that are buried for one cause would push everything else away; an alarm among them must be seen at once.
TEST(LiveView, LinesOfAKindAreToldTogether) {
  Chatter chatter;
  using testing::ElementsAre;
  using testing::IsEmpty;
  EXPECT_THAT(chatter.Take({"pool: group 1 tombstoned: deadline", "pool: group 12 tombstoned: deadline", "pool: group 3 tombstoned: stale"}, 100),
              ElementsAre("pool: group 1 tombstoned: deadline", "pool: group 3 tombstoned: stale"));
  EXPECT_THAT(chatter.Take({"pool: group 4 tombstoned: deadline", "pool: alarm: infra_share: 40 of the last 64"}, 101), ElementsAre("pool: alarm: infra_share: 40 of the last 64"));
  EXPECT_THAT(chatter.Take({}, 109.9), IsEmpty());
  EXPECT_THAT(chatter.Take({}, 110), ElementsAre("pool: group 4 tombstoned: deadline (and 1 more like it)"));
  EXPECT_THAT(chatter.Take({"pool: group 5 tombstoned: deadline"}, 119), IsEmpty()) << "ten seconds since it was told last";
  EXPECT_THAT(chatter.Take({}, 120), ElementsAre("pool: group 5 tombstoned: deadline"));
  EXPECT_THAT(chatter.Take({}, 130), IsEmpty());
  EXPECT_THAT(chatter.Take({"pool: group 6 tombstoned: deadline"}, 131), ElementsAre("pool: group 6 tombstoned: deadline"));
}

// A line at every change of the phase, none for what every step goes through, and never half a minute of silence.
TEST(LiveView, ProgressIsDueAtChangesAndInSilence) {
  ViewState view;
  Progress progress;
  auto due = [&](const char* phase, double now_s) {
    view.phase = phase;
    return progress.Due(view, now_s);
  };
  progress.Said(1000);
  EXPECT_TRUE(due("starting", 1000));
  EXPECT_FALSE(due("starting", 1029));
  EXPECT_TRUE(due("starting", 1030));
  EXPECT_TRUE(due("warm-up", 1031));
  EXPECT_FALSE(due("warm-up", 1060));
  progress.Said(1060);  // a role was restarted
  EXPECT_FALSE(due("warm-up", 1089));
  EXPECT_TRUE(due("warm-up", 1090));
  EXPECT_TRUE(due("collecting", 1091));
  EXPECT_TRUE(due("training", 1092));
  EXPECT_TRUE(due("proving", 1093));
  EXPECT_TRUE(due("training", 1094));
  view.history.emplace_back();
  progress.Said(1095);
  EXPECT_FALSE(due("collecting", 1096));
  EXPECT_FALSE(due("training", 1097));
  EXPECT_TRUE(due("collecting", 1125));
  EXPECT_TRUE(due("evaluating", 1126));
  EXPECT_FALSE(due("collecting", 1127));
}

}  // namespace
}  // namespace temper::job
