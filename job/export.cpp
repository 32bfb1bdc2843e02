#include "job/export.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "common/config.h"
#include "common/file.h"
#include "common/json.h"
#include "datapool/format.h"
#include "datapool/listing.h"
#include "datapool/store_reader.h"
#include "engine/kept_json.h"
#include "job/job.h"
#include "trainer/batch.h"
#include "trainer/loss.h"
#include "trainer/trajectory.h"

namespace temper::job {
namespace {

struct TrainedGroup {
  int64_t version_admitted = 0, task = 0;
  std::string source;
  std::map<int32_t, int32_t> attempts;  // of each valid rollout
};

// By step, what its update trained.
struct Trained {
  std::map<int64_t, TrainedGroup> groups;
  std::map<int64_t, std::set<int64_t>> steps;
  std::set<int64_t> dropped;
};

Trained ReadTrained(const std::vector<datapool::LedgerRecord>& ledger) {
  using Kind = datapool::LedgerLine::Kind;
  Trained out;
  for (const datapool::LedgerRecord& record : ledger) {
    const datapool::LedgerLine& l = record.line;
    switch (l.kind) {
      case Kind::kAdmit: out.groups[*l.group] = {l.version_admitted.value_or(0), l.task.value_or(0), l.source, {}}; break;
      case Kind::kOutcome:
        if (l.reward && l.outcome != "aborted") out.groups[*l.group].attempts[*l.rollout] = *l.attempt;
        break;
      case Kind::kQuarantine: out.groups[*l.group].attempts.erase(*l.rollout); break;
      case Kind::kRetire:
        if (l.reason == "drop") out.dropped.insert(l.groups.begin(), l.groups.end());
        break;
      case Kind::kConsume: out.steps[*l.step].insert(*l.group); break;
      case Kind::kRollback: out.steps.erase(out.steps.upper_bound(*l.step), out.steps.end()); break;
      default: break;
    }
  }
  return out;
}

// Of each sampled run of a rollout, the advantages of its tokens: the loss has them in the order in which the tokens were drawn.
std::map<int32_t, std::vector<double>> ByRun(const trainer::Rollout& rollout, const std::vector<double>& advantages) {
  std::vector<int32_t> sampled;
  for (size_t r = 0; r < rollout.runs.size(); ++r) {
    if (rollout.runs[r].sampled) sampled.push_back(static_cast<int32_t>(r));
  }
  std::sort(sampled.begin(), sampled.end(), [&](int32_t a, int32_t b) {
    const trainer::TokenRun &x = rollout.runs[static_cast<size_t>(a)], &y = rollout.runs[static_cast<size_t>(b)];
    return std::tuple(x.call, x.choice, a) < std::tuple(y.call, y.choice, b);
  });
  std::map<int32_t, std::vector<double>> out;
  size_t at = 0;
  for (int32_t r : sampled) {
    const size_t n = rollout.runs[static_cast<size_t>(r)].ids.size();
    out[r].assign(advantages.begin() + static_cast<ptrdiff_t>(at), advantages.begin() + static_cast<ptrdiff_t>(at + n));
    at += n;
  }
  return out;
}

std::string PrintRow(const trainer::Rollout& rollout, const std::string& head, int64_t sequence, const std::vector<int32_t>& path,
                     const std::map<int32_t, std::vector<double>>& advantages, std::set<int32_t>& told) {
  JsonWriter w;
  w.BeginObject().Key("sequence").Int(sequence);
  double inv_temperature = 1;
  std::vector<bool> counts;
  for (int32_t r : path) {
    const trainer::TokenRun& run = rollout.runs[static_cast<size_t>(r)];
    counts.push_back(run.sampled && run.trainable && told.insert(r).second);
    if (run.sampled) inv_temperature = run.inv_temperature;
  }
  w.Key("inv_temperature").Double(inv_temperature);
  auto list = [&](const char* key, auto print) {
    w.Key(key).BeginArray();
    for (size_t p = 0; p < path.size(); ++p) {
      const trainer::TokenRun& run = rollout.runs[static_cast<size_t>(path[p])];
      for (size_t k = 0; k < run.ids.size(); ++k) print(run, p, k);
    }
    w.EndArray();
  };
  list("ids", [&](const trainer::TokenRun& run, size_t, size_t k) { w.Int(run.ids[k]); });
  list("mask", [&](const trainer::TokenRun&, size_t p, size_t) { w.Int(counts[p]); });
  list("logprobs", [&](const trainer::TokenRun& run, size_t, size_t k) { run.sampled ? w.Double(run.logprobs[k]) : w.Null(); });
  std::vector<std::string> kept;
  for (int32_t r : path) {
    const trainer::TokenRun& run = rollout.runs[static_cast<size_t>(r)];
    kept.insert(kept.end(), run.kept.begin(), run.kept.end());
    kept.resize(kept.size() + run.ids.size() - run.kept.size());
  }
  if (std::any_of(kept.begin(), kept.end(), [](const std::string& set) { return !set.empty(); })) {
    w.Key("kept");
    engine::WriteKept(w, kept);
  }
  list("versions", [&](const trainer::TokenRun& run, size_t, size_t) { run.sampled ? w.Int(run.version.step) : w.Null(); });
  list("advantages", [&](const trainer::TokenRun&, size_t p, size_t k) { w.Double(counts[p] ? advantages.at(path[p])[k] : 0); });
  w.EndObject();
  // The head's fields first.
  return head.substr(0, head.size() - 1) + "," + w.Take().substr(1);
}

}  // namespace

std::vector<std::string> RowsOf(const trainer::Rollout& rollout, const std::string& head, const std::vector<double>& advantages) {
  const auto by_run = ByRun(rollout, advantages);
  std::vector<bool> parent(rollout.runs.size());
  for (const trainer::TokenRun& r : rollout.runs) {
    if (r.parent >= 0) parent[static_cast<size_t>(r.parent)] = true;
  }
  std::set<int32_t> told;
  std::vector<std::string> rows;
  for (size_t leaf = 0; leaf < rollout.runs.size(); ++leaf) {
    if (parent[leaf]) continue;
    std::vector<int32_t> path;
    for (auto r = static_cast<int32_t>(leaf); r >= 0; r = rollout.runs[static_cast<size_t>(r)].parent) path.push_back(r);
    std::reverse(path.begin(), path.end());
    rows.push_back(PrintRow(rollout, head, static_cast<int64_t>(rows.size()), path, by_run, told));
  }
  return rows;
}

Status ExportRows(const std::string& run, const std::function<void(const std::string&)>& row, const std::function<void(const std::string&)>& dropped) {
  ASSIGN_OR_RETURN(Config config, Config::Load(run + "/job.yaml"));
  ASSIGN_OR_RETURN(const Job job, ReadJob(config));
  const trainer::Algorithm& algorithm = job.algorithm.algorithm;
  if (algorithm.ReadsReference() || algorithm.distillation.kind != trainer::DistillationKind::kNone || algorithm.ReadsValues() || algorithm.off_policy.decoupled) {
    return Unimplemented("algorithm: its advantages depend on what only the trainer computes (a reference model, a teacher, values, or its own log-probabilities)");
  }
  ASSIGN_OR_RETURN(const std::string text, ReadFile(run + datapool::kLedgerFile));
  ASSIGN_OR_RETURN(const std::vector<datapool::LedgerRecord> ledger, datapool::ReadLedger(text));
  const Trained trained = ReadTrained(ledger);
  ASSIGN_OR_RETURN(const std::unique_ptr<datapool::StoreReader> reader, datapool::StoreReader::Open(run));
  for (const auto& [step, numbers] : trained.steps) {
    // A step's groups are dropped together, with the commit that holds it; advantages are of whole steps.
    if (trained.dropped.count(*numbers.begin())) {
      dropped(fmt::format("step {}: the records of its {} groups were dropped (pool.retention)", step, numbers.size()));
      continue;
    }
    std::vector<trainer::Group> groups;
    for (int64_t number : numbers) {
      const TrainedGroup& facts = trained.groups.at(number);
      trainer::Group& group = groups.emplace_back();
      group.group = number;
      group.version_admitted = facts.version_admitted;
      for (const auto& [rollout, attempt] : facts.attempts) {
        ASSIGN_OR_RETURN(const std::string bytes, reader->Read(number, rollout, attempt));
        ASSIGN_OR_RETURN(trainer::Rollout parsed, trainer::ParseTrajectory(bytes, std::numeric_limits<int32_t>::max()));
        parsed.rollout = rollout;
        group.rollouts.push_back(std::move(parsed));
      }
    }
    if (job.trainer.permute_rewards) trainer::PermuteRewards(job.seed, groups);
    ASSIGN_OR_RETURN(const trainer::Batch batch, trainer::BuildBatch(std::move(groups), {.merge = false}));
    const trainer::LossResult loss = trainer::ComputeLoss(algorithm, trainer::RecordedLossGroups(batch));
    const std::vector<uint8_t> silent = trainer::SilentGroups(algorithm, batch);
    for (size_t g = 0; g < batch.groups.size(); ++g) {
      const trainer::Group& group = batch.groups[g];
      for (size_t i = 0; i < group.rollouts.size(); ++i) {
        const trainer::Rollout& rollout = group.rollouts[i];
        const TrainedGroup& facts = trained.groups.at(group.group);
        JsonWriter head;
        head.BeginObject().Key("step").Int(step).Key("group").Int(group.group).Key("rollout").Int(rollout.rollout);
        head.Key("source").String(facts.source).Key("task").Int(facts.task).Key("version_admitted").Int(group.version_admitted);
        head.Key("outcome").String(OutcomeName(rollout.outcome)).Key("reward").Double(rollout.reward);
        head.Key("silent").Bool(!silent.empty() && silent[g]).EndObject();
        for (const std::string& line : RowsOf(rollout, head.Take(), loss.token_advantages[g][i])) row(line);
      }
    }
  }
  return Status::Ok();
}

}  // namespace temper::job
