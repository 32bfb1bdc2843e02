// Command verifiers in real sandboxes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/verifiers/own_sandboxes.h"
#include "verifiers/verifier.h"

namespace temper::verifiers {
namespace {

using ::testing::HasSubstr;

Verdict Judge(const std::string& script, const Case& c = {}, double timeout_s = 10) {
  CommandOptions o;
  o.name = "a test";
  o.command = {"sh", "-c", script};
  o.timeout_s = timeout_s;
  return MakeCommandVerifier(o, &OwnEnvironment::Service())->Verify(c);
}

// What could go wrong: the verifier does not see what the agent left, or not all of the case.
TEST(CommandVerifier, SeesFilesAndCase) {
  using sandbox::File;
  Case c;
  c.task_json = R"({"hidden":"sesame"})";
  c.files = {{"out", "", 0755, File::Kind::kFolder}, {"out/a", "left by the agent", 0600, File::Kind::kRegular},
             {"evil", "/etc/passwd", 0777, File::Kind::kLink}};
  Verdict v = Judge(
      "read -r line; case \"$line\" in *'\"hidden\":\"sesame\"'*'\"files\":[\"out/a\"]'*) ;; *) exit 1;; esac\n"
      "[ \"$(cat out/a)\" = 'left by the agent' ] && [ -L evil ] && echo x > out/new && echo '{\"reward\":0.5,\"components\":{\"files\":1}}' >&3",
      c);
  EXPECT_EQ(v.outcome, VerdictOutcome::kScored) << v.evidence_json;
  EXPECT_EQ(v.reward, 0.5);
  EXPECT_EQ(v.components.at("files"), 1);
}

// What could go wrong: a verifier that fails gives a reward. All of these are infrastructure failures that say why.
TEST(CommandVerifier, FailuresAreNeverRewards) {
  struct Row {
    const char* script;
    const char* reason;
  };
  for (Row row : {Row{"true", "verdict"}, {"echo '{\"reward\":1}'", "verdict"}, {"echo '{\"reward\":1}{\"reward\":1}' >&3", "verdict"},
                  {"echo rubbish >&3", "verdict"}, {"echo '{\"reward\":NaN}' >&3", "verdict"}, {"echo '{\"reward\":1}' >&3; exit 3", "exit"},
                  {"echo '{\"reward\":1}' >&3; kill -SEGV $$", "signal"}, {"echo '{\"reward\":1}' >&3; sleep 60", "deadline"}, {"nosuchcommand", "exit"},
                  {"head -c 5000000 /dev/zero >&3", "verdict"}}) {
    Verdict v = Judge(row.script, {}, 0.6);
    EXPECT_EQ(v.outcome, VerdictOutcome::kInfraFailure) << row.script;
    EXPECT_THAT(v.evidence_json, HasSubstr(std::string("\"reason\":\"") + row.reason + "\"")) << row.script;
  }
  EXPECT_THAT(Judge("echo the log >&2; exit 3").evidence_json, HasSubstr("the log"));
  Case bad;
  bad.files = {{"../x", "y"}};
  EXPECT_THAT(Judge("echo '{\"reward\":1}' >&3", bad).evidence_json, HasSubstr("\"reason\":\"sandbox\""));
}

// What could go wrong: what one verification leaves behind changes the next.
TEST(CommandVerifier, EachRunIsFresh) {
  const std::string script = "[ -e mark ] && r=0 || r=1; touch mark /tmp/mark; (setsid sleep 100 &); echo \"{\\\"reward\\\":$r}\" >&3";
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Judge(script).reward, 1);
}

// What could go wrong: a case with more than the limits of the verifier's sandbox cannot be verified.
TEST(CommandVerifier, LargeCasesFit) {
  Case c;
  for (int i = 0; i < 3; ++i) c.files.push_back({"f" + std::to_string(i), std::string(30 << 20, 'x'), 0644, sandbox::File::Kind::kRegular});
  Verdict v = Judge("echo \"{\\\"reward\\\":$(cat f0 f1 f2 | wc -c)}\" >&3", c);
  EXPECT_EQ(v.reward, 3.0 * (30 << 20)) << v.evidence_json;
}

// What could go wrong: verifications at once meet in one sandbox.
TEST(CommandVerifier, ManyAtOnce) {
  CommandOptions o;
  o.command = {"sh", "-c", "echo \"{\\\"reward\\\":$(cat n)}\" >&3"};
  auto verifier = MakeCommandVerifier(o, &OwnEnvironment::Service());
  std::vector<std::thread> threads;
  for (int t = 0; t < 12; ++t) {
    threads.emplace_back([&, t] {
      Case c;
      c.files = {{"n", std::to_string(t)}};
      EXPECT_EQ(verifier->Verify(c).reward, t);
    });
  }
  for (auto& t : threads) t.join();
}

}  // namespace
}  // namespace temper::verifiers
