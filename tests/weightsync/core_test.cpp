// The two state machines against each other: loss, delay, crashes, hangs and trainer restarts, with the invariants of
// docs/weightsync.md checked at every step.
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <memory>
#include <random>

#include "weightsync/publisher_core.h"
#include "weightsync/subscriber_core.h"

namespace temper::weightsync {
namespace {

VersionRecord Record(const Version& v, uint64_t arena = 0) {
  return {.version = v, .digest = {v.epoch * 1000 + static_cast<uint64_t>(v.step), 7}, .bytes = 64, .pid = 1, .fd = 3, .arena = arena};
}

Report Join(const std::string& name, uint64_t seq, std::optional<Version> active = {}, std::optional<Version> staged = {}) {
  Report r{.worker = name, .incarnation = 1, .seq = seq, .active = active, .staged = staged};
  if (staged) {
    r.staged_digest = Record(*staged).digest;
    r.staged_bytes = Record(*staged).bytes;
    r.held.push_back(*staged);
  }
  if (active) r.held.push_back(*active);
  return r;
}

// Goes wrong if a version counts as served before each worker serves it, or workers are told to swap before all have staged.
TEST(PublisherCore, CommitsWhenEveryWorkerServes) {
  PublisherCore p(1, 1000);
  p.OnReport(Join("a", 1), 0);
  p.OnReport(Join("b", 1), 0);
  ASSERT_TRUE(p.Seal(Record({1, 0}), 0).ok());
  Answer a = p.AnswerTo(Join("a", 1));
  ASSERT_TRUE(a.offer);
  EXPECT_FALSE(a.commit);
  p.AnswerTo(Join("b", 1));
  p.OnReport(Join("a", 2, {}, Version{1, 0}), 10);
  EXPECT_FALSE(p.TellsNews(Join("a", 2))) << "b has not staged";
  p.OnReport(Join("b", 2, {}, Version{1, 0}), 10);
  EXPECT_EQ(p.newest_state(), VersionState::kCommittable);
  EXPECT_EQ(p.AnswerTo(Join("a", 2)).commit, (Version{1, 0}));
  p.OnReport(Join("a", 3, Version{1, 0}), 20);
  EXPECT_FALSE(p.committed());
  p.OnReport(Join("b", 3, Version{1, 0}), 20);
  EXPECT_EQ(p.committed(), (Version{1, 0}));
}

// Goes wrong if a worker that hangs or dies holds the trainer up, or if its bytes are written again while it may read them.
TEST(PublisherCore, LostWorkersDoNotBlock) {
  PublisherCore p(1, 1000);
  p.OnReport(Join("a", 1), 0);
  p.OnReport(Join("hung", 1), 0);
  p.OnReport(Join("dead", 1), 0);
  ASSERT_TRUE(p.Seal(Record({1, 0}), 0).ok());
  for (const char* w : {"a", "hung", "dead"}) p.AnswerTo(Join(w, 1));
  p.OnReport(Join("a", 2, {}, Version{1, 0}), 500);
  p.OnGone("dead", 1, 500);
  EXPECT_EQ(p.newest_state(), VersionState::kDistributing);
  p.OnReport(Join("a", 3, {}, Version{1, 0}), 1000);
  p.OnTick(1001);
  EXPECT_EQ(p.newest_state(), VersionState::kCommittable);
  p.OnReport(Join("a", 4, Version{1, 0}), 1100);
  EXPECT_EQ(p.committed(), (Version{1, 0}));
  EXPECT_EQ(p.lost(), 2);
  ASSERT_TRUE(p.Seal(Record({1, 1}), 1200).ok());
  p.OnReport(Join("a", 5, Version{1, 1}), 1300);
  EXPECT_EQ(p.ReadersOf({1, 0}), PublisherCore::Readers::kFenced) << "the hung worker may map it still";
  p.OnGone("hung", 1, 1400);
  EXPECT_EQ(p.ReadersOf({1, 0}), PublisherCore::Readers::kNone);
  // Nobody is left: the next version is served by everyone there is, that is, at once.
  p.OnGone("a", 1, 1500);
  ASSERT_TRUE(p.Seal(Record({1, 2}), 1600).ok());
  EXPECT_EQ(p.committed(), (Version{1, 2}));
}

// Goes wrong if stale or repeated messages count, a former incarnation gets bytes, or its lease is forgotten.
TEST(PublisherCore, StaleMessagesChangeNothing) {
  PublisherCore p(2, 1000);
  EXPECT_EQ(p.Seal(Record({1, 9}), 0).code(), StatusCode::kInvalidArgument);
  p.OnReport(Join("a", 5), 0);
  ASSERT_TRUE(p.Seal(Record({2, 3}), 0).ok());
  EXPECT_EQ(p.Seal(Record({2, 3}), 0).code(), StatusCode::kInvalidArgument);
  p.AnswerTo(Join("a", 5));
  p.OnReport(Join("a", 4, Version{2, 3}), 1);
  p.OnReport(Join("a", 5, Version{2, 3}), 1);
  EXPECT_FALSE(p.committed());
  Report second = Join("a", 1);
  second.incarnation = 2;
  p.OnReport(second, 2);
  EXPECT_EQ(p.committed(), (Version{2, 3})) << "the new process serves nothing older";
  EXPECT_FALSE(p.AnswerTo(Join("a", 6)).refuse.empty());
  EXPECT_TRUE(p.AnswerTo(second).offer);
  EXPECT_EQ(p.ReadersOf({2, 3}), PublisherCore::Readers::kLive);
  p.OnGone("a", 2, 3);
  EXPECT_EQ(p.ReadersOf({2, 3}), PublisherCore::Readers::kFenced) << "the first incarnation was offered the bytes too";
  p.OnGone("a", 1, 3);
  EXPECT_EQ(p.ReadersOf({2, 3}), PublisherCore::Readers::kNone);
}

// Goes wrong if a staged version with another digest or size counts, or if one bad read ends the job.
TEST(PublisherCore, RefusalsAreRetriedOnce) {
  PublisherCore p(1, 1000);
  p.OnReport(Join("a", 1), 0);
  ASSERT_TRUE(p.Seal(Record({1, 0}), 0).ok());
  Report wrong = Join("a", 2, {}, Version{1, 0});
  wrong.staged_digest.low ^= 1;
  p.OnReport(wrong, 1);
  EXPECT_NE(p.newest_state(), VersionState::kCommittable);
  Report refused = Join("a", 3);
  refused.refused = Version{1, 0};
  refused.refused_reason = "digest";
  p.OnReport(refused, 2);
  EXPECT_TRUE(p.TellsNews(refused));
  EXPECT_TRUE(p.AnswerTo(refused).offer);
  p.OnReport(refused, 3);  // the same message again
  EXPECT_NE(p.newest_state(), VersionState::kRejected);
  refused.seq = 4;
  p.OnReport(refused, 4);
  EXPECT_EQ(p.newest_state(), VersionState::kRejected);
  ASSERT_TRUE(p.Seal(Record({1, 1}), 5).ok());
  EXPECT_EQ(p.newest_state(), VersionState::kSealed);
}

// Goes wrong if a worker serves below the committed version, after its lease, or goes back.
TEST(SubscriberCore, ServesOnlyWhileItMay) {
  SubscriberCore s("a", 1, 1);
  EXPECT_FALSE(s.MayServe(0));
  s.NextReport({}, 100);
  auto stage = s.OnAnswer({.epoch = 1, .offer = Record({1, 0}), .commit = Version{1, 0}, .lease_ms = 1000, .refuse = ""});
  ASSERT_TRUE(stage);
  EXPECT_FALSE(s.SwapDue());
  s.OnStaged(*stage);
  ASSERT_TRUE(s.SwapDue());
  EXPECT_EQ(s.TakeSwap(), (Version{1, 0}));
  EXPECT_FALSE(s.TakeSwap());
  s.OnSwapped({1, 0});
  EXPECT_TRUE(s.MayServe(1099));
  EXPECT_FALSE(s.MayServe(1100)) << "the lease counts from the sending of the report";
  s.OnAbsent();
  EXPECT_TRUE(s.MayServe(99999)) << "without a publisher nobody goes on without us";
  s.NextReport({}, 2000);
  // Back from a hang: the others went on to 1.4.
  auto next = s.OnAnswer({.epoch = 1, .offer = Record({1, 4}), .commit = Version{1, 4}, .lease_ms = 1000, .refuse = ""});
  ASSERT_TRUE(next);
  EXPECT_FALSE(s.MayServe(2001));
  s.OnStaged(*next);
  s.TakeSwap();
  s.OnSwapped({1, 4});
  EXPECT_TRUE(s.MayServe(2001));
  EXPECT_FALSE(s.OnAnswer({.epoch = 1, .offer = Record({1, 3}), .commit = Version{1, 3}, .lease_ms = 1000, .refuse = ""}));
  EXPECT_FALSE(s.OnAnswer({.epoch = 0, .offer = Record({0, 9}), .commit = Version{0, 9}, .lease_ms = 1000, .refuse = ""}));
  EXPECT_TRUE(s.OnAnswer({.epoch = 2, .offer = Record({2, 1}), .commit = {}, .lease_ms = 1000, .refuse = ""})) << "a rollback is a new epoch";
}

// One world: a trainer that publishes, workers that sample, a network that delays and loses, and a scheduler that kills and
// stops processes. Bytes are a number in an arena: what a step reads must be the version it serves.
class World {
 public:
  explicit World(uint64_t seed) : rng_(seed) { StartTrainer(); }

  void Run(int steps) {
    for (int i = 0; i < steps; ++i) {
      now_ += static_cast<int64_t>(rng_() % 30);
      Event();
      Check();
    }
    // Calm: everything is delivered, nothing fails; all live workers come to the newest version.
    for (Worker& w : workers_) w.stopped_until = 0;
    if (!trainer_) StartTrainer();
    calm_ = true;
    if (!trainer_->core.newest()) SealNext();
    for (int i = 0; i < 3000; ++i) {
      now_ += 10;
      trainer_->core.OnTick(now_);
      for (size_t k = 0; k < workers_.size(); ++k) WorkerTurn(k);
      Deliver();
      Check();
    }
    EXPECT_EQ(trainer_->core.newest_state(), VersionState::kCommitted);
    for (Worker& w : workers_) {
      EXPECT_EQ(w.core->active(), trainer_->core.newest()) << w.name;
      EXPECT_TRUE(w.core->MayServe(now_));
    }
    EXPECT_GT(served_steps_, 0);
  }

 private:
  static constexpr int64_t kLease = 300;
  struct Arena {
    std::optional<Version> holds;
    bool abandoned = false;
  };
  struct Trainer {
    PublisherCore core;
    std::map<uint64_t, std::shared_ptr<Arena>> arenas;
  };
  struct Waiting {  // a report at the trainer (a long-poll), or on its way back as an answer
    size_t worker;
    Report report;
    std::optional<Answer> answer;
    int64_t at;
    uint64_t epoch;
  };
  struct Worker {
    std::string name;
    uint64_t incarnation = 0;
    std::unique_ptr<SubscriberCore> core;
    std::map<Version, std::shared_ptr<Arena>> mapped;
    bool waiting = false;     // for an answer
    uint64_t asked_seq = 0;
    int64_t asked_at = 0;
    int64_t stopped_until = 0;
    bool absent = false;      // knows of no publisher
    std::optional<Version> last_active;
  };

  void StartTrainer() {
    ++epoch_;
    trainer_ = std::make_unique<Trainer>(Trainer{PublisherCore(epoch_, kLease), {}});
    step_ = static_cast<int64_t>(rng_() % 3);  // a restart may fall back
  }

  void SealNext() {
    // As the Publisher does: an arena nobody reads, else a new one.
    std::shared_ptr<Arena> arena;
    uint64_t id = 0;
    for (auto& [i, a] : trainer_->arenas) {
      if (a->abandoned || a->holds == trainer_->core.newest()) continue;
      auto readers = a->holds ? trainer_->core.ReadersOf(*a->holds) : PublisherCore::Readers::kNone;
      if (readers == PublisherCore::Readers::kFenced) a->abandoned = true;
      if (readers == PublisherCore::Readers::kNone) arena = a, id = i;
    }
    if (!arena) {
      id = next_arena_++;
      arena = trainer_->arenas[id] = std::make_shared<Arena>();
    }
    Version v{epoch_, ++step_};
    arena->holds = v;
    ASSERT_TRUE(trainer_->core.Seal(Record(v, id), now_).ok());
  }

  void Event() {
    switch (rng_() % 40) {
      case 0:
        if (workers_.size() < 3) {
          workers_.push_back({});
          workers_.back().name = std::string("w") + std::to_string(workers_.size());
          Restart(workers_.size() - 1);
        }
        return;
      case 1:
        if (!workers_.empty() && rng_() % 3 == 0) {
          size_t k = rng_() % workers_.size();
          uint64_t dead = workers_[k].incarnation;
          if (trainer_ && rng_() % 2) trainer_->core.OnGone(workers_[k].name, dead, now_);
          Restart(k);
          if (trainer_ && rng_() % 2) trainer_->core.OnGone(workers_[k].name, dead, now_);
        }
        return;
      case 2:
        if (!workers_.empty()) workers_[rng_() % workers_.size()].stopped_until = now_ + static_cast<int64_t>(rng_() % 1500);
        return;
      case 3:
        if (rng_() % 5 == 0) {
          if (trainer_) {
            trainer_.reset();
            for (auto& m : network_) m.answer.reset();
            for (Worker& w : workers_) {
              w.waiting = false;
              w.absent = true;
              w.core->OnAbsent();
            }
            network_.clear();
          } else {
            StartTrainer();
          }
        }
        return;
      case 4:
      case 5:
        // The trainer publishes when the last is served, or (deadline) over one that is not.
        if (trainer_ && (trainer_->core.newest_state() == VersionState::kCommitted || !trainer_->core.newest() || rng_() % 10 == 0)) SealNext();
        return;
      case 6:
        if (trainer_) trainer_->core.OnTick(now_);
        return;
      default:
        if (!workers_.empty()) WorkerTurn(rng_() % workers_.size());
        if (rng_() % 2) Deliver();
    }
  }

  void Restart(size_t k) {
    Worker& w = workers_[k];
    w.core = std::make_unique<SubscriberCore>(w.name, ++w.incarnation, 1);
    w.absent = !trainer_;
    if (!trainer_) w.core->OnAbsent();
    w.mapped.clear();
    w.waiting = false;
    w.stopped_until = 0;
    w.last_active.reset();
    std::erase_if(network_, [k](const Waiting& m) { return m.worker == k && m.answer; });
  }

  void WorkerTurn(size_t k) {
    Worker& w = workers_[k];
    if (now_ < w.stopped_until) return;
    // The engine thread: swap if due, then a step.
    if (auto v = w.core->TakeSwap()) w.core->OnSwapped(*v);
    if (w.core->active()) {
      for (auto it = w.mapped.begin(); it != w.mapped.end();) {
        bool keep = it->first >= *w.core->active();
        it = keep ? std::next(it) : w.mapped.erase(it);
      }
    }
    if (w.core->MayServe(now_)) {
      ++served_steps_;
      const Version v = *w.core->active();
      ASSERT_TRUE(w.mapped.count(v));
      EXPECT_EQ(w.mapped[v]->holds, v) << w.name << " reads bytes that were written again";
      if (trainer_ && trainer_->core.committed() && !w.absent) {
        EXPECT_GE(v, *trainer_->core.committed()) << w.name << " serves below the committed version";
      }
      EXPECT_TRUE(!w.last_active || *w.last_active <= v) << "went back";
      w.last_active = v;
    }
    // The control thread.
    if (w.waiting && now_ - w.asked_at > 200) w.waiting = false;  // given up: the answer will not be read
    if (!w.waiting && trainer_) {
      std::vector<Version> held;
      for (auto& [v, a] : w.mapped) held.push_back(v);
      Report r = w.core->NextReport(held, now_);
      w.waiting = true;
      w.asked_seq = r.seq;
      w.asked_at = now_;
      if (calm_ || rng_() % 10) network_.push_back({k, r, {}, now_ + (calm_ ? 1 : static_cast<int64_t>(rng_() % 60)), epoch_});
      if (!calm_ && rng_() % 10 == 0) network_.push_back({k, r, {}, now_ + static_cast<int64_t>(rng_() % 200), epoch_});  // twice
    }
  }

  void Deliver() {
    for (size_t i = 0; i < network_.size(); ++i) {
      Waiting& m = network_[i];
      if (m.at > now_) continue;
      if (!m.answer) {
        if (!trainer_ || m.epoch != epoch_) {
          network_.erase(network_.begin() + static_cast<int64_t>(i--));
          continue;
        }
        trainer_->core.OnReport(m.report, now_);  // again at each look: a repeated message changes nothing
        if (!trainer_->core.TellsNews(m.report) && now_ - m.at < 75) continue;  // the long-poll waits
        m.answer = trainer_->core.AnswerTo(m.report);
        m.at = now_ + (calm_ ? 1 : static_cast<int64_t>(rng_() % 40));
        if (!calm_ && rng_() % 10 == 0) network_.erase(network_.begin() + static_cast<int64_t>(i--));  // lost
        continue;
      }
      Worker& w = workers_[m.worker];
      if (now_ < w.stopped_until) continue;
      if (w.waiting && w.incarnation == m.report.incarnation && w.asked_seq == m.report.seq) {
        w.waiting = false;
        w.absent = false;
        if (auto record = w.core->OnAnswer(*m.answer)) Stage(w, *record);
      }
      network_.erase(network_.begin() + static_cast<int64_t>(i--));
    }
  }

  void Stage(Worker& w, const VersionRecord& record) {
    if (!trainer_) return;
    auto it = trainer_->arenas.find(record.arena);
    // The bytes are verified against the record, as the Subscriber does.
    if (it == trainer_->arenas.end() || it->second->abandoned || it->second->holds != record.version || (!calm_ && rng_() % 50 == 0)) {
      w.core->OnRefused(record, "digest");
      return;
    }
    w.mapped[record.version] = it->second;
    w.core->OnStaged(record);
  }

  void Check() {
    if (!trainer_) return;
    // An arena that a worker maps holds what it held when it was mapped.
    for (Worker& w : workers_) {
      for (auto& [v, a] : w.mapped) ASSERT_EQ(a->holds, v) << w.name << ": bytes of " << ToString(v) << " were written again";
    }
    size_t usable = 0;
    for (auto& [i, a] : trainer_->arenas) usable += !a->abandoned;
    ASSERT_LE(usable, 6u) << "arenas pile up";
  }

  std::mt19937_64 rng_;
  int64_t now_ = 0;
  uint64_t epoch_ = 0;
  int64_t step_ = 0;
  uint64_t next_arena_ = 1;
  std::unique_ptr<Trainer> trainer_;
  std::vector<Worker> workers_;
  std::vector<Waiting> network_;
  bool calm_ = false;
  int served_steps_ = 0;
};

TEST(WeightSyncSim, InvariantsHold) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World(seed).Run(1500);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace temper::weightsync
