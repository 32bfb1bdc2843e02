#include "trainer/loop.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <iterator>
#include <mutex>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "common/faults.h"
#include "common/file.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"
#include "engine/kernel_path.h"
#include "engine/train_pass.h"
#include "trainer/batch.h"
#include "trainer/checkpoint.h"
#include "trainer/frozen_model.h"
#include "trainer/loss.h"
#include "trainer/prove.h"
#include "trainer/ranks.h"

namespace temper::trainer {
namespace {

constexpr uint32_t kLeaseWaitMs = 500;
constexpr double kPatienceS = 120;  // how long another part may be away, a restart included
constexpr int64_t kProofTokens = 1 << 16;

std::string MetricsPath(const std::string& run_dir) { return run_dir + "/metrics.jsonl"; }
std::string EvaluationsPath(const std::string& run_dir) { return run_dir + "/evaluations.jsonl"; }

// Lines of a JSON Lines file that parse; a torn last line (the process died in it) is dropped. Absent file: none.
Result<std::vector<std::pair<std::string, json::value>>> ReadLines(const std::string& path) {
  std::vector<std::pair<std::string, json::value>> lines;
  if (!Exists(path)) return lines;
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  for (const std::string& line : Split(text, '\n')) {
    Result<json::value> value = ParseJson(line);
    if (value.ok() && value->is_object()) lines.emplace_back(line, std::move(*value));
  }
  return lines;
}

// The largest number of nodes whose forward and backward fit into `bytes`; never less than 64.
int64_t ChunkNodes(const engine::ModelConfig& config, engine::Profile profile, int64_t bytes) {
  int64_t low = 64, high = int64_t{1} << 24;
  while (low + 64 < high) {
    const int64_t middle = (low + high) / 2;
    const bool fits = static_cast<int64_t>(engine::TrainPass::EstimateBytes(config, profile, middle, middle / 16 + 1)) <= bytes;
    (fits ? low : high) = middle;
  }
  return low;
}

// What one optimizer step says of itself: the line of metrics.jsonl and the live view.
struct StepReport {
  int64_t step = 0;     // after it; trained with version step-1
  int64_t groups = 0, rollouts = 0;
  std::map<std::string, int64_t> outcomes;
  double loss = 0;
  LossMetrics loss_metrics;
  int64_t tree_tokens = 0, logical_tokens = 0;
  OnPolicyCheck on_policy;
  int64_t staleness_max = 0;
  double staleness_mean = 0;
  int64_t staleness_steps_max = 0;  // in optimizer steps
  struct Source {
    int64_t groups = 0, rollouts = 0, staleness_max = 0;
    double reward = 0;  // sum
  };
  std::map<std::string, Source> sources;
  AdamW::Report optimizer;
  std::string skipped;  // why no optimizer step was taken; empty when one was
  bool again = false;
  double wait_s = 0, batch_s = 0, forward_s = 0, backward_s = 0, optimizer_s = 0, publish_s = 0, checkpoint_s = 0, wall_s = 0, job_s = 0;
};

void WriteDistribution(JsonWriter& w, const std::string& name, const Distribution& d) {
  w.Key(name + "_mean").Double(d.mean).Key(name + "_std").Double(d.deviation).Key(name + "_min").Double(d.min).Key(name + "_max").Double(d.max);
}

// `clip_norm` as AdamWOptions has it: 0 = none.
std::string MetricsLine(const StepReport& r, double clip_norm) {
  JsonWriter w;
  w.BeginObject().Key("step").Int(r.step).Key("version").Int(r.step - 1);
  WriteDistribution(w, "reward", r.loss_metrics.reward);
  w.Key("groups").Int(r.groups).Key("rollouts").Int(r.rollouts).Key("outcomes").BeginObject();
  for (const auto& [name, count] : r.outcomes) w.Key(name).Int(count);
  w.EndObject();
  WriteDistribution(w, "advantage", r.loss_metrics.advantage);
  WriteDistribution(w, "turn_tokens", r.loss_metrics.turn_tokens);
  const double clipped_norm = clip_norm > 0 ? std::min(r.optimizer.grad_norm, clip_norm) : r.optimizer.grad_norm;
  w.Key("entropy").Double(r.loss_metrics.entropy).Key("rejected_tokens").Int(r.loss_metrics.rejected_tokens);
  w.Key("loss").Double(r.loss).Key("grad_norm").Double(r.optimizer.grad_norm).Key("grad_norm_clipped").Double(clipped_norm);
  w.Key("lr").Double(r.optimizer.lr);
  w.Key("tokens_trained").Int(r.loss_metrics.tokens).Key("sequences").Int(r.loss_metrics.sequences);
  w.Key("tree_tokens").Int(r.tree_tokens).Key("logical_tokens").Int(r.logical_tokens);
  w.Key("on_policy_tokens").Int(r.on_policy.tokens);
  w.Key("importance_ratio_max_dev_on_policy").Double(r.on_policy.max_deviation);
  w.Key("staleness_max").Int(r.staleness_max).Key("staleness_mean").Double(r.staleness_mean);
  w.Key("staleness_steps_max").Int(r.staleness_steps_max);
  if (r.sources.size() > 1) {
    w.Key("sources").BeginObject();
    for (const auto& [name, s] : r.sources) {
      w.Key(name).BeginObject().Key("groups").Int(s.groups).Key("rollouts").Int(s.rollouts);
      w.Key("reward_mean").Double(s.rollouts > 0 ? s.reward / static_cast<double>(s.rollouts) : 0);
      w.Key("staleness_max").Int(s.staleness_max).EndObject();
    }
    w.EndObject();
  }
  w.Key("zero_signal_groups").Int(r.loss_metrics.zero_signal_groups);
  w.Key("clip_fraction_low").Double(r.loss_metrics.clip_fraction_low);
  w.Key("clip_fraction_high").Double(r.loss_metrics.clip_fraction_high);
  if (r.loss_metrics.has_mismatch) {
    w.Key("mismatch_k1").Double(r.loss_metrics.mismatch_k1).Key("mismatch_k3").Double(r.loss_metrics.mismatch_k3);
    w.Key("log_ppl_diff").Double(r.loss_metrics.log_ppl_diff).Key("ppl_ratio").Double(r.loss_metrics.ppl_ratio);
    w.Key("chi2_token").Double(r.loss_metrics.chi2_token).Key("chi2_seq").Double(r.loss_metrics.chi2_seq);
  }
  if (r.loss_metrics.has_reference) w.Key("kl_reference").Double(r.loss_metrics.kl_reference);
  if (r.loss_metrics.has_teacher) w.Key("kl_teacher").Double(r.loss_metrics.kl_teacher);
  if (!r.skipped.empty()) w.Key("skipped").String(r.skipped);
  w.Key("ess").Double(r.loss_metrics.ess).Key("again").Bool(r.again);
  w.Key("wait_s").Double(r.wait_s).Key("batch_s").Double(r.batch_s);
  w.Key("forward_s").Double(r.forward_s).Key("backward_s").Double(r.backward_s);
  w.Key("optimizer_s").Double(r.optimizer_s).Key("publish_s").Double(r.publish_s).Key("checkpoint_s").Double(r.checkpoint_s);
  w.Key("wall_s").Double(r.wall_s).Key("job_s").Double(r.job_s).EndObject();
  return w.Take() + "\n";
}

class Loop {
 public:
  Loop(const TrainerOptions& options, const text::TextFiles& text, TrainerDoors& doors)
      : options_(options), text_(text), doors_(doors), pass_(doors.engine), ranks_(pass_, doors.ranks), start_s_(doors.clock.NowS()) {}

  Status Run(engine::Parameters initial) {
    doors_.metrics[fmt::format("cpu_path.{}", engine::CpuPathName(engine::KernelPath(doors_.engine, options_.profile)))].Set(1);
    RETURN_IF_ERROR(LoadOrInitialise(std::move(initial)));
    RETURN_IF_ERROR(CutMetrics());
    grads_ = engine::Gradients(state_.params.config());
    RETURN_IF_ERROR(PublishWeights());
    // Paused before it may admit anything: the first evaluation holds the version.
    const bool evaluate_first = WantsEvaluation(state_.step);
    RETURN_IF_ERROR(Patiently("data pool, pause", [&] { return doors_.pool.Pause(evaluate_first); }));
    const Status attached = Patiently("data pool, attach", [&]() -> Status {
      return doors_.pool.AttachTrainer(options_.incarnation, state_.step).status();
    });
    if (!attached.ok()) return passed_over_.empty() ? attached : attached.WithContext("checkpoint passed over (" + passed_over_ + ")");
    if (evaluate_first) RETURN_IF_ERROR(Evaluate());
    while (state_.step < options_.steps) RETURN_IF_ERROR(Step());
    return Status::Ok();
  }

 private:
  bool stopped() const { return doors_.stopped.load(std::memory_order_relaxed); }
  double Now() const { return doors_.clock.NowS(); }
  void Enter(Phase phase) { doors_.metrics["phase"].Set(static_cast<double>(phase)); }

  // Repeats a call while the part it goes to is away (it may be restarting), for a bounded time.
  Status Patiently(const std::string& what, const std::function<Status()>& call) {
    double give_up_s = 0;
    while (true) {
      const Status status = call();
      const bool away = status.code() == StatusCode::kUnavailable || status.code() == StatusCode::kDeadlineExceeded;
      if (!away) return status.ok() ? status : status.WithContext(what);
      if (stopped()) return Cancelled("stopped: " + what);
      if (give_up_s == 0) give_up_s = Now() + kPatienceS;
      if (Now() > give_up_s) return status.WithContext(fmt::format("{}: away for {:g} s", what, kPatienceS));
      doors_.clock.SleepS(0.1);
    }
  }

  Status LoadOrInitialise(engine::Parameters initial) {
    Result<Checkpoint> loaded = LoadNewestCheckpoint(options_.run_dir, &passed_over_);
    if (loaded.ok()) {
      state_ = std::move(*loaded);
      ASSIGN_OR_RETURN(const json::value plan, ParseJson(state_.plan_json));
      ASSIGN_OR_RETURN(const JsonRef profile_field, JsonRef(plan).Field("numerics"));
      ASSIGN_OR_RETURN(const std::string profile, profile_field.String());
      if (profile != engine::ProfileName(options_.profile)) {
        return FailedPrecondition(fmt::format("the run was started with numerics {}, not {}", profile, engine::ProfileName(options_.profile)));
      }
      ASSIGN_OR_RETURN(const JsonRef nodes, JsonRef(plan).Field("max_chunk_nodes"));
      ASSIGN_OR_RETURN(max_chunk_nodes_, nodes.Int());
      ASSIGN_OR_RETURN(memory_bytes_, JsonRef(plan).IntOr("memory_bytes", options_.memory_bytes));
      ASSIGN_OR_RETURN(const int64_t ranks, JsonRef(plan).IntOr("ranks", 1));
      if (ranks != ranks_.size()) {
        return FailedPrecondition(fmt::format("the run was started with trainer.ranks: {}, not {}: its gradients would be added up in another order", ranks, ranks_.size()));
      }
      RETURN_IF_ERROR(LoadFrozenModels());
      for (const auto& [name, model] : {std::pair("reference", &reference_), std::pair("teacher", &teacher_)}) {
        if (model->empty()) continue;
        ASSIGN_OR_RETURN(const JsonRef field, JsonRef(plan).Field(name));
        ASSIGN_OR_RETURN(const std::string before, field.String());
        if (before != model->Fingerprint()) {
          return FailedPrecondition(fmt::format("trainer.{}: the model is another than at the start of the run", name));
        }
      }
      log::Info("resumed", {{"step", state_.step}});
      return Status::Ok();
    }
    if (loaded.status().code() != StatusCode::kNotFound) return loaded.status();

    memory_bytes_ = options_.memory_bytes;
    max_chunk_nodes_ = ChunkNodes(initial.config(), options_.profile, memory_bytes_);
    state_.params = std::move(initial);
    const engine::ModelConfig& config = state_.params.config();
    if (options_.sft && options_.sft->tokens > 0) {
      auto progress = [&](const SftReport& r) {
        doors_.metrics["sft_tokens"].Set(static_cast<double>(r.tokens));
        doors_.metrics["sft_steps"].Set(static_cast<double>(r.steps));
        doors_.metrics["sft_loss"].Set(r.last_loss);
        doors_.metrics["sft_tokens_per_s"].Set(r.wall_s > 0 ? static_cast<double>(r.tokens) / r.wall_s : 0);
      };
      SftOptions warm_up = *options_.sft;
      warm_up.memory_bytes = memory_bytes_;
      Enter(Phase::kWarmUp);
      ASSIGN_OR_RETURN(const SftReport sft,
                       RunSft(doors_.engine, options_.profile, warm_up, doors_.sft_source, state_.params,
                              options_.run_dir + "/sft.jsonl", [&] { return stopped(); }, progress));
      state_.sft_tokens = sft.tokens;
      doors_.metrics.Say(fmt::format("SFT: {} tokens in {:.1f} s, loss {:.3f} -> {:.3f}", sft.tokens, sft.wall_s, sft.first_loss, sft.last_loss));
    }
    state_.optimizer = AdamW(config);
    if (algorithm().ReadsReference() && options_.reference.empty()) {
      RETURN_IF_ERROR(SaveStartModel(options_.run_dir, state_.params, text_));
    }
    RETURN_IF_ERROR(LoadFrozenModels());
    JsonWriter plan;
    plan.BeginObject().Key("numerics").String(engine::ProfileName(options_.profile)).Key("max_chunk_nodes").Int(max_chunk_nodes_);
    plan.Key("memory_bytes").Int(memory_bytes_).Key("ranks").Int(ranks_.size());
    if (!reference_.empty()) plan.Key("reference").String(reference_.Fingerprint());
    if (!teacher_.empty()) plan.Key("teacher").String(teacher_.Fingerprint());
    plan.EndObject();
    state_.plan_json = plan.Take();
    return SaveCheckpoint(options_.run_dir, state_, text_, options_.keep);
  }

  const Algorithm& algorithm() const { return options_.algorithm.algorithm; }

  // Of every batch: chunks of at most max_chunk_nodes_, and a way of computing each that stays within the memory of the plan.
  BatchOptions Layout() const {
    return {.merge = options_.tree, .max_chunk_nodes = max_chunk_nodes_, .choose = [this](const engine::TreeBatch& tree, std::span<const uint8_t> wanted) {
              const engine::PassChoice choice = engine::ChoosePass(state_.params.config(), options_.profile, tree, wanted, static_cast<size_t>(memory_bytes_));
              if (choice.bytes > static_cast<size_t>(memory_bytes_)) {
                log::Warn("a rollout exceeds trainer.memory", {{"tokens", tree.size()}, {"bytes", choice.bytes}, {"memory", memory_bytes_}});
              }
              return choice;
            }};
  }

  Status LoadFrozenModels() {
    const engine::ModelConfig& policy = state_.params.config();
    if (algorithm().ReadsReference()) {
      const std::string path = options_.reference.empty() ? StartModelPath(options_.run_dir) : options_.reference;
      Result<FrozenModel> loaded = FrozenModel::Load(path, policy, text_, options_.profile);
      if (!loaded.ok()) return loaded.status().WithContext("trainer.reference");
      reference_ = std::move(*loaded);
      RETURN_IF_ERROR(ranks_.Load(RankModel::kReference, reference_.weights()));
    }
    if (algorithm().HasTeacher()) {
      Result<FrozenModel> loaded = FrozenModel::Load(options_.teacher, policy, text_, options_.profile);
      if (!loaded.ok()) return loaded.status().WithContext("trainer.teacher");
      teacher_ = std::move(*loaded);
      RETURN_IF_ERROR(ranks_.Load(RankModel::kTeacher, teacher_.weights()));
    }
    return Status::Ok();
  }

  // What was written after the checkpoint belongs to steps that will be done again.
  Status CutMetrics() {
    ASSIGN_OR_RETURN(const auto lines, ReadLines(MetricsPath(options_.run_dir)));
    std::string kept;
    for (const auto& [text, value] : lines) {
      ASSIGN_OR_RETURN(const int64_t step, JsonRef(value).IntOr("step", 0));
      if (step <= state_.step) kept += text + "\n";
    }
    doors_.metrics["step"].Set(static_cast<double>(state_.step));
    return WriteFileAtomic(MetricsPath(options_.run_dir), kept);
  }

  // What every rank computes with from now on.
  Status PackWeights() {
    weights_ = engine::Repack(state_.params, options_.profile, doors_.engine.threads(), packed_);
    return ranks_.Load(RankModel::kPolicy, weights_);
  }

  Status PublishWeights() {
    RETURN_IF_ERROR(PackWeights());
    ASSIGN_OR_RETURN(const std::span<std::byte> out, doors_.weights.Begin());
    if (out.size() != weights_.bytes().size()) {
      return Internal(fmt::format("weight sync offers {} bytes for {}", out.size(), weights_.bytes().size()));
    }
    std::memcpy(out.data(), weights_.bytes().data(), out.size());
    RETURN_IF_ERROR(doors_.weights.Publish(state_.step, weights_.ComputeDigest(), [&] { return stopped(); }));
    doors_.metrics["version"].Set(static_cast<double>(state_.step));
    return Status::Ok();
  }

  bool WantsEvaluation(int64_t version) const {
    if (!options_.evaluate) return false;
    return version == 0 || version == options_.steps || (options_.eval_every > 0 && version % options_.eval_every == 0);
  }

  // The version of the best evaluation so far whose checkpoint is to stay; -1 without.
  Result<int64_t> BestVersion() const {
    int64_t best = -1;
    if (!options_.keep_best) return best;
    ASSIGN_OR_RETURN(const auto lines, ReadLines(EvaluationsPath(options_.run_dir)));
    double most = 0;
    for (const auto& [text, value] : lines) {
      ASSIGN_OR_RETURN(const int64_t version, JsonRef(value).IntOr("version", 0));
      ASSIGN_OR_RETURN(const double rate, JsonRef(value).DoubleOr("pass_rate", 0));
      if (version <= state_.step && (best < 0 || rate > most)) most = rate, best = version;
    }
    return best;
  }

  // Evaluations are numbered along their schedule, so a repeated one has its former number.
  int64_t EvaluationNumber(int64_t version) const {
    int64_t number = 0;
    for (int64_t v = 0; v < version; ++v) number += WantsEvaluation(v);
    return number;
  }

  // The pool is paused already. After the last step it stays so: nothing more is to be sampled.
  Status Evaluate() {
    const int64_t version = state_.step, number = EvaluationNumber(version);
    Enter(Phase::kEvaluating);
    Evaluation evaluation;
    RETURN_IF_ERROR(Patiently(fmt::format("evaluation {} at version {}", number, version), [&]() -> Status {
      Result<Evaluation> result = doors_.evaluator(number, version);
      if (result.ok()) evaluation = std::move(*result);
      return result.status();
    }));
    OnPolicyCheck check;
    if (!evaluation.probe.empty()) {
      ASSIGN_OR_RETURN(check, Probe(evaluation.probe, version));
      if (!check.first_mismatch.empty()) return Disagreement(check, version);
    }
    JsonWriter w;
    w.BeginObject().Key("evaluation").Int(number).Key("version").Int(version).Key("pass_rate").Double(evaluation.pass_rate);
    w.Key("families").BeginObject();
    for (const auto& [family, rate] : evaluation.families) w.Key(family).Double(rate);
    w.EndObject().Key("on_policy_tokens").Int(check.tokens);
    w.Key("importance_ratio_max_dev_on_policy").Double(check.max_deviation).EndObject();
    ASSIGN_OR_RETURN(const auto lines, ReadLines(EvaluationsPath(options_.run_dir)));
    std::string text;
    for (const auto& [line, value] : lines) {
      ASSIGN_OR_RETURN(const int64_t other, JsonRef(value).IntOr("evaluation", -1));
      if (other != number) text += line + "\n";
    }
    RETURN_IF_ERROR(WriteFileAtomic(EvaluationsPath(options_.run_dir), text + w.Take() + "\n"));
    doors_.metrics["pass_rate"].Set(evaluation.pass_rate);
    if (version == options_.steps) return Status::Ok();
    return Patiently("data pool, pause", [&] { return doors_.pool.Pause(false); });
  }

  // Forward only, over rollouts drawn at the version that is scored.
  Result<OnPolicyCheck> Probe(const std::vector<std::string>& trajectories, int64_t version) {
    std::vector<Group> groups;
    for (size_t i = 0; i < trajectories.size(); ++i) {
      ASSIGN_OR_RETURN(Rollout rollout, ParseTrajectory(trajectories[i], state_.params.config().vocab));
      rollout.rollout = static_cast<int32_t>(i);
      // Evaluation sessions are marked as not to be trained; their logprobs are as good as any.
      for (TokenRun& run : rollout.runs) run.trainable = true;
      if (groups.empty()) groups.emplace_back();
      groups[0].rollouts.push_back(std::move(rollout));
    }
    ASSIGN_OR_RETURN(const Batch batch, BuildBatch(std::move(groups), Layout()));
    ASSIGN_OR_RETURN(const auto logprobs, ScoreBatch(pass_, weights_, batch));
    return CheckOnPolicy(batch, logprobs, version);
  }

  Status Disagreement(const OnPolicyCheck& check, int64_t version) const {
    std::string what = fmt::format(
        "trainer and rollout worker disagree at version {}: {} of tokens drawn and scored with the same weights: importance ratio off by "
        "{:.3g} at most; {}. The weights a worker serves or the stored logprobs are not what they should be",
        version, check.tokens, check.max_deviation, check.first_mismatch);
    if (const auto pool = doors_.pool.Metrics(); pool.ok() && pool->count("quarantined") && pool->at("quarantined") > 0) {
      what += fmt::format(
          ". The pool has quarantined {:.0f} damaged records (logs/pool.log names their file): a batch that came back without one of its "
          "members gives other weights than those that later rollouts were drawn with. This run cannot be gone on with; begin a new one",
          pool->at("quarantined"));
    }
    return DataLoss(what);
  }

  // The next batch of the pool; waits for it.
  Result<datapool::LeaseReply> Lease() {
    while (true) {
      if (stopped()) return Cancelled("stopped");
      datapool::LeaseReply reply;
      RETURN_IF_ERROR(Patiently("data pool, lease", [&]() -> Status {
        Result<datapool::LeaseReply> lease = doors_.pool.Lease(options_.incarnation, state_.step, kLeaseWaitMs);
        if (lease.ok()) reply = std::move(*lease);
        return lease.status();
      }));
      if (reply.ready) return reply;
      if (reply.closed) return Cancelled("the data pool was closed");
      if (reply.exhausted) {
        return FailedPrecondition(fmt::format("no task is left and what still runs cannot fill batch {}; give more tasks or fewer trainer.steps",
                                              state_.step));
      }
    }
  }

  Result<datapool::LeaseReply> NextLease() {
    if (ahead_.empty()) return Lease();
    datapool::LeaseReply lease = std::move(ahead_.front());
    ahead_.pop_front();
    return lease;
  }

  // So that the pool fills the next batches while this one is trained. Waits for none: what is not full yet stays asked for.
  Status AskAhead() {
    while (static_cast<int64_t>(ahead_.size()) + 1 < options_.max_leases) {
      const int64_t batch = state_.step + 1 + static_cast<int64_t>(ahead_.size());
      if (batch >= options_.steps) return Status::Ok();
      datapool::LeaseReply reply;
      RETURN_IF_ERROR(Patiently("data pool, lease", [&]() -> Status {
        Result<datapool::LeaseReply> lease = doors_.pool.Lease(options_.incarnation, batch, 0);
        if (lease.ok()) reply = std::move(*lease);
        return lease.status();
      }));
      if (!reply.ready) return Status::Ok();
      ahead_.push_back(std::move(reply));
    }
    return Status::Ok();
  }

  Result<std::vector<Group>> Parse(const datapool::LeaseReply& lease, StepReport& report) const {
    std::vector<Group> groups;
    double staleness = 0;
    for (const datapool::LeasedGroup& leased : lease.groups) {
      Group& group = groups.emplace_back();
      group.group = leased.group;
      group.version_admitted = leased.version_admitted;
      const int64_t age = state_.step - leased.version_admitted;
      report.staleness_max = std::max(report.staleness_max, age);
      staleness += static_cast<double>(age);
      StepReport::Source& source = report.sources[leased.source];
      ++source.groups;
      source.staleness_max = std::max(source.staleness_max, age);
      for (size_t i = 0; i < leased.members.size(); ++i) {
        ASSIGN_OR_RETURN(Rollout rollout, ParseTrajectory(leased.members[i], state_.params.config().vocab));
        rollout.rollout = leased.rollouts[i];
        ++source.rollouts;
        ++report.outcomes[OutcomeName(rollout.outcome)];
        ++report.rollouts;
        group.rollouts.push_back(std::move(rollout));
      }
    }
    report.groups = static_cast<int64_t>(groups.size());
    if (options_.permute_rewards) PermuteRewards(options_.seed, groups);
    for (size_t g = 0; g < groups.size(); ++g) {
      for (const Rollout& r : groups[g].rollouts) report.sources[lease.groups[g].source].reward += RewardOf(algorithm(), r.reward, r.turn_rewards);
    }
    if (report.groups > 0) report.staleness_mean = staleness / static_cast<double>(report.groups);
    return groups;
  }

  Status Step() {
    StepReport report;
    report.step = state_.step + 1;
    double mark = Now();
    auto lap = [&] {
      const double now = Now();
      return now - std::exchange(mark, now);
    };
    Enter(Phase::kCollecting);
    ASSIGN_OR_RETURN(const datapool::LeaseReply lease, NextLease());
    RETURN_IF_ERROR(AskAhead());
    Enter(Phase::kTraining);
    report.again = lease.again;
    report.wait_s = lap();

    ASSIGN_OR_RETURN(std::vector<Group> groups, Parse(lease, report));
    std::vector<Part> parts;
    for (std::vector<Group>& dealt : Deal(std::move(groups))) {
      ASSIGN_OR_RETURN(Part part, Prepare(std::move(dealt), /*first=*/parts.empty(), lap, report));
      report.tree_tokens += part.batch.tree_tokens;
      report.logical_tokens += part.batch.logical_tokens;
      parts.push_back(std::move(part));
    }
    std::vector<LossGroup> trained;  // of all parts, each as it was scored when it was trained last
    for (int64_t index = 0; index < options_.optimizer_steps(); ++index) {
      Part& part = parts[static_cast<size_t>(index) % parts.size()];
      RETURN_IF_ERROR(TrainPart(part, index, lap, report, trained));
    }
    if (options_.optimizer_steps() > 1) {
      const LossResult whole = ComputeLoss(algorithm(), trained);
      report.loss = whole.loss;
      report.loss_metrics = whole.metrics;
    }
    ++state_.step;
    report.optimizer_s += lap();
    RETURN_IF_ERROR(PublishWeights());
    const bool evaluate = WantsEvaluation(state_.step);
    const bool last = state_.step == options_.steps;
    // Before the update frees slots, so that nothing is admitted at a version that is to be evaluated first.
    if (evaluate || last) RETURN_IF_ERROR(Patiently("data pool, pause", [&] { return doors_.pool.Pause(true); }));
    RETURN_IF_ERROR(Faults::Get().Hit("trainer.before_update"));
    RETURN_IF_ERROR(Patiently("data pool, update", [&] { return doors_.pool.Update(options_.incarnation, state_.step - 1); }));
    report.publish_s += lap();
    report.checkpoint_s = std::exchange(checkpoint_s_, 0);
    report.wall_s = Now() - start_s_;
    report.job_s = Now() - options_.job_began_s.value_or(start_s_);
    // Before the checkpoint: a line too many is cut on resume, one too few would be missing for good.
    RETURN_IF_ERROR(AppendFile(MetricsPath(options_.run_dir), MetricsLine(report, options_.optimizer.clip_norm)));
    Show(report);
    if (last || state_.step % options_.checkpoint_every == 0 || (options_.keep_best && evaluate)) {
      RETURN_IF_ERROR(Faults::Get().Hit("trainer.before_checkpoint"));
      ASSIGN_OR_RETURN(const int64_t best, BestVersion());
      RETURN_IF_ERROR(SaveCheckpoint(options_.run_dir, state_, text_, options_.keep, best));
      RETURN_IF_ERROR(Faults::Get().Hit("trainer.before_commit"));
      RETURN_IF_ERROR(Patiently("data pool, commit", [&] { return doors_.pool.Commit(state_.step); }));
      checkpoint_s_ = lap();
    }
    if (evaluate) RETURN_IF_ERROR(Evaluate());
    return Status::Ok();
  }

  // In canonical order, dealt out like cards: groups of one source, or admitted together, do not all come into one part.
  std::vector<std::vector<Group>> Deal(std::vector<Group> groups) const {
    std::sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.group < b.group; });
    std::vector<std::vector<Group>> parts(static_cast<size_t>(options_.minibatches));
    for (size_t i = 0; i < groups.size(); ++i) parts[i % parts.size()].push_back(std::move(groups[i]));
    return parts;
  }

  // What one optimizer step is taken on, and what of it does not change while the batch is gone through.
  struct Part {
    Batch batch;
    BatchOptions layout;
    std::vector<std::vector<float>> reference, teacher;  // [chunk][node], where the algorithm reads them
    std::vector<std::vector<float>> old;  // by the weights before the batch's first step, where logp_old is theirs; that step fills in its own
  };

  // `first`: the part of the batch's first step, which scores it with those weights anyway.
  Result<Part> Prepare(std::vector<Group> groups, bool first, const std::function<double()>& lap, StepReport& report) {
    Part part;
    part.layout = Layout();
    ASSIGN_OR_RETURN(part.batch, BuildRankedBatch(std::move(groups), part.layout, ranks_.size()));
    part.layout.silent = SilentGroups(algorithm(), part.batch);
    if (std::count(part.layout.silent.begin(), part.layout.silent.end(), 1) > 0) {
      ASSIGN_OR_RETURN(part.batch, BuildRankedBatch(std::move(part.batch.groups), part.layout, ranks_.size()));
    }
    report.batch_s += lap();
    // Models that do not change have the whole part scored first: advantages may read them.
    if (!reference_.empty()) {
      ASSIGN_OR_RETURN(part.reference, ranks_.Score(RankModel::kReference, part.batch));
    }
    if (algorithm().ReadsTeacher()) {
      ASSIGN_OR_RETURN(part.teacher, ranks_.Score(RankModel::kTeacher, part.batch));
    }
    if (algorithm().ReadsTeacherTop()) RETURN_IF_ERROR(AskTeacher(part.batch));
    if (algorithm().off_policy.decoupled && !first) {
      ASSIGN_OR_RETURN(part.old, ranks_.Score(RankModel::kPolicy, part.batch));
    }
    report.forward_s += lap();
    return part;
  }

  // One optimizer step on a part of the batch of version state_.step; `index` were taken since that version was published.
  Status TrainPart(Part& part, int64_t index, const std::function<double()>& lap, StepReport& report, std::vector<LossGroup>& trained) {
    const Batch& batch = part.batch;
    const BatchOptions& layout = part.layout;
    for (const Group& group : batch.groups) {
      const int64_t age = (state_.step - group.version_admitted) * options_.optimizer_steps() + index;
      report.staleness_steps_max = std::max(report.staleness_steps_max, age);
      if (options_.staleness_bound_steps && age > *options_.staleness_bound_steps) {
        return Internal(fmt::format("group {} of step {} would be trained {} optimizer steps stale; the bound is {}", group.group, report.step, age,
                                    *options_.staleness_bound_steps));
      }
    }
    if (index > 0) {
      RETURN_IF_ERROR(PackWeights());
      report.publish_s += lap();
    }

    // A token's coefficient comes from the logprobs of its own rollout, which lies in one chunk; advantages and denominators know of
    // none. So a chunk can be scored, checked and differentiated before the next one takes its memory. Losses that look at the whole
    // batch have all of it scored first.
    std::vector<std::vector<float>> logprobs;
    for (const BatchChunk& chunk : batch.chunks) logprobs.emplace_back(static_cast<size_t>(chunk.tree.items()), 0.0f);
    auto loss_groups = [&] { return MakeLossGroups(batch, logprobs, algorithm().off_policy.decoupled, {part.reference, part.teacher, part.old}); };
    auto loss_of = [&] { return ComputeLoss(algorithm(), loss_groups()); };
    grads_.SetZero();
    report.batch_s += lap();
    if (algorithm().NeedsWholeBatch() && batch.chunks.size() > 1) {
      ASSIGN_OR_RETURN(logprobs, ranks_.Score(RankModel::kPolicy, batch));
      report.forward_s += lap();
    }
    std::mutex mutex;  // of logprobs: ranks are beside each other
    const auto train_chunk = [&](size_t c) -> Status {
      const BatchChunk& chunk = batch.chunks[c];
      const bool timed = chunk.rank == 0;  // the others work meanwhile
      ASSIGN_OR_RETURN(std::vector<float> row, ranks_.Forward(RankModel::kPolicy, chunk, /*keep=*/true));
      if (timed) report.forward_s += lap();
      std::vector<float> coef;
      {
        const std::lock_guard lock(mutex);
        logprobs[c] = std::move(row);
        if (chunk.silent) return Status::Ok();
        const LossResult so_far = loss_of();
        coef = std::move(ItemCoefficients(batch, so_far.coef, so_far.coef_top)[c]);
      }
      if (timed) report.batch_s += lap();
      RETURN_IF_ERROR(ranks_.Backward(chunk, coef, grads_));
      if (timed) report.backward_s += lap();
      return Status::Ok();
    };
    RETURN_IF_ERROR(ranks_.ForEach(batch, train_chunk));
    RETURN_IF_ERROR(ranks_.Reduce(grads_));
    report.backward_s += lap();
    const LossResult loss = loss_of();
    report.batch_s += lap();
    for (size_t g = 0; g < layout.silent.size(); ++g) {
      TEMPER_CHECK(!layout.silent[g] || IsSilent(loss.coef[g])) << "group " << batch.groups[g].group << " was left out of the backward pass";
    }
    report.loss = loss.loss;
    report.loss_metrics = loss.metrics;
    if (index == 0 && algorithm().off_policy.decoupled) part.old = logprobs;
    if (options_.optimizer_steps() > 1 && index >= options_.optimizer_steps() - options_.minibatches) {
      std::vector<LossGroup> scored = loss_groups();
      std::move(scored.begin(), scored.end(), std::back_inserter(trained));
    }

    // Behind the first step the weights are those of no version.
    if (index == 0) RETURN_IF_ERROR(CheckAgreement(batch, logprobs, report));
    std::string skipped;
    if (!std::isfinite(loss.loss)) skipped = fmt::format("the loss is not finite at step {}", report.step);
    // A step that cannot be taken proves nothing.
    const bool due = index == 0 && skipped.empty() && (!proved_ || (options_.prove_every > 0 && report.step % options_.prove_every == 0));
    if (options_.prove_tree && options_.tree && due) RETURN_IF_ERROR(Prove(batch, loss, layout));
    lap();

    RETURN_IF_ERROR(Faults::Get().Hit("trainer.before_optimizer_step"));
    if (loss.metrics.tokens > 0 && skipped.empty()) {
      Result<AdamW::Report> taken = state_.optimizer.Step(doors_.engine, options_.optimizer, grads_, state_.params);
      if (taken.ok()) {
        // Of several steps the largest gradient and the last rate.
        const double largest = std::max(report.optimizer.grad_norm, taken->grad_norm);
        report.optimizer = *taken;
        report.optimizer.grad_norm = largest;
      } else if (taken.status().code() == StatusCode::kInternal) {
        skipped = taken.status().message();
      } else {
        return taken.status();
      }
    }
    skips_ = skipped.empty() ? 0 : skips_ + 1;
    if (skips_ > options_.skip_limit) {
      return Internal(skipped + (skips_ > 1 ? fmt::format("; {} steps in a row (optimizer.skip_limit)", skips_) : ""));
    }
    if (!skipped.empty()) {
      log::Warn("step skipped", {{"step", report.step}, {"reason", skipped}});
      report.skipped = skipped;
    }
    report.optimizer_s += lap();
    return Status::Ok();
  }

  // The teacher's likeliest tokens at every draw become targets of the batch.
  Status AskTeacher(Batch& batch) {
    return ranks_.ForEach(batch, [&](size_t c) -> Status {
      ASSIGN_OR_RETURN(LikelyTokens likely, ranks_.Likeliest(RankModel::kTeacher, batch.chunks[c], options_.teacher_top));
      Compare(batch.chunks[c], std::move(likely));
      return Status::Ok();
    });
  }

  // The trainer against the workers: on what the batch holds of this version, else on a rollout that does.
  Status CheckAgreement(const Batch& batch, std::span<const std::vector<float>> logprobs, StepReport& report) {
    report.on_policy = CheckOnPolicy(batch, logprobs, state_.step);
    if (report.on_policy.tokens == 0 && doors_.probe) {
      ASSIGN_OR_RETURN(const std::vector<std::string> probe, doors_.probe(state_.step));
      if (!probe.empty()) {
        ASSIGN_OR_RETURN(report.on_policy, Probe(probe, state_.step));
      }
    }
    return report.on_policy.first_mismatch.empty() ? Status::Ok() : Disagreement(report.on_policy, state_.step);
  }

  Status Prove(const Batch& batch, const LossResult& loss, const BatchOptions& layout) {
    Enter(Phase::kProving);
    ASSIGN_OR_RETURN(const TreeProof proof, ProveTree(pass_, weights_, batch.groups, loss.coef, layout, kProofTokens));
    proved_ = true;
    Enter(Phase::kTraining);
    const std::string text = proof.Text();
    if (!proof.holds()) return DataLoss("tree training differs from separate rows on this batch: " + text + ". trainer.tree: off trains on rows");
    log::Info("tree training proved", {{"result", text}});
    doors_.metrics.Say("tree = rows: " + text);
    return Status::Ok();
  }

  void Show(const StepReport& r) {
    Metrics& m = doors_.metrics;
    m["step"].Set(static_cast<double>(r.step));
    m["reward_mean"].Set(r.loss_metrics.reward.mean);
    m["loss"].Set(r.loss);
    m["grad_norm"].Set(r.optimizer.grad_norm);
    m["tokens_trained"].Add(static_cast<double>(r.loss_metrics.tokens));
    m["tree_tokens"].Add(static_cast<double>(r.tree_tokens));
    m["logical_tokens"].Add(static_cast<double>(r.logical_tokens));
    m["on_policy_tokens"].Add(static_cast<double>(r.on_policy.tokens));
    m["staleness_max"].Max(static_cast<double>(r.staleness_max));
    m["weight_updates"].Add();
    const double train_s = r.batch_s + r.forward_s + r.backward_s + r.optimizer_s;
    m["train_tokens_per_s"].Set(train_s > 0 ? static_cast<double>(r.logical_tokens) / train_s : 0);
    m["step_s"].Set(r.wait_s + train_s + r.publish_s + r.checkpoint_s);
    m["wait_s"].Set(r.wait_s);
    log::Info("step", {{"step", r.step}, {"reward", r.loss_metrics.reward.mean}, {"tokens", r.loss_metrics.tokens}, {"grad_norm", r.optimizer.grad_norm},
                       {"staleness", r.staleness_max}, {"on_policy", r.on_policy.tokens}, {"wait_s", r.wait_s}, {"train_s", train_s}});
  }

  const TrainerOptions& options_;
  const text::TextFiles& text_;
  TrainerDoors& doors_;
  engine::TrainPass pass_;
  Ranks ranks_;
  const double start_s_;
  Checkpoint state_;
  std::string passed_over_;  // checkpoints that did not verify, with their faults
  FrozenModel reference_, teacher_;  // empty where the algorithm reads none
  engine::Gradients grads_;
  engine::Buffer packed_;           // holds weights_
  engine::ComputeWeights weights_;  // of version state_.step
  int64_t max_chunk_nodes_ = 0, memory_bytes_ = 0;  // of the plan: kept on resume
  bool proved_ = false;
  std::deque<datapool::LeaseReply> ahead_;  // batches leased before their turn, the next one first
  int64_t skips_ = 0;  // steps in a row without an optimizer step
  double checkpoint_s_ = 0;  // of the checkpoint before this step
};

}  // namespace

Result<TrainTotals> ReadTrainTotals(const std::string& run_dir) {
  TrainTotals totals;
  std::set<int64_t> versions;
  for (const std::string& path : {MetricsPath(run_dir), EvaluationsPath(run_dir)}) {
    ASSIGN_OR_RETURN(const auto lines, ReadLines(path));
    for (const auto& [text, value] : lines) {
      const JsonRef line(value);
      ASSIGN_OR_RETURN(const int64_t version, line.IntOr("version", 0));
      ASSIGN_OR_RETURN(const int64_t on_policy, line.IntOr("on_policy_tokens", 0));
      ASSIGN_OR_RETURN(const double deviation, line.DoubleOr("importance_ratio_max_dev_on_policy", 0));
      totals.on_policy_tokens += on_policy;
      totals.ratio_max_dev_on_policy = std::max(totals.ratio_max_dev_on_policy, deviation);
      if (on_policy > 0 && version >= 1) versions.insert(version);
      if (!line.Has("step")) continue;
      ++totals.steps;
      int64_t* const sums[] = {&totals.tokens_trained, &totals.tree_tokens, &totals.logical_tokens};
      const char* const names[] = {"tokens_trained", "tree_tokens", "logical_tokens"};
      for (int i = 0; i < 3; ++i) {
        ASSIGN_OR_RETURN(const int64_t count, line.IntOr(names[i], 0));
        *sums[i] += count;
      }
      ASSIGN_OR_RETURN(const int64_t staleness, line.IntOr("staleness_max", 0));
      totals.staleness_max = std::max(totals.staleness_max, staleness);
      for (const char* name : {"batch_s", "forward_s", "backward_s", "optimizer_s"}) {
        ASSIGN_OR_RETURN(const double seconds, line.DoubleOr(name, 0));
        totals.train_s += seconds;
      }
    }
  }
  totals.on_policy_versions.assign(versions.begin(), versions.end());
  return totals;
}

Status RunTraining(const TrainerOptions& options, engine::Parameters initial, const text::TextFiles& text, TrainerDoors doors) {
  Loop loop(options, text, doors);
  const Status status = loop.Run(std::move(initial));
  // Whatever fails while everything is being stopped is the stop.
  const bool stop = !status.ok() && status.code() != StatusCode::kDataLoss && doors.stopped.load();
  return stop ? Cancelled(status.message()) : status;
}

}  // namespace temper::trainer
