// Pages of keys and values. A page holds 64 consecutive positions (64*i … 64*i+63) of one path, for every layer and KV head,
// in the packed form the kernels read. Pages are reference counted; a page with more than one reference is read-only, so a
// fork copies the page that holds it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/config.h"

namespace temper::engine {

constexpr int kPagePositions = 64;

// Not thread-safe: one owner.
class KvPool {
 public:
  // Reserves `pages` pages; memory is touched when a page is first allocated.
  KvPool(const ModelConfig& config, Profile profile, int pages);

  static size_t PageBytes(const ModelConfig& config, Profile profile);

  const ModelConfig& config() const { return config_; }
  Profile profile() const { return profile_; }
  int capacity() const { return static_cast<int>(references_.size()); }
  int free_pages() const { return static_cast<int>(free_.size()); }

  // A zeroed page with one reference, or -1 when all are taken.
  int Allocate();
  void Retain(int page);
  // Frees the page with its last reference.
  void Release(int page);
  int references(int page) const { return references_[page]; }
  // Copies the first `positions` positions of `from` into the freshly allocated `to`.
  void CopyPrefix(int from, int to, int positions);
  // Keys and values of one position as fp32, exactly: [layers][kv_heads][key, value][head_dim].
  std::vector<float> Read(int page, int position);

  // The packed keys / values of one layer and KV head (engine-internal form: engine/cpu/ops.h).
  std::byte* keys(int page, int layer, int kv_head) { return Slot(page, layer, kv_head); }
  std::byte* values(int page, int layer, int kv_head) { return Slot(page, layer, kv_head) + key_bytes_; }

 private:
  struct Unmap {
    size_t bytes;
    void operator()(std::byte* p) const;
  };
  std::byte* Slot(int page, int layer, int kv_head) {
    return memory_.get() + page * page_bytes_ +
           (static_cast<size_t>(layer) * config_.kv_heads + kv_head) * (key_bytes_ + value_bytes_);
  }

  ModelConfig config_;
  Profile profile_;
  size_t key_bytes_, value_bytes_, page_bytes_;
  std::unique_ptr<std::byte, Unmap> memory_;
  std::vector<int32_t> references_;
  std::vector<int32_t> free_;
};

}  // namespace temper::engine
