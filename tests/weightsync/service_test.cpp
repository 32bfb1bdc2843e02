// Publisher and Subscriber over real sockets and real memory: in one process, and with worker processes that are killed and stopped.
// `weightsync_service_test --worker ADDRESS NAME INCARNATION` is such a worker.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "common/clock.h"
#include "common/faults.h"
#include "common/rng.h"
#include "common/rpc.h"
#include "engine/weights.h"
#include "temper/v1/weightsync.pb.h"
#include "tests/engine/test_models.h"
#include "tests/fuzz/mutate.h"
#include "tests/harness/tiny_model.h"
#include "weightsync/manifest.h"
#include "weightsync/publisher.h"
#include "weightsync/publisher_core.h"
#include "weightsync/subscriber.h"
#include "weightsync/subscriber_core.h"
#include "weightsync/wire.h"

namespace temper::weightsync {
namespace {

engine::ModelConfig TinyConfig() { return TinyModel(40); }

void SleepMs(int ms) { SystemClock::Get().SleepS(ms * 1e-3); }

// A subscriber with a stand-in for the engine thread, which checks that what it serves is what the version says.
class Worker {
 public:
  Worker(const std::string& address, const std::string& name, uint64_t incarnation) {
    subscriber_ = std::make_unique<Subscriber>(
        SubscriberOptions{.publisher_address = address, .worker = name, .incarnation = incarnation, .retry_ms = 20}, [] {});
    thread_ = std::thread([this] { Loop(); });
  }
  ~Worker() {
    stop_ = true;
    thread_.join();
    subscriber_->Stop();
  }
  int64_t step() const { return step_; }
  uint64_t epoch() const { return epoch_; }
  bool serving() const { return serving_; }
  engine::Digest digest() {
    std::lock_guard lock(mutex_);
    return digest_;
  }
  Subscriber& subscriber() { return *subscriber_; }

 private:
  void Loop() {
    engine::ComputeWeights weights;
    while (!stop_) {
      if (auto staged = subscriber_->TakeSwap()) {
        weights = std::move(staged->weights);
        {
          std::lock_guard lock(mutex_);
          digest_ = weights.ComputeDigest();
          epoch_ = staged->version.epoch;
          step_ = staged->version.step;
        }
        subscriber_->Swapped(staged->version);
      }
      serving_ = subscriber_->MayServe();
      if (serving_) {
        // A canary: the digest of what is read never changes under a version.
        std::lock_guard lock(mutex_);
        TEMPER_CHECK(weights.ComputeDigest() == digest_) << "bytes changed while served";
      }
      SleepMs(1);
    }
  }
  std::unique_ptr<Subscriber> subscriber_;
  std::thread thread_;
  std::atomic<bool> stop_{false}, serving_{false};
  std::atomic<int64_t> step_{-1};
  std::atomic<uint64_t> epoch_{0};
  std::mutex mutex_;
  engine::Digest digest_;
};

// The trainer's side.
struct Trainer {
  Trainer(const std::string& name, uint64_t epoch, int expected, int64_t lease_ms = 1000, int64_t join_ms = 5000) {
    PublisherOptions o{.manifest = MakeManifest(TinyConfig(), engine::Profile::kBf16)};
    o.epoch = epoch;
    o.expected_workers = expected;
    o.lease_ms = lease_ms;
    o.join_ms = join_ms;
    publisher = *Publisher::Create(o);
    server = std::make_unique<RpcServer>(*ListenAbstract(name));
    server->Register(publisher->service());
    TEMPER_CHECK(server->Start().ok());
  }
  ~Trainer() {
    publisher->Stop();
    server->Stop(0);
  }
  Result<PublishReport> Publish(int64_t step, int64_t deadline_ms = 10000) {
    engine::Parameters p = engine::InitParameters(TinyConfig(), static_cast<uint64_t>(step) + 17);
    std::span<std::byte> bytes = *publisher->Begin();
    engine::Pack(p, engine::Profile::kBf16, bytes);
    digest = engine::ComputeWeights::FromParameters(p, engine::Profile::kBf16).ComputeDigest();
    return publisher->Publish(step, digest, deadline_ms);
  }
  std::unique_ptr<Publisher> publisher;
  std::unique_ptr<RpcServer> server;
  engine::Digest digest;
};

std::string Name(const char* test) { return std::string("temper-test-weightsync-") + test + std::to_string(getpid()); }
std::string Address(const std::string& name) { return "unix-abstract:" + name; }

template <typename F>
bool Eventually(F condition, int ms = 5000) {
  for (int i = 0; i < ms / 5; ++i) {
    if (condition()) return true;
    SleepMs(5);
  }
  return condition();
}

// Goes wrong if Publish returns before a worker serves the version, or a worker serves other bytes.
TEST(WeightSync, EveryWorkerServesWhenPublishReturns) {
  std::string name = Name("all");
  Trainer trainer(name, 1, 2);
  Worker a(Address(name), "a", 1), b(Address(name), "b", 1);
  for (int step = 0; step < 30; ++step) {
    Result<PublishReport> report = trainer.Publish(step);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_EQ(report->workers, 2);
    EXPECT_EQ(a.step(), step);
    EXPECT_EQ(b.step(), step);
    EXPECT_EQ(a.digest(), trainer.digest);
    EXPECT_EQ(b.digest(), trainer.digest);
  }
  EXPECT_LE(trainer.publisher->Metrics()["arenas"], 2) << "two arenas suffice when workers keep up";
  EXPECT_EQ(trainer.Publish(29).status().code(), StatusCode::kInvalidArgument);
}

// Goes wrong if a worker that joins later waits for the next version instead of getting the newest.
TEST(WeightSync, LateJoinersGetTheNewest) {
  std::string name = Name("late");
  Trainer trainer(name, 1, 0);
  ASSERT_TRUE(trainer.Publish(0).ok());
  ASSERT_TRUE(trainer.Publish(1).ok());
  ASSERT_TRUE(trainer.Publish(2).ok());
  Worker late(Address(name), "late", 1);
  EXPECT_TRUE(Eventually([&] { return late.step() == 2 && late.serving(); }));
  EXPECT_EQ(late.digest(), trainer.digest);
}

// Goes wrong if a restarted trainer's versions are ignored, or an older step of a newer epoch is taken for old.
TEST(WeightSync, TrainerRestartIsANewEpoch) {
  std::string name = Name("restart");
  Fd keep = *ListenAbstract(name);  // as the supervisor does: the socket outlives the trainer
  auto trainer = std::make_unique<Trainer>(name + "x", 1, 0);
  trainer->server->Stop(0);
  auto start = [&](uint64_t epoch) {
    trainer = std::make_unique<Trainer>(name + std::to_string(epoch), epoch, 1);
    trainer->server = std::make_unique<RpcServer>(Fd(dup(keep.get())));
    trainer->server->Register(trainer->publisher->service());
    ASSERT_TRUE(trainer->server->Start().ok());
  };
  start(1);
  Worker w(Address(name), "w", 1);
  ASSERT_TRUE(trainer->Publish(5).ok());
  EXPECT_EQ(w.step(), 5);
  trainer.reset();
  SleepMs(1300);  // longer than the lease
  EXPECT_TRUE(w.serving()) << "without a trainer the worker serves on";
  start(2);
  Result<PublishReport> report = trainer->Publish(3);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->workers, 1);
  EXPECT_EQ(w.step(), 3);
  EXPECT_EQ(w.epoch(), 2u);
}

// Goes wrong if corrupted bytes are served, or one bad read ends the job.
TEST(WeightSync, CorruptedBytesAreRefused) {
  std::string name = Name("corrupt");
  Trainer trainer(name, 1, 1);
  Worker w(Address(name), "w", 1);
  ASSERT_TRUE(trainer.Publish(0).ok());
  Faults::Get().Arm("weightsync.corrupt_staged", "fail", 1);
  Result<PublishReport> report = trainer.Publish(1);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->refused, 1);
  EXPECT_EQ(w.digest(), trainer.digest);
  // What the trainer says and what it wrote differ: refused for good, and the worker stays with what it had.
  engine::Digest good = trainer.digest;
  std::span<std::byte> bytes = *trainer.publisher->Begin();
  std::memset(bytes.data(), 0x11, bytes.size());
  Result<PublishReport> bad = trainer.publisher->Publish(2, good, 5000);
  EXPECT_EQ(bad.status().code(), StatusCode::kDataLoss) << bad.status().ToString();
  EXPECT_EQ(w.step(), 1);
  ASSERT_TRUE(trainer.Publish(3).ok());
  EXPECT_EQ(w.step(), 3);
}

// Goes wrong if the fault point does not bite: the tests of the ratio check stand on it.
TEST(WeightSync, FlippedWeightIsServed) {
  std::string name = Name("flip");
  Trainer trainer(name, 1, 1);
  Worker w(Address(name), "w", 1);
  ASSERT_TRUE(trainer.Publish(0).ok());
  Faults::Get().Arm("weightsync.flip_verified", "fail", 1);
  ASSERT_TRUE(trainer.Publish(1).ok());
  EXPECT_FALSE(w.digest() == trainer.digest);
  ASSERT_TRUE(trainer.Publish(2).ok());
  EXPECT_EQ(w.digest(), trainer.digest);
}

// Goes wrong if a bug of the trainer could write bytes that workers read: the sealed arena is read-only here too.
TEST(WeightSyncDeathTest, SealedBytesCannotBeWritten) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        auto p = *Publisher::Create({.manifest = MakeManifest(TinyConfig(), engine::Profile::kBf16), .epoch = 1, .expected_workers = 0});
        std::span<std::byte> bytes = *p->Begin();
        bytes[0] = std::byte{1};
        (void)p->Publish(0, {}, 1000);
        bytes[0] = std::byte{2};
      },
      "");
}

// Goes wrong if a worker, which knows the model by the manifest alone, computes another one.
TEST(WeightSync, TheManifestHoldsTheWholeConfig) {
  for (const auto& [name, config] : engine::AllConfigs()) {
    const auto read = ReadManifest(MakeManifest(config, engine::Profile::kBf16));
    ASSERT_TRUE(read.ok()) << name << ": " << read.status().ToString();
    EXPECT_TRUE(read->config == config) << name;
  }
  engine::ModelConfig odd = engine::AllConfigs()[5].config;  // numbers that no default has
  odd.rope_scaling = {engine::RopeScaling::Kind::kYarn, 3.5, 1.25, 4.5, 77, 31, 1.5, 1.75, false};
  odd.local_rope_theta = 12345;
  odd.bos_id = 3, odd.pad_id = 4, odd.eos_ids = {5, 6};
  EXPECT_TRUE(ReadManifest(MakeManifest(odd, engine::Profile::kF32))->config == odd);
}

// Goes wrong if another model's worker joins.
TEST(WeightSync, OtherModelsAreRefused) {
  Manifest m = MakeManifest(TinyConfig(), engine::Profile::kBf16);
  EXPECT_TRUE(ReadManifest(m).ok());
  Manifest other = m;
  other.config_hash ^= 1;
  EXPECT_EQ(ReadManifest(other).status().code(), StatusCode::kInvalidArgument);
  other = m;
  other.bytes -= 64;
  EXPECT_FALSE(ReadManifest(other).ok());
  other = m;
  other.layout = "x";
  EXPECT_FALSE(ReadManifest(other).ok());
  other = m;
  other.profile = "f32";
  EXPECT_FALSE(ReadManifest(other).ok());
  for (size_t i = 0; i < m.config_json.size(); ++i) {
    other = m;
    other.config_json[i] ^= 0x15;
    EXPECT_FALSE(ReadManifest(other).ok()) << other.config_json;  // never a crash, never accepted
  }
}

// Goes wrong if a manifest that is no configuration of ours, or one of a model no machine could hold, takes a worker down.
TEST(WeightSync, SurvivesMutatedManifests) {
  Rng rng(5);
  const std::vector<std::string> words = {"0", "-1", "2147483647", "1e300", "null", "\"llama3\"", "\"linear\"", "true", "[1,2]", "{}"};
  const Manifest good = MakeManifest(TinyConfig(), engine::Profile::kBf16);
  int read = 0;
  for (int i = 0; i < 20000; ++i) {
    Manifest m = good;
    if (i % 8 == 0) m.profile = Mutated(m.profile, {"f32", "bf16"}, rng);
    m.config_json = i % 3 ? Mutated(good.config_json, words, rng) : good.config_json;
    if (i % 5 == 0) m.config_hash = HashName(0, m.config_json);
    if (rng.Chance(0.1)) m.bytes = rng.Next();
    if (rng.Chance(0.1)) m.layout = Mutated(m.layout, {}, rng);
    Result<ManifestModel> model = ReadManifest(m);
    if (!model.ok()) continue;
    ++read;
    EXPECT_EQ(MakeManifest(model->config, model->profile).bytes, m.bytes);
  }
  EXPECT_GT(read, 100);
}

// Goes wrong if bytes on the wire can take either side down (seeded mutations of real messages).
TEST(WeightSync, SurvivesMutatedMessages) {
  std::mt19937_64 rng(3);
  Report report{.worker = "w", .incarnation = 1, .seq = 1, .active = Version{1, 2}, .staged = Version{1, 3}};
  report.held = {{1, 2}, {1, 3}};
  v1::SyncRequest request;
  ToProto(report, &request);
  Answer answer{.epoch = 1, .offer = VersionRecord{.version = {1, 3}, .bytes = 64, .pid = 1, .fd = 3}, .commit = Version{1, 2}, .lease_ms = 1000};
  v1::SyncReply reply;
  ToProto(answer, &reply);
  PublisherCore publisher(1, 1000);
  SubscriberCore subscriber("w", 1, 1);
  int parsed = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = i % 2 ? request.SerializeAsString() : reply.SerializeAsString();
    for (uint64_t n = rng() % 5; n > 0; --n) {
      size_t at = rng() % bytes.size();
      if (rng() % 3) {
        bytes[at] = static_cast<char>(rng());
      } else if (bytes.size() > 1) {
        bytes.erase(at, 1);
      }
    }
    if (i % 2) {
      v1::SyncRequest in;
      if (!in.ParseFromString(bytes)) continue;
      Result<Report> r = FromProto(in);
      if (!r.ok()) continue;
      publisher.OnReport(*r, i);
      publisher.AnswerTo(*r);
    } else {
      v1::SyncReply in;
      if (!in.ParseFromString(bytes)) continue;
      Result<Answer> a = FromProto(in);
      if (!a.ok()) continue;
      subscriber.NextReport({}, i);
      subscriber.OnAnswer(*a);
    }
    ++parsed;
  }
  EXPECT_GT(parsed, 1000);
}

pid_t Spawn(const std::string& address, const std::string& name, int incarnation) {
  pid_t pid = fork();
  if (pid == 0) {
    std::string number = std::to_string(incarnation);
    execl("/proc/self/exe", "weightsync_service_test", "--worker", address.c_str(), name.c_str(), number.c_str(), nullptr);
    _exit(127);
  }
  return pid;
}

void Kill(pid_t pid, int signal) {
  kill(pid, signal);
  if (signal == SIGKILL) waitpid(pid, nullptr, 0);
}

// Goes wrong if a killed worker holds up Publish, or its successor is not served the newest version.
TEST(WeightSyncProcesses, KilledWorkerIsDroppedAtOnce) {
  std::string name = Name("kill");
  Trainer trainer(name, 1, 2, 20000);
  pid_t a = Spawn(Address(name), "a", 1), b = Spawn(Address(name), "b", 1);
  ASSERT_TRUE(trainer.Publish(0).ok());
  Kill(b, SIGKILL);
  Result<PublishReport> report = trainer.Publish(1);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->workers, 1);
  EXPECT_LT(report->wall_ms, 2000) << "the lease is 20 s, the process is gone now";
  b = Spawn(Address(name), "b", 2);
  EXPECT_TRUE(Eventually([&] { return trainer.publisher->Metrics()["workers"] == 2; }));
  report = trainer.Publish(2);
  ASSERT_TRUE(report.ok());
  EXPECT_TRUE(Eventually([&] { return trainer.publisher->Describe()[1].find("serves 1.2") != std::string::npos; }));
  Kill(a, SIGKILL);
  Kill(b, SIGKILL);
}

// Goes wrong if a stopped worker blocks Publish beyond the lease, if its bytes are written again while it sleeps, or if it serves
// an old version when it wakes.
TEST(WeightSyncProcesses, StoppedWorkerIsFencedAndComesBack) {
  std::string name = Name("stop");
  Trainer trainer(name, 1, 2, 700);
  pid_t a = Spawn(Address(name), "a", 1), b = Spawn(Address(name), "b", 1);
  ASSERT_TRUE(trainer.Publish(0).ok());
  Kill(b, SIGSTOP);
  for (int step = 1; step < 5; ++step) {
    Result<PublishReport> report = trainer.Publish(step);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_LT(report->wall_ms, 3000);
    EXPECT_EQ(report->workers, 1);
  }
  Kill(b, SIGCONT);  // its own canary would abort it if its bytes had changed
  EXPECT_TRUE(Eventually([&] {
    auto lines = trainer.publisher->Describe();
    return lines.size() == 2 && lines[1].find("serves 1.4") != std::string::npos;
  }));
  int status = 0;
  EXPECT_EQ(waitpid(b, &status, WNOHANG), 0) << "the worker aborted: " << status;
  Result<PublishReport> report = trainer.Publish(5);
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->workers, 2);
  Kill(a, SIGKILL);
  Kill(b, SIGKILL);
}

}  // namespace

int WorkerMain(char** argv) {
  Worker worker(argv[2], argv[3], std::strtoull(argv[4], nullptr, 10));
  for (;;) pause();
}

}  // namespace temper::weightsync

int main(int argc, char** argv) {
  if (argc == 5 && !std::strcmp(argv[1], "--worker")) return temper::weightsync::WorkerMain(argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
