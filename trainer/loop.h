// The training loop: lease → forward → proof of agreement → loss → backward → AdamW → publish → update → checkpoint → commit.
//
// An optimizer step is a pure function of (checkpoint, set of groups, plan), so a resumed run that gets the same batches ends with the same
// bits. The loop itself is single-threaded but for chunks that other ranks compute; the engine's threads run the kernels. Everything it touches outside comes in through
// TrainerDoors, so that a test runs the whole loop in one process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/metrics.h"
#include "common/status.h"
#include "datapool/client.h"
#include "engine/engine.h"
#include "engine/parameters.h"
#include "engine/weights.h"
#include "text/text_model.h"
#include "trainer/adamw.h"
#include "trainer/algorithm.h"
#include "trainer/ranks.h"
#include "trainer/sft.h"

namespace temper::trainer {

struct TrainerOptions {
  std::string run_dir;      // RUN: checkpoints/, metrics.jsonl, sft.jsonl, evaluations.jsonl
  std::string incarnation;  // name of this process towards the pool; new at each start
  uint64_t seed = 0;        // of the job
  engine::Profile profile = engine::Profile::kBf16;
  ParsedAlgorithm algorithm;
  // Models beside the policy, as MODEL of the command line; read where the algorithm reads their logprobs.
  std::string reference;  // empty = the weights of version 0
  std::string teacher;    // to be given
  int teacher_top = 0;    // how many of the teacher's likeliest tokens are compared with, where the algorithm reads them
  AdamWOptions optimizer;
  int64_t steps = 0;             // optimizer steps of the job
  int64_t checkpoint_every = 10;  // and always after the last
  int keep = 3;
  bool keep_best = false;        // a checkpoint at each evaluation too; that of the best one stays (of equals the first)
  // Optimizer steps on each batch: its groups in so many parts, one after the other; recorded logprobs stay those of the draw, and weights
  // are published once, after the last. Divides the groups of a batch.
  int64_t minibatches = 1;
  int64_t epochs = 1;            // so often is each batch gone through, part after part
  int64_t optimizer_steps() const { return minibatches * epochs; }  // on each batch
  int64_t max_leases = 1;        // batches out at once: above 1 the next ones are asked for before this one is trained
  // No token is trained staler than this, in optimizer steps; nothing = not looked at. A batch that is ends the job.
  std::optional<int64_t> staleness_bound_steps;
  int64_t skip_limit = 0;        // so many steps in a row may be skipped because loss or gradient is no number; one more ends the job
  int64_t memory_bytes = int64_t{1} << 30;  // for activations of one forward and backward
  bool tree = true;              // false: every branch is a row of its own
  bool prove_tree = true;        // on the first step: tree against separate rows, on the batch itself
  int64_t prove_every = 0;       // and on each step whose number it divides; 0 = on the first alone
  bool permute_rewards = false;  // control: rewards exchanged within each group
  std::optional<SftOptions> sft;
  int64_t eval_every = 0;        // evaluations at version 0, each multiple, and the last; 0 = only the first and the last
  bool evaluate = true;          // false: none at all
  std::optional<double> job_began_s;  // the clock's reading that `job_s` of metrics.jsonl counts from; absent = the loop's start
};

// What the trainer is at: its metric `phase`.
enum class Phase { kStarting, kWarmUp, kEvaluating, kCollecting, kProving, kTraining };

// Where new weights go: weightsync's Publisher in a job.
class WeightSink {
 public:
  virtual ~WeightSink() = default;
  // Memory for the compute form of the next version, 64-byte aligned; all of it is written before Publish.
  virtual Result<std::span<std::byte>> Begin() = 0;
  // Returns when every live worker serves version `step`, or with the reason why that cannot be. `stopped` is polled.
  virtual Status Publish(int64_t step, const engine::Digest& digest, const std::function<bool()>& stopped) = 0;
};

struct Evaluation {
  double pass_rate = 0;
  std::map<std::string, double> families;
  // Serialised temper.v1.Trajectory of some of its rollouts: drawn at the version evaluated.
  std::vector<std::string> probe;
};
// Plays evaluation number `evaluation` (0, 1, …) at version `version`; the pool is paused meanwhile.
using Evaluator = std::function<Result<Evaluation>(int64_t evaluation, int64_t version)>;

// With staleness a batch may hold no token of the version that scores it. This offers rollouts that do: serialised temper.v1.Trajectory,
// sealed while `version` was served; none when there is none.
using ProbeSource = std::function<Result<std::vector<std::string>>(int64_t version)>;

struct TrainerDoors {
  engine::Engine& engine;
  datapool::DataPool& pool;
  WeightSink& weights;
  Metrics& metrics;
  Clock& clock;
  Evaluator evaluator;   // may be empty when TrainerOptions::evaluate is false
  SftSource sft_source;  // may be empty without SFT
  ProbeSource probe;     // may be empty
  std::atomic<bool>& stopped;  // set by anyone: the loop ends soon with kCancelled, resumable
  RankLinks* ranks = nullptr;  // to the other ranks; null: there are none
};

// Sums over the steps of a run, as metrics.jsonl has them; what summary.json needs of the trainer.
struct TrainTotals {
  int64_t steps = 0;
  int64_t tokens_trained = 0, tree_tokens = 0, logical_tokens = 0;
  int64_t on_policy_tokens = 0;
  std::vector<int64_t> on_policy_versions;  // versions >= 1 at which on-policy tokens were checked
  double ratio_max_dev_on_policy = 0;
  int64_t staleness_max = 0;
  double train_s = 0;  // forward, backward, optimizer
};
// Reads RUN/metrics.jsonl. An absent file has no steps.
Result<TrainTotals> ReadTrainTotals(const std::string& run_dir);

// Runs the job's training from its newest checkpoint (or from `initial`, after SFT) to the last step. OK: done. kCancelled: stopped.
// Any other error ends the job and says why in one line; disagreement with the workers is kDataLoss.
Status RunTraining(const TrainerOptions& options, engine::Parameters initial, const text::TextFiles& text, TrainerDoors doors);

}  // namespace temper::trainer
