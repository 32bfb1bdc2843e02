#include "datapool/format.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/json.h"
#include "fmt/format.h"

namespace temper::datapool {
namespace {

template <typename T>
Result<std::optional<T>> Narrow(Result<int64_t> value, const JsonRef& at) {
  if (!value.ok()) return value.status();
  if (*value < std::numeric_limits<T>::min() || *value > std::numeric_limits<T>::max()) return at.Error("the number is too large");
  return std::optional<T>(static_cast<T>(*value));
}

// A member that may be absent or null.
template <typename T>
Result<std::optional<T>> OptionalInt(const JsonRef& object, std::string_view key) {
  if (!object.Has(key)) return std::optional<T>();
  ASSIGN_OR_RETURN(JsonRef field, object.Field(key));
  if (field.is_null()) return std::optional<T>();
  return Narrow<T>(field.Int(), field);
}

Result<std::optional<double>> OptionalDouble(const JsonRef& object, std::string_view key) {
  if (!object.Has(key)) return std::optional<double>();
  ASSIGN_OR_RETURN(JsonRef field, object.Field(key));
  if (field.is_null()) return std::optional<double>();
  ASSIGN_OR_RETURN(double value, field.Double());
  return std::optional<double>(value);
}

Status ReadInt(const JsonRef& object, std::string_view key, auto* out) {
  using T = std::remove_reference_t<decltype(*out)>;
  ASSIGN_OR_RETURN(std::optional<T> value, OptionalInt<T>(object, key));
  if (value) *out = *value;
  return Status::Ok();
}

Status ReadDouble(const JsonRef& object, std::string_view key, double* out) {
  ASSIGN_OR_RETURN(std::optional<double> value, OptionalDouble(object, key));
  if (value) *out = *value;
  return Status::Ok();
}

// The index of a word in a list.
Result<int> Word(const JsonRef& field, const std::vector<std::string>& words) {
  ASSIGN_OR_RETURN(std::string word, field.String());
  for (size_t i = 0; i < words.size(); ++i) {
    if (word == words[i]) return static_cast<int>(i);
  }
  std::string list;
  for (const std::string& w : words) list += (list.empty() ? "" : ", ") + w;
  return field.Error("'" + word + "' is not one of " + list);
}

const std::vector<std::string>& PolicyWords() {
  static const std::vector<std::string> kWords = {"anchored", "strict", "greedy", "areal"};
  return kWords;
}
const std::vector<std::string>& OnDeadlineWords() {
  static const std::vector<std::string> kWords = {"wait", "tombstone", "requeue"};
  return kWords;
}
const std::vector<std::string>& ZeroSignalWords() {
  static const std::vector<std::string> kWords = {"train", "refill"};
  return kWords;
}

Result<WindowConfig> ReadWindow(const JsonRef& object) {
  RETURN_IF_ERROR(object.OnlyKeys({"policy", "size", "fraction"}));
  WindowConfig window;
  if (object.Has("policy")) {
    ASSIGN_OR_RETURN(JsonRef field, object.Field("policy"));
    ASSIGN_OR_RETURN(int word, Word(field, PolicyWords()));
    window.policy = static_cast<Policy>(word);
  }
  ASSIGN_OR_RETURN(window.size, OptionalInt<int64_t>(object, "size"));
  ASSIGN_OR_RETURN(window.fraction, OptionalDouble(object, "fraction"));
  return window;
}

Result<SourceConfig> ReadSource(const JsonRef& object) {
  RETURN_IF_ERROR(object.OnlyKeys({"name", "weight", "tasks", "window"}));
  SourceConfig source;
  ASSIGN_OR_RETURN(JsonRef name, object.Field("name"));
  ASSIGN_OR_RETURN(source.name, name.String());
  RETURN_IF_ERROR(ReadDouble(object, "weight", &source.weight));
  ASSIGN_OR_RETURN(source.tasks, OptionalInt<int64_t>(object, "tasks"));
  if (object.Has("window")) {
    ASSIGN_OR_RETURN(JsonRef field, object.Field("window"));
    if (!field.is_null()) {
      ASSIGN_OR_RETURN(source.window, ReadWindow(field));
    }
  }
  return source;
}

Result<PoolConfig> ReadPool(const JsonRef& object) {
  PoolConfig c;
  ASSIGN_OR_RETURN(JsonRef p, object.Field("P"));
  ASSIGN_OR_RETURN(c.P, p.Int());
  RETURN_IF_ERROR(ReadInt(object, "S", &c.S));
  if (object.Has("window")) {
    ASSIGN_OR_RETURN(JsonRef field, object.Field("window"));
    if (!field.is_null()) {
      ASSIGN_OR_RETURN(c.window, ReadWindow(field));
    }
  }
  ASSIGN_OR_RETURN(c.B, OptionalInt<int64_t>(object, "B"));
  RETURN_IF_ERROR(ReadInt(object, "G", &c.G));
  RETURN_IF_ERROR(ReadInt(object, "extra", &c.extra));
  ASSIGN_OR_RETURN(c.min_valid, OptionalInt<int32_t>(object, "min_valid"));
  RETURN_IF_ERROR(ReadInt(object, "retries", &c.retries));
  ASSIGN_OR_RETURN(c.deadline_s, OptionalDouble(object, "deadline_s"));
  if (object.Has("on_deadline")) {
    ASSIGN_OR_RETURN(JsonRef field, object.Field("on_deadline"));
    ASSIGN_OR_RETURN(int word, Word(field, OnDeadlineWords()));
    c.on_deadline = static_cast<OnDeadline>(word);
  }
  if (object.Has("zero_signal")) {
    ASSIGN_OR_RETURN(JsonRef field, object.Field("zero_signal"));
    ASSIGN_OR_RETURN(int word, Word(field, ZeroSignalWords()));
    c.refill = word == 1;
  }
  ASSIGN_OR_RETURN(c.max_staleness, OptionalInt<int64_t>(object, "max_staleness"));
  RETURN_IF_ERROR(ReadInt(object, "max_leases", &c.max_leases));
  ASSIGN_OR_RETURN(c.tasks, OptionalInt<int64_t>(object, "tasks"));
  int64_t seed = 0;
  RETURN_IF_ERROR(ReadInt(object, "seed", &seed));
  c.seed = static_cast<uint64_t>(seed);
  if (object.Has("sources")) {
    ASSIGN_OR_RETURN(JsonRef field, object.Field("sources"));
    if (!field.is_null()) {
      ASSIGN_OR_RETURN(std::vector<JsonRef> items, field.Items());
      for (const JsonRef& item : items) {
        ASSIGN_OR_RETURN(SourceConfig source, ReadSource(item));
        c.sources.push_back(std::move(source));
      }
    }
  }
  RETURN_IF_ERROR(Validate(c));
  return c;
}

Status Probability(const char* key, double p) {
  if (p >= 0 && p <= 1) return Status::Ok();
  return InvalidArgument(fmt::format("world.{}: {} is not a probability", key, p));
}

Result<World> ReadWorld(const JsonRef& object) {
  RETURN_IF_ERROR(object.OnlyKeys({"latency", "fail", "zero", "trainer_s", "updates"}));
  World world;
  Latency& l = world.latency;
  ASSIGN_OR_RETURN(JsonRef latency, object.Field("latency"));
  ASSIGN_OR_RETURN(JsonRef dist, latency.Field("dist"));
  static const std::vector<std::string> kDists = {"lognormal", "pareto", "exp", "fixed", "list", "ledger"};
  ASSIGN_OR_RETURN(int word, Word(dist, kDists));
  l.dist = kDists[static_cast<size_t>(word)];
  // What each distribution needs, and nothing else.
  static const std::vector<std::vector<std::string>> kNeeds = {{"median", "sigma"}, {"min", "alpha"}, {"mean"}, {"value"}, {"values"}, {"path"}};
  std::vector<std::string> keys = kNeeds[static_cast<size_t>(word)];
  for (const std::string& key : keys) {
    ASSIGN_OR_RETURN(JsonRef field, latency.Field(key));
    if (key == "values") {
      ASSIGN_OR_RETURN(l.values, field.Doubles());
      if (l.values.empty()) return field.Error("empty");
      for (double v : l.values) {
        if (v < 0) return field.Error("a negative time");
      }
    } else if (key == "path") {
      ASSIGN_OR_RETURN(l.path, field.String());
    } else {
      ASSIGN_OR_RETURN(double v, field.Double());
      const bool may_be_zero = key == "sigma" || key == "value";
      if (v < 0 || (v == 0 && !may_be_zero)) return field.Error("out of range");
      (key == "median" ? l.median : key == "sigma" ? l.sigma : key == "min" ? l.min : key == "alpha" ? l.alpha : key == "mean" ? l.mean : l.value) = v;
    }
  }
  keys.push_back("dist");
  RETURN_IF_ERROR(latency.OnlyKeys(keys));
  RETURN_IF_ERROR(ReadDouble(object, "fail", &world.fail));
  RETURN_IF_ERROR(ReadDouble(object, "zero", &world.zero));
  RETURN_IF_ERROR(ReadDouble(object, "trainer_s", &world.trainer_s));
  RETURN_IF_ERROR(ReadInt(object, "updates", &world.updates));
  RETURN_IF_ERROR(Probability("fail", world.fail));
  RETURN_IF_ERROR(Probability("zero", world.zero));
  if (world.trainer_s < 0) return InvalidArgument(fmt::format("world.trainer_s: {} is negative", world.trainer_s));
  if (world.updates < 1 || world.updates > 10'000'000) {
    return InvalidArgument(fmt::format("world.updates: {} is out of range [1, 10000000]", world.updates));
  }
  return world;
}

void PrintWindow(JsonWriter& w, const WindowConfig& window) {
  w.BeginObject().Key("policy").String(Name(window.policy));
  if (window.size) w.Key("size").Int(*window.size);
  if (window.fraction) w.Key("fraction").Double(*window.fraction);
  w.EndObject();
}

void IntField(JsonWriter& w, const char* key, const auto& value) {
  if (value) w.Key(key).Int(*value);
}

void TextField(JsonWriter& w, const char* key, const std::string& value) {
  if (!value.empty()) w.Key(key).String(value);
}

Result<std::string> TextOr(const JsonRef& object, std::string_view key) { return object.StringOr(key, ""); }

}  // namespace

Result<SimConfig> ParseSimConfig(std::string_view text) {
  ASSIGN_OR_RETURN(json::value value, ParseJson(text));
  JsonRef object(value);
  if (!value.is_object()) return object.Error("the configuration must be an object");
  RETURN_IF_ERROR(object.OnlyKeys({"P", "S", "window", "B", "G", "extra", "min_valid", "retries", "deadline_s", "on_deadline", "zero_signal",
                                   "max_staleness", "max_leases", "tasks", "seed", "sources", "world", "policies"}));
  SimConfig sim;
  ASSIGN_OR_RETURN(sim.pool, ReadPool(object));
  if (object.Has("world")) {
    ASSIGN_OR_RETURN(JsonRef world, object.Field("world"));
    ASSIGN_OR_RETURN(sim.world, ReadWorld(world));
  }
  if (object.Has("policies")) {
    ASSIGN_OR_RETURN(JsonRef field, object.Field("policies"));
    if (!sim.world) return field.Error("has an effect with a world only");
    ASSIGN_OR_RETURN(std::vector<JsonRef> items, field.Items());
    if (items.empty()) return field.Error("empty");
    for (const JsonRef& item : items) {
      ASSIGN_OR_RETURN(WindowConfig window, ReadWindow(item));
      PoolConfig one = sim.pool;
      one.window = window;
      for (SourceConfig& s : one.sources) s.window.reset();
      RETURN_IF_ERROR(Validate(one).WithContext(item.path()));
      sim.policies.push_back(window);
    }
  }
  return sim;
}

std::string PrintPoolConfig(const PoolConfig& c) {
  JsonWriter w;
  w.BeginObject().Key("P").Int(c.P).Key("S").Int(c.S).Key("window");
  PrintWindow(w, c.window);
  IntField(w, "B", c.B);
  w.Key("G").Int(c.G).Key("extra").Int(c.extra).Key("min_valid").Int(c.MinValid()).Key("retries").Int(c.retries);
  if (c.deadline_s) {
    w.Key("deadline_s").Double(*c.deadline_s);
    w.Key("on_deadline").String(OnDeadlineWords()[static_cast<size_t>(c.on_deadline)]);
  }
  w.Key("zero_signal").String(ZeroSignalWords()[c.refill ? 1 : 0]);
  IntField(w, "max_staleness", c.max_staleness);
  w.Key("max_leases").Int(c.max_leases);
  IntField(w, "tasks", c.tasks);
  w.Key("seed").Int(static_cast<int64_t>(c.seed));
  if (!c.sources.empty()) {
    w.Key("sources").BeginArray();
    for (const SourceConfig& s : c.sources) {
      w.BeginObject().Key("name").String(s.name).Key("weight").Double(s.weight);
      IntField(w, "tasks", s.tasks);
      if (s.window) {
        w.Key("window");
        PrintWindow(w, *s.window);
      }
      w.EndObject();
    }
    w.EndArray();
  }
  w.EndObject();
  return w.Take();
}

Result<TimedEvent> ParseEvent(std::string_view text) {
  ASSIGN_OR_RETURN(json::value value, ParseJson(text));
  JsonRef object(value);
  TimedEvent timed;
  Event& e = timed.event;
  ASSIGN_OR_RETURN(JsonRef t, object.Field("t"));
  ASSIGN_OR_RETURN(timed.t, t.Double());
  ASSIGN_OR_RETURN(JsonRef event, object.Field("event"));
  enum { kFinish, kFail, kLease, kUpdate, kCommit, kCrash, kTick };
  ASSIGN_OR_RETURN(int word, Word(event, {"finish", "fail", "lease", "update", "commit", "crash", "tick"}));
  // Each has its own: a field that would be passed over is a mistake.
  std::vector<std::string> keys = {"t", "event"};
  auto add = [&](std::initializer_list<const char*> more) { keys.insert(keys.end(), more.begin(), more.end()); };
  if (word == kFinish || word == kFail) add({"group", "rollout", "attempt", "outcome", "kind"});
  if (word == kFinish) add({"reward"});
  if (word == kUpdate) add({"batch"});
  if (word == kCommit) add({"step"});
  if (word == kCrash) add({"who"});
  if (Status s = object.OnlyKeys(keys); !s.ok()) return s.WithContext("a " + *event.String());
  switch (word) {
    case kFinish:
    case kFail: {
      e.kind = word == kFinish ? Event::Kind::kFinish : Event::Kind::kFail;
      ASSIGN_OR_RETURN(JsonRef group, object.Field("group"));
      ASSIGN_OR_RETURN(e.group, group.Int());
      RETURN_IF_ERROR(ReadInt(object, "rollout", &e.rollout));
      RETURN_IF_ERROR(ReadInt(object, "attempt", &e.attempt));
      ASSIGN_OR_RETURN(e.outcome, object.StringOr("outcome", word == kFinish ? "scored" : "infra_failure"));
      ASSIGN_OR_RETURN(e.reason, TextOr(object, "kind"));
      ASSIGN_OR_RETURN(e.reward, OptionalDouble(object, "reward"));
      break;
    }
    case kLease: e.kind = Event::Kind::kLease; break;
    case kUpdate: {
      e.kind = Event::Kind::kUpdate;
      ASSIGN_OR_RETURN(JsonRef batch, object.Field("batch"));
      ASSIGN_OR_RETURN(e.number, batch.Int());
      break;
    }
    case kCommit: {
      e.kind = Event::Kind::kCommit;
      ASSIGN_OR_RETURN(JsonRef step, object.Field("step"));
      ASSIGN_OR_RETURN(e.number, step.Int());
      break;
    }
    case kCrash: {
      ASSIGN_OR_RETURN(JsonRef who, object.Field("who"));
      ASSIGN_OR_RETURN(int crashed, Word(who, {"pool", "trainer"}));
      e.kind = crashed == 0 ? Event::Kind::kCrashPool : Event::Kind::kCrashTrainer;
      break;
    }
    case kTick: e.kind = Event::Kind::kTick; break;
  }
  return timed;
}

std::string PrintEvent(const TimedEvent& timed) {
  const Event& e = timed.event;
  JsonWriter w;
  w.BeginObject().Key("t").Double(timed.t).Key("event");
  switch (e.kind) {
    case Event::Kind::kFinish:
    case Event::Kind::kFail:
      w.String(e.kind == Event::Kind::kFinish ? "finish" : "fail");
      w.Key("group").Int(e.group).Key("rollout").Int(e.rollout).Key("outcome").String(e.outcome);
      TextField(w, "kind", e.reason);
      if (e.reward && e.kind == Event::Kind::kFinish) w.Key("reward").Double(*e.reward);
      break;
    case Event::Kind::kLease: w.String("lease"); break;
    case Event::Kind::kUpdate: w.String("update").Key("batch").Int(e.number); break;
    case Event::Kind::kCommit: w.String("commit").Key("step").Int(e.number); break;
    case Event::Kind::kCrashPool: w.String("crash").Key("who").String("pool"); break;
    case Event::Kind::kCrashTrainer: w.String("crash").Key("who").String("trainer"); break;
    case Event::Kind::kTick: w.String("tick"); break;
    case Event::Kind::kClose:
    case Event::Kind::kReopen: TEMPER_CHECK(false) << "close and reopen have no scripted form";
  }
  w.EndObject();
  return w.Take();
}

std::string PrintDecision(const Decision& d) {
  JsonWriter w;
  w.BeginObject().Key("t").Double(d.t).Key("decision").String(Name(d.kind));
  TextField(w, "event", d.event);
  TextField(w, "who", d.who);
  IntField(w, "group", d.group);
  IntField(w, "rollout", d.rollout);
  IntField(w, "attempt", d.attempt);
  TextField(w, "source", d.source);
  IntField(w, "pos", d.pos);
  IntField(w, "batch", d.batch);
  IntField(w, "step", d.step);
  IntField(w, "version", d.version);
  IntField(w, "from", d.from);
  IntField(w, "valid", d.valid);
  if (d.partial) w.Key("partial").Bool(*d.partial);
  TextField(w, "reason", d.reason);
  switch (d.kind) {
    case Decision::Kind::kTake: w.Key("staleness").Int(*d.stale); break;
    case Decision::Kind::kLease: w.Key("groups").Ints(d.groups).Key("staleness").Ints(d.staleness).Key("again").Bool(*d.again); break;
    case Decision::Kind::kUpdate: w.Key("groups").Ints(d.groups); break;
    case Decision::Kind::kRecover: w.Key("batches").Ints(d.groups); break;
    case Decision::Kind::kHold: w.Key("have").Int(*d.have).Key("need").Int(*d.need).Key("blocked").Ints(d.groups); break;
    default: break;
  }
  w.Key("head").BeginArray();
  for (const std::optional<int64_t>& head : d.head) head ? w.Int(*head) : w.Null();
  w.EndArray().Key("ledger").Ints(d.ledger).EndObject();
  return w.Take();
}

std::string PrintSummary(const Window& window) {
  const WindowTotals t = window.totals();
  const PoolPlan& plan = window.plan();
  JsonWriter w;
  w.BeginObject().Key("bound");
  plan.bound ? w.Int(*plan.bound) : w.Null();
  w.Key("max_staleness").Int(t.staleness_max).Key("B").Ints(plan.slots).Key("W").BeginArray();
  for (const std::optional<int64_t>& size : plan.window) size ? w.Int(*size) : w.Null();
  w.EndArray().Key("quota").Ints(plan.quota).Key("version").Int(window.version()).Key("batches").Int(t.batches);
  w.Key("ledger").BeginObject().Key("admitted").Int(t.admitted).Key("consumed").Int(t.consumed).Key("tombstoned").BeginObject();
  for (const auto& [reason, n] : t.tombstones) w.Key(reason).Int(n);
  w.EndObject().Key("in_flight").Int(t.in_flight).EndObject();
  w.Key("rollouts").BeginObject().Key("issued").Int(t.issued).Key("finished").Int(t.finished).Key("failed").Int(t.failed);
  w.Key("aborted").Int(t.aborted).Key("in_flight").Int(t.running).EndObject().EndObject();
  return w.Take();
}

std::string PrintError(const Status& status) {
  std::string kind = status.ToString();
  kind = kind.substr(0, kind.find(':'));
  std::transform(kind.begin(), kind.end(), kind.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  JsonWriter w;
  w.BeginObject().Key("error").BeginObject().Key("kind").String(kind).Key("message").String(status.message()).EndObject().EndObject();
  return w.Take();
}

std::string PrintLedger(const LedgerRecord& record) {
  const LedgerLine& l = record.line;
  JsonWriter w;
  w.BeginObject().Key("seq").Int(record.seq).Key("t").Double(l.t).Key("event").String(Name(l.kind));
  IntField(w, "group", l.group);
  IntField(w, "rollout", l.rollout);
  IntField(w, "attempt", l.attempt);
  TextField(w, "source", l.source);
  IntField(w, "task", l.task);
  IntField(w, "from", l.from);
  TextField(w, "outcome", l.outcome);
  if (l.reward) w.Key("reward").Double(*l.reward);
  IntField(w, "version_admitted", l.version_admitted);
  IntField(w, "version_consumed", l.version_consumed);
  IntField(w, "step", l.step);
  if (l.kind == LedgerLine::Kind::kLease || l.kind == LedgerLine::Kind::kRetire) w.Key("groups").Ints(l.groups);
  TextField(w, "reason", l.reason);
  TextField(w, l.kind == LedgerLine::Kind::kRecover ? "who" : "trainer", l.who);
  w.EndObject();
  return w.Take();
}

Result<LedgerRecord> ParseLedger(std::string_view text) {
  ASSIGN_OR_RETURN(json::value value, ParseJson(text));
  JsonRef object(value);
  RETURN_IF_ERROR(object.OnlyKeys({"seq", "t", "event", "group", "rollout", "attempt", "source", "task", "from", "outcome", "reward",
                                   "version_admitted", "version_consumed", "step", "groups", "reason", "who", "trainer"}));
  LedgerRecord record;
  LedgerLine& l = record.line;
  ASSIGN_OR_RETURN(JsonRef seq, object.Field("seq"));
  ASSIGN_OR_RETURN(record.seq, seq.Int());
  ASSIGN_OR_RETURN(JsonRef t, object.Field("t"));
  ASSIGN_OR_RETURN(l.t, t.Double());
  ASSIGN_OR_RETURN(JsonRef event, object.Field("event"));
  std::vector<std::string> kinds;
  for (int i = 0; i <= static_cast<int>(LedgerLine::Kind::kSpace); ++i) kinds.push_back(Name(static_cast<LedgerLine::Kind>(i)));
  ASSIGN_OR_RETURN(int word, Word(event, kinds));
  l.kind = static_cast<LedgerLine::Kind>(word);
  ASSIGN_OR_RETURN(l.group, OptionalInt<int64_t>(object, "group"));
  ASSIGN_OR_RETURN(l.rollout, OptionalInt<int32_t>(object, "rollout"));
  ASSIGN_OR_RETURN(l.attempt, OptionalInt<int32_t>(object, "attempt"));
  ASSIGN_OR_RETURN(l.source, TextOr(object, "source"));
  ASSIGN_OR_RETURN(l.task, OptionalInt<int64_t>(object, "task"));
  ASSIGN_OR_RETURN(l.from, OptionalInt<int64_t>(object, "from"));
  ASSIGN_OR_RETURN(l.outcome, TextOr(object, "outcome"));
  ASSIGN_OR_RETURN(l.reward, OptionalDouble(object, "reward"));
  ASSIGN_OR_RETURN(l.version_admitted, OptionalInt<int64_t>(object, "version_admitted"));
  ASSIGN_OR_RETURN(l.version_consumed, OptionalInt<int64_t>(object, "version_consumed"));
  ASSIGN_OR_RETURN(l.step, OptionalInt<int64_t>(object, "step"));
  if (object.Has("groups")) {
    ASSIGN_OR_RETURN(JsonRef groups, object.Field("groups"));
    ASSIGN_OR_RETURN(l.groups, groups.Ints());
  }
  ASSIGN_OR_RETURN(l.reason, TextOr(object, "reason"));
  ASSIGN_OR_RETURN(l.who, TextOr(object, l.kind == LedgerLine::Kind::kRecover ? "who" : "trainer"));
  return record;
}

}  // namespace temper::datapool
