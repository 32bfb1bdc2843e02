#include "engine/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "common/check.h"
#include "engine/kept_set.h"
#include "engine/layer.h"
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

// The gain of a norm: w + offset.
struct Gain {
  std::span<const float> w;
  double offset;
  double operator[](int i) const { return static_cast<double>(w[i]) + offset; }
};

double Norm(const double* x, const Gain& gain, double eps, int n, double* y) {
  double squares = 0;
  for (int i = 0; i < n; ++i) squares += x[i] * x[i];
  const double r = 1 / std::sqrt(squares / n + eps);
  for (int i = 0; i < n; ++i) y[i] = x[i] * r * gain[i];
  return r;
}

void NormBackward(const double* x, const Gain& gain, double r, const double* dy, int n, double* dx, double* dgain) {
  double dot = 0;
  for (int i = 0; i < n; ++i) dot += x[i] * gain[i] * dy[i];
  for (int i = 0; i < n; ++i) {
    dx[i] += r * gain[i] * dy[i] - x[i] * r * r * r / n * dot;
    dgain[i] += dy[i] * x[i] * r;
  }
}

// Angles of one rotary table.
struct Rotation {
  Vector inverse_frequency;
  double factor;

  // Turns pairs (i, i + half) and multiplies by the factor; `direction` -1 is the transpose.
  void Apply(double* x, int position, int head_dim, int direction) const {
    const int half = head_dim / 2;
    for (int i = 0; i < half; ++i) {
      const double angle = position * inverse_frequency[i], c = factor * std::cos(angle),
                   s = direction * factor * std::sin(angle);
      const double a = x[i], b = x[half + i];
      x[i] = a * c - b * s;
      x[half + i] = b * c + a * s;
    }
  }
};

struct Value {
  double y, slope;
};

Value Activate(Activation kind, double x) {
  if (kind == Activation::kSilu) {
    const double sigmoid = 1 / (1 + std::exp(-x));
    return {x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))};
  }
  const double k = std::sqrt(2 / M_PI), t = std::tanh(k * (x + 0.044715 * x * x * x));
  return {0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x)};
}

Value SoftCap(double cap, double x) {
  if (cap == 0) return {x, 1};
  const double t = std::tanh(x / cap);
  return {cap * t, 1 - t * t};
}

// What one layer keeps, [nodes][…]; q_raw and k_raw are before the norms of the heads.
struct Layer {
  LayerSpec spec;
  Vector x, h1, q_raw, k_raw, q, k, v, o, attention, mid, h2, gate, up, act, mlp;
  Vector r1, rq, rk, r_attention, r2, r_mlp;
};

}  // namespace

ReferenceResult RunReference(const Parameters& params, const TreeBatch& tree, const ReferenceOptions& options) {
  const ModelConfig& c = params.config();
  const ModelSpec model = SpecOf(c);
  const int n = tree.size(), w = c.width, qd = c.q_dim(), kd = c.kv_dim(), f = c.ffn, hd = c.head_dim, vocab = c.vocab;
  const int group = c.heads / c.kv_heads;
  std::vector<Rotation> rotations;
  for (int i = 0; i < model.ropes; ++i) rotations.push_back({InverseFrequencies(c, i), AngleFactor(c, i)});
  const int head_tensor = HeadIndex(c), norm_tensor = FinalGainIndex(c);
  TEMPER_CHECK(options.coef.empty() || static_cast<int>(options.coef.size()) == n);
  TEMPER_CHECK(options.inv_temperature.empty() || static_cast<int>(options.inv_temperature.size()) == n);
  const auto at = [](auto& vector, int node, int width) { return vector.data() + static_cast<size_t>(node) * width; };
  const auto gain_of = [&](int tensor) { return Gain{params.tensor(tensor), model.gain_offset}; };
  // The keys a node sees, root first.
  const auto keys_of = [&](const LayerSpec& spec, int node) {
    std::vector<int> out;
    for (int v = node; v >= 0; v = tree.parent[v]) {
      if (spec.window && tree.pos[node] - tree.pos[v] >= spec.window) break;
      out.push_back(v);
    }
    std::reverse(out.begin(), out.end());
    return out;
  };
  // Attention probabilities of one head over the keys of a node, and the slopes of the capped scores.
  const auto probabilities = [&](const Layer& layer, int node, int head, const std::vector<int>& keys, Vector* slopes) {
    Vector p(keys.size());
    if (slopes) slopes->resize(keys.size());
    const double* q = at(layer.q, node, qd) + head * hd;
    double max = -std::numeric_limits<double>::infinity(), sum = 0;
    for (size_t j = 0; j < keys.size(); ++j) {
      const double* k = at(layer.k, keys[j], kd) + head / group * hd;
      double dot = 0;
      for (int i = 0; i < hd; ++i) dot += q[i] * k[i];
      const Value score = SoftCap(layer.spec.score_cap, dot * layer.spec.score_scale);
      p[j] = score.y;
      if (slopes) (*slopes)[j] = score.slope;
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
    for (int i = 0; i < w; ++i) at(x, v, w)[i] = row[i] * model.embedding_scale;
  }
  for (int l = 0; l < c.layers; ++l) {
    Layer& s = layers[l];
    s.spec = LayerOf(c, l);
    const LayerIndex index(c, l);
    const auto t = [&](Role role) { return params.tensor(index[role]); };
    const auto gain = [&](Role role) { return gain_of(index[role]); };
    const Rotation& rotation = rotations[s.spec.rope];
    s.x = x;
    for (Vector* a : {&s.h1, &s.attention, &s.mid, &s.h2, &s.mlp}) a->assign(static_cast<size_t>(n) * w, 0);
    for (Vector* a : {&s.q, &s.o}) a->assign(static_cast<size_t>(n) * qd, 0);
    for (Vector* a : {&s.k, &s.v}) a->assign(static_cast<size_t>(n) * kd, 0);
    for (Vector* a : {&s.gate, &s.up, &s.act}) a->assign(static_cast<size_t>(n) * f, 0);
    for (Vector* a : {&s.r1, &s.r_attention, &s.r2, &s.r_mlp}) a->assign(n, 0);
    s.rq.assign(static_cast<size_t>(n) * c.heads, 0);
    s.rk.assign(static_cast<size_t>(n) * c.kv_heads, 0);
    const auto project = [&](Role matrix, Role bias, int v, int out, Vector& y) {
      MatVec(t(matrix), at(s.h1, v, w), out, w, at(y, v, out));
      for (int i = 0; s.spec.qkv_bias && i < out; ++i) at(y, v, out)[i] += t(bias)[i];
    };
    for (int v = 0; v < n; ++v) {
      s.r1[v] = Norm(at(s.x, v, w), gain(Role::kInputGain), c.rms_eps, w, at(s.h1, v, w));
      project(Role::kQ, Role::kQBias, v, qd, s.q);
      project(Role::kK, Role::kKBias, v, kd, s.k);
      project(Role::kV, Role::kVBias, v, kd, s.v);
    }
    s.q_raw = s.q;
    s.k_raw = s.k;
    const auto turn = [&](const Vector& raw, Vector& out, Vector& r, int v, int h, int heads, Role role) {
      double* y = at(out, v, heads * hd) + h * hd;
      if (s.spec.qk_norm) at(r, v, heads)[h] = Norm(at(raw, v, heads * hd) + h * hd, gain(role), c.rms_eps, hd, y);
      rotation.Apply(y, tree.pos[v], hd, 1);
    };
    for (int v = 0; v < n; ++v) {
      for (int h = 0; h < c.heads; ++h) turn(s.q_raw, s.q, s.rq, v, h, c.heads, Role::kQGain);
      for (int h = 0; h < c.kv_heads; ++h) turn(s.k_raw, s.k, s.rk, v, h, c.kv_heads, Role::kKGain);
    }
    // `product`, normed where outputs are, added to `from`.
    const auto add = [&](const Vector& from, const Vector& product, Role role, int v, Vector& r, Vector& to) {
      Vector y(at(product, v, w), at(product, v, w) + w);
      if (s.spec.output_norms) r[v] = Norm(at(product, v, w), gain(role), c.rms_eps, w, y.data());
      for (int i = 0; i < w; ++i) at(to, v, w)[i] = at(from, v, w)[i] + y[i];
    };
    for (int v = 0; v < n; ++v) {
      const std::vector<int> keys = keys_of(s.spec, v);
      for (int h = 0; h < c.heads; ++h) {
        const Vector p = probabilities(s, v, h, keys, nullptr);
        double* o = at(s.o, v, qd) + h * hd;
        for (size_t j = 0; j < keys.size(); ++j) {
          const double* value = at(s.v, keys[j], kd) + h / group * hd;
          for (int i = 0; i < hd; ++i) o[i] += p[j] * value[i];
        }
      }
      MatVec(t(Role::kO), at(s.o, v, qd), w, qd, at(s.attention, v, w));
      add(s.x, s.attention, Role::kAttentionGain, v, s.r_attention, s.mid);
      s.r2[v] = Norm(at(s.mid, v, w), gain(Role::kMlpGain), c.rms_eps, w, at(s.h2, v, w));
      MatVec(t(Role::kGate), at(s.h2, v, w), f, w, at(s.gate, v, f));
      MatVec(t(Role::kUp), at(s.h2, v, w), f, w, at(s.up, v, f));
      for (int i = 0; i < f; ++i) at(s.act, v, f)[i] = Activate(s.spec.activation, at(s.gate, v, f)[i]).y * at(s.up, v, f)[i];
      MatVec(t(Role::kDown), at(s.act, v, f), w, f, at(s.mlp, v, w));
      add(s.mid, s.mlp, Role::kOutGain, v, s.r_mlp, x);
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
  std::vector<int32_t> all(vocab);
  std::iota(all.begin(), all.end(), 0);
  Vector dx(static_cast<size_t>(n) * w, 0), hidden(w), logits(vocab), slopes(vocab), dlogits(vocab), dhidden(w);
  for (int u = 0; u < n; ++u) {
    if (children[u].empty() && !options.rows) continue;
    const double r = Norm(at(x, u, w), gain_of(norm_tensor), c.rms_eps, w, hidden.data());
    MatVec(params.tensor(head_tensor), hidden.data(), vocab, w, logits.data());
    for (int i = 0; i < vocab; ++i) {
      const Value capped = SoftCap(model.logit_cap, logits[i]);
      logits[i] = capped.y;
      slopes[i] = capped.slope;
    }
    const auto log_sum = [&](double t, const std::vector<int32_t>& ids) {
      double max = -std::numeric_limits<double>::infinity(), sum = 0;
      for (int32_t i : ids) max = std::max(max, logits[i] * t);
      for (int32_t i : ids) sum += std::exp(logits[i] * t - max);
      return max + std::log(sum);
    };
    if (options.rows) {
      const double t = options.row_inv_temperature, lse = log_sum(t, all);
      Vector row(vocab);
      for (int i = 0; i < vocab; ++i) row[i] = logits[i] * t - lse;
      out.rows.push_back(std::move(row));
    }
    std::fill(dlogits.begin(), dlogits.end(), 0);
    bool pulled = false;
    for (int v : children[u]) {
      const double t = options.inv_temperature.empty() ? tree.inv_temperature[v] : options.inv_temperature[v];
      std::vector<int32_t> ids = all;
      if (tree.kept_index(v) >= 0) {
        const Status read = DecodeKept(tree.kept_set(tree.kept_index(v)), vocab, &ids);
        TEMPER_CHECK(read.ok() && std::binary_search(ids.begin(), ids.end(), tree.token[v])) << "kept set of node " << v;
      }
      const double lse = log_sum(t, ids);
      const double coef = options.coef.empty() ? 0 : options.coef[v];
      out.logprobs[v] = logits[tree.token[v]] * t - lse;
      out.objective += coef * out.logprobs[v];
      if (!options.gradient || coef == 0) continue;
      pulled = true;
      for (int32_t i : ids) dlogits[i] -= coef * t * std::exp(logits[i] * t - lse);
      dlogits[tree.token[v]] += coef * t;
    }
    if (!pulled) continue;
    for (int i = 0; i < vocab; ++i) dlogits[i] *= slopes[i];
    std::fill(dhidden.begin(), dhidden.end(), 0);
    MatVecBackward(params.tensor(head_tensor), hidden.data(), dlogits.data(), vocab, w, dhidden.data(), grad(head_tensor));
    NormBackward(at(x, u, w), gain_of(norm_tensor), r, dhidden.data(), w, at(dx, u, w), grad(norm_tensor));
  }
  if (!options.gradient) return out;

  for (int l = c.layers - 1; l >= 0; --l) {
    const Layer& s = layers[l];
    const LayerIndex index(c, l);
    const auto t = [&](Role role) { return params.tensor(index[role]); };
    const auto g = [&](Role role) { return grad(index[role]); };
    const auto norm_backward = [&](const double* from, Role role, double r, const double* dy, int count, double* to) {
      NormBackward(from, gain_of(index[role]), r, dy, count, to, g(role));
    };
    // The gradient of an output before its norm.
    const auto output = [&](const Vector& product, Role role, const Vector& r, int v) {
      Vector dy(at(dx, v, w), at(dx, v, w) + w);
      if (!s.spec.output_norms) return dy;
      Vector before(w, 0);
      norm_backward(at(product, v, w), role, r[v], dy.data(), w, before.data());
      return before;
    };
    Vector dq(static_cast<size_t>(n) * qd, 0), dk(static_cast<size_t>(n) * kd, 0), dv(static_cast<size_t>(n) * kd, 0);
    for (int v = 0; v < n; ++v) {
      Vector dact(f, 0), dgate(f), dup(f), dh2(w, 0), dout(qd, 0);
      const Vector dmlp = output(s.mlp, Role::kOutGain, s.r_mlp, v);
      MatVecBackward(t(Role::kDown), at(s.act, v, f), dmlp.data(), w, f, dact.data(), g(Role::kDown));
      for (int i = 0; i < f; ++i) {
        const Value a = Activate(s.spec.activation, at(s.gate, v, f)[i]);
        dgate[i] = dact[i] * at(s.up, v, f)[i] * a.slope;
        dup[i] = dact[i] * a.y;
      }
      MatVecBackward(t(Role::kGate), at(s.h2, v, w), dgate.data(), f, w, dh2.data(), g(Role::kGate));
      MatVecBackward(t(Role::kUp), at(s.h2, v, w), dup.data(), f, w, dh2.data(), g(Role::kUp));
      norm_backward(at(s.mid, v, w), Role::kMlpGain, s.r2[v], dh2.data(), w, at(dx, v, w));
      const Vector dattention = output(s.attention, Role::kAttentionGain, s.r_attention, v);
      MatVecBackward(t(Role::kO), at(s.o, v, qd), dattention.data(), w, qd, dout.data(), g(Role::kO));
      const std::vector<int> keys = keys_of(s.spec, v);
      for (int h = 0; h < c.heads; ++h) {
        Vector slope;
        const Vector p = probabilities(s, v, h, keys, &slope);
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
          const double ds = p[j] * (dp[j] - delta) * slope[j] * s.spec.score_scale;
          for (int i = 0; i < hd; ++i) {
            at(dq, v, qd)[h * hd + i] += ds * at(s.k, keys[j], kd)[kv + i];
            at(dk, keys[j], kd)[kv + i] += ds * at(s.q, v, qd)[h * hd + i];
          }
        }
      }
    }
    // From the gradient of a head as it was turned to that of its projection, in place.
    const auto turn_back = [&](Vector& d, const Vector& raw, const Vector& r, int v, int h, int heads, Role role) {
      double* row = at(d, v, heads * hd) + h * hd;
      rotations[s.spec.rope].Apply(row, tree.pos[v], hd, -1);
      if (!s.spec.qk_norm) return;
      const Vector dy(row, row + hd);
      std::fill(row, row + hd, 0);
      norm_backward(at(raw, v, heads * hd) + h * hd, role, at(r, v, heads)[h], dy.data(), hd, row);
    };
    const auto project_back = [&](Role matrix, Role bias, int v, int width, const Vector& d, Vector& dh1) {
      MatVecBackward(t(matrix), at(s.h1, v, w), at(d, v, width), width, w, dh1.data(), g(matrix));
      for (int i = 0; s.spec.qkv_bias && i < width; ++i) g(bias)[i] += at(d, v, width)[i];
    };
    for (int v = 0; v < n; ++v) {
      for (int h = 0; h < c.heads; ++h) turn_back(dq, s.q_raw, s.rq, v, h, c.heads, Role::kQGain);
      for (int h = 0; h < c.kv_heads; ++h) turn_back(dk, s.k_raw, s.rk, v, h, c.kv_heads, Role::kKGain);
      Vector dh1(w, 0);
      project_back(Role::kQ, Role::kQBias, v, qd, dq, dh1);
      project_back(Role::kK, Role::kKBias, v, kd, dk, dh1);
      project_back(Role::kV, Role::kVBias, v, kd, dv, dh1);
      norm_backward(at(s.x, v, w), Role::kInputGain, s.r1[v], dh1.data(), w, at(dx, v, w));
    }
  }
  for (int v = 0; v < n; ++v) {
    for (int i = 0; i < w; ++i) grad(0)[static_cast<size_t>(tree.token[v]) * w + i] += at(dx, v, w)[i] * model.embedding_scale;
  }
  return out;
}

}  // namespace temper::engine
