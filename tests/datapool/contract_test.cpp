// One body for both forms of the pool: in this process, and behind gRPC.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "common/file.h"
#include "common/log.h"
#include "common/rpc.h"
#include "common/strings.h"
#include "datapool/client.h"
#include "datapool/format.h"
#include "datapool/record.h"
#include "datapool/server.h"
#include "datapool/service.h"
#include "datapool/store.h"
#include "datapool/store_reader.h"
#include "datapool/verify.h"
#include "fmt/format.h"
#include "tests/datapool/script.h"

namespace temper::datapool {
namespace {

enum class Form { kLocal, kRemote };

std::string NewRun() {
  std::string path = testing::TempDir() + "/pool-XXXXXX";
  TEMPER_CHECK(mkdtemp(path.data()) != nullptr);
  return path;
}

VerifyReport Verify(const PoolConfig& config, const std::string& run) {
  Result<std::string> ledger = ReadFile(run + kLedgerFile);
  TEMPER_CHECK(ledger.ok()) << ledger.status().message();
  return VerifyLedger(config, *ledger);
}

class PoolContract : public testing::TestWithParam<Form> {
 protected:
  void TearDown() override {
    Stop();
    EXPECT_TRUE(RemoveAll(run).ok());
  }

  // A new process, as far as the pool can tell; the run folder stays.
  void Start(const std::string& config_text, const std::string& job = "job-1") {
    Stop();
    config = Config(config_text);
    ServerOptions options;
    options.run = run;
    options.config = config;
    options.task_counts = {5};
    options.job_incarnation = job;
    std::string address;
    if (GetParam() == Form::kRemote) {
      static std::atomic<int> number{0};
      const std::string name = fmt::format("temper-pool-test-{}-{}", getpid(), number++);
      Result<Fd> fd = ListenAbstract(name);
      ASSERT_TRUE(fd.ok()) << fd.status().message();
      options.listen_fd = fd->Release();
      address = "unix-abstract:" + name;
    }
    server = std::make_unique<Server>(options, Env{clock, PosixFileSystem::Get(), faults, Rng(0)});
    Status started = server->Start();
    ASSERT_TRUE(started.ok()) << started.message();
    if (GetParam() == Form::kRemote) client = ConnectDataPool(address);
  }
  void Stop() {
    client.reset();
    if (server) server->Stop();
    server.reset();
  }
  DataPool& pool() { return client ? *client : server->pool(); }

  TakeIssuesReply Take(int32_t max = 100, uint32_t wait_ms = 0) {
    Result<TakeIssuesReply> r = pool().TakeIssues("a", max, wait_ms);
    EXPECT_TRUE(r.ok()) << r.status().message();
    return r.ok() ? *r : TakeIssuesReply();
  }
  static FinishedAttempt Scored(const AttemptId& id, double reward = 1) {
    FinishedAttempt f;
    f.id = id;
    f.outcome = "scored";
    f.reward = reward;
    f.trajectory = fmt::format("bytes of {}.{}.{}", id.group, id.rollout, id.attempt);
    return f;
  }
  bool Finish(const FinishedAttempt& f) {
    Result<bool> r = pool().Finish("a", f);
    EXPECT_TRUE(r.ok()) << r.status().message();
    return r.ok() && *r;
  }
  LeaseReply Lease(int64_t batch, uint32_t wait_ms = 0) {
    Result<LeaseReply> r = pool().Lease("t", batch, wait_ms);
    EXPECT_TRUE(r.ok()) << r.status().message();
    return r.ok() ? *r : LeaseReply();
  }
  void Attach() {
    ASSERT_TRUE(pool().AttachAgents("a").ok());
    ASSERT_TRUE(pool().AttachTrainer("t", 0).ok());
  }
  void ExpectVerified() {
    VerifyReport report = Verify(config, run);
    EXPECT_TRUE(report.ok()) << PrintVerify(report);
  }

  const std::string run = NewRun();
  PoolConfig config;
  FakeClock clock;
  Faults faults;
  std::unique_ptr<Server> server;
  std::unique_ptr<DataPool> client;
};

constexpr char kSmall[] = R"({"P":2,"S":1,"G":2,"window":{"policy":"greedy"}})";

// What could go wrong: any call, answer field, or the bytes of a trajectory, from the first admission to the end of the job.
TEST_P(PoolContract, ALifeOfAJob) {
  Start(kSmall);
  EXPECT_TRUE(pool().AttachAgents("a").ok());
  EXPECT_TRUE(Take().issues.empty()) << "nothing is admitted before checkpoint 0 exists";
  EXPECT_TRUE(pool().AttachTrainer("t", 0).ok());
  TakeIssuesReply taken = Take();
  ASSERT_EQ(taken.issues.size(), 8u);
  EXPECT_EQ(taken.issues[0].id, (AttemptId{0, 0, 1}));
  EXPECT_EQ(taken.issues[7].id, (AttemptId{3, 1, 1}));
  EXPECT_EQ(taken.issues[7].task, 3);
  EXPECT_EQ(taken.issues[7].source, "default");
  EXPECT_EQ(taken.issues[7].version, 0);
  EXPECT_LT(taken.issues[7].deadline_left_s, 0);
  EXPECT_TRUE(Take().issues.empty()) << "each is handed out once";

  EXPECT_FALSE(Lease(0).ready);
  for (int32_t r : {1, 0}) EXPECT_TRUE(Finish(Scored({1, r, 1})));
  EXPECT_FALSE(Finish(Scored({1, 0, 1}))) << "a repeat is ignored";
  FinishedAttempt lost;
  lost.id = {0, 1, 1};
  lost.outcome = "aborted";
  lost.reason = "deadline";
  EXPECT_TRUE(Finish(lost));
  TakeIssuesReply again = Take();
  ASSERT_EQ(again.issues.size(), 1u);
  EXPECT_EQ(again.issues[0].id, (AttemptId{0, 1, 2}));
  EXPECT_TRUE(Finish(Scored({0, 1, 2}, 0)));
  FinishedAttempt broken = lost;
  broken.id = {0, 0, 1};
  broken.outcome = "infra_failure";
  EXPECT_TRUE(Finish(broken)) << "no retries: over, one valid is too few";
  for (int32_t r : {0, 1}) EXPECT_TRUE(Finish(Scored({2, r, 1})));

  LeaseReply lease = Lease(0);
  ASSERT_TRUE(lease.ready);
  EXPECT_FALSE(lease.again);
  ASSERT_EQ(lease.groups.size(), 2u);
  EXPECT_EQ(lease.groups[0].group, 1);
  EXPECT_EQ(lease.groups[1].group, 2);
  EXPECT_EQ(lease.groups[1].task, 2);
  EXPECT_EQ(lease.groups[0].rollouts, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(lease.groups[0].members, (std::vector<std::string>{"bytes of 1.0.1", "bytes of 1.1.1"}));
  EXPECT_EQ(Lease(0).groups[0].members, lease.groups[0].members) << "asking again costs nothing";

  EXPECT_TRUE(pool().Update("t", 0).ok());
  EXPECT_TRUE(pool().Update("t", 0).ok()) << "a repeat";
  EXPECT_TRUE(pool().Commit(1).ok());
  EXPECT_TRUE(pool().Commit(1).ok());
  taken = Take();
  ASSERT_EQ(taken.issues.size(), 6u);
  EXPECT_EQ(taken.issues[0].id.group, 4) << "admitted when group 0 was buried";
  EXPECT_EQ(taken.issues[2].version, 1);
  EXPECT_EQ(taken.issues[2].task, 0) << "five tasks, over and over";

  std::map<std::string, double> m = *pool().Metrics();
  EXPECT_EQ(m["admitted"], 7);
  EXPECT_EQ(m["consumed"], 2);
  EXPECT_EQ(m["tombstone.too_few_valid"], 1);
  EXPECT_EQ(m["outcome.scored"], 5);
  EXPECT_EQ(m["outcome.aborted"], 1);
  EXPECT_EQ(m["outcome.infra_failure"], 1);
  EXPECT_EQ(m["staleness_bound"], 3);

  // While it runs.
  Result<std::unique_ptr<StoreReader>> reader = StoreReader::Open(run);
  ASSERT_TRUE(reader.ok()) << reader.status().message();
  EXPECT_EQ(*(*reader)->Read(1, 1, std::nullopt), "bytes of 1.1.1");
  EXPECT_EQ(*(*reader)->Read(0, 1, std::nullopt), "bytes of 0.1.2");
  EXPECT_EQ(*(*reader)->Read(0, 1, 1), "");
  EXPECT_EQ((*reader)->Read(0, 1, 3).status().code(), StatusCode::kNotFound);
  EXPECT_EQ((*reader)->Read(77, 0, std::nullopt).status().code(), StatusCode::kNotFound);
  EXPECT_EQ((*reader)->List(1)->size(), 2u);
  EXPECT_TRUE(Finish(Scored({3, 0, 1})));
  EXPECT_EQ(*(*reader)->Read(3, 0, std::nullopt), "bytes of 3.0.1") << "a reader sees what came later";

  EXPECT_TRUE(pool().Close(CloseReason::kJobEnd).ok());
  EXPECT_TRUE(Take().closed);
  EXPECT_TRUE(Lease(1).closed);
  EXPECT_FALSE(Finish(Scored({3, 1, 1})));
  m = *pool().Metrics();
  EXPECT_EQ(m["running"], 0);
  EXPECT_EQ(m["tombstone.job_end"], 4);
  ExpectVerified();
  Stop();
  reader = StoreReader::Open(run);
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ(*(*reader)->Read(2, 0, 1), "bytes of 2.0.1") << "after the job too";
}

// What could go wrong: malformed or misplaced calls are taken, or end the process.
TEST_P(PoolContract, RefusedCalls) {
  Start(kSmall);
  EXPECT_EQ(pool().AttachTrainer("", 0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool().AttachTrainer("t", 3).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool().Lease("t", 0, 0).status().code(), StatusCode::kFailedPrecondition);
  Attach();
  Take();
  EXPECT_EQ(pool().TakeIssues("b", 1, 0).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool().Finish("b", Scored({0, 0, 1})).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool().Finish("a", Scored({9, 0, 1})).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool().Finish("a", Scored({0, 2, 1})).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool().Finish("a", Scored({0, -1, 1})).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool().Finish("a", Scored({0, 0, 0})).status().code(), StatusCode::kInvalidArgument);
  FinishedAttempt f = Scored({0, 0, 1});
  f.outcome = "won";
  EXPECT_EQ(pool().Finish("a", f).status().code(), StatusCode::kInvalidArgument);
  f = Scored({0, 0, 1}, NAN);
  EXPECT_EQ(pool().Finish("a", f).status().code(), StatusCode::kInvalidArgument);
  f = Scored({0, 0, 1});
  f.outcome = "aborted";
  EXPECT_EQ(pool().Finish("a", f).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool().Update("t", 0).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool().Update("u", 0).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool().Commit(1).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool().Lease("t", 1, 0).status().code(), StatusCode::kFailedPrecondition);
  ExpectVerified();
}

// What could go wrong: a long poll sleeps through its news, or past its time.
TEST_P(PoolContract, LongPolls) {
  Start(kSmall);
  Attach();
  Take();
  EXPECT_TRUE(Take(10, 30).issues.empty());
  std::thread agent([&] {
    SystemClock::Get().SleepS(0.03);
    for (int64_t g : {0, 1}) {
      for (int32_t r : {0, 1}) Finish(Scored({g, r, 1}));
    }
  });
  const double before = SystemClock::Get().NowS();
  EXPECT_TRUE(Lease(0, 10000).ready);
  EXPECT_LT(SystemClock::Get().NowS() - before, 5);
  agent.join();
  std::thread trainer([&] {
    SystemClock::Get().SleepS(0.03);
    EXPECT_TRUE(pool().Update("t", 0).ok());
  });
  EXPECT_EQ(Take(100, 10000).issues.size(), 4u);
  trainer.join();
  std::thread stopper([&] {
    SystemClock::Get().SleepS(0.03);
    EXPECT_TRUE(pool().Close(CloseReason::kStopped).ok());
  });
  EXPECT_TRUE(Lease(1, 10000).closed);
  stopper.join();
}

// What could go wrong: a restart of the pool hands rollouts out twice, forgets them, drops an open request or a leased batch.
TEST_P(PoolContract, ARestartChangesNothing) {
  Start(kSmall);
  Attach();
  ASSERT_EQ(Take(3).issues.size(), 3u);
  EXPECT_TRUE(Finish(Scored({0, 0, 1})));
  EXPECT_FALSE(Lease(0).ready);
  Start(kSmall);
  EXPECT_TRUE(pool().AttachAgents("a").ok());
  EXPECT_TRUE(pool().AttachTrainer("t", 0).ok());
  EXPECT_TRUE(Finish(Scored({0, 1, 1})));
  if (GetParam() == Form::kRemote) {
    // The client is new as well: it has not seen the last answer, and gets what of it still runs.
    EXPECT_EQ(Take(0).issues.size(), 1u);
  }
  TakeIssuesReply rest = Take();
  ASSERT_EQ(rest.issues.size(), 5u);
  EXPECT_EQ(rest.issues[0].id, (AttemptId{1, 1, 1}));
  for (int32_t r : {0, 1}) EXPECT_TRUE(Finish(Scored({1, r, 1})));
  LeaseReply lease = Lease(0);
  EXPECT_TRUE(lease.ready) << "the request stayed open";
  Start(kSmall);
  EXPECT_EQ(Lease(0).groups[1].members, lease.groups[1].members);
  EXPECT_TRUE(pool().Update("t", 0).ok());
  ExpectVerified();
  const std::string ledger = *ReadFile(run + kLedgerFile);
  EXPECT_THAT(ledger, testing::HasSubstr(R"("event":"recover","who":"pool")"));
}

// What could go wrong: attempts that end together get each other's answers, or one that is refused takes others with it.
TEST_P(PoolContract, AttemptsThatEndTogether) {
  Start(R"({"P":8,"S":1,"G":4,"window":{"policy":"greedy"}})");
  Attach();
  const TakeIssuesReply taken = Take(1000);
  ASSERT_EQ(taken.issues.size(), 64u);
  std::vector<Result<bool>> answers(64, Internal("none"));
  std::vector<std::thread> callers;
  for (size_t i = 0; i < 64; ++i) {
    callers.emplace_back([&, i] {
      FinishedAttempt f = Scored(taken.issues[i].id);
      if (i % 4 == 1) f.outcome = "won";                  // no such outcome
      if (i % 4 == 2) f.id = taken.issues[i - 2].id;      // one of the two is a repeat
      answers[i] = pool().Finish(i % 4 == 3 ? "zombie" : "a", f);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (size_t i = 0; i < 64; i += 4) {
    ASSERT_TRUE(answers[i].ok() && answers[i + 2].ok()) << i;
    EXPECT_NE(*answers[i], *answers[i + 2]) << i << ": counted once";
    EXPECT_EQ(answers[i + 1].status().code(), StatusCode::kInvalidArgument) << i;
    EXPECT_THAT(answers[i + 1].status().message(), testing::HasSubstr("won"));
    EXPECT_EQ(answers[i + 3].status().code(), StatusCode::kFailedPrecondition) << i;
  }
  EXPECT_EQ((*pool().Metrics())["outcome.scored"], 16);
  ExpectVerified();
}

// What could go wrong: the memory of a lease stays after it was read, or a second trainer reads the first one's.
TEST_P(PoolContract, LeasedDataGoesWhenItWasRead) {
  const auto segments = [] {
    int n = 0;
    const std::vector<std::string> names = *ListDir("/proc/self/fd");
    for (const std::string& name : names) {
      char target[256];
      const ssize_t size = readlink(("/proc/self/fd/" + name).c_str(), target, sizeof target);
      n += size > 0 && std::string_view(target, static_cast<size_t>(size)).find("temper-lease") != std::string_view::npos;
    }
    return n;
  };
  Start(kSmall);
  Attach();
  Take();
  for (int64_t g : {0, 1}) {
    for (int32_t r : {0, 1}) EXPECT_TRUE(Finish(Scored({g, r, 1})));
  }
  EXPECT_TRUE(Lease(0).ready);
  EXPECT_EQ(segments(), 0) << "it was read";
  LocalDataPool& local = static_cast<LocalDataPool&>(server->pool());
  ASSERT_TRUE(local.LeaseHandles("t", 0, 0)->reply.ready);
  const SegmentHandle first = local.LeaseHandles("t", 0, 0)->segment;
  EXPECT_EQ(segments(), 1) << "asked twice, made once";
  EXPECT_TRUE(pool().AttachTrainer("t2", 0).ok());
  EXPECT_EQ(segments(), 0) << "its trainer is gone";
  EXPECT_EQ(SegmentView::Open(first).status().code(), StatusCode::kUnavailable);
  ASSERT_TRUE(local.LeaseHandles("t2", 0, 0)->reply.ready);
  EXPECT_TRUE(pool().Update("t2", 0).ok());
  EXPECT_EQ(segments(), 0) << "its batch is trained";
}

// What could go wrong: after a restart of the agents rollouts are lost, or those never handed out are wasted.
TEST_P(PoolContract, AgentsRestart) {
  Start(kSmall);
  Attach();
  ASSERT_EQ(Take(3).issues.size(), 3u);
  EXPECT_TRUE(Finish(Scored({0, 0, 1})));
  EXPECT_EQ(*pool().AttachAgents("b"), 2);
  EXPECT_EQ(*pool().AttachAgents("b"), 0);
  Result<TakeIssuesReply> taken = pool().TakeIssues("b", 100, 0);
  ASSERT_TRUE(taken.ok());
  ASSERT_EQ(taken->issues.size(), 7u);
  EXPECT_EQ(taken->issues[0].id, (AttemptId{0, 1, 2}));
  EXPECT_EQ(taken->issues[1].id, (AttemptId{1, 0, 2}));
  EXPECT_EQ(taken->issues[2].id, (AttemptId{1, 1, 1}));
  EXPECT_EQ(pool().Finish("a", Scored({0, 1, 1})).status().code(), StatusCode::kFailedPrecondition) << "a zombie";
  ExpectVerified();
}

// What could go wrong: a restarted trainer gets other batches, or a checkpoint ahead of the pool's knowledge is trained twice.
TEST_P(PoolContract, TrainerRestart) {
  Start(kSmall);
  Attach();
  Take();
  for (int64_t g : {0, 1, 2, 3}) {
    for (int32_t r : {0, 1}) EXPECT_TRUE(Finish(Scored({g, r, 1})));
  }
  std::vector<LeasedGroup> first = Lease(0).groups;
  EXPECT_TRUE(pool().Update("t", 0).ok());
  std::vector<LeasedGroup> second = Lease(1).groups;
  ASSERT_EQ(second.size(), 2u);
  EXPECT_EQ(*pool().AttachTrainer("t2", 0), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(pool().Update("t", 1).code(), StatusCode::kFailedPrecondition) << "a zombie";
  Result<LeaseReply> back = pool().Lease("t2", 0, 0);
  ASSERT_TRUE(back.ok() && back->ready);
  EXPECT_TRUE(back->again);
  EXPECT_EQ(back->groups[0].members, first[0].members);
  EXPECT_TRUE(pool().Update("t2", 0).ok());
  ASSERT_TRUE(pool().Lease("t2", 1, 0)->ready);
  EXPECT_TRUE(pool().Pause(true).ok());
  // Dies after its checkpoint 2 and before it could tell of the update.
  EXPECT_EQ(*pool().AttachTrainer("t3", 2), (std::vector<int64_t>{}));
  EXPECT_EQ((*pool().Metrics())["committed"], 2);
  EXPECT_EQ((*pool().Metrics())["paused"], 1) << "set before it attached, for an evaluation of its own";
  EXPECT_EQ(pool().AttachTrainer("t4", 1).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool().AttachTrainer("t4", 3).status().code(), StatusCode::kFailedPrecondition);
  ExpectVerified();
}

// What could go wrong: stopping and resuming a job loses groups, or plays rollouts before the weights are back.
TEST_P(PoolContract, StopAndResume) {
  Start(kSmall);
  Attach();
  Take(5);
  EXPECT_TRUE(Finish(Scored({0, 0, 1})));
  EXPECT_TRUE(pool().Close(CloseReason::kStopped).ok());
  EXPECT_EQ((*pool().Metrics())["running"], 0);
  ExpectVerified();
  Start(kSmall, "job-2");
  EXPECT_TRUE(pool().AttachAgents("a").ok());
  EXPECT_TRUE(Take().issues.empty()) << "not before the trainer is back";
  EXPECT_TRUE(pool().AttachTrainer("t", 0).ok()) << "the same name in another job is another process";
  TakeIssuesReply taken = Take();
  ASSERT_EQ(taken.issues.size(), 7u);
  EXPECT_EQ(taken.issues[0].id, (AttemptId{0, 1, 2}));
  ExpectVerified();

  // And without an orderly stop.
  Start(kSmall, "job-3");
  EXPECT_TRUE(pool().AttachAgents("a").ok());
  EXPECT_TRUE(pool().AttachTrainer("t", 0).ok());
  taken = Take();
  ASSERT_EQ(taken.issues.size(), 7u);
  EXPECT_EQ(taken.issues[0].id, (AttemptId{0, 1, 3}));
  EXPECT_THAT(*ReadFile(run + kLedgerFile), testing::HasSubstr(R"("outcome":"aborted","reason":"supervisor")"));
  ExpectVerified();
}

// What could go wrong: deadlines do not fire, fire during an evaluation, or the agents are not told.
TEST_P(PoolContract, DeadlinesAndEvaluations) {
  const std::string text = R"({"P":1,"G":2,"deadline_s":10,"min_valid":1})";
  Start(text);
  Attach();
  ASSERT_EQ(Take().issues.size(), 2u);
  EXPECT_TRUE(Finish(Scored({0, 1, 1})));
  clock.Advance(4);
  EXPECT_TRUE(pool().Pause(true).ok());
  clock.Advance(1000);
  EXPECT_TRUE(Take(10, 300).cancelled.empty()) << "the clock stands still";
  Start(text);
  clock.Advance(1000);
  EXPECT_TRUE(pool().AttachAgents("a").ok());
  EXPECT_TRUE(Take(0, 300).cancelled.empty()) << "also over a restart";
  EXPECT_TRUE(pool().Pause(false).ok());
  clock.Advance(5.5);
  EXPECT_TRUE(Take(0, 300).cancelled.empty());
  clock.Advance(1);
  TakeIssuesReply taken = Take(0, 5000);
  ASSERT_EQ(taken.cancelled.size(), 1u);
  EXPECT_EQ(taken.cancelled[0], (AttemptId{0, 0, 1}));
  FinishedAttempt late = Scored({0, 0, 1});
  EXPECT_FALSE(Finish(late));
  LeaseReply lease = Lease(0);
  ASSERT_TRUE(lease.ready);
  EXPECT_EQ(lease.groups[0].rollouts, (std::vector<int32_t>{1}));
  EXPECT_TRUE(pool().Pause(true).ok());
  EXPECT_TRUE(pool().Update("t", 0).ok());
  EXPECT_TRUE(Take(10, 50).issues.empty()) << "an evaluation is on";
  EXPECT_TRUE(pool().Pause(false).ok());
  EXPECT_EQ(Take(10, 1000).issues.size(), 2u);
  ExpectVerified();
}

// What could go wrong: the trainer waits for ever when the tasks run out.
TEST_P(PoolContract, TasksRunOut) {
  Start(R"({"P":2,"tasks":3})");
  Attach();
  ASSERT_EQ(Take().issues.size(), 2u);
  for (int64_t g : {0, 1}) EXPECT_TRUE(Finish(Scored({g, 0, 1})));
  EXPECT_TRUE(Lease(0).ready);
  EXPECT_TRUE(pool().Update("t", 0).ok());
  LeaseReply lease = Lease(1, 10000);
  EXPECT_FALSE(lease.ready);
  EXPECT_TRUE(lease.exhausted);
}

// What could go wrong: a resumed run takes other settings than it was started with.
TEST_P(PoolContract, SettingsCannotChange) {
  Start(kSmall);
  Stop();
  ServerOptions options;
  options.run = run;
  options.config = Config(R"({"P":3,"S":1,"G":2})");
  Server other(options);
  EXPECT_EQ(other.Start().code(), StatusCode::kFailedPrecondition);
}

// What could go wrong: a ledger cut short by a crash keeps its torn line, loses lines, or gets two with one number.
TEST_P(PoolContract, ATornLedgerIsRepaired) {
  Start(kSmall);
  Attach();
  Take();
  EXPECT_TRUE(Finish(Scored({0, 0, 1})));
  Stop();
  const std::string whole = *ReadFile(run + kLedgerFile);
  for (size_t keep : {whole.size() - 5, whole.rfind('\n', whole.size() - 2) + 1}) {
    ASSERT_TRUE(WriteFile(run + kLedgerFile, whole.substr(0, keep)).ok());
    Start(kSmall);
    Stop();
    EXPECT_EQ(ReadFile(run + kLedgerFile)->substr(0, whole.size()), whole);
    ExpectVerified();
    // Back to where it was for the next round.
    ASSERT_TRUE(RemoveAll(run).ok());
    ASSERT_TRUE(MakeDirs(run).ok());
    Start(kSmall);
    Attach();
    Take();
    EXPECT_TRUE(Finish(Scored({0, 0, 1})));
    Stop();
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, PoolContract, testing::Values(Form::kLocal, Form::kRemote),
                         [](const auto& param) { return param.param == Form::kLocal ? "Local" : "Remote"; });

// What could go wrong: an answer lost on the wire loses its rollouts, or hands them out twice.
TEST(PoolService, ALostAnswerIsGivenAgain) {
  Metrics metrics;
  LocalPoolOptions options;
  options.config = Config(kSmall);
  options.job_incarnation = "j";
  Result<std::unique_ptr<LocalDataPool>> pool = LocalDataPool::Open(options, MakeMemoryStore(), metrics, Env::System());
  ASSERT_TRUE(pool.ok());
  ASSERT_TRUE((*pool)->AttachAgents("a").ok());
  ASSERT_TRUE((*pool)->AttachTrainer("t", 0).ok());
  LocalDataPool::Taken first = *(*pool)->TakeIssuesAfter("a", 3, 0, 0);
  ASSERT_EQ(first.reply.issues.size(), 3u);
  LocalDataPool::Taken again = *(*pool)->TakeIssuesAfter("a", 3, 0, 0);
  EXPECT_EQ(again.serial, first.serial);
  ASSERT_EQ(again.reply.issues.size(), 3u);
  EXPECT_EQ(again.reply.issues[0].id, first.reply.issues[0].id);
  LocalDataPool::Taken next = *(*pool)->TakeIssuesAfter("a", 3, 0, first.serial);
  EXPECT_EQ(next.reply.issues[0].id, (AttemptId{1, 1, 1}));
}

// What could go wrong: a waiting call keeps the process from stopping.
TEST(PoolService, StopEndsWaitingCalls) {
  Metrics metrics;
  LocalPoolOptions options;
  options.config = Config(kSmall);
  Result<std::unique_ptr<LocalDataPool>> pool = LocalDataPool::Open(options, MakeMemoryStore(), metrics, Env::System());
  ASSERT_TRUE(pool.ok());
  ASSERT_TRUE((*pool)->AttachAgents("a").ok());
  std::thread waiting([&] { EXPECT_EQ((*pool)->TakeIssues("a", 1, 60000).status().code(), StatusCode::kUnavailable); });
  SystemClock::Get().SleepS(0.02);
  const double before = SystemClock::Get().NowS();
  (*pool)->Stop();
  waiting.join();
  EXPECT_LT(SystemClock::Get().NowS() - before, 5);
  EXPECT_EQ((*pool)->Commit(0).code(), StatusCode::kUnavailable);
}

// ---- kill -9

constexpr char kCrashPool[] = R"({"P":2,"S":1,"G":2,"retries":1,"window":{"policy":"greedy"}})";
constexpr int kCrashSteps = 5;

// One process that is pool, agents and trainer at once, and goes on from whatever the run folder holds.
void PlayJob(const std::string& run) {
  ServerOptions options;
  options.run = run;
  options.config = Config(kCrashPool);
  options.job_incarnation = "job";
  Server server(options);
  Status started = server.Start();
  TEMPER_CHECK(started.ok()) << started.message();
  DataPool& pool = server.pool();
  const std::string name = std::to_string(getpid());
  int64_t step = Exists(run + "/checkpoint") ? std::atoll(ReadFile(run + "/checkpoint")->c_str()) : 0;
  TEMPER_CHECK(pool.AttachAgents(name).ok());
  Result<std::vector<int64_t>> attached = pool.AttachTrainer(name, step);
  TEMPER_CHECK(attached.ok()) << attached.status().message();
  while (step < kCrashSteps) {
    Result<LeaseReply> lease = pool.Lease(name, step, 0);
    TEMPER_CHECK(lease.ok()) << lease.status().message();
    if (lease->ready) {
      // The same groups for the same step in every life.
      std::string members;
      for (const LeasedGroup& g : lease->groups) {
        for (const std::string& m : g.members) members += m + "\n";
      }
      const std::string path = run + "/batch-" + std::to_string(step);
      if (Exists(path)) TEMPER_CHECK(*ReadFile(path) == members) << "batch " << step << " came back changed";
      TEMPER_CHECK(WriteFileAtomic(path, members).ok());
      TEMPER_CHECK(pool.Update(name, step).ok());
      ++step;
      if (step % 2 == 0) {
        TEMPER_CHECK(WriteFileAtomic(run + "/checkpoint", std::to_string(step)).ok());
        TEMPER_CHECK(pool.Commit(step).ok());
      }
      continue;
    }
    Result<TakeIssuesReply> taken = pool.TakeIssues(name, 3, 1000);
    TEMPER_CHECK(taken.ok()) << taken.status().message();
    for (const Issue& i : taken->issues) {
      FinishedAttempt f;
      f.id = i.id;
      f.outcome = (i.id.group + i.id.rollout) % 5 == 0 && i.id.attempt == 1 ? "infra_failure" : "scored";
      if (f.outcome == "scored") f.reward = i.id.rollout;
      f.reason = "test";
      f.trajectory = fmt::format("{}.{}.{}", i.id.group, i.id.rollout, i.id.attempt);
      TEMPER_CHECK(pool.Finish(name, f).ok());
    }
  }
  TEMPER_CHECK(pool.Close(CloseReason::kJobEnd).ok());
  server.Stop();
}

TEST(PoolCrash, DISABLED_Process) { PlayJob(std::getenv("TEMPER_TEST_RUN")); }

int RunProcess(const std::string& run, const std::string& faults) {
  const pid_t pid = fork();
  if (pid == 0) {
    setenv("TEMPER_TEST_RUN", run.c_str(), 1);
    setenv("TEMPER_FAULTS", faults.c_str(), 1);
    execl("/proc/self/exe", "pool", "--gtest_also_run_disabled_tests", "--gtest_filter=PoolCrash.DISABLED_Process", "--gtest_brief=1", nullptr);
    _exit(127);
  }
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return status;
}

// What could go wrong: killed at any moment of a write, the pool comes back with lost or doubled work, or a ledger that does not
// balance or does not lead to its decisions.
TEST(PoolCrash, KilledAtEveryPointItGoesOn) {
  const PoolConfig config = Config(kCrashPool);
  int deaths = 0;
  for (const char* point : {"pool.before_write", "pool.after_write", "pool.after_ledger"}) {
    for (int first : {1, 2, 7}) {
      const std::string run = NewRun();
      bool done = false;
      for (int at = first; !done && at < 200; at = at * 3 + 2) {
        const int status = RunProcess(run, fmt::format("{}=exit@{}", point, at));
        done = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!done) ++deaths;
        if (Exists(run + kLedgerFile)) {
          VerifyReport report = Verify(config, run);
          ASSERT_TRUE(report.balanced || std::string(point) == "pool.after_write") << point << "@" << at << " " << PrintVerify(report);
        }
      }
      ASSERT_TRUE(done);
      VerifyReport report = Verify(config, run);
      EXPECT_TRUE(report.ok()) << point << " " << PrintVerify(report);
      EXPECT_EQ(report.consumed, kCrashSteps * config.P);
      EXPECT_EQ(report.running, 0);
      Result<std::unique_ptr<StoreReader>> reader = StoreReader::Open(run);
      ASSERT_TRUE(reader.ok()) << reader.status().message();
      for (int b = 0; b < kCrashSteps; ++b) {
        for (const std::string& id : Split(*ReadFile(run + "/batch-" + std::to_string(b)), '\n')) {
          if (id.empty()) continue;
          Result<AttemptId> parsed = ParseAttemptId(id);
          ASSERT_TRUE(parsed.ok());
          EXPECT_EQ(*(*reader)->Read(parsed->group, parsed->rollout, parsed->attempt), id);
        }
      }
      EXPECT_TRUE(RemoveAll(run).ok());
    }
  }
  EXPECT_GT(deaths, 12);
}

// What could go wrong: the two stores differ, or a write is not atomic.
class StoreContract : public testing::TestWithParam<bool> {};
TEST_P(StoreContract, WritesAndReads) {
  const std::string run = NewRun();
  std::unique_ptr<Store> store;
  if (GetParam()) {
    store = *OpenRocksStore(run);
    EXPECT_FALSE(OpenRocksStore(run).ok()) << "held by another";
  } else {
    store = MakeMemoryStore();
  }
  EXPECT_FALSE(store->State()->has_value());
  EXPECT_EQ(store->Trajectory({1, 2, 3}).status().code(), StatusCode::kNotFound);
  StoreWrite w;
  w.state = std::string("a\0b", 3);
  for (const auto& [id, bytes] : {std::pair(AttemptId{1, 2, 3}, "x"), std::pair(AttemptId{1, 2, 4}, "")}) w.records.emplace_back(id, PackRecord(id, bytes));
  for (int64_t seq = 1; seq <= 300; ++seq) w.ledger.emplace_back(seq, std::to_string(seq));
  EXPECT_TRUE(store->Write(w, false).ok());
  StoreWrite drop;
  drop.drop_ledger_to = 256;
  EXPECT_TRUE(store->Write(drop, true).ok());
  EXPECT_EQ(**store->State(), w.state);
  EXPECT_EQ(*store->Trajectory({1, 2, 3}), "x");
  EXPECT_EQ(*store->Trajectory({1, 2, 4}), "");
  auto lines = *store->Ledger();
  ASSERT_EQ(lines.size(), 44u);
  EXPECT_EQ(lines.front(), (std::pair<int64_t, std::string>{257, "257"}));
  store.reset();
  EXPECT_TRUE(RemoveAll(run).ok());
}
INSTANTIATE_TEST_SUITE_P(Stores, StoreContract, testing::Bool(), [](const auto& param) { return param.param ? "Rocks" : "Memory"; });

TEST(StoreReaderTest, Names) {
  EXPECT_EQ(*ParseAttemptId("3.1"), (AttemptId{3, 1, 0}));
  EXPECT_EQ(*ParseAttemptId("3.1.2"), (AttemptId{3, 1, 2}));
  for (const char* bad : {"", "3", "3.", "3.1.0", "3.1.2.4", "a.b", "-1.0", "3.99999999999", "3.1 "}) EXPECT_FALSE(ParseAttemptId(bad).ok()) << bad;
  EXPECT_EQ(StoreReader::Open("/nonexistent").status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace temper::datapool
