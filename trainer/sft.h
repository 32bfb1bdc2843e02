// The warm-up phase: supervised fine-tuning on demonstrations, before version 0 exists. Own optimizer state, dropped afterwards.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/engine.h"
#include "engine/train_pass.h"
#include "trainer/adamw.h"

namespace temper::trainer {

// One demonstration: mask 1 = to be learnt. The first token cannot be (nothing predicts it).
struct SftRow {
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;
};

// Row `index` (0, 1, …) of an endless, repeatable stream: the same index always gives the same row.
using SftSource = std::function<Result<SftRow>(int64_t index)>;

struct SftOptions {
  int64_t tokens = 0;           // of all rows together; the phase ends with the batch that reaches it. 0 = no SFT
  int64_t batch_tokens = 8192;  // rows are added to a batch until it has so many
  AdamWOptions optimizer;       // its schedule counts tokens: warmup_steps and total_steps are not read
  double warmup_fraction = 0.05;  // of `tokens`
  int64_t memory_bytes = INT64_MAX;  // for activations of one forward and backward: engine::ChoosePass
};

struct SftReport {
  int64_t steps = 0, rows = 0;
  int64_t tokens = 0;          // of all rows
  int64_t trained_tokens = 0;  // with mask 1
  double first_loss = 0, last_loss = 0;  // mean over trained tokens of a batch
  double wall_s = 0;
};

// Trains `params` in place. One line of JSON per step goes to `log_path` (truncated first). kCancelled when `stopped` says so.
Result<SftReport> RunSft(engine::Engine& engine, engine::Profile profile, const SftOptions& options, const SftSource& source,
                         engine::Parameters& params, const std::string& log_path, const std::function<bool()>& stopped,
                         const std::function<void(const SftReport&)>& progress);

}  // namespace temper::trainer
