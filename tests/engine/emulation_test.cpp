// The profiles restated in plain scalar code, loop by loop as docs/numerics.md defines them, and the engine held to it bit for
// bit: forward and gradient, on a forest with forks.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <set>

#include "engine/bf16.h"
#include "engine/kept_set.h"
#include "engine/rope.h"
#include "engine/train_pass.h"
#include "tests/engine/scalar_math.h"
#include "tests/engine/test_models.h"

namespace temper::engine {
namespace {

using namespace scalar;
using Row = std::vector<float>;
using Rows = std::vector<Row>;

struct Activated {
  float y, slope;
};
Activated Activate(Activation kind, float x) {
  if (kind == Activation::kSilu) {
    const float s = Sigmoid(x);
    return {x * s, s * Fma(x, 1 - s, 1)};
  }
  const float k = 1.5957691216057308f, cube = 0.044715f, square = x * x;
  const float s = Sigmoid(x * k * Fma(square, cube, 1));
  return {x * s, Fma(x * s * (1 - s), k * Fma(square, 3 * cube, 1), s)};
}

class Emulator {
 public:
  Emulator(const Parameters& params, Profile profile, const TreeBatch& tree)
      : params_(params), c_(params.config()), bf16_(profile == Profile::kBf16), tree_(tree), n_(tree.size()) {
    group_ = c_.heads / c_.kv_heads;
    for (int i = 0; i < SpecOf(c_).ropes; ++i) ropes_.push_back(GetRopeTable(c_, i));
    MakePages();
    Forward();
  }

  std::vector<float> logprobs;

  void Backward(const std::vector<float>& coef, Gradients& grads);

 private:
  // A page: which node holds each of its 64 positions.
  struct Page {
    int first_position;
    std::vector<int> node = std::vector<int>(64, -1);
  };
  struct Tile {
    int first, tokens;
    std::vector<int> pages;
  };
  struct Layer {
    LayerSpec spec;
    Rows x, h1, q_raw, k_raw, q, k, v, rq, rk, o, oe, attention, mid, h2, gate, up, act, mlp, max, inverse;
    Row r1, r_attention, r2, r_mlp;
  };

  float R(float x) const { return bf16_ ? FromBf16(ToBf16(x)) : x; }
  Row Rounded(const Row& x) const {
    Row y;
    for (float v : x) y.push_back(R(v));
    return y;
  }
  // c + a · b in the profile's order; both are zero beyond n up to a multiple of 32.
  float Dot(int n, auto a, auto b, float c) const {
    for (int block = 0; block < n; block += 32) {
      const auto at = [&](auto f, int i) { return block + i < n ? static_cast<float>(f(block + i)) : 0.0f; };
      float even = 0, odd = 0;
      if (bf16_) {
        for (int i = 0; i < 16; ++i) {
          even = Fma(at(a, 2 * i), at(b, 2 * i), even);
          odd = Fma(at(a, 2 * i + 1), at(b, 2 * i + 1), odd);
        }
        c = c + (even + odd);
      } else {
        for (int i = 0; i < 32; ++i) even = Fma(at(a, i), at(b, i), even);
        c = c + even;
      }
    }
    return c;
  }
  float W(int tensor, int row, int col) const {
    return R(params_.tensor(tensor)[static_cast<size_t>(row) * params_.tensors()[tensor].shape[1] + col]);
  }
  Row Linear(int tensor, const Row& x, const Row* start = nullptr) const {
    const auto& shape = params_.tensors()[tensor].shape;
    Row y(shape[0]);
    for (int o = 0; o < shape[0]; ++o) {
      y[o] = Dot(static_cast<int>(shape[1]), [&](int i) { return x[i]; }, [&](int i) { return W(tensor, o, i); },
                 start ? (*start)[o] : 0);
    }
    return y;
  }
  Row LinearBackward(int tensor, int outputs, const std::function<float(int)>& dy) const {
    const int inputs = static_cast<int>(params_.tensors()[tensor].shape[1]);
    Row dx(inputs);
    for (int i = 0; i < inputs; ++i) dx[i] = Dot(outputs, dy, [&](int o) { return W(tensor, o, i); }, 0);
    return dx;
  }
  // dW += dYᵀ X over rows in order.
  void WeightBackward(Gradients& grads, int tensor, const Rows& dy, int offset, const Rows& x) const {
    const auto& shape = params_.tensors()[tensor].shape;
    for (int o = 0; o < shape[0]; ++o) {
      for (int i = 0; i < shape[1]; ++i) {
        float& g = grads.tensor(tensor)[static_cast<size_t>(o) * shape[1] + i];
        g = Dot(static_cast<int>(dy.size()), [&](int t) { return dy[t][offset + o]; }, [&](int t) { return x[t][i]; }, g);
      }
    }
  }
  float Gain(int tensor, int i) const {
    const float w = params_.tensor(tensor)[i];
    return SpecOf(c_).gain_offset == 0 ? w : w + static_cast<float>(SpecOf(c_).gain_offset);
  }
  Row Norm(const Row& x, int tensor, float* inverse) const {
    const auto n = static_cast<int>(x.size());
    float lanes[16] = {};
    for (int i = 0; i < n; ++i) lanes[i % 16] = Fma(x[i], x[i], lanes[i % 16]);
    const float mean = Tree(lanes) / static_cast<float>(n);
    *inverse = 1.0f / std::sqrt(mean + static_cast<float>(c_.rms_eps));
    Row y(n);
    for (int i = 0; i < n; ++i) y[i] = x[i] * *inverse * Gain(tensor, i);
    return y;
  }
  void NormBackward(const Row& dy, const Row& x, int tensor, float r, Row& dx) const {
    const auto n = static_cast<int>(x.size());
    float lanes[16] = {};
    for (int i = 0; i < n; ++i) lanes[i % 16] = Fma(dy[i] * Gain(tensor, i), x[i], lanes[i % 16]);
    const float factor = Tree(lanes) * (r * r * r) / static_cast<float>(n);
    for (int i = 0; i < n; ++i) dx[i] = dx[i] + Fma(-x[i], factor, dy[i] * Gain(tensor, i) * r);
  }
  void GainBackward(Gradients& grads, int tensor, const Rows& dy, const Rows& x, const Row& r) const {
    for (size_t i = 0; i < x[0].size(); ++i) {
      float& g = grads.tensor(tensor)[i];
      for (size_t t = 0; t < dy.size(); ++t) g = Fma(dy[t][i], x[t][i] * r[t], g);
    }
  }
  // residual + product, the product normed where outputs are.
  Row Add(const Row& residual, int matrix, const Row& input, int gain, Row* product, float* r) const {
    if (gain < 0) return Linear(matrix, input, &residual);
    *product = Linear(matrix, input);
    Row y = Norm(*product, gain, r);
    for (int i = 0; i < c_.width; ++i) y[i] = y[i] + residual[i];
    return y;
  }
  // The gradients of such products, rounded, from those of the residual.
  Rows AddBackward(Gradients& grads, const Rows& dx, int gain, const Rows& products, const Row& r) const {
    if (gain >= 0) GainBackward(grads, gain, dx, products, r);
    Rows out;
    for (int v = 0; v < n_; ++v) {
      Row before = dx[v];
      if (gain >= 0) {
        before.assign(c_.width, 0);
        NormBackward(dx[v], products[v], gain, r[v], before);
      }
      out.push_back(Rounded(before));
    }
    return out;
  }
  // Heads of a row before they are rotated.
  void NormHeads(Row& x, int gain, Row* raw, Row* r) const {
    if (gain < 0) return;
    *raw = x;
    r->resize(x.size() / c_.head_dim);
    for (size_t h = 0; h < r->size(); ++h) {
      const Row y = Norm(HeadOf(x, h), gain, &(*r)[h]);
      std::copy(y.begin(), y.end(), x.begin() + h * c_.head_dim);
    }
  }
  Row HeadOf(const Row& x, size_t h) const { return {x.begin() + h * c_.head_dim, x.begin() + (h + 1) * c_.head_dim}; }
  // From gradients of heads as they are rotated, in place, to those of heads as they were projected; and of the gain.
  void NormHeadsBackward(Gradients& grads, Rows& d, int gain, const Rows& raw, const Rows& r) const {
    if (gain < 0) return;
    Rows dys, xs;
    Row inverse;
    for (int v = 0; v < n_; ++v) {
      for (size_t h = 0; h < r[v].size(); ++h) {
        dys.push_back(HeadOf(d[v], h));
        xs.push_back(HeadOf(raw[v], h));
        inverse.push_back(r[v][h]);
        Row before(c_.head_dim, 0);
        NormBackward(dys.back(), xs.back(), gain, r[v][h], before);
        std::copy(before.begin(), before.end(), d[v].begin() + h * c_.head_dim);
      }
    }
    GainBackward(grads, gain, dys, xs, inverse);
  }
  // A scaled and capped score, and its slope by the product of query and key.
  Activated Score(const LayerSpec& spec, float product) const {
    const float scale = static_cast<float>(spec.score_scale), cap = static_cast<float>(spec.score_cap);
    if (cap == 0) return {product * scale, scale};
    const float t = Tanh(product * scale / cap);
    return {cap * t, scale * Fma(-t, t, 1)};
  }
  void Rotate(const LayerSpec& spec, float* x, int position, bool back) const {
    const int half = c_.head_dim / 2;
    const RopeTable& rope = *ropes_[spec.rope];
    for (int i = 0; i < half; ++i) {
      const float c = rope.cos(position)[i], s = rope.sin(position)[i] * (back ? -1.0f : 1.0f);
      const float a = x[i], b = x[half + i];
      x[i] = Fma(-b, s, a * c);
      x[half + i] = Fma(a, s, b * c);
    }
  }
  // The numbers of a row at the kept tokens of a node, all of them where nothing was cut; one after the other.
  Row Kept(int node, const Row& x) const {
    const int32_t set = tree_.kept_index(node);
    return set < 0 ? x : KeptLogits(tree_.kept_set(set), x.data()).values;
  }
  float LogSumExp(const Row& x) const {
    float max = -INFINITY, sum = 0;
    for (size_t t = 0; t < x.size(); t += 256) {
      const size_t end = std::min(x.size(), t + 256);
      const float m = std::max(max, *std::max_element(x.begin() + t, x.begin() + end));
      float lanes[16] = {};
      for (size_t i = t; i < end; ++i) lanes[i % 16] = lanes[i % 16] + Exp(x[i] - m);
      sum = Fma(sum, Exp(max - m), Tree(lanes));
      max = m;
    }
    return max + Log(sum);
  }

  void MakePages();
  void Forward();
  int NodeAt(int page, int i) const { return pages_[page].node[i]; }
  // How many of the page's keys a node sees.
  int Seen(int node, int page) const { return std::clamp(tree_.pos[node] - pages_[page].first_position + 1, 0, 64); }
  // How many lie before its window.
  int Passed(const LayerSpec& spec, int node, int page) const {
    return spec.window ? std::clamp(tree_.pos[node] - spec.window + 1 - pages_[page].first_position, 0, 64) : 0;
  }

  const Parameters& params_;
  const ModelConfig& c_;
  bool bf16_;
  const TreeBatch& tree_;
  int n_, group_;
  std::vector<std::shared_ptr<const RopeTable>> ropes_;
  std::vector<Page> pages_;
  std::vector<Tile> tiles_;
  std::vector<Layer> layers_;
  Rows final_;
  // Per node with children: its temperature, logits and log-sum-exp (one temperature in these tests).
  Rows logits_, hi_;
  Row lse_, final_r_;
};

void Emulator::MakePages() {
  std::vector<int> children(n_, 0);
  for (int p : tree_.parent) {
    if (p >= 0) ++children[p];
  }
  std::vector<std::vector<int>> table(n_);
  std::vector<bool> continued;
  const auto add = [&](int position) {
    pages_.push_back({position / 64 * 64});
    continued.push_back(false);
    return static_cast<int>(pages_.size()) - 1;
  };
  for (int begin = 0, end; begin < n_; begin = end) {
    for (end = begin + 1; end < n_ && tree_.parent[end] == end - 1 && children[end - 1] == 1;) ++end;
    const int depth = tree_.pos[begin], parent = tree_.parent[begin];
    std::vector<int> pages;
    if (parent >= 0) pages.assign(table[parent].begin(), table[parent].begin() + depth / 64);
    if (depth % 64) {
      const int last = table[parent][depth / 64];
      if (!continued[last]) {
        pages.push_back(last);
      } else {
        pages.push_back(add(depth));
        for (int v = parent, i = depth % 64 - 1; i >= 0; --i, v = tree_.parent[v]) pages_.back().node[i] = v;
      }
      continued[pages.back()] = true;
    }
    for (int v = begin; v < end; ++v) {
      if (static_cast<int>(pages.size()) <= tree_.pos[v] / 64) pages.push_back(add(tree_.pos[v]));
      pages_[pages[tree_.pos[v] / 64]].node[tree_.pos[v] % 64] = v;
    }
    for (int v = begin; v < end; ++v) table[v] = pages;
    const int size = std::clamp(96 / group_, 8, 32);
    for (int v = begin; v < end; v += size) {
      const int tokens = std::min(size, end - v), last = tree_.pos[v + tokens - 1];
      tiles_.push_back({v, tokens, {pages.begin(), pages.begin() + last / 64 + 1}});
    }
  }
}

void Emulator::Forward() {
  const int hd = c_.head_dim;
  const auto embedding_scale = static_cast<float>(SpecOf(c_).embedding_scale), cap = static_cast<float>(SpecOf(c_).logit_cap);
  Rows x;
  for (int v = 0; v < n_; ++v) {
    x.emplace_back();
    for (int i = 0; i < c_.width; ++i) x.back().push_back(W(0, tree_.token[v], i) * embedding_scale);
  }
  for (int l = 0; l < c_.layers; ++l) {
    Layer s;
    s.spec = LayerOf(c_, l);
    const LayerIndex t(c_, l);
    s.x = x;
    for (Rows* rows : {&s.h1, &s.q_raw, &s.k_raw, &s.q, &s.k, &s.v, &s.rq, &s.rk, &s.o, &s.oe, &s.attention, &s.mid, &s.h2,
                       &s.gate, &s.up, &s.act, &s.mlp, &s.max, &s.inverse}) {
      rows->resize(n_);
    }
    for (Row* row : {&s.r1, &s.r_attention, &s.r2, &s.r_mlp}) row->resize(n_);
    const auto project = [&](Role matrix, Role bias, const Row& h) {
      if (t[bias] < 0) return Linear(t[matrix], h);
      const auto from = params_.tensor(t[bias]);
      const Row start(from.begin(), from.end());
      return Linear(t[matrix], h, &start);
    };
    for (int v = 0; v < n_; ++v) {
      s.h1[v] = Rounded(Norm(x[v], t[Role::kInputGain], &s.r1[v]));
      s.q[v] = project(Role::kQ, Role::kQBias, s.h1[v]);
      s.k[v] = project(Role::kK, Role::kKBias, s.h1[v]);
      NormHeads(s.q[v], t[Role::kQGain], &s.q_raw[v], &s.rq[v]);
      NormHeads(s.k[v], t[Role::kKGain], &s.k_raw[v], &s.rk[v]);
      for (int h = 0; h < c_.heads; ++h) Rotate(s.spec, &s.q[v][h * hd], tree_.pos[v], false);
      for (int h = 0; h < c_.kv_heads; ++h) Rotate(s.spec, &s.k[v][h * hd], tree_.pos[v], false);
      s.q[v] = Rounded(s.q[v]);
      s.k[v] = Rounded(s.k[v]);
      s.v[v] = Rounded(project(Role::kV, Role::kVBias, s.h1[v]));
    }
    for (const Tile& tile : tiles_) {
      for (int v = tile.first; v < tile.first + tile.tokens; ++v) {
        s.o[v].assign(c_.q_dim(), 0);
        s.max[v].assign(c_.heads, -INFINITY);
        s.inverse[v].assign(c_.heads, 0);
        for (int h = 0; h < c_.heads; ++h) {
          const int kv = h / group_ * hd;
          float& max = s.max[v][h];
          float sum = 0;
          float* o = &s.o[v][h * hd];
          for (int page : tile.pages) {
            const int seen = Seen(v, page), passed = Passed(s.spec, v, page);
            if (!seen || passed == 64) continue;
            float score[64], e[64] = {}, lanes[16], page_max = -INFINITY;
            for (int j = passed; j < seen; ++j) {
              const Row& k = s.k[NodeAt(page, j)];
              const float product = Dot(hd, [&](int i) { return s.q[v][h * hd + i]; }, [&](int i) { return k[kv + i]; }, 0);
              score[j] = Score(s.spec, product).y;
              page_max = std::max(page_max, score[j]);
            }
            const float new_max = std::max(max, page_max), alpha = Exp(max - new_max);
            for (int j = passed; j < seen; ++j) e[j] = Exp(score[j] - new_max);
            for (int i = 0; i < 16; ++i) lanes[i] = (e[i] + e[16 + i]) + (e[32 + i] + e[48 + i]);
            sum = Fma(sum, alpha, Tree(lanes));
            max = new_max;
            for (int i = 0; i < hd; ++i) {
              const float pv = Dot(64, [&](int j) { return R(e[j]); },
                                   [&](int j) { return j < seen ? s.v[NodeAt(page, j)][kv + i] : 0; }, 0);
              o[i] = Fma(o[i], alpha, pv + 0.0f);
            }
          }
          s.inverse[v][h] = 1.0f / sum;
          for (int i = 0; i < hd; ++i) o[i] = (o[i] + 0.0f) * s.inverse[v][h];
        }
      }
    }
    for (int v = 0; v < n_; ++v) {
      s.oe[v] = Rounded(s.o[v]);
      s.mid[v] = Add(s.x[v], t[Role::kO], s.oe[v], t[Role::kAttentionGain], &s.attention[v], &s.r_attention[v]);
      s.h2[v] = Rounded(Norm(s.mid[v], t[Role::kMlpGain], &s.r2[v]));
      s.gate[v] = Linear(t[Role::kGate], s.h2[v]);
      s.up[v] = Linear(t[Role::kUp], s.h2[v]);
      for (int i = 0; i < c_.ffn; ++i) s.act[v].push_back(R(Activate(s.spec.activation, s.gate[v][i]).y * s.up[v][i]));
      x[v] = Add(s.mid[v], t[Role::kDown], s.act[v], t[Role::kOutGain], &s.mlp[v], &s.r_mlp[v]);
    }
    layers_.push_back(std::move(s));
  }
  final_ = x;
  const int norm = FinalGainIndex(c_), head = HeadIndex(c_);
  logprobs.assign(n_, NAN);
  logits_.resize(n_);
  hi_.resize(n_);
  lse_.resize(n_);
  final_r_.resize(n_);
  for (int u = 0; u < n_; ++u) {
    const Row y = Norm(x[u], norm, &final_r_[u]);
    hi_[u] = Rounded(y);
    Row lo;
    for (int i = 0; i < c_.width; ++i) lo.push_back(R(y[i] - hi_[u][i]));
    logits_[u] = Linear(head, hi_[u]);
    if (bf16_) logits_[u] = Linear(head, lo, &logits_[u]);
    if (cap != 0) {
      for (float& z : logits_[u]) z = cap * Tanh(z / cap);
    }
  }
  std::vector<bool> done(n_, false);
  for (int v = 0; v < n_; ++v) {
    const int u = tree_.parent[v];
    if (u < 0) continue;
    if (!done[u]) {
      done[u] = true;
      for (float& z : logits_[u]) z *= tree_.inv_temperature[v];
      lse_[u] = LogSumExp(Kept(v, logits_[u]));
    }
    logprobs[v] = logits_[u][tree_.token[v]] - lse_[u];
  }
}

void Emulator::Backward(const std::vector<float>& coef, Gradients& grads) {
  const int norm = FinalGainIndex(c_), head = HeadIndex(c_), hd = c_.head_dim;
  const auto embedding_scale = static_cast<float>(SpecOf(c_).embedding_scale), cap = static_cast<float>(SpecOf(c_).logit_cap);
  Rows dx(n_, Row(c_.width, 0));
  {
    Rows dlogits, dnorms, xs, his;
    Row rs;
    for (int u = 0; u < n_; ++u) {
      float total = 0, t = 1;
      bool any = false;
      int child = 0;
      for (int v = 0; v < n_; ++v) {
        if (tree_.parent[v] != u) continue;
        total += coef[v];
        child = v;
        t = tree_.inv_temperature[v];
        any = any || coef[v] != 0;
      }
      if (!any) continue;
      Row d, all;
      for (float z : logits_[u]) all.push_back(-(total * t) * Exp(z - lse_[u]));
      if (const int32_t set = tree_.kept_index(child); set < 0) {
        d = all;
      } else {
        d.assign(all.size(), 0);
        KeptLogits(tree_.kept_set(set), all.data()).Scatter(d.data());
      }
      for (int v = 0; v < n_; ++v) {
        if (tree_.parent[v] == u) d[tree_.token[v]] += coef[v] * t;
      }
      for (size_t i = 0; cap != 0 && i < d.size(); ++i) {
        const float y = logits_[u][i] * (1.0f / (cap * t));
        d[i] = d[i] * Fma(-y, y, 1);
      }
      d = Rounded(d);
      const Row dnorm = LinearBackward(head, c_.vocab, [&](int o) { return d[o]; });
      NormBackward(dnorm, final_[u], norm, final_r_[u], dx[u]);
      dlogits.push_back(d);
      dnorms.push_back(dnorm);
      xs.push_back(final_[u]);
      rs.push_back(final_r_[u]);
      his.push_back(hi_[u]);
    }
    WeightBackward(grads, head, dlogits, 0, his);
    GainBackward(grads, norm, dnorms, xs, rs);
  }
  for (int l = c_.layers - 1; l >= 0; --l) {
    const Layer& s = layers_[l];
    const LayerIndex index(c_, l);
    const auto t = [&](Role role) { return index[role]; };
    const int f = c_.ffn, f16 = RoundUp(f, 16);
    Rows dgu(n_), dh(n_), d_o(n_), dq(n_, Row(c_.q_dim(), 0));
    Rows dy = AddBackward(grads, dx, t(Role::kOutGain), s.mlp, s.r_mlp);
    for (int v = 0; v < n_; ++v) {
      const Row dact = LinearBackward(t(Role::kDown), c_.width, [&](int o) { return dy[v][o]; });
      dgu[v].assign(2 * f16, 0);
      for (int i = 0; i < f; ++i) {
        const Activated a = Activate(s.spec.activation, s.gate[v][i]);
        dgu[v][i] = R(dact[i] * s.up[v][i] * a.slope);
        dgu[v][f16 + i] = R(dact[i] * a.y);
      }
      // gate and up are stacked along the reduced axis, each padded to 16.
      dh[v].resize(c_.width);
      for (int i = 0; i < c_.width; ++i) {
        dh[v][i] = Dot(2 * f16, [&](int o) { return dgu[v][o]; },
                       [&](int o) {
                         const int row = o % f16;
                         return row < f ? W(t(o < f16 ? Role::kGate : Role::kUp), row, i) : 0.0f;
                       },
                       0);
      }
      NormBackward(dh[v], s.mid[v], t(Role::kMlpGain), s.r2[v], dx[v]);
    }
    WeightBackward(grads, t(Role::kDown), dy, 0, s.act);
    WeightBackward(grads, t(Role::kGate), dgu, 0, s.h2);
    WeightBackward(grads, t(Role::kUp), dgu, f16, s.h2);
    GainBackward(grads, t(Role::kMlpGain), dh, s.mid, s.r2);
    Rows delta(n_, Row(c_.heads));
    dy = AddBackward(grads, dx, t(Role::kAttentionGain), s.attention, s.r_attention);
    for (int v = 0; v < n_; ++v) {
      d_o[v] = Rounded(LinearBackward(t(Role::kO), c_.width, [&](int o) { return dy[v][o]; }));
      for (int h = 0; h < c_.heads; ++h) {
        float lanes[16] = {};
        for (int i = 0; i < hd; ++i) lanes[i % 16] = Fma(d_o[v][h * hd + i], s.o[v][h * hd + i], lanes[i % 16]);
        delta[v][h] = Tree(lanes);
      }
    }
    WeightBackward(grads, t(Role::kO), dy, 0, s.oe);
    const int q16 = RoundUp(c_.q_dim(), 16), kv16 = RoundUp(c_.kv_dim(), 16);
    Rows dqkv(n_, Row(q16 + 2 * kv16, 0)), dk_rows(n_, Row(c_.kv_dim(), 0));
    for (int kvh = 0; kvh < c_.kv_heads; ++kvh) {
      // Per page position: dK and dV, to be summed over a node's copies.
      std::vector<Rows> dk(pages_.size(), Rows(64, Row(hd, 0))), dv(dk);
      for (size_t page = 0; page < pages_.size(); ++page) {
        for (const Tile& tile : tiles_) {
          if (std::find(tile.pages.begin(), tile.pages.end(), static_cast<int>(page)) == tile.pages.end()) continue;
          const int rows = tile.tokens * group_;
          const auto node = [&](int r) { return tile.first + r / group_; };
          if (Passed(s.spec, tile.first, static_cast<int>(page)) == 64) continue;
          const auto at = [&](int r) { return (kvh * group_ + r % group_) * hd; };
          Rows p(rows, Row(64, 0)), ds(rows, Row(64, 0));
          for (int r = 0; r < rows; ++r) {
            const int v = node(r), h = kvh * group_ + r % group_, seen = Seen(v, static_cast<int>(page));
            for (int j = Passed(s.spec, v, static_cast<int>(page)); j < seen; ++j) {
              const int key = NodeAt(static_cast<int>(page), j);
              const auto query = [&](int i) { return s.q[v][at(r) + i]; };
              const Activated score = Score(s.spec, Dot(hd, query, [&](int i) { return s.k[key][kvh * hd + i]; }, 0));
              const float dp = Dot(hd, [&](int i) { return d_o[v][at(r) + i]; }, [&](int i) { return s.v[key][kvh * hd + i]; }, 0);
              const float y = Exp(score.y - s.max[v][h]) * s.inverse[v][h];
              p[r][j] = R(y);
              ds[r][j] = R(y * (dp - delta[v][h]) * score.slope);
            }
          }
          const int seen = Seen(node(rows - 1), static_cast<int>(page));
          for (int i = 0; i < hd; ++i) {
            for (int j = 0; j < seen; ++j) {
              dk[page][j][i] = Dot(rows, [&](int r) { return ds[r][j]; }, [&](int r) { return s.q[node(r)][at(r) + i]; }, dk[page][j][i]);
              dv[page][j][i] = Dot(rows, [&](int r) { return p[r][j]; }, [&](int r) { return d_o[node(r)][at(r) + i]; }, dv[page][j][i]);
            }
            for (int r = 0; r < rows; ++r) {
              float& q = dq[node(r)][at(r) + i];
              q = Dot(64, [&](int j) { return ds[r][j]; },
                      [&](int j) { return j < seen ? s.k[NodeAt(static_cast<int>(page), j)][kvh * hd + i] : 0; }, q);
            }
          }
        }
      }
      for (int v = 0; v < n_; ++v) {
        Row k, value;
        for (size_t page = 0; page < pages_.size(); ++page) {
          for (int j = 0; j < 64; ++j) {
            if (NodeAt(static_cast<int>(page), j) != v) continue;
            if (k.empty()) {
              k = dk[page][j];
              value = dv[page][j];
            } else {
              for (int i = 0; i < hd; ++i) {
                k[i] += dk[page][j][i];
                value[i] += dv[page][j][i];
              }
            }
          }
        }
        Rotate(s.spec, k.data(), tree_.pos[v], true);
        for (int i = 0; i < hd; ++i) {
          dk_rows[v][kvh * hd + i] = k[i];
          dqkv[v][q16 + kv16 + kvh * hd + i] = R(value[i]);
        }
      }
    }
    for (int v = 0; v < n_; ++v) {
      for (int h = 0; h < c_.heads; ++h) Rotate(s.spec, &dq[v][h * hd], tree_.pos[v], true);
    }
    NormHeadsBackward(grads, dq, t(Role::kQGain), s.q_raw, s.rq);
    NormHeadsBackward(grads, dk_rows, t(Role::kKGain), s.k_raw, s.rk);
    for (int v = 0; v < n_; ++v) {
      for (int i = 0; i < c_.q_dim(); ++i) dqkv[v][i] = R(dq[v][i]);
      for (int i = 0; i < c_.kv_dim(); ++i) dqkv[v][q16 + i] = R(dk_rows[v][i]);
      for (int i = 0; i < c_.width; ++i) {
        dh[v][i] = Dot(q16 + 2 * kv16, [&](int o) { return dqkv[v][o]; },
                       [&](int o) {
                         if (o < q16) return o < c_.q_dim() ? W(t(Role::kQ), o, i) : 0.0f;
                         const int row = (o - q16) % kv16;
                         return row < c_.kv_dim() ? W(t(o < q16 + kv16 ? Role::kK : Role::kV), row, i) : 0.0f;
                       },
                       0);
      }
      NormBackward(dh[v], s.x[v], t(Role::kInputGain), s.r1[v], dx[v]);
    }
    WeightBackward(grads, t(Role::kQ), dqkv, 0, s.h1);
    WeightBackward(grads, t(Role::kK), dqkv, q16, s.h1);
    WeightBackward(grads, t(Role::kV), dqkv, q16 + kv16, s.h1);
    GainBackward(grads, t(Role::kInputGain), dh, s.x, s.r1);
    const std::pair<Role, int> biases[] = {{Role::kQBias, 0}, {Role::kKBias, q16}, {Role::kVBias, q16 + kv16}};
    for (const auto& [role, offset] : biases) {
      if (t(role) < 0) continue;
      for (const Row& d : dqkv) {
        for (size_t i = 0; i < grads.tensor(t(role)).size(); ++i) grads.tensor(t(role))[i] += d[offset + i];
      }
    }
  }
  for (int v = 0; v < n_; ++v) {
    float* row = &grads.tensor(0)[static_cast<size_t>(tree_.token[v]) * c_.width];
    for (int i = 0; i < c_.width; ++i) row[i] += dx[v][i] * embedding_scale;
  }
}

// Could go wrong: the kernels compute a consistent number that is not the defined one.
TEST(Emulation, ForwardAndGradientAreTheDefinition) {
  std::vector<NamedConfig> models = AllConfigs();
  for (NamedConfig& model : models) model.config.head_dim = 6;
  // Attention has kernels of their own for wider heads (cpu::QueryStride).
  for (const auto& [name, head_dim] : {std::pair("heads of 72", 72), {"heads of 140", 140}, {"heads of 300", 300}}) {
    models.push_back({name, OddConfig()});
    models.back().config.head_dim = head_dim;
  }
  for (auto& [name, c] : models) {
    SCOPED_TRACE(name);
    c.vocab = 37;
    c.width = 20;
    c.heads = 4;
    c.kv_heads = 2;
    c.ffn = 28;
    c.max_positions = 200;
    const Parameters params = TestParameters(c, 13);
    std::mt19937_64 rng(31);
    TreeBuilder builder;
    const float t = 0.75f;
    const auto trunk = RandomIds(rng, 97, c.vocab);
    std::vector<std::vector<int32_t>> rows;
    for (int keep : {97, 70, 70, 20, 64}) {
      std::vector<int32_t> row(trunk.begin(), trunk.begin() + keep);
      for (int32_t id : RandomIds(rng, 5, c.vocab)) row.push_back(id);
      rows.push_back(row);
    }
    rows.push_back(RandomIds(rng, 9, c.vocab));
    // One set a depth, which holds what any row has there: the children of a node are drawn from one distribution.
    std::vector<std::string> kept(trunk.size() + 5);
    for (size_t i = 0; i < kept.size(); ++i) {
      if (i % 3 == 0) continue;
      std::set<int32_t> ids;
      for (int32_t id : RandomIds(rng, i % 3 == 1 ? 4 : 40, c.vocab)) ids.insert(id);
      for (const auto& row : rows) {
        if (i < row.size()) ids.insert(row[i]);
      }
      kept[i] = EncodeKept(std::vector<int32_t>(ids.begin(), ids.end()), c.vocab);
    }
    for (const auto& row : rows) builder.AddRow(row, std::span(&t, 1), std::span(kept).first(row.size()));
    const TreeBatch tree = builder.Build(nullptr);
    std::vector<float> coef(tree.size());
    for (float& x : coef) x = rng() % 3 ? static_cast<float>(rng() % 2001) / 1000 - 1 : 0;
    for (Profile profile : {Profile::kBf16, Profile::kF32}) {
      FlushDenormals mode;
      Emulator emulator(params, profile, tree);
      Gradients want(c), got(c);
      emulator.Backward(coef, want);
      for (CpuPath path : AvailableCpuPaths()) {
        auto engine = MakeEngine(path, 2);
        TrainPass pass(*engine);
        const ComputeWeights weights = ComputeWeights::FromParameters(params, profile);
        const auto logprobs = pass.Forward(weights, tree);
        ASSERT_TRUE(logprobs.ok());
        for (int v = 0; v < tree.size(); ++v) {
          if (tree.parent[v] >= 0) {
            ASSERT_EQ(emulator.logprobs[v], (*logprobs)[v]) << "node " << v << " " << ProfileName(profile);
          }
        }
        got.SetZero();
        pass.Backward(coef, got);
        for (size_t i = 0; i < want.tensors().size(); ++i) {
          EXPECT_EQ(std::memcmp(want.tensor(i).data(), got.tensor(i).data(), want.tensor(i).size_bytes()), 0)
              << want.tensors()[i].name << " " << ProfileName(profile) << " " << CpuPathName(path);
        }
      }
    }
  }
}

}  // namespace
}  // namespace temper::engine
