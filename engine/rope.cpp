#include "engine/rope.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <tuple>

namespace temper::engine {

namespace {

// The windowed layers of Gemma turn by unscaled angles of a base of their own.
double ThetaOf(const ModelConfig& c, int which) { return which ? c.local_rope_theta : c.rope_theta; }
RopeScaling ScalingOf(const ModelConfig& c, int which) { return which ? RopeScaling() : c.rope_scaling; }

// Which share of pair i stays as it was under yarn: 1 where it turns often within the original positions, 0 where seldom.
double YarnKept(const RopeScaling& s, double theta, int head_dim, int i) {
  const auto pair_turning = [&](double turns) {
    return head_dim * std::log(s.original_max_positions / (turns * 2 * M_PI)) / (2 * std::log(theta));
  };
  double low = pair_turning(s.beta_fast), high = pair_turning(s.beta_slow);
  if (s.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, head_dim - 1.0);
  if (low == high) high += 0.001;
  return 1 - std::clamp((i - low) / (high - low), 0.0, 1.0);
}

}  // namespace

std::vector<double> InverseFrequencies(const ModelConfig& c, int which) {
  const int half = c.head_dim / 2;
  const double theta = ThetaOf(c, which);
  const RopeScaling s = ScalingOf(c, which);
  std::vector<double> out(half);
  for (int i = 0; i < half; ++i) {
    const long double exponent = static_cast<long double>(2 * i) / c.head_dim;
    double f = static_cast<double>(1.0L / std::pow(static_cast<long double>(theta), exponent));
    switch (s.kind) {
      case RopeScaling::Kind::kNone:
      case RopeScaling::Kind::kDynamic: break;
      case RopeScaling::Kind::kLinear: f /= s.factor; break;
      case RopeScaling::Kind::kLlama3: {
        const double wavelength = 2 * M_PI / f;
        const double low = s.original_max_positions / s.low_freq_factor;
        const double high = s.original_max_positions / s.high_freq_factor;
        if (wavelength > low) {
          f /= s.factor;
        } else if (wavelength >= high) {
          const double smooth = (s.original_max_positions / wavelength - s.low_freq_factor) /
                                (s.high_freq_factor - s.low_freq_factor);
          f = (1 - smooth) * f / s.factor + smooth * f;
        }
        break;
      }
      case RopeScaling::Kind::kYarn: {
        const double kept = YarnKept(s, theta, c.head_dim, i);
        f = f / s.factor * (1 - kept) + f * kept;
        break;
      }
    }
    out[i] = f;
  }
  return out;
}

double AngleFactor(const ModelConfig& c, int which) {
  const RopeScaling s = ScalingOf(c, which);
  return s.kind == RopeScaling::Kind::kYarn ? s.attention_factor : 1;
}

RopeTable::RopeTable(const ModelConfig& c, int which)
    : inverse_(InverseFrequencies(c, which)),
      factor_(AngleFactor(c, which)),
      blocks_(std::make_unique<Block[]>((c.max_positions + kBlock - 1) / kBlock)) {}

const float* RopeTable::Row(int position) const {
  Block& block = blocks_[position / kBlock];
  const size_t half = inverse_.size();
  std::call_once(block.once, [&] {
    std::vector<float> rows(kBlock * 2 * half);
    for (int p = 0; p < kBlock; ++p) {
      for (size_t i = 0; i < half; ++i) {
        const long double angle = (position / kBlock * kBlock + p) * inverse_[i];
        rows[p * 2 * half + i] = static_cast<float>(std::cos(angle) * factor_);
        rows[p * 2 * half + half + i] = static_cast<float>(std::sin(angle) * factor_);
      }
    }
    block.rows = std::move(rows);
  });
  return block.rows.data() + position % kBlock * 2 * half;
}

std::shared_ptr<const RopeTable> GetRopeTable(const ModelConfig& c, int which) {
  static std::mutex mutex;
  // The angles are a function of these.
  using Key = std::tuple<int, std::vector<double>, double>;
  static std::map<Key, std::weak_ptr<const RopeTable>> cache;
  const Key key{c.max_positions, InverseFrequencies(c, which), AngleFactor(c, which)};
  std::lock_guard lock(mutex);
  if (auto found = cache[key].lock()) return found;
  auto table = std::make_shared<RopeTable>(c, which);
  cache[key] = table;
  return table;
}

}  // namespace temper::engine
