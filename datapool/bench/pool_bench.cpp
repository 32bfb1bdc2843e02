#include "datapool/bench/pool_bench.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <mutex>
#include <thread>

#include "common/clock.h"
#include "common/file.h"
#include "common/rng.h"
#include "common/rpc.h"
#include "common/rpc_call.h"
#include "datapool/bench/raw_store.h"
#include "datapool/bench/redis.h"
#include "datapool/format.h"
#include "datapool/server.h"
#include "datapool/service.h"
#include "datapool/store.h"
#include "temper/v1/pool.grpc.pb.h"
#include "temper/v1/types.pb.h"

namespace temper::datapool::bench {
namespace {

constexpr int64_t kTurn = 256;                  // tokens of one run of a trajectory
constexpr size_t kDistinctBytes = 16 << 20;     // of different records in a sample, at least 64
constexpr int64_t kRawBatch = 64;               // records a raw write, as many as the pool makes durable together,
constexpr size_t kRawBatchBytes = 4 << 20;      // or so many bytes
constexpr int kCallers = 32;                    // attempts that end at the same time
// All rewards of a group are equal: it is buried when complete, and the next one is admitted. So nothing but writing is measured.
constexpr char kWriteConfig[] = R"({"P":16,"S":1,"G":8,"zero_signal":"refill","window":{"policy":"greedy"}})";
constexpr char kLeaseConfig[] = R"({"P":64,"S":0,"G":8})";
constexpr int64_t kLeaseRecords = 64 * 8, kLeaseTokens = 4000;
constexpr char kSustainConfig[] = R"({"P":16,"S":1,"G":8,"window":{"policy":"greedy"}})";
constexpr int64_t kCommitEvery = 4;             // steps
constexpr double kAskedTokens = 2e6, kAskedHandlesMs = 50, kAskedBytes = 1e9;  // a second; ms; a second

double Now() { return SystemClock::Get().NowS(); }

double Median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  const size_t n = x.size();
  return n == 0 ? 0 : n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

Row Compare(const std::string& work, const std::string& name, const std::string& unit, const std::string& reference, const std::vector<double>& ours,
            const std::vector<double>& theirs) {
  Row row{.work = work, .name = name, .unit = unit, .reference = reference, .samples = ours};
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(unit == "ms" ? theirs[i] / ours[i] : ours[i] / theirs[i]);
  row.ours = Median(ours);
  row.theirs = Median(theirs);
  row.ratio = Median(ratios);
  return row;
}

std::vector<std::string> MakeRecords(int64_t tokens) {
  std::vector<std::string> out;
  size_t bytes = 0;
  while (out.size() < 64 || (bytes < kDistinctBytes && out.size() < 4096)) {
    out.push_back(MakeTrajectory(tokens, out.size()));
    bytes += out.back().size();
  }
  return out;
}

// Agents that end one attempt after another, `callers` at a time, each call waiting for its answer.
class Agents {
 public:
  Agents(DataPool& pool, const std::vector<std::string>& records, int64_t count, bool equal_rewards = false)
      : pool_(pool), records_(records), equal_rewards_(equal_rewards), left_(count) {}

  // All of `count`, or until Stop.
  Status Finish(int callers) {
    return Together(callers, [this]() -> Status {
      while (std::optional<FinishedAttempt> f = Next()) RETURN_IF_ERROR(pool_.Finish("a", *f).status());
      return Status::Ok();
    });
  }
  // The same, so many a call as raw RocksDB gets a write.
  Status FinishInBatches(LocalDataPool& pool, int callers) {
    return Together(callers, [this, &pool]() -> Status {
      for (;;) {
        std::vector<FinishedAttempt> batch;
        size_t bytes = 0;
        while (batch.size() < kRawBatch && bytes < kRawBatchBytes) {
          std::optional<FinishedAttempt> f = Next();
          if (!f) break;
          bytes += f->trajectory.size();
          batch.push_back(*std::move(f));
        }
        if (batch.empty()) return Status::Ok();
        for (const Result<bool>& counted : pool.FinishMany("a", batch)) RETURN_IF_ERROR(counted.status());
      }
    });
  }
  Status TakeSome() {
    std::lock_guard lock(mutex_);
    return Refill();
  }
  void Stop() { stopped_ = true; }

 private:
  Status Refill() {
    ASSIGN_OR_RETURN(const TakeIssuesReply taken, pool_.TakeIssues("a", 4096, 50));
    for (const Issue& issue : taken.issues) open_.push_back(issue.id);
    return Status::Ok();
  }
  Status Together(int callers, const std::function<Status()>& caller) {
    std::vector<std::thread> threads;
    std::mutex mutex;
    Status failed;
    for (int i = 0; i < callers; ++i) {
      threads.emplace_back([&] {
        const Status s = caller();
        std::lock_guard lock(mutex);
        if (failed.ok()) failed = s;
        stopped_ = stopped_ || !s.ok();
      });
    }
    for (std::thread& thread : threads) thread.join();
    return failed;
  }
  // Nothing: all are done, or Stop was called, or the pool hands out none (which the caller sees at its next call).
  std::optional<FinishedAttempt> Next() {
    if (stopped_ || left_.fetch_sub(1) <= 0) return std::nullopt;
    FinishedAttempt f;
    while (f.id.attempt == 0) {
      if (stopped_) return std::nullopt;
      std::lock_guard lock(mutex_);
      if (open_.empty() && !Refill().ok()) return std::nullopt;
      if (open_.empty()) continue;
      f.id = open_.front();
      open_.pop_front();
    }
    f.outcome = "scored";
    f.reward = equal_rewards_ ? 1 : f.id.rollout % 2;
    f.trajectory = records_[static_cast<size_t>(f.id.group * 8 + f.id.rollout) % records_.size()];
    return f;
  }

  DataPool& pool_;
  const std::vector<std::string>& records_;
  const bool equal_rewards_;
  std::atomic<int64_t> left_;
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::deque<AttemptId> open_;
};

// A pool in a process of its own.
class PoolProcess {
 public:
  static Result<std::unique_ptr<PoolProcess>> Start(const Options& options, const std::string& dir, const std::string& config) {
    static int number = 0;
    RETURN_IF_ERROR(MakeDirs(dir));
    std::unique_ptr<PoolProcess> out(new PoolProcess());
    const std::string name = fmt::format("temper-bench-pool-{}-{}", getpid(), ++number);
    out->address_ = "unix-abstract:" + name;
    out->pid_ = fork();
    if (out->pid_ < 0) return ErrnoStatus("fork", errno);
    if (out->pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      execl(options.program.c_str(), "temper", "bench", "pool", "--serve", dir.c_str(), name.c_str(), config.c_str(), nullptr);
      _exit(127);
    }
    out->pool_ = ConnectDataPool(out->address_);
    RETURN_IF_ERROR(out->pool_->AttachAgents("a").status());
    RETURN_IF_ERROR(out->pool_->AttachTrainer("t", 0).status());
    return out;
  }
  ~PoolProcess() {
    pool_.reset();
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  DataPool& pool() { return *pool_; }
  const std::string& address() const { return address_; }

 private:
  PoolProcess() = default;
  pid_t pid_ = -1;
  std::string address_;
  std::unique_ptr<DataPool> pool_;
};

class Bench {
 public:
  Bench(const Options& options, const std::function<void(const Row&)>& emit) : options_(options), emit_(emit) {}

  Status Write(RedisPool* redis) {
    for (const int64_t tokens : {1'000, 16'000, 200'000}) {
      const std::vector<std::string> records = MakeRecords(tokens);
      size_t bytes = 0;
      for (const std::string& record : records) bytes += record.size();
      const double each = static_cast<double>(bytes) / static_cast<double>(records.size());
      const auto count = std::max<int64_t>(kRawBatch, static_cast<int64_t>(static_cast<double>(options_.sample_bytes) / each));
      std::vector<const std::string*> all;
      double total = 0;
      for (int64_t i = 0; i < count; ++i) {
        all.push_back(&records[static_cast<size_t>(i) % records.size()]);
        total += static_cast<double>(all.back()->size());
      }
      std::vector<double> raw, here, beyond, peer;
      for (int i = -1; i < options_.samples; ++i) {  // the first of each warms up
        ASSIGN_OR_RETURN(const double raw_s, WriteRaw(all));
        ASSIGN_OR_RETURN(const double here_s, WriteHere(records, count));
        ASSIGN_OR_RETURN(const double beyond_s, WriteBeyond(records, count));
        double peer_s = 0;
        if (redis) {
          ASSIGN_OR_RETURN(peer_s, WriteRedis(*redis, all));
        }
        if (i < 0) continue;
        raw.push_back(total / raw_s / 1e6);
        here.push_back(total / here_s / 1e6);
        beyond.push_back(total / beyond_s / 1e6);
        peer.push_back(total / peer_s / 1e6);
      }
      const std::string what = fmt::format("{}k tokens, {:.1f} kB a record", tokens / 1000, each / 1e3);
      const std::string floor = "raw RocksDB " + RocksVersion();
      emit_(Compare("write", what + ", in one process", "MB/s", floor, here, raw));
      emit_(Compare("write", what + ", over the socket", "MB/s", floor, beyond, raw));
      if (redis) emit_(Compare("write", what + ", over the socket", "MB/s", redis->version(), beyond, peer));
    }
    return Status::Ok();
  }

  Status Lease(RedisPool* redis) {
    const std::vector<std::string> records = MakeRecords(kLeaseTokens);
    ASSIGN_OR_RETURN(const std::unique_ptr<PoolProcess> process, PoolProcess::Start(options_, NewDir("lease"), kLeaseConfig));
    Agents agents(process->pool(), records, kLeaseRecords);
    RETURN_IF_ERROR(agents.Finish(kCallers));
    std::vector<const std::string*> all;
    for (int64_t i = 0; i < kLeaseRecords; ++i) all.push_back(&records[static_cast<size_t>(i) % records.size()]);
    if (redis) RETURN_IF_ERROR(redis->Add(all));
    const std::shared_ptr<grpc::Channel> channel = RpcChannel(process->address());
    const std::unique_ptr<v1::Pool::Stub> stub = v1::Pool::NewStub(channel);
    std::vector<double> handles, rate, whole, peer;
    for (int i = -1; i < options_.samples; ++i) {
      const std::string trainer = fmt::format("t{}", i);
      RETURN_IF_ERROR(process->pool().AttachTrainer(trainer, 0).status());
      v1::PoolLeaseRequest ask;
      ask.set_incarnation(trainer);
      ask.set_wait_ms(1000);
      v1::PoolLeaseReply reply;
      const double begin = Now();
      RETURN_IF_ERROR(RpcCall(*channel, *stub, &v1::Pool::Stub::Lease, ask, &reply));
      const double handles_s = Now() - begin;
      if (!reply.ready()) return Internal("the batch is not ready");
      const v1::PoolSegment& where = reply.segment();
      ASSIGN_OR_RETURN(const SegmentView segment, SegmentView::Open({where.pid(), where.fd(), where.inode(), where.bytes()}));
      int64_t bytes = 0, members = 0;
      for (const v1::PoolLeasedGroup& g : reply.groups()) {
        for (const v1::PoolMember& m : g.members()) {
          ASSIGN_OR_RETURN(const std::string data, segment.Read({m.offset(), m.bytes(), m.checksum()}));
          bytes += static_cast<int64_t>(data.size());
          ++members;
        }
      }
      const double whole_s = Now() - begin;
      if (members != kLeaseRecords) return Internal(fmt::format("{} of {} members were leased", members, kLeaseRecords));
      double peer_s = 0;
      if (redis) {
        const double ask_s = Now();
        RETURN_IF_ERROR(redis->Lease(kLeaseRecords).status());
        peer_s = Now() - ask_s;
      }
      if (i < 0) continue;
      handles.push_back(handles_s * 1e3);
      rate.push_back(static_cast<double>(bytes) / (whole_s - handles_s) / 1e9);
      whole.push_back(whole_s * 1e3);
      peer.push_back(peer_s * 1e3);
    }
    if (redis) RETURN_IF_ERROR(redis->Forget());
    const std::string what = "64 groups x 8 x 4k tokens, ";
    const auto asked = [&](double value) { return std::vector<double>(handles.size(), value); };
    emit_(Compare("lease", what + "until the handles are there", "ms", "asked for", handles, asked(kAskedHandlesMs)));
    emit_(Compare("lease", what + "then their data, verified", "GB/s", "asked for", rate, asked(kAskedBytes / 1e9)));
    if (redis) emit_(Compare("lease", what + "until all data is there", "ms", redis->version(), whole, peer));
    return Status::Ok();
  }

  // A whole life of records, for a minute: written, leased, read, updated (which waits for the disk), committed.
  Status Sustain() {
    const std::vector<std::string> records = MakeRecords(kLeaseTokens);
    ASSIGN_OR_RETURN(const std::unique_ptr<PoolProcess> process, PoolProcess::Start(options_, NewDir("sustain"), kSustainConfig));
    const std::unique_ptr<DataPool> trainer = ConnectDataPool(process->address());
    Agents agents(process->pool(), records, int64_t{1} << 40);
    Status played;
    std::thread playing([&] { played = agents.Finish(kCallers); });
    const double begin = Now(), end = begin + options_.seconds, slice = options_.seconds / std::max(2, options_.samples);
    double next = begin + slice, committed = 0, said = 0, pending = 0, last = begin;
    std::vector<double> rates;
    const auto train = [&]() -> Status {
      for (int64_t step = 0; Now() < end; ++step) {
        LeaseReply lease;
        while (!lease.ready) {
          ASSIGN_OR_RETURN(lease, trainer->Lease("t", step, 1000));
        }
        for (const LeasedGroup& g : lease.groups) pending += static_cast<double>(g.members.size()) * kLeaseTokens;
        RETURN_IF_ERROR(trainer->Update("t", step));
        if ((step + 1) % kCommitEvery != 0) continue;
        RETURN_IF_ERROR(trainer->Commit(step + 1));
        committed += std::exchange(pending, 0);
        last = Now();
        if (last >= next) {
          rates.push_back((committed - said) / (last - (next - slice)));
          said = committed;
          next = last + slice;
        }
      }
      return Status::Ok();
    };
    const Status trained = train();
    agents.Stop();
    playing.join();
    RETURN_IF_ERROR(trained);
    RETURN_IF_ERROR(played);
    Row row = Compare("sustain", fmt::format("{:.0f} s: written, leased, read, updated, committed; 4k tokens each", last - begin), "tokens/s", "asked for", rates,
                      std::vector<double>(rates.size(), kAskedTokens));
    row.ours = committed / (last - begin);
    row.ratio = row.ours / kAskedTokens;
    emit_(row);
    return Status::Ok();
  }

 private:
  std::string NewDir(const std::string& name) {
    const std::string dir = options_.dir + "/" + name;
    (void)RemoveAll(dir);
    (void)MakeDirs(dir);
    return dir;
  }

  Result<double> WriteRaw(const std::vector<const std::string*>& records) {
    ASSIGN_OR_RETURN(const std::unique_ptr<RawStore> store, RawStore::Open(NewDir("raw")));
    const double begin = Now();
    std::vector<const std::string*> batch;
    size_t bytes = 0;
    for (size_t i = 0; i < records.size(); ++i) {
      batch.push_back(records[i]);
      bytes += records[i]->size();
      if (batch.size() < static_cast<size_t>(kRawBatch) && bytes < kRawBatchBytes && i + 1 < records.size()) continue;
      RETURN_IF_ERROR(store->Write(batch));
      batch.clear();
      bytes = 0;
    }
    return Now() - begin;
  }

  Result<double> Finished(DataPool& pool, const std::vector<std::string>& records, int64_t count) {
    Agents agents(pool, records, count, true);
    RETURN_IF_ERROR(agents.TakeSome());
    const double begin = Now();
    RETURN_IF_ERROR(agents.Finish(kCallers));
    return Now() - begin;
  }

  // As raw RocksDB is written: batches of kRawBatch records, two on their way.
  Result<double> WriteHere(const std::vector<std::string>& records, int64_t count) {
    const std::string dir = NewDir("here");
    Metrics metrics;
    LocalPoolOptions local;
    ASSIGN_OR_RETURN(const SimConfig config, ParseSimConfig(kWriteConfig));
    local.config = config.pool;
    local.job_incarnation = "bench";
    local.ledger_path = dir + kLedgerFile;
    ASSIGN_OR_RETURN(std::unique_ptr<Store> store, OpenRocksStore(dir + "/pool"));
    ASSIGN_OR_RETURN(const std::unique_ptr<LocalDataPool> pool, LocalDataPool::Open(local, std::move(store), metrics, Env::System()));
    RETURN_IF_ERROR(pool->AttachAgents("a").status());
    RETURN_IF_ERROR(pool->AttachTrainer("t", 0).status());
    Agents agents(*pool, records, count, true);
    RETURN_IF_ERROR(agents.TakeSome());
    const double begin = Now();
    RETURN_IF_ERROR(agents.FinishInBatches(*pool, 2));
    return Now() - begin;
  }

  Result<double> WriteBeyond(const std::vector<std::string>& records, int64_t count) {
    ASSIGN_OR_RETURN(const std::unique_ptr<PoolProcess> process, PoolProcess::Start(options_, NewDir("beyond"), kWriteConfig));
    return Finished(process->pool(), records, count);
  }

  Result<double> WriteRedis(RedisPool& redis, const std::vector<const std::string*>& records) {
    const double begin = Now();
    RETURN_IF_ERROR(redis.Add(records));
    const double seconds = Now() - begin;
    RETURN_IF_ERROR(redis.Forget());
    return seconds;
  }

  const Options& options_;
  const std::function<void(const Row&)>& emit_;
};

}  // namespace

const std::vector<std::string>& Works() {
  static const std::vector<std::string> kWorks = {"write", "lease", "sustain"};
  return kWorks;
}

std::string MakeTrajectory(int64_t tokens, uint64_t seed) {
  Rng rng(seed);
  v1::Trajectory t;
  t.set_session("0.0.1");
  t.set_attempt(1);
  t.set_outcome("scored");
  t.set_reward(1);
  for (int64_t made = 0; made < tokens;) {
    v1::TokenRun* run = t.add_runs();
    const int64_t n = std::min(kTurn, tokens - made);
    run->set_id(t.runs_size() - 1);
    run->set_parent(t.runs_size() - 2);
    // Every fourth turn is what a tool answered.
    const bool sampled = t.runs_size() % 4 != 1;
    run->set_provenance(sampled ? v1::SAMPLED : v1::CONTEXT);
    run->set_trainable(sampled);
    for (int64_t i = 0; i < n; ++i) {
      run->add_ids(static_cast<uint32_t>(std::exp(rng.Uniform() * std::log(49152.0))) - 1);
      if (sampled) run->add_logprobs(static_cast<float>(std::log(1 - rng.Uniform()) * (rng.Chance(0.5) ? 0.01 : 1)));
    }
    if (sampled) run->mutable_version()->set_step(1);
    made += n;
  }
  return t.SerializeAsString();
}

Status ServePool(const std::string& dir, const std::string& name, const std::string& config) {
  ServerOptions options;
  options.run = dir;
  ASSIGN_OR_RETURN(const SimConfig parsed, ParseSimConfig(config));
  options.config = parsed.pool;
  options.job_incarnation = "bench";
  ASSIGN_OR_RETURN(Fd listening, ListenAbstract(name));
  options.listen_fd = listening.Release();
  Server server(std::move(options));
  RETURN_IF_ERROR(server.Start());
  for (;;) pause();
}

Status RunPoolBench(const Options& options, const std::function<void(const Row&)>& emit, const std::function<void(const std::string&)>& say) {
  const auto wanted = [&](const char* work) { return options.works.empty() || std::count(options.works.begin(), options.works.end(), work) > 0; };
  RETURN_IF_ERROR(MakeDirs(options.dir));
  std::unique_ptr<RedisPool> redis;
  if (wanted("write") || wanted("lease")) {
    Result<std::unique_ptr<RedisPool>> started = RedisPool::Start(options.redis, options.dir + "/redis");
    if (started.ok()) redis = *std::move(started);
    else say("not run: Redis Streams: " + started.status().message());
  }
  Bench bench(options, emit);
  if (wanted("write")) RETURN_IF_ERROR(bench.Write(redis.get()));
  if (wanted("lease")) RETURN_IF_ERROR(bench.Lease(redis.get()));
  redis.reset();
  if (wanted("sustain")) RETURN_IF_ERROR(bench.Sustain());
  return Status::Ok();
}

}  // namespace temper::datapool::bench
