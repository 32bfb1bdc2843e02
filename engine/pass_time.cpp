#include "engine/pass_time.h"

#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace temper::engine {
namespace {

constexpr int kMost = 4;
using Terms = std::array<double, kMost>;

// Least squares over the terms of `used` (bits) alone; nothing where they do not tell each other apart.
bool Solve(std::span<const Terms> rows, int used, Terms& x) {
  std::vector<int> index;
  for (int i = 0; i < kMost; ++i) {
    if (used >> i & 1) index.push_back(i);
  }
  const size_t n = index.size();
  std::vector<std::vector<double>> a(n, std::vector<double>(n + 1, 0));
  for (const Terms& row : rows) {
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < n; ++j) a[i][j] += row[index[i]] * row[index[j]];
      a[i][n] += row[index[i]];
    }
  }
  for (size_t i = 0; i < n; ++i) {
    size_t best = i;
    for (size_t j = i + 1; j < n; ++j) {
      if (std::abs(a[j][i]) > std::abs(a[best][i])) best = j;
    }
    std::swap(a[i], a[best]);
    if (!(std::abs(a[i][i]) > 1e-14)) return false;
    for (size_t j = 0; j < n; ++j) {
      if (j == i) continue;
      const double f = a[j][i] / a[i][i];
      for (size_t k = i; k <= n; ++k) a[j][k] -= f * a[i][k];
    }
  }
  x = {};
  for (size_t i = 0; i < n; ++i) x[index[i]] = a[i][n] / a[i][i];
  return true;
}

// The non-negative x with the least Σ (rows · x - 1)²: of all sets of terms the best whose solution has no negative one.
Terms Fit(std::span<const Terms> rows) {
  // Terms of one size, so that one bound tells what is singular.
  Terms scale = {};
  for (const Terms& row : rows) {
    for (int i = 0; i < kMost; ++i) scale[i] = std::max(scale[i], row[i]);
  }
  std::vector<Terms> scaled(rows.begin(), rows.end());
  int present = 0;
  for (int i = 0; i < kMost; ++i) {
    if (scale[i] > 0) present |= 1 << i;
    for (Terms& row : scaled) row[i] = scale[i] > 0 ? row[i] / scale[i] : 0;
  }
  Terms best = {};
  double least = std::numeric_limits<double>::infinity();
  for (int used = 1; used < 1 << kMost; ++used) {
    Terms x;
    if ((used & ~present) != 0 || !Solve(scaled, used, x)) continue;
    bool negative = false;
    for (const double v : x) negative = negative || v < 0;
    if (negative) continue;
    double error = 0;
    for (const Terms& row : scaled) {
      double e = -1;
      for (int i = 0; i < kMost; ++i) e += row[i] * x[i];
      error += e * e;
    }
    if (error < least) {
      least = error;
      best = x;
    }
  }
  for (int i = 0; i < kMost; ++i) best[i] = scale[i] > 0 ? best[i] / scale[i] : 0;
  return best;
}

}  // namespace

PassRates FitRates(std::span<const PassTime> measured) {
  std::vector<Terms> rows;
  for (const PassTime& m : measured) {
    if (m.forward_s <= 0) continue;
    rows.push_back({m.work.forward_rows / m.forward_s, m.work.forward_pairs / m.forward_s, m.work.forward_head_rows / m.forward_s, 0});
  }
  const Terms f = Fit(rows);
  PassRates r{.row = f[0], .pair = f[1], .head_row = f[2]};
  rows.clear();
  for (const PassTime& m : measured) {
    // What was computed again is forward work, whose rates are known.
    const double again = m.work.again_rows * r.row + m.work.again_pairs * r.pair + m.work.again_head_rows * r.head_row;
    const double s = m.backward_s - again;
    if (s <= 0) continue;
    rows.push_back({m.work.backward_rows / s, m.work.backward_pairs / s, m.work.backward_head_rows / s, m.work.chunks / s});
  }
  const Terms b = Fit(rows);
  r.backward_row = b[0];
  r.backward_pair = b[1];
  r.backward_head_row = b[2];
  r.chunk = b[3];
  return r;
}

double ForwardSeconds(const PassWork& w, const PassRates& r) {
  return w.forward_rows * r.row + w.forward_pairs * r.pair + w.forward_head_rows * r.head_row;
}

double BackwardSeconds(const PassWork& w, const PassRates& r) {
  if (w.backward_rows == 0) return 0;
  return w.again_rows * r.row + w.again_pairs * r.pair + w.again_head_rows * r.head_row + w.backward_rows * r.backward_row +
         w.backward_pairs * r.backward_pair + w.backward_head_rows * r.backward_head_row + w.chunks * r.chunk;
}

}  // namespace temper::engine
