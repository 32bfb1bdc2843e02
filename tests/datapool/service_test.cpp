// The pool's service in this process, over a store that forgets.
#include "datapool/service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>

#include "common/file.h"
#include "common/strings.h"
#include "datapool/verify.h"
#include "tests/datapool/borrowed_store.h"
#include "tests/datapool/script.h"

namespace temper::datapool {
namespace {

struct Service {
  Service(const std::string& config, const std::string& ledger_path) {
    LocalPoolOptions options;
    options.config = Config(config);
    options.job_incarnation = "j";
    options.ledger_path = ledger_path;
    Result<std::unique_ptr<LocalDataPool>> opened = LocalDataPool::Open(options, MakeMemoryStore(), metrics, Env{clock, PosixFileSystem::Get(), faults, Rng(0)});
    TEMPER_CHECK(opened.ok()) << opened.status().message();
    pool = *std::move(opened);
    TEMPER_CHECK(pool->AttachAgents("a").ok());
    TEMPER_CHECK(pool->AttachTrainer("t", 0).ok());
  }
  void Finish(int64_t group, int32_t rollout = 0) {
    FinishedAttempt f;
    f.id = {group, rollout, 1};
    f.outcome = "scored";
    f.reward = 1;
    EXPECT_TRUE(pool->Finish("a", f).ok());
  }
  double Metric(const std::string& name) { return pool->Metrics()->at(name); }

  FakeClock clock;
  Faults faults;
  Metrics metrics;
  std::unique_ptr<LocalDataPool> pool;
};

// What could go wrong: a pool that breaks its bound goes on. Group 1 is held back as long as anything else may go; at the right bound
// nothing else may go after two updates, and a pool that gives more (tests/mutants) must end itself before the batch is seen.
TEST(Service, NeverLeasesBeyondItsBound) {
  Service s(R"({"P":1,"S":1,"window":{"size":2}})", "");
  EXPECT_EQ(s.Metric("staleness_bound"), 2);
  EXPECT_TRUE(s.pool->TakeIssues("a", 100, 0).ok());
  s.Finish(0);
  int64_t batch = 0;
  for (int64_t next = 2; next < 9; ++next) {
    Result<LeaseReply> lease = s.pool->Lease("t", batch, 0);
    ASSERT_TRUE(lease.ok());
    if (!lease->ready) break;
    ASSERT_TRUE(s.pool->Update("t", batch).ok());
    ++batch;
    EXPECT_TRUE(s.pool->TakeIssues("a", 100, 0).ok());
    s.Finish(next);
  }
  EXPECT_EQ(batch, 2);
  s.Finish(1);
  ASSERT_TRUE(s.pool->Lease("t", batch, 0)->ready);
  EXPECT_EQ(s.Metric("staleness_max"), 2);
}

// What could go wrong: the view of the window contradicts the window.
TEST(Service, ShowsItsWindow) {
  Service s(R"({"P":2,"S":1,"window":{"size":2},"deadline_s":30,"on_deadline":"wait"})", "");
  EXPECT_TRUE(s.pool->TakeIssues("a", 100, 0).ok());
  s.Finish(1);
  s.Finish(3);
  s.clock.Advance(31);
  EXPECT_FALSE(s.pool->Lease("t", 0, 0)->ready);
  EXPECT_EQ(s.Metric("asking"), 1);
  EXPECT_EQ(s.Metric("window.default.head"), 0);
  EXPECT_EQ(s.Metric("window.default.head_wait_s"), 31);
  EXPECT_EQ(s.Metric("window.default.head_running"), 1);
  EXPECT_EQ(s.Metric("window.default.running"), 2);
  EXPECT_EQ(s.Metric("window.default.batch_have"), 1);
  EXPECT_EQ(s.Metric("window.default.batch_need"), 2);
  EXPECT_EQ(s.Metric("window.default.ready_inside"), 0);
  EXPECT_EQ(s.Metric("window.default.ready_outside"), 1);
  std::string positions;
  for (int i = 0; i < s.Metric("window.default.positions"); ++i) positions += static_cast<char>(s.Metric(fmt::format("window.default.{:02}", i)));
  EXPECT_EQ(positions, "!.!#");
  // The wait goes on while nothing changes.
  s.clock.Advance(7);
  EXPECT_FALSE(s.pool->Lease("t", 0, 0)->ready);
  EXPECT_EQ(s.Metric("window.default.head_wait_s"), 38);
}

// What could go wrong: the view of one source hides that another one keeps the trainer waiting.
TEST(Service, ShowsTheWindowOfEachSource) {
  Service s(R"({"P":3,"S":0,"sources":[{"name":"math","weight":1},{"name":"code","weight":2,"window":{"size":2}}]})", "");
  EXPECT_TRUE(s.pool->TakeIssues("a", 100, 0).ok());
  EXPECT_EQ(s.Metric("window.code.running"), 2);
  s.Finish(1);
  s.Finish(2);
  s.clock.Advance(5);
  EXPECT_FALSE(s.pool->Lease("t", 0, 0)->ready);
  for (const auto& [name, value] : std::map<std::string, double>{{"math.size", 1}, {"math.head", 0}, {"math.head_wait_s", 5}, {"math.running", 1},
                                                                {"math.batch_have", 0}, {"math.batch_need", 1}, {"code.size", 2}, {"code.head", -1},
                                                                {"code.head_wait_s", 0}, {"code.running", 0}, {"code.batch_have", 2}, {"code.batch_need", 2}}) {
    EXPECT_EQ(s.Metric("window." + name), value) << name;
  }
}

// What could go wrong: an alarm that should pause the job does not, or one that should only speak does; groups that nobody plays while it
// is paused reach their deadlines; the view does not say why nothing goes on; a pool that restarts meanwhile goes on.
TEST(Service, AnAlarmCanPauseTheJob) {
  for (const bool pause : {false, true}) {
    FakeClock clock;
    Faults faults;
    Metrics metrics;
    LocalPoolOptions options;
    options.config = Config(R"({"P":1,"S":3,"deadline_s":100})");
    options.job_incarnation = "j";
    std::string path = testing::TempDir() + "/ledger-XXXXXX";
    const int fd = mkstemp(path.data());
    ASSERT_GE(fd, 0);
    close(fd);
    options.ledger_path = path;
    options.alarms.head_wait_s = 60;
    options.alarms.pause = pause;
    const std::unique_ptr<Store> store = MakeMemoryStore();
    auto open = [&] {
      return LocalDataPool::Open(options, std::make_unique<BorrowedStore>(*store), metrics, Env{clock, PosixFileSystem::Get(), faults, Rng(0)});
    };
    auto pool = open();
    ASSERT_TRUE(pool.ok());
    ASSERT_TRUE((*pool)->AttachAgents("a").ok());
    ASSERT_TRUE((*pool)->AttachTrainer("t", 0).ok());
    EXPECT_EQ((*pool)->TakeIssues("a", 1, 0)->issues.size(), 1u);
    clock.Advance(61);
    ASSERT_TRUE((*pool)->Pause(false).ok());  // any call: time is looked at between calls
    EXPECT_EQ((*pool)->TakeIssues("a", 1, 0)->issues.size(), pause ? 0u : 1u);
    EXPECT_EQ((*pool)->Metrics()->at("alarm.head_wait"), 1);
    EXPECT_EQ((*pool)->Metrics()->at("alarm_pauses"), pause);
    EXPECT_THAT(metrics.Lines(), testing::ElementsAre(testing::StartsWith("alarm: head_wait: group 0 of default runs for 61 s")));
    EXPECT_FALSE((*pool)->Lease("t", 0, 0)->ready);  // something is written, with the time
    for (int life = 0; life < 2; ++life) {
      clock.Advance(500);
      ASSERT_TRUE((*pool)->Pause(false).ok());
      EXPECT_EQ((*pool)->TakeIssues("a", 0, 0)->issues.size(), 0u);
      EXPECT_EQ((*pool)->Metrics()->at("tombstoned") > 0, !pause) << "life " << life;
      pool->reset();
      pool = open();
      ASSERT_TRUE(pool.ok());
    }
    unlink(path.c_str());
    if (!pause) continue;
    // What runs goes on.
    FinishedAttempt f;
    f.id = {0, 0, 1};
    f.outcome = "scored";
    f.reward = 1;
    ASSERT_TRUE((*pool)->Finish("a", f).ok());
  }
}

// What could go wrong: the clock stands for ever after an alarm that has paused the job and fallen.
TEST(Service, AnAlarmThatFallsLetsTheJobGoOn) {
  FakeClock clock;
  Faults faults;
  Metrics metrics;
  LocalPoolOptions options;
  options.config = Config(R"({"P":1,"S":0})");
  options.job_incarnation = "j";
  options.alarms.head_wait_s = 60;
  options.alarms.pause = true;
  auto opened = LocalDataPool::Open(options, MakeMemoryStore(), metrics, Env{clock, PosixFileSystem::Get(), faults, Rng(0)});
  ASSERT_TRUE(opened.ok());
  LocalDataPool& pool = **opened;
  ASSERT_TRUE(pool.AttachAgents("a").ok());
  ASSERT_TRUE(pool.AttachTrainer("t", 0).ok());
  EXPECT_EQ(pool.TakeIssues("a", 1, 0)->issues.size(), 1u);
  clock.Advance(61);
  ASSERT_TRUE(pool.Pause(false).ok());
  EXPECT_EQ(pool.Metrics()->at("alarm_pauses"), 1);
  clock.Advance(1000);
  FinishedAttempt f;
  f.id = {0, 0, 1};
  f.outcome = "scored";
  f.reward = 1;
  ASSERT_TRUE(pool.Finish("a", f).ok());
  EXPECT_EQ(pool.Metrics()->at("alarm_pauses"), 0);
  ASSERT_TRUE(pool.Lease("t", 0, 0)->ready);
  ASSERT_TRUE(pool.Update("t", 0).ok());
  EXPECT_EQ(pool.TakeIssues("a", 1, 0)->issues.size(), 1u);
  clock.Advance(30);
  ASSERT_TRUE(pool.Pause(false).ok());
  EXPECT_EQ(pool.Metrics()->at("window.default.head_wait_s"), 30);
}

// What could go wrong: a call is answered although what it did is not on disk; damage is taken for a full disk, or is not told on.
TEST(ServiceDeathTest, AWriteThatFailsEndsThePool) {
  struct Full final : Store {
    Full(int64_t* count, Status why) : writes(count), status(std::move(why)) {}
    Status Write(const StoreWrite&, bool) override { return ++*writes > 1 ? status : Status::Ok(); }
    Result<std::optional<std::string>> State() override { return std::optional<std::string>(); }
    Result<std::vector<std::pair<int64_t, std::string>>> Ledger() override { return std::vector<std::pair<int64_t, std::string>>(); }
    Result<std::string> Trajectory(const AttemptId&) override { return NotFound("none"); }
    Result<std::vector<std::pair<AttemptId, std::string>>> Records(int64_t) override { return NotFound("none"); }
    Result<StoreSpace> Space() override { return StoreSpace(); }
    int64_t* writes;
    const Status status;
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  LocalPoolOptions options;
  options.config = Config("{\"P\":1,\"S\":1}");
  options.job_incarnation = "j";
  options.on_damage = [](const std::string& reason) { std::fprintf(stderr, "told: %s\n", reason.c_str()); };
  auto fail = [&](const Status& status) {
    FakeClock clock;
    Faults faults;
    Metrics metrics;
    int64_t writes = 0;
    auto pool = LocalDataPool::Open(options, std::make_unique<Full>(&writes, status), metrics, Env{clock, PosixFileSystem::Get(), faults, Rng(0)});
    (void)(*pool)->AttachAgents("a");
    (void)(*pool)->AttachTrainer("t", 0);
    (void)(*pool)->TakeIssues("a", 1, 0);
  };
  EXPECT_DEATH(fail(ResourceExhausted("no space left")), "is the disk full.*no space left");
  EXPECT_DEATH(fail(DataLoss("bad block in 000008.sst")), "pool store is damaged.*bad block in 000008.sst.*\n.*told: the store is damaged.*000008.sst");
}

// What could go wrong: a record that does not verify is trained, takes its whole batch down, or its loss is not told; one that verifies
// the second time is trusted again; each record is read twice.
TEST(Service, ARecordThatDoesNotVerifyIsQuarantined) {
  struct Damaging final : Store {
    Status Write(const StoreWrite& w, bool sync) override { return store->Write(w, sync); }
    Result<std::optional<std::string>> State() override { return store->State(); }
    Result<std::vector<std::pair<int64_t, std::string>>> Ledger() override { return store->Ledger(); }
    Result<std::string> Trajectory(const AttemptId& id) override {
      ++*reads;
      if (id == AttemptId{1, 1, 1} && *reads <= 6) return DataLoss("record 1.1.1 does not verify: checksum");
      return store->Trajectory(id);
    }
    Result<std::vector<std::pair<AttemptId, std::string>>> Records(int64_t group) override { return store->Records(group); }
    Result<StoreSpace> Space() override { return store->Space(); }
    explicit Damaging(std::atomic<int>* count) : reads(count) {}
    std::atomic<int>* reads;
    std::unique_ptr<Store> store = MakeMemoryStore();
  };
  std::atomic<int> reads = 0;
  std::string path = testing::TempDir() + "/ledger-XXXXXX";
  const int fd = mkstemp(path.data());
  ASSERT_GE(fd, 0);
  close(fd);
  Metrics metrics;
  LocalPoolOptions options;
  options.config = Config(R"({"P":2,"S":0,"G":3})");
  options.job_incarnation = "j";
  options.ledger_path = path;
  Result<std::unique_ptr<LocalDataPool>> opened = LocalDataPool::Open(options, std::make_unique<Damaging>(&reads), metrics, Env::System());
  ASSERT_TRUE(opened.ok());
  LocalDataPool& pool = **opened;
  ASSERT_TRUE(pool.AttachAgents("a").ok());
  ASSERT_TRUE(pool.AttachTrainer("t", 0).ok());
  EXPECT_TRUE(pool.TakeIssues("a", 100, 0).ok());
  for (int64_t g : {0, 1}) {
    for (int32_t r : {0, 1, 2}) {
      FinishedAttempt f;
      f.id = {g, r, 1};
      f.outcome = "scored";
      f.reward = r;
      f.trajectory = fmt::format("{}.{}", g, r);
      ASSERT_TRUE(pool.Finish("a", f).ok());
    }
  }
  for (int again = 0; again < 2; ++again) {
    Result<LeaseReply> lease = pool.Lease("t", 0, 0);
    ASSERT_TRUE(lease.ok() && lease->ready) << lease.status().message();
    ASSERT_EQ(lease->groups.size(), 2u);
    EXPECT_EQ(lease->groups[0].rollouts, (std::vector<int32_t>{0, 1, 2}));
    EXPECT_EQ(lease->groups[1].rollouts, (std::vector<int32_t>{0, 2}));
    EXPECT_EQ(lease->groups[1].members, (std::vector<std::string>{"1.0", "1.2"}));
  }
  EXPECT_EQ(reads, 6 + 5);
  EXPECT_EQ(pool.Metrics()->at("quarantined"), 1);
  ASSERT_TRUE(pool.Update("t", 0).ok());
  const std::string ledger = *ReadFile(path);
  const std::string line = R"("event":"quarantine","group":1,"rollout":1,"attempt":1,"reason":"record"})";
  const size_t at = ledger.find(line);
  ASSERT_NE(at, std::string::npos) << ledger;
  EXPECT_EQ(ledger.find(line, at + 1), std::string::npos) << "said once";
  const VerifyReport report = VerifyLedger(options.config, ledger);
  EXPECT_TRUE(report.ok()) << PrintVerify(report);
  unlink(path.c_str());
}

// What could go wrong: a pool goes on with a ledger that does not balance.
TEST(Service, ALedgerThatDoesNotBalanceIsRefused) {
  std::string path = testing::TempDir() + "/ledger-XXXXXX";
  const int fd = mkstemp(path.data());
  ASSERT_GE(fd, 0);
  close(fd);
  auto open = [&](std::unique_ptr<Store>& store) {
    static Metrics metrics;
    LocalPoolOptions options;
    options.config = Config(R"({"P":1,"S":1})");
    options.job_incarnation = "j";
    options.ledger_path = path;
    return LocalDataPool::Open(options, std::make_unique<BorrowedStore>(*store), metrics, Env::System());
  };
  std::unique_ptr<Store> store = MakeMemoryStore();
  {
    auto pool = open(store);
    ASSERT_TRUE(pool.ok());
    ASSERT_TRUE((*pool)->AttachTrainer("t", 0).ok());
  }
  const std::string good = *ReadFile(path);
  const size_t at = good.find(R"("group":1)");
  ASSERT_NE(at, std::string::npos);
  std::string bad = good;
  bad[at + 8] = '0';
  ASSERT_TRUE(WriteFile(path, bad).ok());
  auto refused = open(store);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.status().message(), testing::HasSubstr("seq 3: group 0 is admitted twice"));
  ASSERT_TRUE(WriteFile(path, good).ok());
  EXPECT_TRUE(open(store).ok());
  unlink(path.c_str());
}

}  // namespace
}  // namespace temper::datapool
