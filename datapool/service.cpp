#include "datapool/service.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "common/bounded_queue.h"
#include "common/file.h"
#include "common/ids.h"
#include "common/log.h"
#include "datapool/archive.h"
#include "datapool/format.h"
#include "datapool/pack.h"
#include "datapool/record.h"
#include "datapool/statistics.h"
#include "datapool/verify.h"
#include "fmt/format.h"

namespace temper::datapool {
namespace {

constexpr size_t kQueued = 1024;         // calls waiting for the state thread; more of them wait at the door
constexpr size_t kCallsPerTurn = 64;     // made durable together
constexpr double kQueueWaitS = 30;
constexpr double kAnswerWaitS = 120;     // a turn is one disk write; longer means that the disk hangs
constexpr double kIdleWaitS = 1;
constexpr double kTickWaitS = 0.2;       // longest sleep before a deadline is looked at again
constexpr char kStoreTag[] = "temper-pool-1";
constexpr size_t kShownPositions = 64;   // of a source, in the metrics
constexpr double kLookEveryS = 0.25;     // at the space on disk,
constexpr int64_t kLookEveryBytes = 4 << 20;  // or after so many bytes
constexpr size_t kFillThreads = 2, kRecordsPerHelper = 16;  // that read a leased batch, beside the caller's

// Words by which the core says why it cut a rollout. A caller's own abort must not look like one in the ledger.
bool IsCoreReason(const std::string& reason) {
  static const std::set<std::string> kWords = {"extra", "deadline", "requeued", "zero_signal", "too_few_valid", "stale", "job_end", "stopped"};
  return kWords.count(reason) > 0;
}

}  // namespace

struct LocalDataPool::Impl {
  Impl(LocalPoolOptions o, std::unique_ptr<Store> s, temper::Metrics& m, Env e)
      : options(std::move(o)), store(std::move(s)), metrics(m), env(e), window(options.config), 
        balance(Balance(options.config)), statistics(options.config, options.task_counts), alarms(options.alarms), gate(options.retention),
        queue(kQueued) {}

  // What one turn of the state thread has to make durable.
  struct Turn {
    StoreWrite write;
    bool sync = false;
    bool changed = false;
    std::set<std::string> calls;  // that changed something: names of fault points
  };
  using Answer = std::function<void()>;
  using Call = std::function<Answer(Turn&)>;

  const LocalPoolOptions options;
  const std::vector<std::string> sources = SourceNames(options.config);
  const std::unique_ptr<Store> store;
  temper::Metrics& metrics;
  Env env;

  // ---- owned by the state thread (and by Open before it starts)
  Window window;
  std::optional<Balance> balance;  // of every line written, those of former lives included; none where they are not known
  Statistics statistics;
  Alarms alarms;
  Retention retention;
  SpaceGate gate;
  std::string held;           // why nothing more is handed out for want of space ("store", "disk"); "": it is
  double looked_s = -1e9;     // when the space was looked at last
  int64_t bytes_since = 0;    // written since then
  std::set<std::string> raised;  // names of the alarms that are
  int64_t seq = 0;            // of the last ledger line
  int64_t synced_seq = 0;     // lines up to here are on disk for good
  int64_t clock_base_us = 0;  // pool time at clock_origin_s
  double clock_origin_s = 0;
  bool paused = false;        // for an evaluation
  bool alarmed = false;       // an alarm that pauses the job is raised
  std::string job;
  std::string trainer;
  bool trainer_attached = false;  // in this job incarnation
  std::string agents;
  std::set<AttemptId> handed;     // with the agents: played, or over without their knowing
  int64_t serial = 0;             // of the last TakeIssues answer with content
  std::vector<AttemptId> last_issues, last_cancelled;  // that answer, until it is known to have arrived
  std::set<int64_t> came_back;    // batches leased again
  std::set<AttemptId> quarantined;  // records that do not verify
  std::map<std::string, std::optional<double>> heads;  // when the head of each source was admitted, pool clock; as of the last turn
  Fd ledger;

  BoundedQueue<Call> queue;
  std::thread thread;

  // ---- token data on loan, by batch: of the callers' threads
  struct OnLoan {
    std::unique_ptr<Segment> segment;
    std::vector<std::vector<int32_t>> rollouts;       // by group
    std::vector<std::vector<MemberHandle>> members;   // of each
  };
  std::mutex loans_mutex;
  std::map<int64_t, OnLoan> loans;

  // ---- long polls
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t generation = 0;
  bool stopping = false;

  // ---- the clock that the core sees: microseconds, so that a printed time parses back to the same double

  // Where nothing is handed out no deadline may pass: groups that nobody plays would be buried and refilled without end.
  bool Stands() const { return paused || alarmed || !held.empty(); }
  int64_t NowUs() const {
    if (Stands()) return clock_base_us;
    return clock_base_us + static_cast<int64_t>(std::max(0.0, env.clock.NowS() - clock_origin_s) * 1e6);
  }
  double Now() const { return std::max(window.now(), static_cast<double>(NowUs()) / 1e6); }

  // Before any of the three that it stands for changes.
  void KeepTime() {
    clock_base_us = NowUs();
    clock_origin_s = env.clock.NowS();
  }
  void SetPaused(bool on) {
    KeepTime();
    paused = on;
  }

  // ---- state as bytes

  static void PackIds(Packer& p, const auto& ids) {
    p.Int(static_cast<int64_t>(ids.size()));
    for (const AttemptId& id : ids) {
      p.Int(id.group);
      p.Int(id.rollout);
      p.Int(id.attempt);
    }
  }
  static std::vector<AttemptId> UnpackIds(Unpacker& u) {
    std::vector<AttemptId> ids(u.Count(24));
    for (AttemptId& id : ids) {
      id.group = u.Int();
      id.rollout = static_cast<int32_t>(u.Int());
      id.attempt = static_cast<int32_t>(u.Int());
    }
    return ids;
  }

  std::string Pack() const {
    Packer p;
    p.Text(kStoreTag);
    p.Text(window.Store());
    p.Int(seq);
    p.Int(NowUs());
    p.Int(paused);
    p.Text(job);
    p.Text(trainer);
    p.Int(trainer_attached);
    p.Text(agents);
    PackIds(p, handed);
    p.Int(serial);
    PackIds(p, last_issues);
    PackIds(p, last_cancelled);
    p.Ints(came_back);
    return p.Take();
  }

  Status Unpack(const std::string& state) {
    Unpacker u(state);
    if (u.Text() != kStoreTag) return DataLoss("the pool's stored state is damaged, or of another version");
    const std::string core = u.Text();
    seq = u.Int();
    clock_base_us = u.Int();
    paused = u.Int() != 0;
    job = u.Text();
    trainer = u.Text();
    trainer_attached = u.Int() != 0;
    agents = u.Text();
    const std::vector<AttemptId> ids = UnpackIds(u);
    handed = {ids.begin(), ids.end()};
    serial = u.Int();
    last_issues = UnpackIds(u);
    last_cancelled = UnpackIds(u);
    const std::vector<int64_t> batches = u.Ints();
    came_back = {batches.begin(), batches.end()};
    if (!u.AtEnd()) return DataLoss("the pool's stored state is damaged");
    ASSIGN_OR_RETURN(window, Window::Rebuild(options.config, core));
    return Status::Ok();
  }

  // ---- opening

  Status Recover() {
    ASSIGN_OR_RETURN(std::optional<std::string> state, store->State());
    if (state) RETURN_IF_ERROR(Unpack(*state));
    clock_origin_s = env.clock.NowS();
    if (!options.ledger_path.empty()) {
      RETURN_IF_ERROR(RepairLedger());
    } else if (state) {
      balance.reset();
    }

    Turn turn;
    turn.sync = true;
    turn.changed = true;
    if (!state) {
      job = options.job_incarnation;
    } else if (job == options.job_incarnation) {
      if (window.started()) RETURN_IF_ERROR(Apply(turn, Simple(Event::Kind::kCrashPool)).status());
      log::Info("pool recovered", {{"seq", seq}, {"version", window.version()}, {"in_flight", window.totals().in_flight}});
    } else {
      RETURN_IF_ERROR(ResumeJob(turn));
    }
    Persist(turn);
    CheckAlarms();  // before a deadline is looked at
    return Status::Ok();
  }

  // A new `temper run` goes on with this pool: what was open is nobody's any more.
  Status ResumeJob(Turn& turn) {
    job = options.job_incarnation;
    trainer_attached = false;
    agents.clear();
    handed.clear();
    last_issues.clear();
    last_cancelled.clear();
    if (paused) SetPaused(false);
    if (!window.started()) return Status::Ok();
    if (window.closed()) {
      // After job_end there is nothing to reopen, and every call answers `closed`.
      Result<StepOutput> out = Apply(turn, Simple(Event::Kind::kReopen));
      if (!out.ok() && out.status().code() != StatusCode::kFailedPrecondition) return out.status();
    } else {
      RETURN_IF_ERROR(Apply(turn, Simple(Event::Kind::kCrashPool)).status());
      RETURN_IF_ERROR(AbortAll(turn, window.Running(), "supervisor").status());
    }
    log::Info("job resumed", {{"seq", seq}, {"version", window.version()}, {"in_flight", window.totals().in_flight}});
    return Status::Ok();
  }

  // The store is ahead of the file by what a crash cut off, never behind it but for the loss of unsynced writes with the machine.
  Status RepairLedger() {
    const std::string& path = options.ledger_path;
    std::string content;
    if (Exists(path)) {
      ASSIGN_OR_RETURN(content, ReadFile(path));
    }
    size_t keep = content.rfind('\n') == std::string::npos ? 0 : content.rfind('\n') + 1;
    int64_t last = 0;
    while (keep > 0) {
      const size_t before = keep >= 2 ? content.rfind('\n', keep - 2) : std::string::npos;
      const size_t begin = before == std::string::npos ? 0 : before + 1;
      Result<LedgerRecord> record = ParseLedger(std::string_view(content).substr(begin, keep - 1 - begin));
      if (!record.ok()) return DataLoss(path + ": the last whole line is damaged: " + record.status().message());
      if (record->seq <= seq) {
        last = record->seq;
        break;
      }
      keep = begin;
    }
    ledger = Fd(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!ledger.valid()) return ErrnoStatus(path, errno);
    RETURN_IF_ERROR(SyncDir(DirName(path)));  // its name must last as long as what it will hold
    if (keep != content.size() && ftruncate(ledger.get(), static_cast<off_t>(keep)) != 0) return ErrnoStatus(path, errno);
    ASSIGN_OR_RETURN(auto lines, store->Ledger());
    Point("pool.recover.cut");
    std::string missing;
    for (const auto& [number, line] : lines) {
      if (number <= last) continue;
      if (number != last + 1) break;
      missing += line + "\n";
      last = number;
    }
    if (last != seq) {
      return DataLoss(fmt::format("{}: ends at line {}, but the pool has written {} and kept no copy of the rest", path, last, seq));
    }
    RETURN_IF_ERROR(WriteAll(ledger.get(), missing));
    content.resize(keep);
    RETURN_IF_ERROR(CountAgain(content));
    return CountAgain(missing);
  }

  void Remember(const LedgerLine& l) {
    if (l.kind == LedgerLine::Kind::kQuarantine && l.group && l.rollout && l.attempt) quarantined.insert({*l.group, *l.rollout, *l.attempt});
  }

  // The balance and the statistics are those of the whole ledger.
  Status CountAgain(std::string_view lines) {
    while (!lines.empty()) {
      const size_t end = lines.find('\n');
      Result<LedgerRecord> record = ParseLedger(lines.substr(0, end));
      if (!record.ok()) return record.status().WithContext(options.ledger_path);
      RETURN_IF_ERROR(balance->Add(*record).WithContext(fmt::format("{}: seq {}", options.ledger_path, record->seq)));
      statistics.Add(record->line);
      alarms.Add(record->line);
      retention.Add(record->line);
      Remember(record->line);
      lines.remove_prefix(end + 1);
    }
    return Status::Ok();
  }

  // ---- turns

  static Event Simple(Event::Kind kind, int64_t number = 0, std::string reason = "") {
    Event e;
    e.kind = kind;
    e.number = number;
    e.reason = std::move(reason);
    return e;
  }

  void Keep(Turn& turn, const StepOutput& out) {
    turn.changed = true;
    for (const LedgerLine& line : out.ledger) {
      Remember(line);
      ++seq;
      turn.write.ledger.emplace_back(seq, PrintLedger({seq, line}));
      // What must never be is not written: the process ends, and what stands on disk is still right.
      if (Status s = balance ? balance->Add({seq, line}) : Status::Ok(); !s.ok()) {
        Wrong(fmt::format("the ledger would not balance at {}: {}", PrintLedger({seq, line}), s.message()));
      }
      statistics.Add(line);
      alarms.Add(line);
      retention.Add(line);
      if (line.kind == LedgerLine::Kind::kTombstone && line.reason != "job_end" && line.reason != "zero_signal") {
        metrics.Say(fmt::format("group {} tombstoned: {}", *line.group, line.reason));
      }
    }
    for (const Decision& d : out.decisions) {
      if (d.kind == Decision::Kind::kLease) {
        for (int64_t stale : d.staleness) {
          if (window.plan().bound && stale > *window.plan().bound) {
            Wrong(fmt::format("batch {} would be {} updates stale; the bound is {}", *d.batch, stale, *window.plan().bound));
          }
        }
      }
      if (d.kind == Decision::Kind::kLease && *d.again) came_back.insert(*d.batch);
      if (d.kind == Decision::Kind::kUpdate) came_back.erase(*d.batch);
    }
  }

  Result<StepOutput> Apply(Turn& turn, const Event& event) {
    ASSIGN_OR_RETURN(StepOutput out, window.Apply(event, Now()));
    Keep(turn, out);
    return out;
  }

  // Ends rollouts that one of our own parts has lost; each is issued again at once. Returns how many.
  Result<int64_t> AbortAll(Turn& turn, const std::vector<OpenRollout>& rollouts, const std::string& reason) {
    int64_t count = 0;
    for (const OpenRollout& r : rollouts) {
      if (window.RunningAttempt(r.id.group, r.id.rollout) != r.id.attempt) continue;
      Event e = Simple(Event::Kind::kFail, 0, reason);
      e.group = r.id.group;
      e.rollout = r.id.rollout;
      e.attempt = r.id.attempt;
      e.outcome = "aborted";
      RETURN_IF_ERROR(Apply(turn, e).status());
      ++count;
    }
    return count;
  }

  // The state in memory is ahead of the disk: only a restart can put that right.
  [[noreturn]] void Broken(const char* what, const Status& status) {
    const bool damaged = status.code() == StatusCode::kDataLoss;
    const bool full = status.code() == StatusCode::kResourceExhausted;
    log::Error(damaged ? "pool store is damaged" : full ? "pool cannot write; is the disk full?" : "pool cannot write",
               {{"what", what}, {"error", status.ToString()}});
    // A full disk can be cured while the job waits; damage is found again by each restart.
    if (damaged && options.on_damage) {
      options.on_damage(fmt::format(
          "the store is damaged, and nothing more can be written to it ({}). Put the run's pool/ and ledger.jsonl back from a copy, or "
          "begin a new run; what was played can still be read (temper pool ls, explain, export)",
          status.message()));
    }
    std::abort();
  }

  // A promise of the pool would be broken: nothing of this turn reaches the disk or a caller.
  [[noreturn]] void Wrong(const std::string& what) {
    log::Error("pool breaks its word", {{"what", what}});
    std::abort();
  }

  void Point(const std::string& name) {
    if (Status s = env.faults.Hit(name.c_str()); !s.ok()) Broken("fault", s);
  }

  void Persist(Turn& turn) {
    turn.write.state = Pack();
    turn.write.drop_ledger_to = synced_seq;
    for (const std::string& call : turn.calls) Point("pool." + call + ".applied");
    Point("pool.before_write");
    if (Status s = store->Write(turn.write, turn.sync); !s.ok()) Broken("store", s);
    Point("pool.after_write");
    if (ledger.valid()) {
      std::string text;
      for (const auto& [number, line] : turn.write.ledger) text += line + "\n";
      // SIGKILL can end a write between two pages. Where a test wants that, the turn's lines are torn in their middle.
      size_t written = 0;
      if (env.faults.Armed("pool.ledger_half")) {
        written = text.size() / 2;
        if (Status s = WriteAll(ledger.get(), std::string_view(text).substr(0, written)); !s.ok()) Broken("ledger", s);
        Point("pool.ledger_half");
      }
      if (Status s = WriteAll(ledger.get(), std::string_view(text).substr(written)); !s.ok()) Broken("ledger", s);
      if (turn.sync) {
        if (fdatasync(ledger.get()) != 0) Broken("ledger", ErrnoStatus(options.ledger_path, errno));
        synced_seq = seq;
      }
    }
    Point("pool.after_ledger");
    for (const std::string& call : turn.calls) Point("pool." + call + ".durable");
    Measure();
  }

  void Measure() {
    const WindowTotals t = window.totals();
    auto set = [&](const char* name, auto value) { metrics[name].Set(static_cast<double>(value)); };
    set("admitted", t.admitted);
    set("consumed", t.consumed);
    set("tombstoned", t.tombstoned);
    set("in_flight", t.in_flight);
    set("issued", t.issued);
    set("running", t.running);
    set("batches", t.batches);
    set("staleness_max", t.staleness_max);
    if (window.plan().bound) set("staleness_bound", *window.plan().bound);
    set("version", window.version());
    set("committed", window.committed());
    set("asking", window.asking());
    set("paused", paused);
    set("closed", window.closed());
    set("quarantined", quarantined.size());
    set("ledger_seq", seq);
    set("held", held == "store" ? 1 : held == "disk" ? 2 : 0);
    set("length_bias", statistics.length_bias());
    set("zero_signal_groups", statistics.zero_signal_groups());
    set("complete_groups", statistics.complete_groups());
    MeasureWindow();
    for (const auto& [outcome, n] : t.outcomes) metrics["outcome." + outcome].Set(static_cast<double>(n));
    for (const auto& [reason, n] : t.tombstones) metrics["tombstone." + reason].Set(static_cast<double>(n));
  }

  // What the live view draws, of each source.
  void MeasureWindow() {
    for (const SourceShape& s : window.Shape()) {
      auto set = [&](const std::string& name, auto value) { metrics[WindowMetric(s.source, name)].Set(static_cast<double>(value)); };
      set("size", s.window ? *s.window : -1);
      set("head", s.head ? *s.head : -1);
      set("head_running", s.head_running);
      set("running", s.running);
      set("ready_inside", s.ready_inside);
      set("ready_outside", s.ready_outside);
      set("batch_have", s.filled);
      set("batch_need", s.quota);
      const size_t count = std::min(s.positions.size(), kShownPositions);
      set("positions", count);
      for (size_t i = 0; i < count; ++i) set(fmt::format("{:02}", i), s.positions[i]);
      heads[s.source] = s.head ? std::optional(s.head_since) : std::nullopt;
    }
  }

  // Grows while nothing else happens, so it is told between the turns too.
  void MeasureWaits() {
    for (const auto& [source, since] : heads) {
      metrics[WindowMetric(source, "head_wait_s")].Set(since ? std::max(0.0, Now() - *since) : 0);
    }
  }

  // Said once each time one rises.
  void CheckAlarms() {
    std::set<std::string> now;
    if (window.started() && !window.closed() && !paused) {
      for (const std::string& text : alarms.Raised(Now(), window.Shape())) {
        const std::string name = text.substr(0, text.find(':'));
        now.insert(name);
        if (raised.count(name)) continue;
        log::Warn("alarm", {{"what", text}});
        metrics.Say("alarm: " + text + (alarms.pause() ? "; paused, nothing more is handed out until it is cured (Ctrl-C, then run --resume)" : ""));
      }
    } else {
      now = raised;
    }
    for (const std::string& name : raised) {
      if (!now.count(name)) metrics["alarm." + name].Set(0);
    }
    for (const std::string& name : now) metrics["alarm." + name].Set(1);
    raised = std::move(now);
    if (const bool pauses = alarms.pause() && !raised.empty(); pauses != alarmed) {
      KeepTime();
      alarmed = pauses;
    }
    metrics["alarm_pauses"].Set(alarmed);
  }

  // Lines of the pool's own.
  void Tell(Turn& turn, LedgerLine line) {
    line.t = Now();
    StepOutput out;
    out.ledger.push_back(std::move(line));
    Keep(turn, out);
  }

  // Back-pressure before the disk is full: what is played goes on, nothing more is handed out, and deadlines stand still meanwhile.
  void LookAtSpace(Turn& turn) {
    const RetentionConfig& limits = options.retention;
    if (!limits.disk && limits.free <= 0) return;
    if (env.clock.NowS() - looked_s < kLookEveryS && bytes_since < kLookEveryBytes) return;
    looked_s = env.clock.NowS();
    bytes_since = 0;
    const Result<StoreSpace> space = store->Space();
    if (!space.ok()) {
      log::Warn("space not known", {{"error", space.status().ToString()}});
      return;
    }
    metrics["store_bytes"].Set(static_cast<double>(space->used));
    if (space->free != INT64_MAX) metrics["disk_free_bytes"].Set(static_cast<double>(space->free));
    gate.Look(*space, static_cast<int64_t>(handed.size()));
    if (gate.reason() == held || !window.started() || window.closed()) return;
    const std::string why = gate.reason();
    KeepTime();
    held = why;
    LedgerLine line;
    line.kind = LedgerLine::Kind::kSpace;
    line.reason = why.empty() ? "back" : why;
    Tell(turn, std::move(line));
    if (why.empty()) metrics.Say("there is space again: rollouts are handed out");
    else metrics.Say(fmt::format("no space ({}: the store has {} MB, {} MB are free): nothing more is handed out until there is", why, space->used >> 20, space->free >> 20));
    log::Warn("space", {{"held", why}, {"store_bytes", space->used}, {"free_bytes", space->free}});
  }

  // With a commit, and in its write: nobody can need these records again.
  Status Retire(Turn& turn) {
    if (options.retention.consumed == Consumed::kKeep || !balance) return Status::Ok();
    std::vector<int64_t> due = retention.Due();
    if (due.empty()) return Status::Ok();
    if (options.retention.consumed == Consumed::kArchive) {
      std::vector<std::pair<AttemptId, std::string>> records;
      for (int64_t group : due) {
        ASSIGN_OR_RETURN(auto some, store->Records(group));
        std::move(some.begin(), some.end(), std::back_inserter(records));
      }
      // Those of this very turn are not in the store yet.
      for (auto& [id, record] : turn.write.records) {
        if (std::binary_search(due.begin(), due.end(), id.group)) records.emplace_back(id, record);
      }
      RETURN_IF_ERROR(WriteArchive(options.archive_dir, window.committed(), records));
      Point("pool.archive.written");
    }
    std::erase_if(turn.write.records, [&](const auto& entry) { return std::binary_search(due.begin(), due.end(), entry.first.group); });
    LedgerLine line;
    line.kind = LedgerLine::Kind::kRetire;
    line.step = window.committed();
    line.groups = due;
    line.reason = Name(options.retention.consumed);
    Tell(turn, std::move(line));
    turn.write.drop_groups.insert(turn.write.drop_groups.end(), due.begin(), due.end());
    turn.calls.insert("retire");
    return Status::Ok();
  }

  double WaitS() const {
    if (Stands()) return kIdleWaitS;
    const std::optional<double> due = window.NextDeadline();
    if (!due) return kIdleWaitS;
    return std::clamp(*due - Now(), 0.001, kTickWaitS);
  }

  void Loop() {
    for (;;) {
      std::optional<Call> call = queue.Pop(WaitS());
      if (!call && queue.closed()) return;
      Turn turn;
      std::vector<Answer> answers;
      for (size_t n = 0; call && n < kCallsPerTurn; ++n) {
        answers.push_back((*call)(turn));
        call = n + 1 < kCallsPerTurn ? queue.TryPop() : std::nullopt;
      }
      // After the calls: a finish at exactly its deadline counts.
      const std::optional<double> due = window.NextDeadline();
      if (due && *due <= Now()) {
        Result<StepOutput> out = Apply(turn, Simple(Event::Kind::kTick));
        TEMPER_CHECK(out.ok()) << out.status().message();
      }
      LookAtSpace(turn);
      if (turn.changed) {
        Persist(turn);
        std::lock_guard lock(mutex);
        ++generation;
        changed.notify_all();
      }
      CheckAlarms();
      MeasureWaits();
      for (Answer& answer : answers) answer();
    }
  }

  // Runs `body` on the state thread; answered when everything it did is durable. `body` is copied: it may outlive the caller.
  template <typename T>
  Result<T> Run(std::function<Result<T>(Turn&)> body) {
    auto promise = std::make_shared<std::promise<Result<T>>>();
    std::future<Result<T>> answer = promise->get_future();
    Call call = [promise, body = std::move(body)](Turn& turn) -> Answer {
      auto result = std::make_shared<Result<T>>(body(turn));
      return [promise, result] { promise->set_value(std::move(*result)); };
    };
    if (!queue.Push(std::move(call), kQueueWaitS)) return Unavailable("the pool is stopping");
    if (answer.wait_for(std::chrono::duration<double>(kAnswerWaitS)) != std::future_status::ready) {
      return Unavailable("the pool did not answer in time");
    }
    return answer.get();
  }

  // Repeats `body` until `done(value)`, an error, or the end of the wait.
  template <typename T>
  Result<T> Poll(uint32_t wait_ms, std::function<Result<T>(Turn&)> body, const std::function<bool(const T&)>& done) {
    SystemClock& clock = SystemClock::Get();
    const double give_up_s = clock.NowS() + wait_ms / 1e3;
    for (;;) {
      uint64_t seen;
      {
        std::lock_guard lock(mutex);
        if (stopping) return Unavailable("the pool is stopping");
        seen = generation;
      }
      Result<T> value = Run<T>(body);
      if (!value.ok() || done(*value)) return value;
      std::unique_lock lock(mutex);
      const double left_s = give_up_s - clock.NowS();
      if (left_s <= 0) return value;
      if (!changed.wait_for(lock, std::chrono::duration<double>(left_s), [&] { return stopping || generation != seen; })) return value;
    }
  }

  // ---- the calls, on the state thread

  const std::string& SourceName(int32_t source) const { return sources[static_cast<size_t>(source)]; }
  int64_t TaskIndex(int64_t task, int32_t source) const {
    const size_t i = static_cast<size_t>(source);
    if (i >= options.task_counts.size() || options.task_counts[i] <= 0) return task;
    return task % options.task_counts[i];
  }

  Status CheckAgents(const std::string& incarnation) const {
    if (incarnation == agents) return Status::Ok();
    return FailedPrecondition("agents incarnation '" + incarnation + "' has been followed by '" + agents + "'");
  }
  Status CheckTrainer(const std::string& incarnation) const {
    if (trainer_attached && incarnation == trainer) return Status::Ok();
    return FailedPrecondition("trainer incarnation '" + incarnation + "' is not attached; the pool's is '" + trainer + "'");
  }

  Result<int64_t> DoAttachAgents(Turn& turn, const std::string& incarnation) {
    if (incarnation.empty()) return InvalidArgument("incarnation: empty");
    if (incarnation == agents) return int64_t{0};
    const bool first = agents.empty();
    turn.calls.insert("attach_agents");
    agents = incarnation;
    std::vector<OpenRollout> lost;
    for (const OpenRollout& r : window.Running()) {
      if (handed.count(r.id)) lost.push_back(r);
    }
    handed.clear();
    last_issues.clear();
    last_cancelled.clear();
    turn.changed = true;
    if (first || window.closed()) return int64_t{0};
    log::Info("agents restarted", {{"reissued", lost.size()}});
    return AbortAll(turn, lost, "agents_restart");
  }

  Issue MakeIssue(const OpenRollout& r) const {
    Issue issue;
    issue.id = r.id;
    issue.task = TaskIndex(r.task, r.source);
    issue.source = SourceName(r.source);
    issue.version = window.version();
    issue.deadline_left_s = r.deadline ? std::max(0.0, *r.deadline - Now()) : -1;
    return issue;
  }

  Result<Taken> DoTakeIssues(Turn& turn, const std::string& incarnation, int32_t max, int64_t received) {
    RETURN_IF_ERROR(CheckAgents(incarnation));
    Taken taken;
    taken.reply.closed = window.closed();
    const std::vector<OpenRollout> running = window.Running();
    if (received < serial && (!last_issues.empty() || !last_cancelled.empty())) {
      // The answer was lost with a connection, or with the process that gave it.
      for (const OpenRollout& r : running) {
        if (std::count(last_issues.begin(), last_issues.end(), r.id)) taken.reply.issues.push_back(MakeIssue(r));
      }
      taken.reply.cancelled = last_cancelled;
      taken.serial = serial;
      if (!taken.reply.issues.empty() || !taken.reply.cancelled.empty()) return taken;
    }
    std::vector<AttemptId> cancelled, issues;
    for (const AttemptId& id : handed) {
      if (window.RunningAttempt(id.group, id.rollout) != id.attempt) cancelled.push_back(id);
    }
    LookAtSpace(turn);
    if (!Stands() && trainer_attached) {
      for (const OpenRollout& r : running) {
        if (static_cast<int64_t>(issues.size()) >= std::min<int64_t>(max, gate.room())) break;
        if (handed.count(r.id)) continue;
        issues.push_back(r.id);
        taken.reply.issues.push_back(MakeIssue(r));
      }
    }
    if (!issues.empty() || !cancelled.empty()) {
      for (const AttemptId& id : cancelled) handed.erase(id);
      handed.insert(issues.begin(), issues.end());
      gate.HandedOut(static_cast<int64_t>(issues.size()));
      ++serial;
      last_issues = std::move(issues);
      last_cancelled = cancelled;
      turn.changed = true;
      turn.calls.insert("take_issues");
    }
    taken.reply.cancelled = std::move(cancelled);
    taken.serial = serial;
    return taken;
  }

  // An attempt that is over, on its way to the state thread.
  struct Done {
    Status refused;
    AttemptId id;
    Outcome kind = Outcome::kScored;
    std::string outcome, reason;
    std::optional<double> reward;
    bool empty = false;  // there is no trajectory
    std::string record;  // the trajectory in its stored form
  };

  static Status Check(const FinishedAttempt& attempt, Outcome& kind) {
    ASSIGN_OR_RETURN(kind, ParseOutcome(attempt.outcome));
    if (attempt.id.attempt < 1) return InvalidArgument(fmt::format("attempt: {} is below 1", attempt.id.attempt));
    if (attempt.reward && !std::isfinite(*attempt.reward)) return InvalidArgument("reward: not a finite number");
    if (attempt.reward && (kind == Outcome::kInfraFailure || kind == Outcome::kAborted)) return InvalidArgument("reward: " + attempt.outcome + " has none");
    return Status::Ok();
  }

  Result<bool> DoFinish(Turn& turn, const std::string& incarnation, Done& f) {
    RETURN_IF_ERROR(CheckAgents(incarnation));
    const bool ours = handed.count(f.id) > 0;
    Event e;
    const bool failed = f.kind == Outcome::kInfraFailure || f.kind == Outcome::kAborted;
    e.kind = failed ? Event::Kind::kFail : Event::Kind::kFinish;
    e.group = f.id.group;
    e.rollout = f.id.rollout;
    e.attempt = f.id.attempt;
    e.outcome = f.outcome;
    e.reason = f.kind == Outcome::kAborted && IsCoreReason(f.reason) ? "agents_" + f.reason : f.reason;
    if (failed && e.reason.empty()) e.reason = "unknown";
    e.reward = f.reward;
    ASSIGN_OR_RETURN(StepOutput out, Apply(turn, e));
    handed.erase(f.id);
    turn.calls.insert("finish");
    bool counted = true;
    for (const Decision& d : out.decisions) {
      if (d.kind == Decision::Kind::kIgnore) counted = false;
    }
    // What was cut while it ran is worth showing too.
    if ((counted || (ours && !f.empty)) && !retention.Retired(f.id.group)) {
      gate.Saw(static_cast<int64_t>(f.record.size()));
      bytes_since += static_cast<int64_t>(f.record.size());
      turn.write.records.emplace_back(f.id, std::move(f.record));
    }
    if (counted && f.kind == Outcome::kInfraFailure) {
      metrics.Say(fmt::format("infrastructure failure: {} (group {}, rollout {}, attempt {})", e.reason, f.id.group, f.id.rollout, f.id.attempt));
    }
    return counted;
  }

  Result<std::vector<int64_t>> DoAttachTrainer(Turn& turn, const std::string& incarnation, int64_t step) {
    if (incarnation.empty()) return InvalidArgument("incarnation: empty");
    if (step < 0) return InvalidArgument(fmt::format("step: {} is negative", step));
    if (window.closed()) return FailedPrecondition("the pool is closed");
    if (trainer_attached && trainer == incarnation) return window.Outstanding();
    if (!window.started()) {
      if (step != 0) return FailedPrecondition(fmt::format("checkpoint {} is of another job: this pool has trained nothing", step));
      Keep(turn, window.Start(Now()));
    } else {
      if (step < window.committed()) {
        return FailedPrecondition(fmt::format("checkpoint {} is older than the committed step {}: its batches are gone", step, window.committed()));
      }
      // The last trainer may have died between its checkpoint and telling us of the update.
      while (step > window.version()) {
        const std::vector<int64_t> out = window.Outstanding();
        if (out.empty() || out.front() != window.version()) {
          return FailedPrecondition(fmt::format("checkpoint {} is ahead of the pool's version {}", step, window.version()));
        }
        RETURN_IF_ERROR(Apply(turn, Simple(Event::Kind::kUpdate, window.version())).status());
      }
      if (step > window.committed()) {
        RETURN_IF_ERROR(Apply(turn, Simple(Event::Kind::kCommit, step)).status());
        if (Status s = Retire(turn); !s.ok()) Broken("archive", s);
      }
    }
    const bool known = !trainer.empty();
    turn.calls.insert("attach_trainer");
    trainer = incarnation;
    trainer_attached = true;
    turn.changed = true;
    turn.sync = true;
    std::vector<int64_t> back;
    if (known) {
      ASSIGN_OR_RETURN(StepOutput out, Apply(turn, Simple(Event::Kind::kCrashTrainer)));
      for (const Decision& d : out.decisions) {
        if (d.kind == Decision::Kind::kRecover) back = d.groups;
      }
      log::Info("trainer restarted", {{"step", step}, {"batches_back", back.size()}});
    }
    return back;
  }

  Result<LeaseReply> DoLease(Turn& turn, const std::string& incarnation, int64_t batch) {
    LeaseReply reply;
    if (window.closed()) {
      reply.closed = true;
      return reply;
    }
    RETURN_IF_ERROR(CheckTrainer(incarnation));
    auto leased = [&] {
      const std::vector<int64_t> out = window.Outstanding();
      return std::count(out.begin(), out.end(), batch) > 0;
    };
    if (!leased() && !window.asking()) {
      const int64_t next = window.version() + static_cast<int64_t>(window.Outstanding().size());
      if (batch != next) return FailedPrecondition(fmt::format("batch {} was asked for, but {} is next", batch, next));
      turn.calls.insert("lease");
      ASSIGN_OR_RETURN(StepOutput out, Apply(turn, Simple(Event::Kind::kLease, 0, incarnation)));
      for (const Decision& d : out.decisions) {
        if (d.kind == Decision::Kind::kRefuse) return FailedPrecondition("lease refused: " + d.reason);
      }
    }
    if (!leased()) {
      reply.exhausted = window.exhausted();
      return reply;
    }
    reply.ready = true;
    reply.batch = batch;
    reply.again = came_back.count(batch) > 0;
    for (BatchMember& m : Batch(batch)) {
      LeasedGroup g;
      g.group = m.group;
      g.version_admitted = m.version_admitted;
      g.task = TaskIndex(m.task, m.source);
      g.source = SourceName(m.source);
      g.rollouts = std::move(m.rollouts);
      reply.groups.push_back(std::move(g));
    }
    return reply;
  }

  Result<bool> DoUpdate(Turn& turn, const std::string& incarnation, int64_t batch) {
    RETURN_IF_ERROR(CheckTrainer(incarnation));
    turn.sync = true;
    turn.calls.insert("update");
    return Refusable(Apply(turn, Simple(Event::Kind::kUpdate, batch)), fmt::format("update of batch {}", batch));
  }

  Result<bool> DoCommit(Turn& turn, int64_t step) {
    turn.sync = true;
    turn.calls.insert("commit");
    RETURN_IF_ERROR(Refusable(Apply(turn, Simple(Event::Kind::kCommit, step)), fmt::format("commit of step {}", step)).status());
    if (Status s = Retire(turn); !s.ok()) Broken("archive", s);
    return true;
  }

  // Of a leased batch, without what is quarantined: a record that did not verify once is not trusted when it does.
  std::vector<BatchMember> Batch(int64_t batch) const {
    std::vector<BatchMember> members = window.Batch(batch);
    for (BatchMember& m : members) {
      for (size_t i = m.rollouts.size(); i-- > 0;) {
        if (!quarantined.count({m.group, m.rollouts[i], m.attempts[i]})) continue;
        m.rollouts.erase(m.rollouts.begin() + static_cast<std::ptrdiff_t>(i));
        m.attempts.erase(m.attempts.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    return members;
  }

  // A record that cannot be trusted: said once, in the ledger, and never given out.
  Result<bool> Quarantine(Turn& turn, const AttemptId& id, const std::string& why) {
    if (quarantined.count(id)) return true;
    LedgerLine line;
    line.kind = LedgerLine::Kind::kQuarantine;
    line.group = id.group;
    line.rollout = id.rollout;
    line.attempt = id.attempt;
    line.reason = "record";
    Tell(turn, std::move(line));
    turn.sync = true;
    log::Error("record quarantined", {{"why", why}});
    metrics.Say(fmt::format("quarantined: {}", why));
    return true;
  }

  static Result<bool> Refusable(const Result<StepOutput>& out, const std::string& what) {
    if (!out.ok()) return out.status();
    for (const Decision& d : out->decisions) {
      if (d.kind == Decision::Kind::kRefuse) return FailedPrecondition(what + " refused: " + d.reason);
    }
    return true;
  }
};

LocalDataPool::LocalDataPool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<LocalDataPool>> LocalDataPool::Open(LocalPoolOptions options, std::unique_ptr<Store> store, temper::Metrics& metrics, Env env) {
  RETURN_IF_ERROR(Validate(options.config));
  auto impl = std::make_unique<Impl>(std::move(options), std::move(store), metrics, env);
  RETURN_IF_ERROR(impl->Recover());
  Impl* raw = impl.get();
  impl->thread = std::thread([raw] { raw->Loop(); });
  return std::unique_ptr<LocalDataPool>(new LocalDataPool(std::move(impl)));
}

LocalDataPool::~LocalDataPool() { Stop(); }

void LocalDataPool::Stop() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
    impl_->changed.notify_all();
  }
  impl_->queue.Close();
  if (impl_->thread.joinable()) impl_->thread.join();
}

Result<int64_t> LocalDataPool::AttachAgents(const std::string& incarnation) {
  return impl_->Run<int64_t>([impl = impl_.get(), incarnation](Impl::Turn& turn) { return impl->DoAttachAgents(turn, incarnation); });
}

Result<LocalDataPool::Taken> LocalDataPool::TakeIssuesAfter(const std::string& incarnation, int32_t max, uint32_t wait_ms, int64_t received) {
  return impl_->Poll<Taken>(
      wait_ms,
      [impl = impl_.get(), incarnation, max, received](Impl::Turn& turn) { return impl->DoTakeIssues(turn, incarnation, max, received); },
      [](const Taken& t) { return t.reply.closed || !t.reply.issues.empty() || !t.reply.cancelled.empty(); });
}

Result<TakeIssuesReply> LocalDataPool::TakeIssues(const std::string& incarnation, int32_t max, uint32_t wait_ms) {
  // Within one process no answer is lost.
  ASSIGN_OR_RETURN(Taken taken, TakeIssuesAfter(incarnation, max, wait_ms, INT64_MAX));
  return std::move(taken.reply);
}

Result<bool> LocalDataPool::Finish(const std::string& incarnation, const FinishedAttempt& attempt) {
  return std::move(FinishMany(incarnation, {&attempt, 1})[0]);
}

std::vector<Result<bool>> LocalDataPool::FinishMany(const std::string& incarnation, std::span<const FinishedAttempt> attempts) {
  using Answers = std::vector<Result<bool>>;
  // Records are compressed here, so that the state thread has only to write them.
  auto done = std::make_shared<std::vector<Impl::Done>>();
  for (const FinishedAttempt& attempt : attempts) {
    Impl::Done& d = done->emplace_back();
    d.refused = Impl::Check(attempt, d.kind);
    if (!d.refused.ok()) continue;
    d.id = attempt.id;
    d.outcome = attempt.outcome;
    d.reason = attempt.reason;
    d.reward = attempt.reward;
    d.empty = attempt.trajectory.empty();
    d.record = PackRecord(attempt.id, attempt.trajectory);
  }
  Result<Answers> answers = impl_->Run<Answers>([impl = impl_.get(), incarnation, done](Impl::Turn& turn) -> Result<Answers> {
    Answers out;
    for (Impl::Done& d : *done) out.push_back(d.refused.ok() ? impl->DoFinish(turn, incarnation, d) : Result<bool>(d.refused));
    return out;
  });
  return answers.ok() ? *std::move(answers) : Answers(attempts.size(), Result<bool>(answers.status()));
}

Result<std::vector<int64_t>> LocalDataPool::AttachTrainer(const std::string& incarnation, int64_t step) {
  ASSIGN_OR_RETURN(std::vector<int64_t> back, impl_->Run<std::vector<int64_t>>([impl = impl_.get(), incarnation, step](Impl::Turn& turn) {
    return impl->DoAttachTrainer(turn, incarnation, step);
  }));
  // What a trainer had on loan is nobody's when another one is here; for the same one it is made again.
  std::lock_guard lock(impl_->loans_mutex);
  impl_->loans.clear();
  return back;
}

Status LocalDataPool::Fill(int64_t batch, Leased& leased, std::unique_ptr<Segment>& segment) {
  ASSIGN_OR_RETURN(segment, Segment::Create());
  ASSIGN_OR_RETURN(const std::vector<BatchMember> groups, impl_->Run<std::vector<BatchMember>>([impl = impl_.get(), batch](Impl::Turn&) {
    return impl->Batch(batch);
  }));
  if (groups.size() != leased.reply.groups.size()) return FailedPrecondition(fmt::format("batch {} is leased no more", batch));
  struct Record {
    AttemptId id;
    Result<MemberHandle> handle = NotFound("not read");
  };
  std::vector<Record> records;
  for (const BatchMember& m : groups) {
    for (size_t i = 0; i < m.rollouts.size(); ++i) records.push_back({{m.group, m.rollouts[i], m.attempts[i]}});
  }
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < records.size();) {
      Result<std::string> bytes = impl_->store->Trajectory(records[i].id);
      records[i].handle = bytes.ok() ? segment->Put(*bytes) : Result<MemberHandle>(bytes.status());
    }
  };
  std::vector<std::thread> helpers(std::min<size_t>(kFillThreads, records.size() / kRecordsPerHelper));
  for (std::thread& helper : helpers) helper = std::thread(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  size_t at = 0;
  for (LeasedGroup& g : leased.reply.groups) {
    g.rollouts.clear();
    std::vector<MemberHandle>& members = leased.members.emplace_back();
    for (; at < records.size() && records[at].id.group == g.group; ++at) {
      const auto& [id, handle] = records[at];
      if (handle.ok()) {
        g.rollouts.push_back(id.rollout);
        members.push_back(*handle);
        continue;
      }
      if (handle.status().code() != StatusCode::kDataLoss && handle.status().code() != StatusCode::kNotFound) return handle.status();
      RETURN_IF_ERROR(impl_->Run<bool>([impl = impl_.get(), lost = id, why = handle.status().message()](Impl::Turn& turn) {
        return impl->Quarantine(turn, lost, why);
      }).status());
    }
  }
  if (at != records.size()) return Internal(fmt::format("batch {} is not what was leased", batch));
  return segment->Seal();
}

Result<LocalDataPool::Leased> LocalDataPool::LeaseHandles(const std::string& incarnation, int64_t batch, uint32_t wait_ms) {
  Leased leased;
  ASSIGN_OR_RETURN(leased.reply, impl_->Poll<LeaseReply>(
                                     wait_ms,
                                     [impl = impl_.get(), incarnation, batch](Impl::Turn& turn) { return impl->DoLease(turn, incarnation, batch); },
                                     [](const LeaseReply& r) { return r.ready || r.closed || r.exhausted; }));
  if (!leased.reply.ready) return leased;
  std::lock_guard lock(impl_->loans_mutex);
  Impl::OnLoan& loan = impl_->loans[batch];
  if (!loan.segment) {
    std::unique_ptr<Segment> segment;
    RETURN_IF_ERROR(Fill(batch, leased, segment));
    for (const LeasedGroup& g : leased.reply.groups) loan.rollouts.push_back(g.rollouts);
    loan.members = std::move(leased.members);
    loan.segment = std::move(segment);
  }
  for (size_t i = 0; i < leased.reply.groups.size(); ++i) leased.reply.groups[i].rollouts = loan.rollouts.at(i);
  leased.members = loan.members;
  leased.segment = loan.segment->handle();
  return leased;
}

void LocalDataPool::Received(int64_t batch) {
  std::lock_guard lock(impl_->loans_mutex);
  impl_->loans.erase(batch);
}

Result<LeaseReply> LocalDataPool::Lease(const std::string& incarnation, int64_t batch, uint32_t wait_ms) {
  ASSIGN_OR_RETURN(Leased leased, LeaseHandles(incarnation, batch, wait_ms));
  if (!leased.reply.ready) return std::move(leased.reply);
  ASSIGN_OR_RETURN(const SegmentView segment, SegmentView::Open(leased.segment));
  for (size_t i = 0; i < leased.reply.groups.size(); ++i) {
    for (const MemberHandle& handle : leased.members[i]) {
      ASSIGN_OR_RETURN(std::string bytes, segment.Read(handle));
      leased.reply.groups[i].members.push_back(std::move(bytes));
    }
  }
  Received(batch);
  return std::move(leased.reply);
}

Status LocalDataPool::Update(const std::string& incarnation, int64_t batch) {
  RETURN_IF_ERROR(impl_->Run<bool>([impl = impl_.get(), incarnation, batch](Impl::Turn& turn) { return impl->DoUpdate(turn, incarnation, batch); }).status());
  Received(batch);
  return Status::Ok();
}

Status LocalDataPool::Commit(int64_t step) {
  return impl_->Run<bool>([impl = impl_.get(), step](Impl::Turn& turn) { return impl->DoCommit(turn, step); }).status();
}

Status LocalDataPool::Pause(bool on) {
  return impl_
      ->Run<bool>([impl = impl_.get(), on](Impl::Turn& turn) -> Result<bool> {
        if (impl->paused != on) {
          impl->SetPaused(on);
          turn.changed = true;
          turn.calls.insert("pause");
        }
        return true;
      })
      .status();
}

Status LocalDataPool::Close(CloseReason reason) {
  return impl_
      ->Run<bool>([impl = impl_.get(), reason](Impl::Turn& turn) -> Result<bool> {
        turn.sync = true;
        turn.changed = true;
        turn.calls.insert("close");
        // Before the first trainer there is nothing to end.
        if (!impl->window.started()) return true;
        RETURN_IF_ERROR(impl->Apply(turn, Impl::Simple(Event::Kind::kClose, 0, reason == CloseReason::kJobEnd ? "job_end" : "stopped")).status());
        return true;
      })
      .status();
}

Result<std::map<std::string, double>> LocalDataPool::Metrics() { return impl_->metrics.Snapshot(); }

}  // namespace temper::datapool
