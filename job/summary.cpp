#include "job/summary.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>

#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "datapool/listing.h"
#include "datapool/statistics.h"
#include "datapool/verify.h"
#include "job/eval_change.h"
#include "trainer/loop.h"

namespace temper::job {
namespace {

struct Evaluations {
  std::optional<double> first, last;
  int64_t count = 0;
};

Evaluations ReadEvaluations(const std::string& path, std::vector<std::string>* notes) {
  Evaluations all;
  auto text = ReadFile(path);
  if (!text.ok()) return all;
  for (const std::string& line : Split(*text, '\n')) {
    if (line.empty()) continue;
    auto value = ParseJson(line);
    if (!value.ok()) {
      notes->push_back("eval.jsonl: a line cannot be read");
      continue;
    }
    const JsonRef row(*value);
    auto rate = row.DoubleOr("pass_rate", 0);
    if (!rate.ok()) continue;
    if (all.count++ == 0) all.first = *rate;
    all.last = *rate;
  }
  if (all.count < 2) all.last.reset();
  return all;
}

int64_t SftTokens(const std::string& path) {
  auto text = ReadFile(path);
  if (!text.ok()) return 0;
  // Each line has the running total; the last whole one counts.
  int64_t tokens = 0;
  for (const std::string& line : Split(*text, '\n')) {
    if (auto value = ParseJson(line); value.ok()) {
      if (auto count = JsonRef(*value).IntOr("tokens", tokens); count.ok()) tokens = std::max(tokens, *count);
    }
  }
  return tokens;
}

}  // namespace

std::string MakeSummary(const Job& job, const Plan& plan, const std::string& run_dir, const JobEnd& end) {
  std::vector<std::string> notes;
  trainer::TrainTotals totals;
  if (auto read = trainer::ReadTrainTotals(run_dir); read.ok()) totals = *read;
  else notes.push_back("metrics.jsonl: " + read.status().message());
  const Evaluations evaluations = ReadEvaluations(run_dir + "/eval.jsonl", &notes);

  datapool::VerifyReport ledger;
  ledger.balanced = true;
  datapool::Statistics statistics(job.pool, {});
  if (auto text = ReadFile(run_dir + "/ledger.jsonl"); text.ok()) {
    ledger = datapool::VerifyLedger(job.pool, *text);
    if (const auto records = datapool::ReadLedger(*text); records.ok()) {
      for (const datapool::LedgerRecord& record : *records) statistics.Add(record.line);
    }
    if (!ledger.balanced) notes.push_back("ledger.jsonl line " + std::to_string(ledger.balance_line) + ": " + ledger.balance_error);
    else if (!ledger.replayed) notes.push_back("ledger.jsonl line " + std::to_string(ledger.replay_line) + " is not what the window machine decides: " + ledger.replay_error);
  }
  auto counter = [&](const char* name) {
    auto it = end.counters.find(name);
    return it == end.counters.end() ? 0.0 : it->second;
  };
  // The gateway sees every token; those of evaluations are counted apart.
  const double sampled = counter("gateway.tokens_sampled"), sampled_eval = counter("gateway.tokens_sampled_eval");

  // What the trainer and the workers said they ran on, not what was planned.
  std::set<std::string> paths;
  for (const auto& [name, value] : end.counters) {
    constexpr std::string_view kMark = ".cpu_path.";
    if (const size_t at = name.find(kMark); at != std::string::npos && value > 0) paths.insert(name.substr(at + kMark.size()));
  }
  if (paths.empty()) notes.push_back("no role said which kernels it ran on");

  JsonWriter w;
  auto number = [&](const char* key, std::optional<double> value) {
    w.Key(key);
    if (value) w.Double(*value);
    else w.Null();
  };
  w.BeginObject();
  w.Key("name").String(job.name).Key("end").String(end.phase).Key("exit_code").Int(end.exit_code).Key("reason").String(end.reason);
  w.Key("steps").Int(totals.steps);
  w.Key("wall_s").Double(end.wall_s);
  number("eval_start", evaluations.first);
  number("eval_end", evaluations.last);
  w.Key("eval_change");
  if (const auto change = ReadEvalChange(run_dir, job.seed)) {
    w.BeginObject().Key("mean").Double(change->mean).Key("ci95").Doubles(std::vector<double>{change->low, change->high});
    w.Key("tasks").Int(change->tasks).Key("unpaired").Int(change->unpaired).Key("resamples").Int(change->resamples).EndObject();
  } else {
    w.Null();
  }
  w.Key("evaluations").Int(evaluations.count);
  w.Key("tokens_sampled").Int(static_cast<int64_t>(sampled)).Key("tokens_sampled_eval").Int(static_cast<int64_t>(sampled_eval));
  w.Key("tokens_trained").Int(totals.tokens_trained).Key("sft_tokens").Int(SftTokens(run_dir + "/sft.jsonl"));
  w.Key("tree_tokens").Int(totals.tree_tokens).Key("logical_tokens").Int(totals.logical_tokens);
  w.Key("on_policy_tokens").Int(totals.on_policy_tokens).Key("on_policy_versions").Ints(totals.on_policy_versions);
  number("importance_ratio_max_dev_on_policy", totals.on_policy_tokens > 0 ? std::optional(totals.ratio_max_dev_on_policy) : std::nullopt);
  if (totals.on_policy_tokens == 0) notes.push_back("no token could be checked at its own version");
  w.Key("staleness_max").Int(ledger.staleness_max);
  number("staleness_bound", plan.bound ? std::optional<double>(static_cast<double>(*plan.bound)) : std::nullopt);
  w.Key("outcomes").BeginObject();
  for (const char* outcome : {"scored", "policy_failure", "truncated", "infra_failure", "aborted"}) {
    auto it = ledger.outcomes.find(outcome);
    w.Key(outcome).Int(it == ledger.outcomes.end() ? 0 : it->second);
  }
  w.EndObject();
  w.Key("ledger_balanced").Bool(ledger.balanced).Key("ledger_replayed").Bool(ledger.replayed || ledger.lines == 0);
  w.Key("groups").BeginObject().Key("admitted").Int(ledger.admitted).Key("consumed").Int(ledger.consumed);
  w.Key("in_flight").Int(ledger.in_flight).Key("tombstoned").BeginObject();
  for (const auto& [reason, count] : ledger.tombstoned) w.Key(reason).Int(count);
  w.EndObject().EndObject();
  w.Key("length_bias").Double(statistics.length_bias());
  if (plan.sources.size() > 1) {
    w.Key("sources").BeginObject();
    for (const PlannedSource& planned : plan.sources) {
      const datapool::Balance::Source source = ledger.sources[planned.name];  // of a run without a ledger: nothing
      w.Key(planned.name).BeginObject().Key("of_every_step").Int(planned.groups).Key("admitted").Int(source.admitted);
      w.Key("consumed").Int(source.consumed).Key("tombstoned").Int(source.tombstoned).Key("in_flight").Int(source.in_flight());
      w.Key("staleness_max").Int(source.staleness_max);
      number("staleness_bound", planned.bound ? std::optional<double>(static_cast<double>(*planned.bound)) : std::nullopt);
      w.EndObject();
    }
    w.EndObject();
  }
  w.Key("weight_updates").Int(job.pool.P > 0 ? ledger.consumed / job.pool.P : 0);
  w.Key("tokens_per_s").BeginObject();
  w.Key("sample").Double(end.sampling_s > 0 ? (sampled + sampled_eval) / end.sampling_s : 0);
  w.Key("train").Double(totals.train_s > 0 ? static_cast<double>(totals.logical_tokens) / totals.train_s : 0).EndObject();
  w.Key("numerics").String(job.numerics);
  w.Key("cpu_paths").BeginArray();
  for (const std::string& path : paths) w.String(path);
  w.EndArray();
  w.Key("restarts").Int(end.restarts);
  w.Key("notes").BeginArray();
  for (const std::string& note : notes) w.String(note);
  w.EndArray().EndObject();
  return w.Take() + "\n";
}

}  // namespace temper::job
