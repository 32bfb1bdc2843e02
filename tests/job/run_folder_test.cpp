#include "job/run_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <thread>

#include "common/clock.h"
#include "tests/fuzz/mutate.h"

namespace temper::job {
namespace {

class RunFolderTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "temper_run_XXXXXX";
    ASSERT_TRUE(mkdtemp(pattern.data()));
    dir_ = pattern;
  }
  void TearDown() override { EXPECT_TRUE(RemoveAll(dir_).ok()); }
  std::string dir_;
};

// A second job in a used folder would mix two runs' files.
TEST_F(RunFolderTest, FreshMeansAbsentOrEmpty) {
  EXPECT_TRUE(RunFolder(dir_ + "/new").CheckFresh().ok());
  EXPECT_TRUE(RunFolder(dir_).CheckFresh().ok());
  ASSERT_TRUE(WriteFile(dir_ + "/x", "").ok());
  EXPECT_EQ(RunFolder(dir_).CheckFresh().code(), StatusCode::kFailedPrecondition);
  EXPECT_FALSE(RunFolder(dir_ + "/x").CheckFresh().ok());
}

// Two supervisors on one run would train it twice.
TEST_F(RunFolderTest, IsHeldByOne) {
  RunFolder first(dir_ + "/r"), second(dir_ + "/r");
  EXPECT_EQ(second.Open().code(), StatusCode::kNotFound);
  ASSERT_TRUE(first.Create().ok());
  ASSERT_TRUE(first.WriteState({}).ok());
  EXPECT_EQ(second.Open().code(), StatusCode::kFailedPrecondition);
}

// Whoever looked whether a run is held could be taken for its supervisor, or could say that a run is dead that is not.
TEST_F(RunFolderTest, LookingAtTheLockTakesNothing) {
  RunFolder run(dir_ + "/r");
  EXPECT_FALSE(run.Held());
  {
    RunFolder supervisor(dir_ + "/r");
    ASSERT_TRUE(supervisor.Create().ok());
    ASSERT_TRUE(supervisor.WriteState({}).ok());
    EXPECT_TRUE(run.Held());
    EXPECT_TRUE(run.Held());
  }
  EXPECT_FALSE(run.Held());
  // While somebody looks, it can still be taken.
  Fd look(open((dir_ + "/r/lock").c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(flock(look.get(), LOCK_SH | LOCK_NB), 0);
  std::thread looking([&] {
    SystemClock::Get().SleepS(0.03);
    look.Reset();
  });
  RunFolder supervisor(dir_ + "/r");
  const Status opened = supervisor.Open();
  EXPECT_TRUE(opened.ok()) << opened.ToString();
  looking.join();
}

// A command that is shown to be typed must be one that a shell reads back.
TEST(ResumeCommand, IsReadyToBeTyped) {
  EXPECT_EQ(ResumeCommand("/runs/a-1_b"), "temper run --resume --out /runs/a-1_b");
  EXPECT_EQ(ResumeCommand("/my runs/it's"), "temper run --resume --out '/my runs/it'\\''s'");
  EXPECT_EQ(ResumeCommand("runs/x"), "temper run --resume --out " + AbsolutePath("runs/x"));
}

// A state that does not come back as written breaks resume.
TEST_F(RunFolderTest, StateRoundTrips) {
  RunFolder run(dir_ + "/r");
  ASSERT_TRUE(run.Create().ok());
  RunState state;
  state.phase = "running";
  state.incarnation = 3;
  state.wall_s = 1.25;
  state.sampling_s = 0.75;
  state.began_s = -3.5;
  state.endpoints = {{"pool", "unix-abstract:x"}};
  state.counters = {{"gateway.tokens_sampled", 12345}};
  ASSERT_TRUE(run.WriteState(state).ok());
  auto back = run.ReadState();
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(back->ToJson(), state.ToJson());
  EXPECT_EQ(back->sampling_s, 0.75);
  EXPECT_EQ(back->began_s, -3.5);
  EXPECT_FALSE(RunState::FromJson("{}").ok());
  EXPECT_FALSE(RunState::FromJson("{\"incarnation\":1,\"endpoints\":3}").ok());
  EXPECT_EQ(DefaultRunPath("a", 0), "runs/a-19700101-000000");
}

// A state file that a full disk or an editor damaged must be refused, not crash the resume.
TEST(RunState, SurvivesMutations) {
  RunState state;
  state.incarnation = 2;
  state.sandbox_job = "temper-1-a";
  state.endpoints = {{"pool", "unix-abstract:x"}};
  state.counters = {{"gateway.tokens_sampled", 12}};
  const std::string scalars = R"({"incarnation":1,"endpoints":2,"counters":3})";
  Rng rng(9);
  int accepted = 0;
  for (int i = 0; i < 10000; ++i) {
    auto back = RunState::FromJson(Mutated(i % 4 ? state.ToJson() : scalars, {"null", "{}", "[]", "1e400", "\"x\"", "-1", "1.5"}, rng));
    if (!back.ok()) continue;
    ++accepted;
    auto again = RunState::FromJson(back->ToJson());
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_EQ(again->ToJson(), back->ToJson());
  }
  EXPECT_GT(accepted, 500);
}

}  // namespace
}  // namespace temper::job
