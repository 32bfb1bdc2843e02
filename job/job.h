// A job: what one YAML file says (docs/job_file.md), as plain values. The only place that knows the schema is job.cpp.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/config.h"
#include "common/status.h"
#include "datapool/alarms.h"
#include "datapool/retention.h"
#include "datapool/types.h"
#include "sandbox/janitor.h"
#include "sandbox/types.h"
#include "trainer/algorithm.h"

namespace temper::job {

struct TaskList {
  std::string key;        // where it stands in the file
  std::string generator;  // terminal | sum, or empty
  std::string jsonl;      // path, or empty
  int64_t count = 0;      // of a generator
  bool held_out = false;  // of a generator
};

struct Job {
  std::string name;
  uint64_t seed = 0;
  std::string numerics;  // bf16 | f32
  std::string cpu;       // auto | avx2 | avx512 | amx

  struct Create {
    int layers = 4, width = 128, heads = 4, kv_heads = 2, ffn = 384, max_positions = 1024;
  };
  struct Model {
    std::string path;              // empty when created
    std::optional<Create> create;  // a policy made on the spot, with the tasks' words as vocabulary
  } model;

  struct Scaffold {
    std::string key;         // where it stands in the file
    std::string name, kind;  // kind: command | builtin
    std::vector<std::string> command;
    bool host = false;
    int max_turns = 0;  // 0 = no limit
    double timeout_s = 0;
    bool exit_is_policy = false;
  };
  std::optional<int64_t> concurrency;  // attempts played at once; absent: from the slots

  struct Sampling {
    double temperature = 1, top_p = 1, min_p = 0;
    int64_t top_k = 0, repetition_stop = 0;  // 0 = off
    int64_t max_tokens = 0;
  } sampling;

  struct Sandbox {
    temper::sandbox::Limits limits;
    std::string rootfs;
    std::vector<temper::sandbox::Mount> mounts;
    temper::sandbox::CgroupMode cgroups = temper::sandbox::CgroupMode::kAuto;
  } sandbox;

  struct Verifier {
    std::string key;         // where it stands in the file
    std::string name, kind;  // kind: command | builtin
    std::vector<std::string> command;
    double timeout_s = 0;
    std::optional<double> failure_reward;
  };

  // Where tasks come from, what plays them and what judges them; in the order of pool.sources, which has each one's share of a batch.
  // A job without those has one, named "default".
  struct Source {
    std::string name = "default";
    TaskList train;
    std::optional<TaskList> eval;  // absent: none of its tasks in an evaluation
    Scaffold scaffold;
    Verifier verifier;
  };
  std::vector<Source> sources;
  // Whether there is anything to evaluate on.
  bool Evaluates() const;

  temper::trainer::ParsedAlgorithm algorithm;
  datapool::PoolConfig pool;
  datapool::AlarmLimits alarms;
  datapool::RetentionConfig retention;

  struct Optimizer {
    double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
    double clip_norm = 0;  // 0 = off
    std::string schedule;  // constant | linear | cosine | wsd
    int64_t warmup_steps = 0;
    int64_t decay_steps = 0;  // of wsd
    int64_t skip_limit = 0;   // steps in a row whose loss or gradient is no number
  } optimizer;

  struct Sft {
    int64_t tokens = 0, batch_tokens = 0;
    double poor_fraction = 0, lr = 0, warmup_fraction = 0;
  };
  struct Trainer {
    int64_t steps = 0;
    std::optional<Sft> sft;
    std::optional<int64_t> memory_bytes;  // absent: from what the machine has
    bool tree = true;
    bool prove_tree = true;
    int64_t ranks = 1;        // processes that compute a batch together
    int64_t minibatches = 1;  // optimizer steps on each batch in one epoch
    int64_t epochs = 1;       // so often is each batch gone through
    int64_t optimizer_steps() const { return minibatches * epochs; }  // on each batch
    int64_t prove_every = 0;  // 0 = on the first step alone
    int64_t checkpoint_every = 0;
    int64_t keep = 0;
    bool keep_best = false;
    bool permute_rewards = false;
    std::string reference;  // a model that a KL or a preference loss compares with; empty = the weights of version 0
    std::string teacher;    // a model to distil from; empty where the algorithm has none
    int teacher_top = 0;    // of how many of its likeliest tokens; 0 where it does not ask for them
  } trainer;

  struct Rollout {
    int64_t workers = 1;
    std::optional<int64_t> threads;  // absent: the cores
    int64_t max_batch = 0;
    std::optional<int64_t> kv_memory_bytes;
  } rollout;

  struct Gateway {
    int port = 0;  // 0 = any free one
    std::string bind;
  } gateway;

  struct Eval {
    int64_t every = 0;  // steps; 0 = only at the start and the end
    double temperature = 1;
  } eval;

  struct WeightSync {
    bool span = false;  // in_flight: span
  } weightsync;
};

// Reads and checks the whole file. The first mistake, with its place, is kInvalidArgument. `config` then holds every value
// with its source.
Result<Job> ReadJob(Config& config);

}  // namespace temper::job
