#include "engine/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/check.h"
#include "engine/rope.h"

namespace temper::engine {
namespace {

using Vector = std::vector<double>;

// y[out] = W[out][in] x. Legend: W row-major as stored.
void MatVec(std::span<const float> w, const double* x, int out, int in, double* y) {
  for (int o = 0; o < out; ++o) {
    double sum = 0;
    for (int i = 0; i < in; ++i) sum += static_cast<double>(w[static_cast<size_t>(o) * in + i]) * x[i];
    y[o] = sum;
  }
}

// dx += Wᵀ dy; dW += dy xᵀ.
void MatVecBackward(std::span<const float> w, const double* x, const double* dy, int out, int in, double* dx, double* dw) {
  for (int o = 0; o < out; ++o) {
    if (dy[o] == 0) continue;
    const size_t row = static_cast<size_t>(o) * in;
    for (int i = 0; i < in; ++i) {
      dx[i] += static_cast<double>(w[row + i]) * dy[o];
      dw[row + i] += dy[o] * x[i];
    }
  }
}

double Norm(const double* x, std::span<const float> gain, double eps, int n, double* y) {
  double squares = 0;
  for (int i = 0; i < n; ++i) squares += x[i] * x[i];
  const double r = 1 / std::sqrt(squares / n + eps);
  for (int i = 0; i < n; ++i) y[i] = x[i] * r * static_cast<double>(gain[i]);
  return r;
}

void NormBackward(const double* x, std::span<const float> gain, double r, const double* dy, int n, double* dx, double* dgain) {
  double dot = 0;
  for (int i = 0; i < n; ++i) dot += x[i] * static_cast<double>(gain[i]) * dy[i];
  for (int i = 0; i < n; ++i) {
    dx[i] += r * static_cast<double>(gain[i]) * dy[i] - x[i] * r * r * r / n * dot;
    dgain[i] += dy[i] * x[i] * r;
  }
}

// Rotates pairs (i, i + half) by angle * direction.
void Rotate(double* x, const Vector& inverse_frequency, int position, int head_dim, int direction) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const double angle = position * inverse_frequency[i], c = std::cos(angle), s = direction * std::sin(angle);
    const double a = x[i], b = x[half + i];
    x[i] = a * c - b * s;
    x[half + i] = b * c + a * s;
  }
}

// What one layer keeps, [nodes][…].
struct Layer {
  Vector x, h1, q, k, v, o, mid, h2, gate, up, act, r1, r2;
};

}  // namespace

ReferenceResult RunReference(const Parameters& params, const TreeBatch& tree, const ReferenceOptions& options) {
  const ModelConfig& c = params.config();
  const int n = tree.size(), w = c.width, qd = c.q_dim(), kd = c.kv_dim(), f = c.ffn, hd = c.head_dim, vocab = c.vocab;
  const int group = c.heads / c.kv_heads;
  const double scale = 1 / std::sqrt(static_cast<double>(hd));
  const Vector inverse = InverseFrequencies(c);
  const int head_tensor = c.tied ? 0 : static_cast<int>(params.tensors().size()) - 1;
  const int norm_tensor = 1 + 9 * c.layers;
  TEMPER_CHECK(options.coef.empty() || static_cast<int>(options.coef.size()) == n);
  TEMPER_CHECK(options.inv_temperature.empty() || static_cast<int>(options.inv_temperature.size()) == n);
  const auto at = [](auto& vector, int node, int width) { return vector.data() + static_cast<size_t>(node) * width; };
  const auto path = [&](int node) {  // root … node
    std::vector<int> out;
    for (int v = node; v >= 0; v = tree.parent[v]) out.push_back(v);
    std::reverse(out.begin(), out.end());
    return out;
  };
  // Attention probabilities of one head over the path of a node.
  const auto probabilities = [&](const Layer& layer, int node, int head, const std::vector<int>& keys) {
    Vector p(keys.size());
    const double* q = at(layer.q, node, qd) + head * hd;
    double max = -std::numeric_limits<double>::infinity(), sum = 0;
    for (size_t j = 0; j < keys.size(); ++j) {
      const double* k = at(layer.k, keys[j], kd) + head / group * hd;
      double dot = 0;
      for (int i = 0; i < hd; ++i) dot += q[i] * k[i];
      p[j] = dot * scale;
      max = std::max(max, p[j]);
    }
    for (double& x : p) sum += x = std::exp(x - max);
    for (double& x : p) x /= sum;
    return p;
  };

  std::vector<Layer> layers(c.layers);
  Vector x(static_cast<size_t>(n) * w);
  for (int v = 0; v < n; ++v) {
    TEMPER_CHECK(tree.token[v] >= 0 && tree.token[v] < vocab) << "token " << tree.token[v];
    const auto row = params.tensor(0).subspan(static_cast<size_t>(tree.token[v]) * w, w);
    std::copy(row.begin(), row.end(), at(x, v, w));
  }
  for (int l = 0; l < c.layers; ++l) {
    Layer& s = layers[l];
    const auto t = [&](int i) { return params.tensor(1 + 9 * l + i); };
    s.x = x;
    for (Vector* a : {&s.h1, &s.mid, &s.h2}) a->assign(static_cast<size_t>(n) * w, 0);
    for (Vector* a : {&s.q, &s.o}) a->assign(static_cast<size_t>(n) * qd, 0);
    for (Vector* a : {&s.k, &s.v}) a->assign(static_cast<size_t>(n) * kd, 0);
    for (Vector* a : {&s.gate, &s.up, &s.act}) a->assign(static_cast<size_t>(n) * f, 0);
    s.r1.assign(n, 0);
    s.r2.assign(n, 0);
    for (int v = 0; v < n; ++v) {
      s.r1[v] = Norm(at(s.x, v, w), t(0), c.rms_eps, w, at(s.h1, v, w));
      MatVec(t(1), at(s.h1, v, w), qd, w, at(s.q, v, qd));
      MatVec(t(2), at(s.h1, v, w), kd, w, at(s.k, v, kd));
      MatVec(t(3), at(s.h1, v, w), kd, w, at(s.v, v, kd));
      for (int h = 0; h < c.heads; ++h) Rotate(at(s.q, v, qd) + h * hd, inverse, tree.pos[v], hd, 1);
      for (int h = 0; h < c.kv_heads; ++h) Rotate(at(s.k, v, kd) + h * hd, inverse, tree.pos[v], hd, 1);
    }
    Vector y(w);
    for (int v = 0; v < n; ++v) {
      const std::vector<int> keys = path(v);
      for (int h = 0; h < c.heads; ++h) {
        const Vector p = probabilities(s, v, h, keys);
        double* o = at(s.o, v, qd) + h * hd;
        for (size_t j = 0; j < keys.size(); ++j) {
          const double* value = at(s.v, keys[j], kd) + h / group * hd;
          for (int i = 0; i < hd; ++i) o[i] += p[j] * value[i];
        }
      }
      MatVec(t(4), at(s.o, v, qd), w, qd, y.data());
      for (int i = 0; i < w; ++i) at(s.mid, v, w)[i] = at(s.x, v, w)[i] + y[i];
      s.r2[v] = Norm(at(s.mid, v, w), t(5), c.rms_eps, w, at(s.h2, v, w));
      MatVec(t(6), at(s.h2, v, w), f, w, at(s.gate, v, f));
      MatVec(t(7), at(s.h2, v, w), f, w, at(s.up, v, f));
      for (int i = 0; i < f; ++i) {
        const double g = at(s.gate, v, f)[i];
        at(s.act, v, f)[i] = g / (1 + std::exp(-g)) * at(s.up, v, f)[i];
      }
      MatVec(t(8), at(s.act, v, f), w, f, y.data());
      for (int i = 0; i < w; ++i) at(x, v, w)[i] = at(s.mid, v, w)[i] + y[i];
    }
  }

  ReferenceResult out;
  out.logprobs.assign(n, std::numeric_limits<double>::quiet_NaN());
  if (options.gradient) out.gradient.assign(params.flat().size(), 0);
  const auto grad = [&](int tensor) { return out.gradient.data() + params.tensors()[tensor].offset; };
  std::vector<std::vector<int>> children(n);
  for (int v = 0; v < n; ++v) {
    if (tree.parent[v] >= 0) children[tree.parent[v]].push_back(v);
  }
  Vector dx(static_cast<size_t>(n) * w, 0), hidden(w), logits(vocab), dlogits(vocab), dhidden(w);
  for (int u = 0; u < n; ++u) {
    if (children[u].empty() && !options.rows) continue;
    const double r = Norm(at(x, u, w), params.tensor(norm_tensor), c.rms_eps, w, hidden.data());
    MatVec(params.tensor(head_tensor), hidden.data(), vocab, w, logits.data());
    const auto log_sum = [&](double t) {
      double max = -std::numeric_limits<double>::infinity(), sum = 0;
      for (double z : logits) max = std::max(max, z * t);
      for (double z : logits) sum += std::exp(z * t - max);
      return max + std::log(sum);
    };
    if (options.rows) {
      const double t = options.row_inv_temperature, lse = log_sum(t);
      Vector row(vocab);
      for (int i = 0; i < vocab; ++i) row[i] = logits[i] * t - lse;
      out.rows.push_back(std::move(row));
    }
    std::fill(dlogits.begin(), dlogits.end(), 0);
    bool pulled = false;
    for (int v : children[u]) {
      const double t = options.inv_temperature.empty() ? tree.inv_temperature[v] : options.inv_temperature[v], lse = log_sum(t), coef = options.coef.empty() ? 0 : options.coef[v];
      out.logprobs[v] = logits[tree.token[v]] * t - lse;
      out.objective += coef * out.logprobs[v];
      if (!options.gradient || coef == 0) continue;
      pulled = true;
      for (int i = 0; i < vocab; ++i) dlogits[i] -= coef * t * std::exp(logits[i] * t - lse);
      dlogits[tree.token[v]] += coef * t;
    }
    if (!pulled) continue;
    std::fill(dhidden.begin(), dhidden.end(), 0);
    MatVecBackward(params.tensor(head_tensor), hidden.data(), dlogits.data(), vocab, w, dhidden.data(), grad(head_tensor));
    NormBackward(at(x, u, w), params.tensor(norm_tensor), r, dhidden.data(), w, at(dx, u, w), grad(norm_tensor));
  }
  if (!options.gradient) return out;

  for (int l = c.layers - 1; l >= 0; --l) {
    const Layer& s = layers[l];
    const int base = 1 + 9 * l;
    const auto t = [&](int i) { return params.tensor(base + i); };
    Vector dq(static_cast<size_t>(n) * qd, 0), dk(static_cast<size_t>(n) * kd, 0), dv(static_cast<size_t>(n) * kd, 0);
    for (int v = 0; v < n; ++v) {
      Vector dact(f, 0), dgate(f), dup(f), dh2(w, 0), dout(qd, 0);
      MatVecBackward(t(8), at(s.act, v, f), at(dx, v, w), w, f, dact.data(), grad(base + 8));
      for (int i = 0; i < f; ++i) {
        const double g = at(s.gate, v, f)[i], sigmoid = 1 / (1 + std::exp(-g));
        dgate[i] = dact[i] * at(s.up, v, f)[i] * sigmoid * (1 + g * (1 - sigmoid));
        dup[i] = dact[i] * g * sigmoid;
      }
      MatVecBackward(t(6), at(s.h2, v, w), dgate.data(), f, w, dh2.data(), grad(base + 6));
      MatVecBackward(t(7), at(s.h2, v, w), dup.data(), f, w, dh2.data(), grad(base + 7));
      NormBackward(at(s.mid, v, w), t(5), s.r2[v], dh2.data(), w, at(dx, v, w), grad(base + 5));
      MatVecBackward(t(4), at(s.o, v, qd), at(dx, v, w), w, qd, dout.data(), grad(base + 4));
      const std::vector<int> keys = path(v);
      for (int h = 0; h < c.heads; ++h) {
        const Vector p = probabilities(s, v, h, keys);
        const double* d_o = dout.data() + h * hd;
        const int kv = h / group * hd;
        Vector dp(keys.size(), 0);
        double delta = 0;
        for (size_t j = 0; j < keys.size(); ++j) {
          for (int i = 0; i < hd; ++i) {
            dp[j] += d_o[i] * at(s.v, keys[j], kd)[kv + i];
            at(dv, keys[j], kd)[kv + i] += p[j] * d_o[i];
          }
          delta += p[j] * dp[j];
        }
        for (size_t j = 0; j < keys.size(); ++j) {
          const double ds = p[j] * (dp[j] - delta) * scale;
          for (int i = 0; i < hd; ++i) {
            at(dq, v, qd)[h * hd + i] += ds * at(s.k, keys[j], kd)[kv + i];
            at(dk, keys[j], kd)[kv + i] += ds * at(s.q, v, qd)[h * hd + i];
          }
        }
      }
    }
    for (int v = 0; v < n; ++v) {
      for (int h = 0; h < c.heads; ++h) Rotate(at(dq, v, qd) + h * hd, inverse, tree.pos[v], hd, -1);
      for (int h = 0; h < c.kv_heads; ++h) Rotate(at(dk, v, kd) + h * hd, inverse, tree.pos[v], hd, -1);
      Vector dh1(w, 0);
      MatVecBackward(t(1), at(s.h1, v, w), at(dq, v, qd), qd, w, dh1.data(), grad(base + 1));
      MatVecBackward(t(2), at(s.h1, v, w), at(dk, v, kd), kd, w, dh1.data(), grad(base + 2));
      MatVecBackward(t(3), at(s.h1, v, w), at(dv, v, kd), kd, w, dh1.data(), grad(base + 3));
      NormBackward(at(s.x, v, w), t(0), s.r1[v], dh1.data(), w, at(dx, v, w), grad(base + 0));
    }
  }
  for (int v = 0; v < n; ++v) {
    for (int i = 0; i < w; ++i) grad(0)[static_cast<size_t>(tree.token[v]) * w + i] += at(dx, v, w)[i];
  }
  return out;
}

}  // namespace temper::engine
