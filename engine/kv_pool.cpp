#include "engine/kv_pool.h"

#include <sys/mman.h>

#include <cstring>

#include "common/check.h"
#include "engine/bf16.h"
#include "engine/buffer.h"

namespace temper::engine {
namespace {

size_t ElementBytes(Profile profile) { return profile == Profile::kBf16 ? 2 : 4; }
// Keys: 64 columns (keys) by head_dim padded to 32 (the reduced axis). Values: head_dim padded to 16 columns by 64 keys.
size_t KeyBytes(const ModelConfig& c, Profile p) { return ElementBytes(p) * kPagePositions * RoundUp(c.head_dim, 32); }
size_t ValueBytes(const ModelConfig& c, Profile p) { return ElementBytes(p) * kPagePositions * RoundUp(c.head_dim, 16); }

}  // namespace

void KvPool::Unmap::operator()(std::byte* p) const { munmap(p, bytes); }

size_t KvPool::PageBytes(const ModelConfig& c, Profile p) {
  return static_cast<size_t>(c.layers) * c.kv_heads * (KeyBytes(c, p) + ValueBytes(c, p));
}

KvPool::KvPool(const ModelConfig& config, Profile profile, int pages)
    : config_(config),
      profile_(profile),
      key_bytes_(KeyBytes(config, profile)),
      value_bytes_(ValueBytes(config, profile)),
      page_bytes_(PageBytes(config, profile)) {
  TEMPER_CHECK(pages > 0) << pages;
  const size_t bytes = page_bytes_ * pages;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TEMPER_CHECK(p != MAP_FAILED) << "no address space for " << bytes << " bytes of KV pages";
  AskForLargePages(static_cast<std::byte*>(p), bytes);
  memory_ = std::unique_ptr<std::byte, Unmap>(static_cast<std::byte*>(p), Unmap{bytes});
  references_.assign(pages, 0);
  for (int i = pages - 1; i >= 0; --i) free_.push_back(i);
}

int KvPool::Allocate() {
  if (free_.empty()) return -1;
  const int page = free_.back();
  free_.pop_back();
  references_[page] = 1;
  // Unused positions must be zero: a masked probability of 0 times garbage could be NaN.
  std::memset(memory_.get() + page * page_bytes_, 0, page_bytes_);
  return page;
}

void KvPool::Retain(int page) {
  TEMPER_CHECK(references_[page] > 0) << "page " << page << " is free";
  ++references_[page];
}

void KvPool::Release(int page) {
  TEMPER_CHECK(references_[page] > 0) << "page " << page << " is free";
  if (--references_[page] == 0) free_.push_back(page);
}

std::vector<float> KvPool::Read(int page, int position) {
  TEMPER_CHECK(references_[page] > 0 && position >= 0 && position < kPagePositions) << page << " " << position;
  const int depth = RoundUp(config_.head_dim, 32);
  const bool pairs = profile_ == Profile::kBf16;
  const auto at = [&](const std::byte* from, int index) {
    return pairs ? FromBf16(reinterpret_cast<const uint16_t*>(from)[index]) : reinterpret_cast<const float*>(from)[index];
  };
  std::vector<float> out;
  for (int l = 0; l < config_.layers; ++l) {
    for (int h = 0; h < config_.kv_heads; ++h) {
      for (int d = 0; d < config_.head_dim; ++d) {
        const int panel = position / 16 * depth * 16, key = position % 16;
        out.push_back(at(keys(page, l, h), pairs ? panel + d / 2 * 32 + key * 2 + d % 2 : panel + d * 16 + key));
      }
      for (int d = 0; d < config_.head_dim; ++d) {
        const int panel = d / 16 * 16 * kPagePositions;
        const int index = pairs ? position / 2 * 32 + d % 16 * 2 + position % 2 : position * 16 + d % 16;
        out.push_back(at(values(page, l, h), panel + index));
      }
    }
  }
  return out;
}

void KvPool::CopyPrefix(int from, int to, int positions) {
  TEMPER_CHECK(positions >= 0 && positions <= kPagePositions) << positions;
  TEMPER_CHECK(references_[from] > 0 && references_[to] == 1);
  const int depth = RoundUp(config_.head_dim, 32), width = RoundUp(config_.head_dim, 16);
  const size_t element = ElementBytes(profile_);
  for (int l = 0; l < config_.layers; ++l) {
    for (int h = 0; h < config_.kv_heads; ++h) {
      // Keys: panels of 16 keys; a cell is a word (a pair of bf16, or a float) and a key is a column of cells.
      const int cells = profile_ == Profile::kBf16 ? depth / 2 : depth;
      const auto* k = reinterpret_cast<const uint32_t*>(keys(from, l, h));
      auto* k_out = reinterpret_cast<uint32_t*>(keys(to, l, h));
      for (int j = 0; j < positions; ++j) {
        const int base = j / 16 * cells * 16 + j % 16;
        for (int d = 0; d < cells; ++d) k_out[base + d * 16] = k[base + d * 16];
      }
      // Values: panels of 16 dimensions; rows of keys (bf16: two keys a row, interleaved).
      const std::byte* v = values(from, l, h);
      std::byte* v_out = values(to, l, h);
      const int whole = profile_ == Profile::kBf16 ? positions / 2 * 2 : positions;
      for (int d0 = 0; d0 < width; d0 += 16) {
        const size_t panel = static_cast<size_t>(d0) * kPagePositions * element;
        std::memcpy(v_out + panel, v + panel, whole * 16 * element);
        if (whole < positions) {
          const auto* last = reinterpret_cast<const uint16_t*>(v + panel) + whole * 16;
          auto* last_out = reinterpret_cast<uint16_t*>(v_out + panel) + whole * 16;
          for (int i = 0; i < 16; ++i) last_out[2 * i] = last[2 * i];
        }
      }
    }
  }
}

}  // namespace temper::engine
