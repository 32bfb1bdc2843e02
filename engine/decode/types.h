// Plain structs of decoding: version, sampling policy, the key of the random numbers.
#pragma once

#include <cstdint>
#include <string>

#include "common/ids.h"

namespace temper::engine {

using temper::Version;

// "epoch.step", for logs and errors.
std::string ToString(const Version& version);

// Names one stream of random numbers; the draw at an absolute position is a pure function of (key, position). The attempt
// of a rollout is not in it, so a repeated attempt repeats its draws.
struct SampleKey {
  uint64_t seed = 0;
  uint32_t domain = 2;  // 0 training (a = group, b = rollout), 1 evaluation (a = evaluation, b = task), 2 ad hoc
  uint64_t a = 0;
  uint64_t b = 0;
  uint32_t call = 0;
  uint32_t choice = 0;
  friend bool operator==(const SampleKey&, const SampleKey&) = default;
};

// How tokens are drawn. Order: temperature, then top_k, then top_p, then min_p, each on what the former kept.
struct Sampling {
  float temperature = 1.0f;  // 0 = greedy (lowest id among equals), logprobs then at T = 1
  float top_p = 1.0f;        // in (0, 1]; 1 = off
  uint32_t top_k = 0;        // 0 = off
  float min_p = 0.0f;        // in [0, 1]; 0 = off; relative to the most probable token
  uint32_t max_tokens = 16;  // at least 1
  // The repetition stop of MiniMax-M1: a sequence ends with the token that is this many in a row whose probability (at the temperature,
  // before anything is cut) exceeds 0.99. 0 = off; the paper's is 3000.
  uint32_t repetition_stop = 0;
  friend bool operator==(const Sampling&, const Sampling&) = default;
};

// 1/T as the forward pass applies it and as it is recorded: the fp32 quotient; 1 at temperature 0.
float InvTemperature(float temperature);

// True when nothing can be cut off: the distribution sampled is the softmax of all logits times 1/T.
bool IsPureTemperature(const Sampling& sampling);

}  // namespace temper::engine
