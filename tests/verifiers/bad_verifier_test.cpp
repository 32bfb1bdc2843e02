// Verifiers that misbehave, in real sandboxes: each ends typed, in time, without a reward, and nothing of it stays.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "tests/verifiers/own_sandboxes.h"
#include "verifiers/verifier.h"

namespace temper::verifiers {
namespace {

constexpr double kSlackS = 2.5;  // a sandbox made, killed and removed on a machine that does other things too

struct Row {
  const char* mode;
  double timeout_s;
  const char* reason;  // evidence.reason, or reasons with '|' between; "" = a verdict is reached
  const char* says;    // part of evidence.message, or of its log
  double back_within_s;
};

const std::vector<Row>& Table() {
  constexpr double kShort = 0.4, kAmple = 30;
  static const std::vector<Row> table = {
      {"good", kAmple, "", "", kSlackS},
      {"crash", kAmple, "signal", "signal 11", kSlackS},
      {"crash", kAmple, "signal", "about to crash", kSlackS},
      {"abort", kAmple, "signal", "signal 6", kSlackS},
      {"kills-itself", kAmple, "signal", "signal 9", kSlackS},
      {"exit-3", kAmple, "exit", "exit code 3", kSlackS},
      {"exit-3", kAmple, "exit", "not my day", kSlackS},
      {"hang", kShort, "deadline", "no verdict within 0.4 s", kShort + kSlackS},
      {"verdict-then-hang", kShort, "deadline", "no verdict within 0.4 s", kShort + kSlackS},
      {"busy", kShort, "deadline", "no verdict within 0.4 s", kShort + kSlackS},
      {"stops-itself", kShort, "deadline", "no verdict within 0.4 s", kShort + kSlackS},
      {"ignores-sigterm", kShort, "deadline", "no verdict within 0.4 s", kShort + kSlackS},
      {"writes-slowly", kShort, "deadline", "no verdict within 0.4 s", kShort + kSlackS},
      {"logs-slowly", kShort, "deadline", "still here", kShort + kSlackS},
      {"fork-storm", kShort, "deadline", "no verdict within 0.4 s", kShort + kSlackS},
      {"silent", kAmple, "verdict", "nothing was written to file descriptor 3", kSlackS},
      {"on-stdout", kAmple, "verdict", "nothing was written to file descriptor 3", kSlackS},
      {"closes-fd3", kAmple, "verdict", "nothing was written to file descriptor 3", kSlackS},
      {"rubbish", kAmple, "verdict", "exactly one JSON object", kSlackS},
      {"nan", kAmple, "verdict", "exactly one JSON object", kSlackS},
      {"infinity", kAmple, "verdict", "exactly one JSON object", kSlackS},
      {"1e999", kAmple, "verdict", "", kSlackS},
      {"component-1e999", kAmple, "verdict", "", kSlackS},
      {"text", kAmple, "verdict", "reward", kSlackS},
      {"null", kAmple, "verdict", "reward", kSlackS},
      {"list", kAmple, "verdict", "not an object", kSlackS},
      {"half", kAmple, "verdict", "exactly one JSON object", kSlackS},
      {"twice", kAmple, "verdict", "exactly one JSON object", kSlackS},
      {"reward-twice", kAmple, "verdict", "twice", kSlackS},
      {"deep", kAmple, "verdict", "exactly one JSON object", kSlackS},
      {"gigabyte-on-fd3", kAmple, "verdict", "more than 4 MiB", kSlackS},
      {"gigabyte-of-log", kAmple, "", "", 20},
      {"memory", kAmple, "limit|exit", "", 10},  // by exit code where memory is held by rlimits
      {"disk", kAmple, "exit", "exit code 7", 10},
      {"daemon", kAmple, "", "", kSlackS},
      {"daemon-judges-later", kAmple, "", "", kSlackS},
      {"daemon-judges-instead", kAmple, "verdict", "nothing was written to file descriptor 3", kSlackS},
      {"daemon-floods-fd3", kAmple, "verdict", "", kSlackS},
      {"reads-nothing", kAmple, "", "", kSlackS},
      {"kills-all", kAmple, "", "", kSlackS},
  };
  return table;
}

// Processes of the bad verifier anywhere on the machine, by the name they were started under.
int Survivors() {
  int count = 0;
  const std::vector<std::string> names = ListDir("/proc").value();
  for (const std::string& name : names) {
    int64_t pid = 0;
    if (!ParseInt(name, &pid)) continue;
    const Result<std::string> line = ReadFile("/proc/" + name + "/cmdline");
    count += line.ok() && line->rfind("/opt/judge/bad-verifier", 0) == 0;
  }
  return count;
}

Verdict Judge(const Row& row, const Case& c) {
  CommandOptions o;
  o.name = row.mode;
  o.command = {"/opt/judge/bad-verifier", row.mode};
  o.mounts = {{TEMPER_BUILD_DIR "/bad-verifier", "/opt/judge/bad-verifier"}};
  o.timeout_s = row.timeout_s;
  o.limits.memory_bytes = 96 << 20;
  o.limits.disk_bytes = 8 << 20;
  o.limits.processes = 24;
  return MakeCommandVerifier(o, &OwnEnvironment::Service())->Verify(c);
}

// Any of them could hold a worker for ever, take the service along, leave something behind, or come out as a number.
TEST(BadVerifiers, EachEndsTypedInTimeWithoutAReward) {
  Case c;
  c.files = {{"a", "left by the agent"}};
  c.final_text = std::string(1 << 20, 'y');  // more than a pipe holds: who does not read must not block us
  for (const Row& row : Table()) {
    SCOPED_TRACE(row.mode);
    const double begin_s = SystemClock::Get().NowS();
    const Verdict verdict = Judge(row, c);
    EXPECT_LT(SystemClock::Get().NowS() - begin_s, row.back_within_s);
    EXPECT_TRUE(OwnEnvironment::Service().List()->empty());
    EXPECT_EQ(Survivors(), 0);
    const json::value shown = ParseJson(VerdictToJson(verdict)).value();
    if (*row.reason == 0) {
      EXPECT_EQ(verdict.outcome, VerdictOutcome::kScored) << verdict.evidence_json;
      EXPECT_EQ(verdict.reward, 1);
      continue;
    }
    EXPECT_EQ(verdict.outcome, VerdictOutcome::kInfraFailure);
    if (verdict.outcome != VerdictOutcome::kInfraFailure) continue;
    EXPECT_TRUE(shown.at("reward").is_null());
    EXPECT_TRUE(verdict.components.empty());
    const json::value evidence = ParseJson(verdict.evidence_json).value();
    const std::vector<std::string> reasons = Split(row.reason, '|');
    const std::string reason(evidence.at("reason").as_string());
    EXPECT_NE(std::find(reasons.begin(), reasons.end(), reason), reasons.end()) << verdict.evidence_json.substr(0, 500);
    EXPECT_NE(verdict.evidence_json.find(row.says), std::string::npos) << verdict.evidence_json.substr(0, 500);
    EXPECT_LT(verdict.evidence_json.size(), 64u << 10) << "evidence is stored with the attempt";
  }
  // The service they all went through still serves.
  EXPECT_EQ(Judge(Table()[0], c).outcome, VerdictOutcome::kScored);
}

}  // namespace
}  // namespace temper::verifiers
