// The stories of tests/scenarios: events in, decisions out, each also with the pool crashing after any event.
#include <gtest/gtest.h>

#include <set>

#include "common/file.h"
#include "common/strings.h"
#include "tests/datapool/script.h"

namespace temper::datapool {
namespace {

constexpr char kFolder[] = TEMPER_SOURCE_DIR "/tests/scenarios";

struct ScenarioStep {
  int line = 0;  // in the file, from 1
  double t = 0;
  std::vector<Event> events;
  std::string expected;  // words
};

struct Scenario {
  std::string config;
  std::string started;
  std::vector<ScenarioStep> steps;
  std::optional<int64_t> bound;
  int64_t staleness = 0;
  std::vector<int64_t> ledger;
};

Result<int64_t> Number(const std::string& word) {
  int64_t value = 0;
  if (!ParseInt(word, &value)) return InvalidArgument("'" + word + "' is not a number");
  return value;
}

// "4/1" = group 4, rollout 1.
Status ParseTarget(const std::string& word, Event* e) {
  const std::vector<std::string> parts = Split(word, '/');
  if (parts.size() > 2) return InvalidArgument("'" + word + "' is not GROUP/ROLLOUT");
  ASSIGN_OR_RETURN(e->group, Number(parts[0]));
  if (parts.size() == 2) {
    ASSIGN_OR_RETURN(const int64_t rollout, Number(parts[1]));
    e->rollout = static_cast<int32_t>(rollout);
  }
  return Status::Ok();
}

Result<std::vector<Event>> ParseEvents(std::vector<std::string> words) {
  const std::string verb = words.at(0);
  std::vector<std::string> rest(words.begin() + 1, words.end());
  auto take = [&](const std::string& word) {
    const auto at = std::find(rest.begin(), rest.end(), word);
    if (at == rest.end()) return false;
    rest.erase(at);
    return true;
  };
  Event e;
  std::vector<Event> out;
  if (verb == "finish" || verb == "fail") {
    e.kind = verb == "finish" ? Event::Kind::kFinish : Event::Kind::kFail;
    e.outcome = verb == "finish" ? "scored" : "infra_failure";
    for (const char* outcome : {"policy_failure", "truncated", "aborted"}) {
      if (take(outcome)) e.outcome = outcome;
    }
    if (verb == "fail") e.reason = "story";
    if (verb == "finish") e.reward = 1;
    if (take("no")) e.reward.reset();
    if (rest.size() == 3 && rest[1] == "reward") {
      double reward = 0;
      if (!ParseDouble(rest[2], &reward)) return InvalidArgument("reward '" + rest[2] + "'");
      e.reward = reward;
      rest.resize(1);
    }
    take("reward");
    if (rest.size() != 1) return InvalidArgument("which group?");
    for (const std::string& target : Split(rest[0], ',')) {
      RETURN_IF_ERROR(ParseTarget(target, &e));
      out.push_back(e);
    }
    return out;
  }
  if (verb == "update" || verb == "commit") {
    e.kind = verb == "update" ? Event::Kind::kUpdate : Event::Kind::kCommit;
    if (rest.size() != 1) return InvalidArgument("which number?");
    ASSIGN_OR_RETURN(e.number, Number(rest[0]));
  } else if (verb == "crash" && rest == std::vector<std::string>{"pool"}) {
    e.kind = Event::Kind::kCrashPool;
  } else if (verb == "crash" && rest == std::vector<std::string>{"trainer"}) {
    e.kind = Event::Kind::kCrashTrainer;
  } else if (verb == "lease" && rest.empty()) {
    e.kind = Event::Kind::kLease;
  } else if (verb == "tick" && rest.empty()) {
    e.kind = Event::Kind::kTick;
  } else {
    return InvalidArgument("'" + verb + "' is not understood");
  }
  return std::vector<Event>{e};
}

std::vector<std::string> Words(const std::string& text) {
  std::vector<std::string> out;
  for (const std::string& word : Split(text, ' ')) {
    if (!word.empty()) out.push_back(word);
  }
  return out;
}

Result<Scenario> ParseScenario(const std::string& text) {
  Scenario s;
  int number = 0;
  for (const std::string& line : Split(text, '\n')) {
    ++number;
    if (line.empty() || line[0] == '#') continue;
    const std::vector<std::string> words = Words(line);
    auto bad = [&](const std::string& what) { return InvalidArgument(fmt::format("line {}: {}", number, what)); };
    if (line[0] == ' ') {
      std::string& into = s.steps.empty() ? s.started : s.steps.back().expected;
      into += (into.empty() ? "" : " ") + Join(words, " ");
    } else if (words[0] == "pool") {
      s.config = line.substr(5);
    } else if (words[0] == "end") {
      if (words.size() != 7 || words[1] != "bound" || words[3] != "staleness" || words[5] != "ledger") return bad("end bound B staleness M ledger a,c,t,i");
      ASSIGN_OR_RETURN(s.bound, Number(words[2]));
      ASSIGN_OR_RETURN(s.staleness, Number(words[4]));
      for (const std::string& part : Split(words[6], ',')) {
        ASSIGN_OR_RETURN(const int64_t n, Number(part));
        s.ledger.push_back(n);
      }
    } else {
      ScenarioStep step;
      step.line = number;
      if (words.size() < 2 || !ParseDouble(words[0], &step.t)) return bad("a time and an event");
      Result<std::vector<Event>> events = ParseEvents({words.begin() + 1, words.end()});
      if (!events.ok()) return bad(events.status().message());
      step.events = *std::move(events);
      s.steps.push_back(std::move(step));
    }
  }
  if (s.config.empty() || s.steps.empty() || !s.bound || s.ledger.size() != 4) return InvalidArgument("no configuration, no event, or no end");
  return s;
}


// The pool dies and comes back from its store form; the decision line that says so is no decision of the story.
void CrashPool(Window& window, double t) {
  Result<StepOutput> out = window.Apply(Of(Event::Kind::kCrashPool), t);
  ASSERT_TRUE(out.ok());
  ASSERT_EQ(Short(*out), "recover:pool[]");
  Result<Window> rebuilt = Window::Rebuild(window.config(), window.Store());
  ASSERT_TRUE(rebuilt.ok());
  window = *std::move(rebuilt);
}

// `crash_after`: the number of the event after which the pool crashes; -1 never; -2 after each.
void PlayScenario(const std::string& name, const Scenario& s, int64_t crash_after) {
  Window window(Config(s.config));
  const std::string started = Short(window.Start(0));
  EXPECT_EQ(started, s.started) << name << ", at the start";
  int64_t number = 0;
  for (const ScenarioStep& step : s.steps) {
    std::string got;
    for (const Event& e : step.events) {
      Result<StepOutput> out = window.Apply(e, step.t);
      const std::string words = out.ok() ? Short(*out) : "error";
      got += (got.empty() || words.empty() ? "" : " ") + words;
      if (crash_after == -2 || crash_after == number) CrashPool(window, step.t);
      ++number;
    }
    EXPECT_EQ(got, step.expected) << name << ":" << step.line << (crash_after == -1 ? "" : fmt::format(" (crash after event {})", crash_after));
  }
  const WindowTotals t = window.totals();
  EXPECT_EQ(window.plan().bound, s.bound) << name;
  EXPECT_EQ(t.staleness_max, s.staleness) << name;
  EXPECT_EQ((std::vector<int64_t>{t.admitted, t.consumed, t.tombstoned, t.in_flight}), s.ledger) << name;
}

std::vector<std::pair<std::string, Scenario>> AllScenarios() {
  std::vector<std::pair<std::string, Scenario>> all;
  Result<std::vector<std::string>> names = ListDir(kFolder);
  EXPECT_TRUE(names.ok());
  for (const std::string& name : *names) {
    if (!name.ends_with(".txt")) continue;
    Result<std::string> text = ReadFile(std::string(kFolder) + "/" + name);
    EXPECT_TRUE(text.ok());
    Result<Scenario> scenario = ParseScenario(*text);
    EXPECT_TRUE(scenario.ok()) << name << ": " << scenario.status().message();
    if (scenario.ok()) all.emplace_back(name, *std::move(scenario));
  }
  return all;
}

// What could go wrong: a decision of a documented story changes; a crash of the pool after any event changes a later one.
TEST(Scenario, DecidesAsWrittenWhereverThePoolCrashes) {
  const auto all = AllScenarios();
  EXPECT_GE(all.size(), 15u);
  for (const auto& [name, scenario] : all) {
    int64_t events = 0;
    for (const ScenarioStep& step : scenario.steps) events += static_cast<int64_t>(step.events.size());
    for (int64_t crash = -2; crash < events; ++crash) PlayScenario(name, scenario, crash);
  }
}

// What could go wrong: no story comes near the bound, so that it proves nothing.
TEST(Scenario, ReachesTheBoundForEachStaleness) {
  std::set<int64_t> reached;
  for (const auto& [name, scenario] : AllScenarios()) {
    if (scenario.staleness == *scenario.bound) reached.insert(Config(scenario.config).S);
  }
  for (int64_t S : {1, 2, 3}) EXPECT_TRUE(reached.count(S)) << "S = " << S;
}

}  // namespace
}  // namespace temper::datapool
