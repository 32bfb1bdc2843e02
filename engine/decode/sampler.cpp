#include "engine/decode/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "common/check.h"
#include "engine/kept_set.h"
#include "engine/score.h"

namespace temper::engine {
namespace {

constexpr int kTile = Sampler::kTile;

// exp(x) for x <= about 0, elementwise operations only (the same bits at every vector width); 0 below -87. Relative error
// below 3e-7: it decides which token is drawn, never a logprob.
inline float ExpWeight(float x) {
  float bounded = x > -87.0f ? x : -87.0f;  // also takes NaN to -87
  bounded = bounded < 80.0f ? bounded : 80.0f;
  float shifted = bounded * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  float n = shifted - 12582912.0f;
  float r = bounded - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  float scale = std::bit_cast<float>((std::bit_cast<int32_t>(shifted) << 23) + 0x3f800000);
  return x > -87.0f ? p * scale : 0.0f;
}

// One clone for each vector width: elementwise and without contraction, so all of them give the same bits.
__attribute__((target_clones("avx512f", "avx2", "default"))) void WeighTile(const float* logits, float log_sum_exp, float* weights) {
  for (int i = 0; i < kTile; ++i) weights[i] = ExpWeight(logits[i] - log_sum_exp);
}

double TileSum(const float* weights) {
  double lanes[8] = {};
  for (int i = 0; i < kTile; i += 8) {
    for (int l = 0; l < 8; ++l) lanes[l] += static_cast<double>(weights[i + l]);
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

int32_t ArgMax(std::span<const float> logits) {
  int32_t best = -1;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) continue;
    if (best < 0 || logits[i] > logits[best]) best = static_cast<int32_t>(i);
  }
  return std::max(best, 0);
}

}  // namespace

Status CheckSampling(const Sampling& sampling) {
  if (sampling.temperature != 0) RETURN_IF_ERROR(CheckTemperature(static_cast<double>(sampling.temperature)));
  if (!(sampling.top_p > 0.0f && sampling.top_p <= 1.0f)) return InvalidArgument("top_p must lie in (0, 1]");
  if (!(sampling.min_p >= 0.0f && sampling.min_p <= 1.0f)) return InvalidArgument("min_p must lie in [0, 1]");
  if (sampling.max_tokens < 1) return InvalidArgument("max_tokens must be 1 or more");
  return Status::Ok();
}

Draw Sampler::Sample(std::span<const float> logits, float log_sum_exp, const Sampling& sampling, double uniform) {
  TEMPER_CHECK(!logits.empty() && uniform >= 0.0 && uniform < 1.0);
  if (sampling.temperature == 0.0f) {
    int32_t token = ArgMax(logits);
    return {token, logits[token] - log_sum_exp};
  }
  if (IsPureTemperature(sampling)) return SampleAll(logits, log_sum_exp, uniform);
  return SampleKept(logits, log_sum_exp, sampling, uniform);
}

double Sampler::Weigh(std::span<const float> logits, float log_sum_exp) {
  const size_t full = logits.size() / kTile;
  const size_t tiles = (logits.size() + kTile - 1) / kTile;
  weights_.resize(tiles * kTile);
  tiles_.resize(tiles);
  for (size_t t = 0; t < full; ++t) WeighTile(logits.data() + t * kTile, log_sum_exp, weights_.data() + t * kTile);
  if (full < tiles) {
    float padded[kTile];
    std::fill(padded, padded + kTile, -std::numeric_limits<float>::infinity());
    std::copy(logits.begin() + full * kTile, logits.end(), padded);
    WeighTile(padded, log_sum_exp, weights_.data() + full * kTile);
  }
  double total = 0.0;
  for (size_t t = 0; t < tiles; ++t) {
    tiles_[t] = TileSum(weights_.data() + t * kTile);
    total += tiles_[t];
  }
  return total;
}

Draw Sampler::SampleAll(std::span<const float> logits, float log_sum_exp, double uniform) {
  const double target = uniform * Weigh(logits, log_sum_exp);
  // `token` is the last one with a weight whose prefix does not exceed the target; rounding at the end of a tile or of the
  // vocabulary thus never leads to a token of weight zero.
  int32_t token = -1;
  double before = 0.0;
  for (size_t t = 0; t < tiles_.size(); ++t) {
    if (!(tiles_[t] > 0.0)) continue;
    bool last_tile = before + tiles_[t] > target;
    if (!last_tile) {
      before += tiles_[t];
      token = static_cast<int32_t>(t) * kTile;  // provisional: only its tile matters when no later tile has weight
      continue;
    }
    token = -1;
    for (int32_t i = static_cast<int32_t>(t) * kTile, end = i + kTile; i < end; ++i) {
      float w = weights_[i];
      if (!(w > 0.0f)) continue;
      token = i;
      before += static_cast<double>(w);
      if (before > target) break;
    }
    return {token, logits[token] - log_sum_exp};
  }
  if (token < 0) {  // no weight at all: every logit is NaN or -inf
    token = ArgMax(logits);
    return {token, logits[token] - log_sum_exp};
  }
  for (int32_t i = token + kTile - 1; i >= token; --i) {
    if (weights_[i] > 0.0f) return {i, logits[i] - log_sum_exp};
  }
  return {token, logits[token] - log_sum_exp};
}

Draw Sampler::SampleKept(std::span<const float> logits, float log_sum_exp, const Sampling& sampling, double uniform) {
  double total = Weigh(logits, log_sum_exp);
  const size_t vocab = logits.size();
  order_.resize(vocab);
  for (size_t i = 0; i < vocab; ++i) order_[i] = static_cast<int32_t>(i);
  // Most probable first, the lower id among equals: a total order, NaN last.
  auto rank = [&](int32_t id) { return std::isnan(logits[id]) ? -std::numeric_limits<float>::infinity() : logits[id]; };
  auto before = [&](int32_t a, int32_t b) {
    float la = rank(a), lb = rank(b);
    return la != lb ? la > lb : a < b;
  };
  size_t sorted = 0;
  auto sort_up_to = [&](size_t n) {
    n = std::min(n, vocab);
    if (n > sorted) std::partial_sort(order_.begin() + sorted, order_.begin() + n, order_.end(), before);
    sorted = std::max(sorted, n);
  };
  size_t kept = vocab;
  if (sampling.top_k > 0 && sampling.top_k < vocab) {
    kept = sampling.top_k;
    sort_up_to(kept);
    total = 0.0;
    for (size_t i = 0; i < kept; ++i) total += static_cast<double>(weights_[order_[i]]);
  }
  if (sampling.top_p < 1.0f) {
    const double enough = static_cast<double>(sampling.top_p) * total;
    double sum = 0.0;
    size_t n = 0;
    while (n < kept) {
      if (n == sorted) sort_up_to(std::max<size_t>(64, sorted * 4));
      sum += static_cast<double>(weights_[order_[n++]]);
      if (sum >= enough) break;
    }
    kept = n;
  }
  if (sampling.min_p > 0.0f) {
    sort_up_to(1);
    const float least = sampling.min_p * weights_[order_[0]];
    if (kept > sorted) {
      auto end = std::partition(order_.begin() + sorted, order_.begin() + kept, [&](int32_t id) { return weights_[id] >= least; });
      kept = static_cast<size_t>(end - order_.begin());
    }
    // The sorted part is in falling order of weight.
    size_t n = 1;
    size_t sorted_kept = std::min(sorted, kept);
    while (n < sorted_kept && weights_[order_[n]] >= least) ++n;
    if (n < sorted_kept) kept = n;
  }
  std::sort(order_.begin(), order_.begin() + kept);
  double mass = 0.0;
  for (size_t i = 0; i < kept; ++i) mass += static_cast<double>(weights_[order_[i]]);
  const double target = uniform * mass;
  int32_t token = order_[0];
  double sum = 0.0;
  for (size_t i = 0; i < kept; ++i) {
    float w = weights_[order_[i]];
    if (!(w > 0.0f)) continue;
    token = order_[i];
    sum += static_cast<double>(w);
    if (sum > target) break;
  }
  if (kept == vocab) return {token, logits[token] - log_sum_exp};
  kept_logits_.clear();
  for (size_t i = 0; i < kept; ++i) kept_logits_.push_back(logits[order_[i]]);
  return {token, logits[token] - log_sum_exp_(kept_logits_), EncodeKept(std::span(order_).first(kept), static_cast<int>(vocab))};
}

}  // namespace temper::engine
