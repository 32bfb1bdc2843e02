// Draws one token from a row of logits and gives the logprob under the distribution actually sampled.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/decode/types.h"

namespace temper::engine {

struct Draw {
  int32_t token = 0;
  float logprob = 0.0f;
  std::string kept = {};  // the tokens it was drawn from (engine/kept_set.h); empty = all
};

// Refuses values out of range with the name of the field (kInvalidArgument).
Status CheckSampling(const Sampling& sampling);

// Holds scratch memory, reused over steps. One per thread.
class Sampler {
 public:
  // `log_sum_exp`: the engine's RowLogSumExp, for the kept logits side by side in order of their ids.
  explicit Sampler(std::function<float(std::span<const float>)> log_sum_exp) : log_sum_exp_(std::move(log_sum_exp)) {}

  // `logits` [V] are already multiplied by InvTemperature(temperature) (by the head's tiles), `log_sum_exp` is the engine's
  // RowLogSumExp of them, `uniform` lies in [0, 1). The draw inverts the cumulative distribution in order of token id, with
  // prefix sums over fixed tiles of the vocabulary (kTile) and an exponential of its own, so it is a pure function of its
  // arguments on every machine. Without truncation logprob = logits[token] - log_sum_exp, the subtraction that training
  // performs. With truncation it is logits[token] less the RowLogSumExp of the kept logits: the subtraction that training performs for
  // this kept set. NaN logits are never drawn while others exist.
  Draw Sample(std::span<const float> logits, float log_sum_exp, const Sampling& sampling, double uniform);

  static constexpr int kTile = 256;

 private:
  Draw SampleAll(std::span<const float> logits, float log_sum_exp, double uniform);
  Draw SampleKept(std::span<const float> logits, float log_sum_exp, const Sampling& sampling, double uniform);
  // Fills weights_ [V padded to kTile] with exp(logit - log_sum_exp), tiles_ with the sum of each tile; returns their total.
  double Weigh(std::span<const float> logits, float log_sum_exp);

  const std::function<float(std::span<const float>)> log_sum_exp_;
  std::vector<float> weights_;
  std::vector<double> tiles_;
  std::vector<int32_t> order_;
  std::vector<float> kept_logits_;
};

}  // namespace temper::engine
