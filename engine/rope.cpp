#include "engine/rope.h"

#include <cmath>
#include <map>
#include <mutex>
#include <tuple>

namespace temper::engine {

std::vector<double> InverseFrequencies(const ModelConfig& c) {
  const int half = c.head_dim / 2;
  std::vector<double> out(half);
  for (int i = 0; i < half; ++i) {
    const long double exponent = static_cast<long double>(2 * i) / c.head_dim;
    double f = static_cast<double>(1.0L / std::pow(static_cast<long double>(c.rope_theta), exponent));
    const RopeScaling& s = c.rope_scaling;
    if (s.kind == RopeScaling::Kind::kLinear) f /= s.factor;
    if (s.kind == RopeScaling::Kind::kLlama3) {
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
    }
    out[i] = f;
  }
  return out;
}

RopeTable::RopeTable(const ModelConfig& c)
    : inverse_(InverseFrequencies(c)), blocks_(std::make_unique<Block[]>((c.max_positions + kBlock - 1) / kBlock)) {}

const float* RopeTable::Row(int position) const {
  Block& block = blocks_[position / kBlock];
  const size_t half = inverse_.size();
  std::call_once(block.once, [&] {
    std::vector<float> rows(kBlock * 2 * half);
    for (int p = 0; p < kBlock; ++p) {
      for (size_t i = 0; i < half; ++i) {
        const long double angle = (position / kBlock * kBlock + p) * inverse_[i];
        rows[p * 2 * half + i] = static_cast<float>(std::cos(angle));
        rows[p * 2 * half + half + i] = static_cast<float>(std::sin(angle));
      }
    }
    block.rows = std::move(rows);
  });
  return block.rows.data() + position % kBlock * 2 * half;
}

std::shared_ptr<const RopeTable> GetRopeTable(const ModelConfig& c) {
  static std::mutex mutex;
  using Key = std::tuple<int, int, double, int, double, double, double, int>;
  static std::map<Key, std::weak_ptr<const RopeTable>> cache;
  const RopeScaling& s = c.rope_scaling;
  const Key key{c.head_dim, c.max_positions, c.rope_theta, static_cast<int>(s.kind),
                s.factor,   s.low_freq_factor, s.high_freq_factor, s.original_max_positions};
  std::lock_guard lock(mutex);
  if (auto found = cache[key].lock()) return found;
  auto table = std::make_shared<RopeTable>(c);
  cache[key] = table;
  return table;
}

}  // namespace temper::engine
