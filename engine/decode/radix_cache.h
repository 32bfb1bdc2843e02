// Radix cache of KV pages: which full pages of 64 positions already hold the keys and values of a token prefix at a version.
//
// A node is one full page: its key is (version, the 64 tokens, the parent node). A tail is the partly filled last page of a
// sequence that ended; it is no node, but the start of it may be copied. Pages are reference counted: a running
// sequence holds every page it reads; a page with no holder stays cached until it is evicted, least recently used leaf
// first. Where layers have windows a sequence gives back pages that it no longer sees, so that a page with a holder may hang below
// pages without: when nothing else is left these are taken too, the deepest first, and what hangs below them leaves the cache (its
// holders keep it). What is found is therefore always whole from the first page on. Only page numbers live here, never memory: a PageSource (the KvPool) owns that. Single-threaded; the Decoder owns it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/decode/types.h"

namespace temper::engine {

// Where pages come from: numbers 0 … pages()-1.
class PageSource {
 public:
  virtual ~PageSource() = default;
  virtual int pages() const = 0;
  virtual int32_t AllocatePage() = 0;  // cleared; called only while fewer than pages() are out
  virtual void FreePage(int32_t page) = 0;
};

class RadixCache {
 public:
  static constexpr int kPageTokens = 64;

  // `source` must outlive the cache, which is its only user.
  explicit RadixCache(PageSource* source);
  ~RadixCache();
  RadixCache(const RadixCache&) = delete;
  RadixCache& operator=(const RadixCache&) = delete;

  // The longest cached prefix of `tokens` made of full pages; takes one reference on each. Never covers the last token:
  // at least one token is left to run, since its logits are needed.
  std::vector<int32_t> Match(const Version& version, std::span<const int32_t> tokens);

  // A free page with one reference, evicting if needed. -1 when every page is referenced.
  int32_t Allocate();

  // Enters a filled page as the child of `path` (the pages before it, all entered). When an equal page is already there, the
  // caller's reference moves to that one and `page` becomes free; the returned number is the page to use from now on.
  int32_t Insert(const Version& version, std::span<const int32_t> path, std::span<const int32_t> page_tokens, int32_t page);

  // Whether the page is in the tree: pages can be entered below it.
  bool Cached(int32_t page) const;

  void Retain(int32_t page);
  void Release(int32_t page);

  // Keeps the last page of a sequence that ends, which holds `page_tokens` (1 to 63) after `path`; takes the caller's reference.
  // Tails that it extends are dropped.
  void EnterTail(const Version& version, std::span<const int32_t> path, std::span<const int32_t> page_tokens, int32_t page);

  // A page whose first `positions` positions hold the start of `rest` after `path`; never all of `rest`.
  struct Partial {
    int32_t page = -1;
    int positions = 0;
  };
  // The longest there is among full pages and tails, with a reference that the caller releases after copying; {-1, 0}: none.
  Partial FindPartial(const Version& version, std::span<const int32_t> path, std::span<const int32_t> rest);

  // Forgets every cached page of versions other than `version`: unreferenced ones become free now, referenced ones when released.
  void DropOtherVersions(const Version& version);

  int free_pages() const;       // free now
  int available_pages() const;  // free, or cached and evictable
  int total_pages() const;

  // Aborts when a count does not balance; for tests and debug builds. O(pages).
  void CheckInvariants() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace temper::engine
