#include "datapool/alarms.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace temper::datapool {
namespace {

LedgerLine Ended(int64_t group, int32_t rollout, double t, std::optional<double> reward) {
  LedgerLine l;
  l.kind = LedgerLine::Kind::kOutcome;
  l.t = t;
  l.group = group;
  l.rollout = rollout;
  l.attempt = 1;
  l.outcome = reward ? "scored" : "infra_failure";
  l.reward = reward;
  return l;
}
LedgerLine Of(LedgerLine::Kind kind, int64_t group, double t = 0) {
  LedgerLine l;
  l.kind = kind;
  l.group = group;
  l.t = t;
  return l;
}
std::vector<SourceShape> Head(double since) {
  SourceShape s;
  s.source = "default";
  s.head = 7;
  s.head_since = since;
  s.head_running = 2;
  s.running = 2;
  return {s};
}
std::vector<std::string> Names(const Alarms& alarms, double now, double head_since) {
  std::vector<std::string> out;
  for (const std::string& text : alarms.Raised(now, Head(head_since))) out.push_back(text.substr(0, text.find(':')));
  return out;
}

// What could go wrong: an alarm stays silent when its limit is passed, or rises in a healthy run.
TEST(Alarms, EachRisesAtItsLimit) {
  Alarms healthy{AlarmLimits()};
  for (int g = 0; g < 100; ++g) {
    healthy.Add(Ended(g, 0, g, 1));
    healthy.Add(Ended(g, 1, g, g % 4 == 0 ? 1 : 0));
    healthy.Add(Of(LedgerLine::Kind::kConsume, g, g));
  }
  EXPECT_THAT(Names(healthy, 100, 90), testing::IsEmpty());
  EXPECT_THAT(Names(healthy, 99 + 1801, 1000), testing::ElementsAre("nothing_scored"));
  EXPECT_THAT(Names(healthy, 1700, 1700 - 1801), testing::ElementsAre("head_wait"));

  Alarms infra = healthy;
  for (int i = 0; i < 32; ++i) infra.Add(Ended(200 + i, 0, 100, std::nullopt));
  EXPECT_THAT(Names(infra, 100, 90), testing::IsEmpty()) << "half of them is not over half";
  infra.Add(Ended(300, 0, 100, std::nullopt));
  EXPECT_THAT(infra.Raised(100, Head(90)), testing::ElementsAre("infra_share: 33 of the last 64 attempts were infrastructure failures"));

  for (int i = 0; i < 64; ++i) {
    LedgerLine aborted = Ended(400 + i, 0, 100, std::nullopt);
    aborted.outcome = "aborted";
    aborted.reason = "stopped";
    infra.Add(aborted);
  }
  EXPECT_THAT(Names(infra, 100, 90), testing::ElementsAre("infra_share")) << "an aborted attempt is none";

  Alarms silent = healthy;
  for (int g = 200; g < 231; ++g) {
    EXPECT_THAT(Names(silent, 100, 90), testing::IsEmpty()) << "at most 30 of 32";
    silent.Add(Ended(g, 0, 100, g % 2));
    silent.Add(Ended(g, 1, 100, g % 2));
    silent.Add(Of(LedgerLine::Kind::kConsume, g, 100));
  }
  EXPECT_THAT(Names(silent, 100, 90), testing::ElementsAre("zero_signal_share")) << "31 of 32";

  Alarms never_differed{AlarmLimits()};
  for (int i = 0; i < 128; ++i) never_differed.Add(Ended(200 + i, 0, 100, 1));
  EXPECT_THAT(Names(never_differed, 100, 90), testing::IsEmpty()) << "nothing collapsed";

  // A head that nobody plays is not waited for, and without a head nothing is.
  std::vector<SourceShape> idle = Head(100 - 1801);
  idle[0].head_running = idle[0].running = 0;
  EXPECT_THAT(healthy.Raised(100, idle), testing::IsEmpty());
  idle[0].head.reset();
  EXPECT_THAT(healthy.Raised(1e6, idle), testing::IsEmpty());

  Alarms collapsed = healthy;
  for (int i = 0; i < 127; ++i) collapsed.Add(Ended(200 + i, 0, 100, 1));
  EXPECT_THAT(Names(collapsed, 100, 90), testing::IsEmpty());
  collapsed.Add(Ended(400, 0, 100, 1));
  EXPECT_THAT(Names(collapsed, 100, 90), testing::ElementsAre("reward_collapse"));
  LedgerLine resumed;
  resumed.kind = LedgerLine::Kind::kRecover;
  resumed.who = "job";
  resumed.t = 100;
  collapsed.Add(resumed);
  EXPECT_THAT(Names(collapsed, 100, 90), testing::IsEmpty()) << "a resumed job begins anew";
  EXPECT_THAT(Names(collapsed, 1800, -1000), testing::IsEmpty()) << "its head too";
  EXPECT_THAT(Names(collapsed, 100 + 1801, -1000), testing::ElementsAre("head_wait", "nothing_scored"));

  Alarms stopped = silent;
  EXPECT_THAT(Names(stopped, 100, 90), testing::ElementsAre("zero_signal_share"));
  stopped.Add(resumed);
  EXPECT_THAT(Names(stopped, 100, 90), testing::IsEmpty());

  // Killed, not stopped: what was open ends in the supervisor's name when the job is resumed.
  Alarms killed = infra;
  LedgerLine cut = Ended(301, 0, 3000, std::nullopt);
  cut.outcome = "aborted";
  cut.reason = "supervisor";
  killed.Add(cut);
  EXPECT_THAT(Names(killed, 3001, 2990), testing::IsEmpty());

  // The clock runs through a warm-up, and nothing can be scored before the first admission.
  Alarms warming{AlarmLimits()};
  EXPECT_THAT(Names(warming, 5000, 4990), testing::IsEmpty());
  warming.Add(Of(LedgerLine::Kind::kAdmit, 0, 5000));
  EXPECT_THAT(Names(warming, 5000 + 1800, 6790), testing::IsEmpty());
  EXPECT_THAT(Names(warming, 5000 + 1801, 6790), testing::ElementsAre("nothing_scored"));

  AlarmLimits off;
  off.infra_share.reset();
  off.head_wait_s.reset();
  off.nothing_scored_s.reset();
  Alarms quiet(off);
  for (int i = 0; i < 64; ++i) quiet.Add(Ended(i, 0, 0, std::nullopt));
  EXPECT_THAT(Names(quiet, 1e6, 0), testing::IsEmpty());
}

// What could go wrong: a source that only fails, or whose rewards are all equal, hides behind another one.
TEST(Alarms, EachSourceIsJudgedByItself) {
  Alarms alarms{AlarmLimits()};
  for (int g = 0; g < 400; ++g) {
    LedgerLine admit = Of(LedgerLine::Kind::kAdmit, g, g);
    admit.source = g % 4 == 0 ? "code" : "math";
    alarms.Add(admit);
    if (g % 4 == 0) {
      alarms.Add(Ended(g, 0, g, g < 100 ? std::optional(0.5 + g) : std::nullopt));
    } else {
      alarms.Add(Ended(g, 0, g, 1));
      alarms.Add(Ended(g, 1, g, g < 200 ? 0 : 1));
    }
    alarms.Add(Of(LedgerLine::Kind::kConsume, g, g));
  }
  std::vector<SourceShape> shapes = {Head(390)[0], Head(390)[0]};
  shapes[0].source = "math";
  shapes[1].source = "code";
  EXPECT_THAT(alarms.Raised(400, shapes),
              testing::ElementsAre("zero_signal_share.math: 32 of the last 32 groups had equal rewards", "reward_collapse.math: the last 128 rewards are all 1",
                                   "infra_share.code: 64 of the last 64 attempts were infrastructure failures"));
  EXPECT_THAT(alarms.Raised(96 + 1801, {shapes[1]}), testing::Contains(testing::StartsWith("nothing_scored: ")));
}

}  // namespace
}  // namespace temper::datapool
