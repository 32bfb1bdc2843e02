#include "engine/weights.h"

#include <emmintrin.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "common/check.h"
#include "engine/bf16.h"
#include "engine/rope.h"

namespace temper::engine {
namespace {

// The parts of the buffer in layout order. A part stacks the matrices, or the vectors, `tensors` (indices into TensorSpecs).
struct Part {
  size_t offset = 0;
  std::vector<int> tensors;
  int rows = 0;   // padded, of the whole stack; 0: vectors
  int depth = 0;  // padded; for vectors the padded length of all
};

struct Layout {
  std::vector<Part> parts;
  size_t bytes = 0;
};

size_t ElementBytes(Profile profile) { return profile == Profile::kBf16 ? 2 : 4; }

Layout MakeLayout(const ModelConfig& c, Profile profile) {
  Layout out;
  auto add = [&](std::vector<int> tensors, std::vector<int> rows, int depth) {
    Part part;
    part.offset = out.bytes;
    part.tensors = std::move(tensors);
    for (int n : rows) part.rows += RoundUp(n, 16);
    part.depth = part.rows ? RoundUp(depth, 32) : depth;
    const size_t elements = static_cast<size_t>(part.rows ? part.rows : 1) * part.depth;
    const size_t bytes = elements * (part.rows ? ElementBytes(profile) : 4);
    out.bytes += (bytes + 63) / 64 * 64;
    out.parts.push_back(std::move(part));
  };
  const auto vector = [&](std::vector<int> tensors, std::vector<int> lengths) {
    if (tensors[0] < 0) return;  // the family has none
    int length = 0;
    for (int n : lengths) length += RoundUp(n, 16);
    add(std::move(tensors), {}, length);
  };
  add({0}, {c.vocab}, c.width);
  for (int l = 0; l < c.layers; ++l) {
    const LayerIndex t(c, l);
    vector({t[Role::kInputGain]}, {c.width});
    add({t[Role::kQ], t[Role::kK], t[Role::kV]}, {c.q_dim(), c.kv_dim(), c.kv_dim()}, c.width);
    vector({t[Role::kQBias], t[Role::kKBias], t[Role::kVBias]}, {c.q_dim(), c.kv_dim(), c.kv_dim()});
    vector({t[Role::kQGain]}, {c.head_dim});
    vector({t[Role::kKGain]}, {c.head_dim});
    add({t[Role::kO]}, {c.width}, c.q_dim());
    vector({t[Role::kAttentionGain]}, {c.width});
    vector({t[Role::kMlpGain]}, {c.width});
    add({t[Role::kGate], t[Role::kUp]}, {c.ffn, c.ffn}, c.width);
    add({t[Role::kDown]}, {c.width}, c.ffn);
    vector({t[Role::kOutGain]}, {c.width});
  }
  vector({FinalGainIndex(c)}, {c.width});
  if (!c.tied) add({HeadIndex(c)}, {c.vocab}, c.width);
  return out;
}

// A panel of 16 rows is, in words of 32 bits, the transpose of the rows: one float a word, or two neighbouring bf16.
void Transpose4(const uint32_t* from, size_t from_stride, uint32_t* to, size_t to_stride) {
  const auto load = [&](int i) { return _mm_loadu_ps(reinterpret_cast<const float*>(from + i * from_stride)); };
  __m128 a = load(0), b = load(1), c = load(2), d = load(3);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  const __m128 rows[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) _mm_storeu_ps(reinterpret_cast<float*>(to + i * to_stride), rows[i]);
}

// `words` is a multiple of 4 in both.
void RowsToPanel(const uint32_t* rows, int words, uint32_t* panel) {
  for (int j = 0; j < words; j += 4) {
    for (int i = 0; i < 16; i += 4) Transpose4(rows + static_cast<size_t>(i) * words + j, words, panel + static_cast<size_t>(j) * 16 + i, 16);
  }
}
void PanelToRows(const uint32_t* panel, int words, uint32_t* rows) {
  for (int j = 0; j < words; j += 4) {
    for (int i = 0; i < 16; i += 4) Transpose4(panel + static_cast<size_t>(j) * 16 + i, 16, rows + static_cast<size_t>(i) * words + j, words);
  }
}

// ToBf16 of k numbers, eight at a time.
void RoundRow(const float* from, int k, uint16_t* to) {
  const auto round = [](__m128 x) {
    const __m128i u = _mm_castps_si128(x);
    const __m128i odd = _mm_and_si128(_mm_srli_epi32(u, 16), _mm_set1_epi32(1));
    const __m128i nearest = _mm_add_epi32(_mm_add_epi32(u, _mm_set1_epi32(0x7fff)), odd);
    const __m128i quiet = _mm_or_si128(u, _mm_set1_epi32(0x400000));
    const __m128i nan = _mm_castps_si128(_mm_cmpunord_ps(x, x));
    // The upper half, with its sign spread, so that packing saturates nothing.
    return _mm_srai_epi32(_mm_or_si128(_mm_and_si128(nan, quiet), _mm_andnot_si128(nan, nearest)), 16);
  };
  int j = 0;
  for (; j + 8 <= k; j += 8) {
    const __m128i packed = _mm_packs_epi32(round(_mm_loadu_ps(from + j)), round(_mm_loadu_ps(from + j + 4)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + j), packed);
  }
  for (; j < k; ++j) to[j] = ToBf16(from[j]);
}

// Rows [16 * group, 16 * group + 16) of an [n, k] matrix, zeros beyond it, into their panel.
void PackGroup(const float* w, int n, int k, int depth, Profile profile, int group, std::byte* matrix,
               std::vector<uint32_t>& scratch) {
  const bool bf16 = profile == Profile::kBf16;
  const int words = bf16 ? depth / 2 : depth;
  scratch.assign(static_cast<size_t>(words) * 16, 0);
  for (int i = 0; i < std::min(16, n - group * 16); ++i) {
    const float* from = w + (static_cast<size_t>(group) * 16 + i) * k;
    uint32_t* to = scratch.data() + static_cast<size_t>(i) * words;
    if (!bf16) {
      std::memcpy(to, from, k * sizeof(float));
      continue;
    }
    RoundRow(from, k, reinterpret_cast<uint16_t*>(to));
  }
  RowsToPanel(scratch.data(), words, reinterpret_cast<uint32_t*>(matrix) + static_cast<size_t>(group) * words * 16);
}

}  // namespace

std::string Digest::Hex() const { return fmt::format("{:016x}{:016x}", high, low); }

size_t ComputeBytes(const ModelConfig& config, Profile profile) { return MakeLayout(config, profile).bytes; }

std::string ComputeLayoutId(Profile profile) { return fmt::format("panel16-v1/{}", ProfileName(profile)); }

void Pack(const Parameters& params, Profile profile, std::span<std::byte> out, Threads* threads) {
  const Layout layout = MakeLayout(params.config(), profile);
  TEMPER_CHECK(out.size() == layout.bytes) << out.size() << " bytes given, " << layout.bytes << " needed";
  TEMPER_CHECK(reinterpret_cast<uintptr_t>(out.data()) % 64 == 0) << "unaligned buffer";
  struct Item {
    int tensor, depth, begin, end;  // groups of 16 rows
    std::byte* matrix;
  };
  const auto gain_offset = static_cast<float>(SpecOf(params.config()).gain_offset);
  constexpr int kGroups = 16;
  std::vector<Item> items;
  for (const Part& part : layout.parts) {
    if (!part.rows) {
      auto* to = reinterpret_cast<float*>(out.data() + part.offset);
      std::memset(to, 0, (part.depth * sizeof(float) + 63) / 64 * 64);
      for (int index : part.tensors) {
        const auto from = params.tensor(index);
        const float offset = params.tensors()[index].gain ? gain_offset : 0;
        for (size_t i = 0; i < from.size(); ++i) to[i] = offset == 0 ? from[i] : from[i] + offset;
        to += RoundUp(static_cast<int>(from.size()), 16);
      }
      continue;
    }
    std::byte* at = out.data() + part.offset;
    for (int index : part.tensors) {
      const int rows = RoundUp(static_cast<int>(params.tensors()[index].shape[0]), 16);
      for (int g = 0; g < rows / 16; g += kGroups) items.push_back({index, part.depth, g, std::min(rows / 16, g + kGroups), at});
      at += static_cast<size_t>(rows) * part.depth * ElementBytes(profile);
    }
  }
  const auto pack = [&](int item, std::vector<uint32_t>& scratch) {
    const Item& it = items[item];
    const TensorSpec& spec = params.tensors()[it.tensor];
    for (int g = it.begin; g < it.end; ++g) {
      PackGroup(params.tensor(it.tensor).data(), static_cast<int>(spec.shape[0]), static_cast<int>(spec.shape[1]), it.depth, profile, g,
                it.matrix, scratch);
    }
  };
  std::vector<std::vector<uint32_t>> scratch(threads ? threads->count() : 1);
  const int count = static_cast<int>(items.size());
  if (threads) {
    threads->Run(count, [&](int item, int thread) { pack(item, scratch[thread]); });
  } else {
    for (int item = 0; item < count; ++item) pack(item, scratch[0]);
  }
}

Result<ComputeWeights> ComputeWeights::View(const ModelConfig& config, Profile profile,
                                            std::span<const std::byte> bytes, std::shared_ptr<const void> owner) {
  RETURN_IF_ERROR(config.Validate());
  const Layout layout = MakeLayout(config, profile);
  if (bytes.size() != layout.bytes) {
    return InvalidArgument(fmt::format("compute weights: {} bytes, the model needs {}", bytes.size(), layout.bytes));
  }
  if (reinterpret_cast<uintptr_t>(bytes.data()) % 64) {
    return InvalidArgument("compute weights: the buffer is not 64-byte aligned");
  }
  ComputeWeights w;
  w.config_ = config;
  w.profile_ = profile;
  w.bytes_ = bytes;
  w.owner_ = std::move(owner);
  w.spec_ = SpecOf(config);
  for (int i = 0; i < w.spec_.ropes; ++i) w.ropes_.push_back(GetRopeTable(config, i));
  size_t next = 0;
  auto panel = [&] {
    const Part& part = layout.parts[next++];
    return Panel{bytes.data() + part.offset, part.rows, part.depth};
  };
  auto vector = [&] { return reinterpret_cast<const float*>(bytes.data() + layout.parts[next++].offset); };
  w.embedding_ = panel();
  for (int l = 0; l < config.layers; ++l) {
    Layer layer;
    layer.spec = LayerOf(config, l);
    layer.rope = w.ropes_[layer.spec.rope].get();
    layer.input_gain = vector();
    layer.qkv = panel();
    layer.qkv_bias = layer.spec.qkv_bias ? vector() : nullptr;
    layer.q_gain = layer.spec.qk_norm ? vector() : nullptr;
    layer.k_gain = layer.spec.qk_norm ? vector() : nullptr;
    layer.o = panel();
    layer.attention_gain = layer.spec.output_norms ? vector() : nullptr;
    layer.mlp_gain = vector();
    layer.gate_up = panel();
    layer.down = panel();
    layer.out_gain = layer.spec.output_norms ? vector() : nullptr;
    w.layers_.push_back(layer);
  }
  w.final_gain_ = vector();
  w.head_ = config.tied ? w.embedding_ : panel();
  return w;
}

ComputeWeights ComputeWeights::FromParameters(const Parameters& params, Profile profile) {
  const size_t bytes = ComputeBytes(params.config(), profile);
  std::shared_ptr<std::byte> memory(AllocateBytes(bytes), [bytes](std::byte* p) { FreeBytes(p, bytes); });
  Pack(params, profile, {memory.get(), bytes});
  auto view = View(params.config(), profile, {memory.get(), bytes}, memory);
  TEMPER_CHECK(view.ok()) << view.status().ToString();
  return *std::move(view);
}

ComputeWeights Repack(const Parameters& params, Profile profile, Threads& threads, Buffer& memory) {
  const std::span<std::byte> out(memory.Get<std::byte>(ComputeBytes(params.config(), profile)), ComputeBytes(params.config(), profile));
  Pack(params, profile, out, &threads);
  auto view = ComputeWeights::View(params.config(), profile, out, nullptr);
  TEMPER_CHECK(view.ok()) << view.status().ToString();
  return *std::move(view);
}

Digest ComputeWeights::ComputeDigest() const {
  TEMPER_CHECK(!empty());
  const Layout layout = MakeLayout(config_, profile_);
  const std::vector<TensorSpec> specs = TensorSpecs(config_);
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  std::vector<uint32_t> rows;  // 16 logical rows at a time, taken out of a panel
  for (const Part& part : layout.parts) {
    const std::byte* at = bytes_.data() + part.offset;
    if (!part.rows) {
      for (int index : part.tensors) {
        XXH3_128bits_update(&state, at, specs[index].size * sizeof(float));
        at += static_cast<size_t>(RoundUp(static_cast<int>(specs[index].size), 16)) * sizeof(float);
      }
      continue;
    }
    for (int index : part.tensors) {
      const auto n = static_cast<int>(specs[index].shape[0]), k = static_cast<int>(specs[index].shape[1]);
      const size_t element = ElementBytes(profile_), row_bytes = k * element;
      const auto words = static_cast<int>(part.depth * element / 4);
      rows.resize(static_cast<size_t>(words) * 16);
      for (int i0 = 0; i0 < n; i0 += 16) {
        PanelToRows(reinterpret_cast<const uint32_t*>(at), words, rows.data());
        at += static_cast<size_t>(words) * 64;
        const auto* row = reinterpret_cast<const std::byte*>(rows.data());
        for (int i = 0; i < std::min(16, n - i0); ++i) XXH3_128bits_update(&state, row + static_cast<size_t>(i) * words * 4, row_bytes);
      }
    }
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return {hash.high64, hash.low64};
}

}  // namespace temper::engine
