// Checkpoints: RUN/checkpoints/STEP, each a Hugging Face folder (so a checkpoint is a MODEL) with the optimizer's state beside.
//
//   config.json, model.safetensors (fp32 master), tokenizer files
//   optimizer.safetensors  "m.NAME", "v.NAME", F32
//   checkpoint.json        {"format":2,"step":n,"optimizer_steps":n,"sft_tokens":n,"plan":{...},"files":{"model.safetensors":"hash",...},
//                           "hash":"of all before"}
//
// A checkpoint is written beside its final name, fsynced and renamed: it exists whole or not at all, and its hashes are checked
// when it is loaded.
#pragma once

#include <cstdint>
#include <string>

#include "common/status.h"
#include "engine/parameters.h"
#include "text/text_model.h"
#include "trainer/adamw.h"

namespace temper::trainer {

struct Checkpoint {
  int64_t step = 0;
  int64_t sft_tokens = 0;
  std::string plan_json = "{}";  // one JSON object, kept on resume
  engine::Parameters params;
  AdamW optimizer;
};

// Writes RUN/checkpoints/STEP, durable on return, then removes all but the newest `keep` and that of step `best` (-1: none).
Status SaveCheckpoint(const std::string& run_dir, const Checkpoint& checkpoint, const text::TextFiles& text, int keep, int64_t best = -1);

// The weights of version 0 as a Hugging Face folder (fp32), durable on return: what a KL term compares with unless the job names a model.
// They outlive the checkpoints.
std::string StartModelPath(const std::string& run_dir);
Status SaveStartModel(const std::string& run_dir, const engine::Parameters& params, const text::TextFiles& text);

// checkpoint.json from its JSON object without "hash". What is loaded must be exactly such a text.
std::string SealManifest(std::string body);

// The newest valid checkpoint; broken ones are passed over with a warning, and named with their faults in `passed_over` ("" when there
// were none). kNotFound when there is none.
Result<Checkpoint> LoadNewestCheckpoint(const std::string& run_dir, std::string* passed_over = nullptr);

}  // namespace temper::trainer
