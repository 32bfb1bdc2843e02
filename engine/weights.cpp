#include "engine/weights.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "common/check.h"
#include "engine/bf16.h"
#include "engine/rope.h"

namespace temper::engine {
namespace {

// The parts of the buffer in layout order. A panel part stacks the matrices `tensors` (indices into TensorSpecs).
struct Part {
  size_t offset = 0;
  std::vector<int> tensors;
  int rows = 0;   // padded, of the whole stack; 0: a vector
  int depth = 0;  // padded; for a vector the padded length
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
    part.depth = RoundUp(depth, part.rows ? 32 : 16);
    const size_t elements = static_cast<size_t>(part.rows ? part.rows : 1) * part.depth;
    const size_t bytes = elements * (part.rows ? ElementBytes(profile) : 4);
    out.bytes += (bytes + 63) / 64 * 64;
    out.parts.push_back(std::move(part));
  };
  int t = 0;
  add({t++}, {c.vocab}, c.width);
  for (int l = 0; l < c.layers; ++l) {
    add({t}, {}, c.width);
    add({t + 1, t + 2, t + 3}, {c.q_dim(), c.kv_dim(), c.kv_dim()}, c.width);
    add({t + 4}, {c.width}, c.q_dim());
    add({t + 5}, {}, c.width);
    add({t + 6, t + 7}, {c.ffn, c.ffn}, c.width);
    add({t + 8}, {c.width}, c.ffn);
    t += 9;
  }
  add({t++}, {}, c.width);
  if (!c.tied) add({t++}, {c.vocab}, c.width);
  return out;
}

void PackBf16(const float* w, int n, int k, int depth, uint16_t* panel) {
  for (int i = 0; i < RoundUp(n, 16); ++i) {
    uint16_t* column = panel + static_cast<size_t>(i / 16) * depth * 16 + i % 16 * 2;
    for (int j = 0; j < depth; ++j) {
      column[j / 2 * 32 + j % 2] = i < n && j < k ? ToBf16(w[static_cast<size_t>(i) * k + j]) : 0;
    }
  }
}

void PackF32(const float* w, int n, int k, int depth, float* panel) {
  for (int i = 0; i < RoundUp(n, 16); ++i) {
    float* column = panel + static_cast<size_t>(i / 16) * depth * 16 + i % 16;
    for (int j = 0; j < depth; ++j) column[j * 16] = i < n && j < k ? w[static_cast<size_t>(i) * k + j] : 0;
  }
}

struct FreeAligned {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(64)); }
};

}  // namespace

std::string Digest::Hex() const { return fmt::format("{:016x}{:016x}", high, low); }

size_t ComputeBytes(const ModelConfig& config, Profile profile) { return MakeLayout(config, profile).bytes; }

std::string ComputeLayoutId(Profile profile) { return fmt::format("panel16-v1/{}", ProfileName(profile)); }

void Pack(const Parameters& params, Profile profile, std::span<std::byte> out) {
  const Layout layout = MakeLayout(params.config(), profile);
  TEMPER_CHECK(out.size() == layout.bytes) << out.size() << " bytes given, " << layout.bytes << " needed";
  TEMPER_CHECK(reinterpret_cast<uintptr_t>(out.data()) % 64 == 0) << "unaligned buffer";
  for (const Part& part : layout.parts) {
    if (!part.rows) {
      const auto from = params.tensor(part.tensors[0]);
      auto* to = reinterpret_cast<float*>(out.data() + part.offset);
      std::memcpy(to, from.data(), from.size_bytes());
      const size_t padded = (part.depth * sizeof(float) + 63) / 64 * 64;
      std::memset(to + from.size(), 0, padded - from.size_bytes());
      continue;
    }
    std::byte* at = out.data() + part.offset;
    for (int index : part.tensors) {
      const TensorSpec& spec = params.tensors()[index];
      const auto n = static_cast<int>(spec.shape[0]), k = static_cast<int>(spec.shape[1]);
      const float* w = params.tensor(index).data();
      if (profile == Profile::kBf16) {
        PackBf16(w, n, k, part.depth, reinterpret_cast<uint16_t*>(at));
      } else {
        PackF32(w, n, k, part.depth, reinterpret_cast<float*>(at));
      }
      at += static_cast<size_t>(RoundUp(n, 16)) * part.depth * ElementBytes(profile);
    }
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
  w.rope_ = GetRopeTable(config);
  size_t next = 0;
  auto panel = [&] {
    const Part& part = layout.parts[next++];
    return Panel{bytes.data() + part.offset, part.rows, part.depth};
  };
  auto vector = [&] { return reinterpret_cast<const float*>(bytes.data() + layout.parts[next++].offset); };
  w.embedding_ = panel();
  for (int l = 0; l < config.layers; ++l) {
    Layer layer;
    layer.input_norm = vector();
    layer.qkv = panel();
    layer.o = panel();
    layer.post_norm = vector();
    layer.gate_up = panel();
    layer.down = panel();
    w.layers_.push_back(layer);
  }
  w.final_norm_ = vector();
  w.head_ = config.tied ? w.embedding_ : panel();
  return w;
}

ComputeWeights ComputeWeights::FromParameters(const Parameters& params, Profile profile) {
  const size_t bytes = ComputeBytes(params.config(), profile);
  std::shared_ptr<std::byte> memory(new (std::align_val_t(64)) std::byte[bytes], FreeAligned());
  Pack(params, profile, {memory.get(), bytes});
  auto view = View(params.config(), profile, {memory.get(), bytes}, memory);
  TEMPER_CHECK(view.ok()) << view.status().ToString();
  return *std::move(view);
}

Digest ComputeWeights::ComputeDigest() const {
  TEMPER_CHECK(!empty());
  const Layout layout = MakeLayout(config_, profile_);
  const std::vector<TensorSpec> specs = TensorSpecs(config_);
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  std::vector<std::byte> rows;  // 16 logical rows at a time, taken out of a panel
  for (const Part& part : layout.parts) {
    const std::byte* at = bytes_.data() + part.offset;
    if (!part.rows) {
      XXH3_128bits_update(&state, at, specs[part.tensors[0]].size * sizeof(float));
      continue;
    }
    for (int index : part.tensors) {
      const auto n = static_cast<int>(specs[index].shape[0]), k = static_cast<int>(specs[index].shape[1]);
      const size_t element = ElementBytes(profile_), row_bytes = k * element;
      rows.resize(16 * row_bytes);
      for (int i0 = 0; i0 < n; i0 += 16) {
        if (profile_ == Profile::kBf16) {
          const auto* panel = reinterpret_cast<const uint16_t*>(at);
          auto* out = reinterpret_cast<uint16_t*>(rows.data());
          for (int j = 0; j < k; ++j) {
            for (int i = 0; i < 16; ++i) out[i * k + j] = panel[j / 2 * 32 + i * 2 + j % 2];
          }
        } else {
          const auto* panel = reinterpret_cast<const float*>(at);
          auto* out = reinterpret_cast<float*>(rows.data());
          for (int j = 0; j < k; ++j) {
            for (int i = 0; i < 16; ++i) out[i * k + j] = panel[j * 16 + i];
          }
        }
        XXH3_128bits_update(&state, rows.data(), std::min(16, n - i0) * row_bytes);
        at += static_cast<size_t>(part.depth) * 16 * element;
      }
    }
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return {hash.high64, hash.low64};
}

}  // namespace temper::engine
