#include "engine/decode/radix_cache.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "common/check.h"

namespace temper::engine {
namespace {

constexpr int32_t kRoot = -1;
constexpr size_t kPartialsMax = 128;  // pages looked at for a partial match, the newest first

struct NodeKey {
  int32_t parent = kRoot;
  Version version;
  std::array<int32_t, RadixCache::kPageTokens> tokens{};
  bool operator==(const NodeKey&) const = default;
};

struct NodeHash {
  size_t operator()(const NodeKey& key) const {
    uint64_t h = static_cast<uint64_t>(key.parent) * 0x9e3779b97f4a7c15ull ^ key.version.epoch;
    h = (h ^ static_cast<uint64_t>(key.version.step)) * 0xbf58476d1ce4e5b9ull;
    for (int32_t token : key.tokens) {
      h = (h ^ static_cast<uint32_t>(token)) * 0x94d049bb133111ebull;
      h ^= h >> 29;
    }
    return static_cast<size_t>(h);
  }
};

struct Page {
  int refs = 0;
  bool cached = false;
  std::vector<int32_t> below;  // cached pages whose parent this is
  uint64_t last_used = 0;
  NodeKey key;      // valid when cached
  int filled = 0;   // tokens of the key; below kPageTokens in a tail
};

}  // namespace

struct RadixCache::State {
  std::vector<Page> pages;
  PageSource* source = nullptr;
  int out = 0;  // pages held or cached, taken from the source
  std::unordered_map<NodeKey, int32_t, NodeHash> nodes;
  // Cached pages without holder and without cached children, oldest first: what may be evicted next.
  std::set<std::pair<uint64_t, int32_t>> leaves;
  std::map<Version, std::vector<int32_t>> roots;  // cached pages that start a sequence
  int idle_cached = 0;  // cached pages without holder
  uint64_t clock = 0;

  void FreeNow(int32_t id) {
    source->FreePage(id);
    --out;
  }

  bool IsIdleLeaf(const Page& p) const { return p.cached && p.refs == 0 && p.below.empty(); }

  void AddRef(int32_t id) {
    Page& p = pages[id];
    if (IsIdleLeaf(p)) leaves.erase({p.last_used, id});
    if (p.cached && p.refs == 0) --idle_cached;
    ++p.refs;
  }

  void DropRef(int32_t id) {
    Page& p = pages[id];
    TEMPER_CHECK(p.refs > 0) << "page " << id;
    if (--p.refs > 0) return;
    if (!p.cached) {
      FreeNow(id);
      return;
    }
    ++idle_cached;
    p.last_used = ++clock;
    if (IsIdleLeaf(p)) leaves.insert({p.last_used, id});
  }

  std::vector<int32_t>& Siblings(const NodeKey& key) { return key.parent == kRoot ? roots[key.version] : pages[key.parent].below; }

  // Puts a page that one sequence holds into the tree.
  void Attach(int32_t id, const NodeKey& key, int filled) {
    Page& p = pages[id];
    p.key = key;
    p.filled = filled;
    p.cached = true;
    p.below.clear();
    Siblings(key).push_back(id);
  }

  // Takes a cached page out of the tree; it is freed when nobody holds it.
  void Forget(int32_t id) {
    Page& p = pages[id];
    TEMPER_CHECK(p.cached);
    if (IsIdleLeaf(p)) leaves.erase({p.last_used, id});
    if (p.filled == kPageTokens) nodes.erase(p.key);
    p.cached = false;
    std::erase(Siblings(p.key), id);
    if (p.key.parent == kRoot) {
      if (roots[p.key.version].empty()) roots.erase(p.key.version);
    } else if (IsIdleLeaf(pages[p.key.parent])) {
      leaves.insert({pages[p.key.parent].last_used, p.key.parent});
    }
    if (p.refs == 0) {
      --idle_cached;
      FreeNow(id);
    }
  }

  // Takes a page and all below it out of the tree.
  void ForgetFrom(int32_t id) {
    const std::vector<int32_t> below = pages[id].below;
    for (int32_t child : below) ForgetFrom(child);
    Forget(id);
  }

  // A page without a holder, whose pages below all have one: the least recently used. -1: there is none.
  int32_t IdleAboveHeld() const {
    int32_t best = -1;
    for (size_t id = 0; id < pages.size(); ++id) {
      const Page& p = pages[id];
      if (!p.cached || p.refs > 0 || p.below.empty()) continue;
      const bool deepest = std::none_of(p.below.begin(), p.below.end(), [&](int32_t child) { return pages[child].refs == 0; });
      if (deepest && (best < 0 || p.last_used < pages[best].last_used)) best = static_cast<int32_t>(id);
    }
    return best;
  }

  NodeKey MakeKey(const Version& version, std::span<const int32_t> path, std::span<const int32_t> page_tokens) const {
    NodeKey key;
    key.version = version;
    key.parent = path.empty() ? kRoot : path.back();
    TEMPER_CHECK(path.empty() || (pages[key.parent].cached && pages[key.parent].key.version == version))
        << "parent page " << key.parent << " is not in the tree";
    std::copy(page_tokens.begin(), page_tokens.end(), key.tokens.begin());
    return key;
  }
};

RadixCache::RadixCache(PageSource* source) : state_(std::make_unique<State>()) {
  TEMPER_CHECK(source->pages() > 0);
  state_->source = source;
  state_->pages.resize(source->pages());
}

RadixCache::~RadixCache() = default;

std::vector<int32_t> RadixCache::Match(const Version& version, std::span<const int32_t> tokens) {
  State& s = *state_;
  std::vector<int32_t> path;
  NodeKey key;
  key.version = version;
  for (size_t at = 0; at + kPageTokens < tokens.size(); at += kPageTokens) {
    key.parent = path.empty() ? kRoot : path.back();
    std::copy_n(tokens.begin() + at, kPageTokens, key.tokens.begin());
    auto it = s.nodes.find(key);
    if (it == s.nodes.end()) break;
    s.AddRef(it->second);
    path.push_back(it->second);
  }
  return path;
}

int32_t RadixCache::Allocate() {
  State& s = *state_;
  if (s.out == total_pages()) {
    if (!s.leaves.empty()) {
      s.Forget(s.leaves.begin()->second);
    } else if (const int32_t idle = s.IdleAboveHeld(); idle >= 0) {
      s.ForgetFrom(idle);
    } else {
      return -1;
    }
  }
  int32_t id = s.source->AllocatePage();
  ++s.out;
  TEMPER_CHECK(s.pages[id].refs == 0 && !s.pages[id].cached) << "page " << id << " was given out twice";
  s.pages[id].refs = 1;
  return id;
}

int32_t RadixCache::Insert(const Version& version, std::span<const int32_t> path, std::span<const int32_t> page_tokens, int32_t page) {
  State& s = *state_;
  TEMPER_CHECK(page_tokens.size() == kPageTokens);
  TEMPER_CHECK(!s.pages[page].cached && s.pages[page].refs == 1) << "page " << page << " is shared already";
  NodeKey key = s.MakeKey(version, path, page_tokens);
  auto [it, added] = s.nodes.try_emplace(key, page);
  if (!added) {
    s.AddRef(it->second);
    s.DropRef(page);
    return it->second;
  }
  s.Attach(page, key, kPageTokens);
  return page;
}

void RadixCache::EnterTail(const Version& version, std::span<const int32_t> path, std::span<const int32_t> page_tokens, int32_t page) {
  State& s = *state_;
  const int filled = static_cast<int>(page_tokens.size());
  TEMPER_CHECK(filled > 0 && filled < kPageTokens && !s.pages[page].cached && s.pages[page].refs == 1) << "page " << page;
  NodeKey key = s.MakeKey(version, path, page_tokens);
  std::vector<int32_t> extended;
  for (int32_t id : s.Siblings(key)) {
    const Page& other = s.pages[id];
    const int both = std::min(filled, other.filled);
    if (!std::equal(key.tokens.begin(), key.tokens.begin() + both, other.key.tokens.begin())) continue;
    if (other.filled >= filled) {
      s.DropRef(page);
      return;
    }
    if (other.refs == 0) extended.push_back(id);
  }
  for (int32_t id : extended) s.Forget(id);
  s.Attach(page, key, filled);
  s.DropRef(page);
}

RadixCache::Partial RadixCache::FindPartial(const Version& version, std::span<const int32_t> path, std::span<const int32_t> rest) {
  State& s = *state_;
  const std::vector<int32_t>* siblings = nullptr;
  if (path.empty()) {
    auto it = s.roots.find(version);
    if (it != s.roots.end()) siblings = &it->second;
  } else {
    siblings = &s.pages[path.back()].below;
  }
  Partial best;
  if (!siblings || rest.empty()) return best;
  size_t looked = 0;
  for (size_t i = siblings->size(); i-- > 0 && looked < kPartialsMax; ++looked) {
    const Page& p = s.pages[(*siblings)[i]];
    const int most = std::min<int>(p.filled, static_cast<int>(rest.size()) - 1);
    int n = 0;
    while (n < most && p.key.tokens[n] == rest[n]) ++n;
    if (n > best.positions) best = {(*siblings)[i], n};
  }
  if (best.page >= 0) s.AddRef(best.page);
  return best;
}

bool RadixCache::Cached(int32_t page) const { return state_->pages[page].cached; }
void RadixCache::Retain(int32_t page) { state_->AddRef(page); }
void RadixCache::Release(int32_t page) { state_->DropRef(page); }

void RadixCache::DropOtherVersions(const Version& version) {
  State& s = *state_;
  for (size_t id = 0; id < s.pages.size(); ++id) {
    if (s.pages[id].cached && s.pages[id].key.version != version) s.Forget(static_cast<int32_t>(id));
  }
}

int RadixCache::free_pages() const { return total_pages() - state_->out; }
int RadixCache::available_pages() const { return free_pages() + state_->idle_cached; }
int RadixCache::total_pages() const { return static_cast<int>(state_->pages.size()); }

void RadixCache::CheckInvariants() const {
  const State& s = *state_;
  std::vector<int> children(s.pages.size(), 0);
  size_t full = 0;
  int out = 0;
  int idle = 0;
  size_t leaves = 0;
  for (size_t id = 0; id < s.pages.size(); ++id) {
    const Page& p = s.pages[id];
    if (p.refs > 0 || p.cached) ++out;
    if (!p.cached) continue;
    if (p.filled == kPageTokens) {
      ++full;
      auto it = s.nodes.find(p.key);
      TEMPER_CHECK(it != s.nodes.end() && it->second == static_cast<int32_t>(id));
    } else {
      TEMPER_CHECK(p.below.empty()) << "tail " << id << " has pages below it";
    }
    if (p.refs == 0) ++idle;
    if (s.IsIdleLeaf(p)) {
      ++leaves;
      TEMPER_CHECK(s.leaves.count({p.last_used, static_cast<int32_t>(id)})) << "leaf " << id << " cannot be evicted";
    }
    if (p.key.parent != kRoot) {
      const Page& parent = s.pages[p.key.parent];
      TEMPER_CHECK(parent.cached && parent.key.version == p.key.version);
      ++children[p.key.parent];
    }
  }
  for (size_t id = 0; id < s.pages.size(); ++id) {
    if (s.pages[id].cached) TEMPER_CHECK(children[id] == static_cast<int>(s.pages[id].below.size()));
  }
  TEMPER_CHECK(out == s.out) << out << " pages in use, " << s.out << " taken from the source";
  TEMPER_CHECK(full == s.nodes.size() && idle == s.idle_cached && leaves == s.leaves.size());
}

}  // namespace temper::engine
