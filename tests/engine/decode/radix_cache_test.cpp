#include "engine/decode/radix_cache.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

namespace temper::engine {
namespace {

class Pages : public PageSource {
 public:
  explicit Pages(int count) : count_(count) {}
  int pages() const override { return count_; }
  int32_t AllocatePage() override {
    for (int32_t i = 0;; ++i) {
      if (out_.insert(i).second) {
        EXPECT_LT(i, count_);
        return i;
      }
    }
  }
  void FreePage(int32_t page) override { EXPECT_EQ(out_.erase(page), 1u) << "page " << page << " freed twice"; }

 private:
  int count_;
  std::set<int32_t> out_;
};

std::vector<int32_t> Tokens(int pages, int seed) {
  std::vector<int32_t> t;
  for (int i = 0; i < pages * 64 + 1; ++i) t.push_back(i / 64 + (i / 64 >= pages - 1 ? seed * 1000 : 0));
  return t;
}

// Enters every full page of `tokens`, returns the pages held.
std::vector<int32_t> Fill(RadixCache& cache, const Version& v, const std::vector<int32_t>& tokens) {
  std::vector<int32_t> path = cache.Match(v, tokens);
  while ((path.size() + 1) * 64 < tokens.size()) {
    int32_t page = cache.Allocate();
    EXPECT_GE(page, 0);
    path.push_back(cache.Insert(v, path, std::span(tokens).subspan(path.size() * 64, 64), page));
  }
  return path;
}

void Release(RadixCache& cache, const std::vector<int32_t>& path) {
  for (size_t i = path.size(); i-- > 0;) cache.Release(path[i]);
}

// Goes wrong if a prefix is found at another version, not found at its own, or covers the last token.
TEST(RadixCache, FindsTheLongestPrefixOfItsVersion) {
  Pages pages(16);
  RadixCache cache(&pages);
  auto a = Tokens(4, 1);
  auto path = Fill(cache, {1, 0}, a);
  ASSERT_EQ(path.size(), 4u);
  auto b = Tokens(4, 2);  // shares three pages
  auto hit = cache.Match({1, 0}, b);
  EXPECT_EQ(hit, std::vector<int32_t>(path.begin(), path.begin() + 3));
  EXPECT_TRUE(cache.Match({1, 1}, a).empty());
  EXPECT_TRUE(cache.Match({2, 0}, a).empty());
  auto exact = cache.Match({1, 0}, std::span(a).subspan(0, 256));  // the fourth page would cover the last token
  EXPECT_EQ(exact.size(), 3u);
  cache.CheckInvariants();
  Release(cache, path);
  Release(cache, hit);
  Release(cache, exact);
  EXPECT_EQ(cache.available_pages(), 16);
  EXPECT_EQ(cache.free_pages(), 12);
}

// Goes wrong if a page that windows have passed is kept while pages are wanted, one in use is taken, or what hung below a page that was
// taken is still found: it would be read below another page of the same number.
TEST(RadixCache, TakesPagesAbovePagesInUse) {
  Pages pages(5);
  RadixCache cache(&pages);
  const Version v{1, 0};
  const auto tokens = Tokens(4, 1);
  const auto path = Fill(cache, v, tokens);
  ASSERT_EQ(path.size(), 4u);
  for (int i : {0, 1, 2}) cache.Release(path[i]);  // its window has passed them
  cache.CheckInvariants();
  EXPECT_EQ(cache.available_pages(), 4);
  ASSERT_GE(cache.Allocate(), 0);  // the fifth
  const int32_t taken = cache.Allocate();
  EXPECT_EQ(taken, path[2]) << "the deepest that nobody holds";
  cache.CheckInvariants();
  EXPECT_FALSE(cache.Cached(path[3])) << "it has no place below a page that is another's";
  const auto found = cache.Match(v, tokens);
  EXPECT_EQ(found, std::vector<int32_t>(path.begin(), path.begin() + 2)) << "the front is still there";
  Release(cache, found);
  EXPECT_EQ(cache.Allocate(), path[1]);
  EXPECT_EQ(cache.Allocate(), path[0]);
  EXPECT_EQ(cache.Allocate(), -1);
  cache.Release(path[3]);
  EXPECT_EQ(cache.Allocate(), path[3]) << "nobody holds it, and no prefix leads to it";
  cache.CheckInvariants();
}

// Goes wrong if eviction takes a page in use, a parent before its child, or the younger leaf first.
TEST(RadixCache, EvictsTheOldestLeaf) {
  Pages pages(6);
  RadixCache cache(&pages);
  Release(cache, Fill(cache, {1, 0}, Tokens(3, 1)));
  Release(cache, Fill(cache, {1, 0}, Tokens(3, 2)));  // two shared, one of its own: 4 pages
  EXPECT_EQ(cache.free_pages(), 2);
  std::vector<int32_t> held = {cache.Allocate(), cache.Allocate(), cache.Allocate()};
  auto one = cache.Match({1, 0}, Tokens(3, 1));
  EXPECT_EQ(one.size(), 2u) << "the oldest leaf is gone";
  auto two = cache.Match({1, 0}, Tokens(3, 2));
  EXPECT_EQ(two.size(), 3u);
  EXPECT_EQ(cache.Allocate(), -1) << "every page is held";
  cache.CheckInvariants();
  Release(cache, one);
  Release(cache, two);
  Release(cache, held);
  cache.CheckInvariants();
}

// Goes wrong if two equal pages both stay in the tree.
TEST(RadixCache, MergesEqualPages) {
  Pages pages(4);
  RadixCache cache(&pages);
  auto t = Tokens(1, 1);
  int32_t a = cache.Allocate(), b = cache.Allocate();
  EXPECT_EQ(cache.Insert({1, 0}, {}, std::span(t).subspan(0, 64), a), a);
  EXPECT_EQ(cache.Insert({1, 0}, {}, std::span(t).subspan(0, 64), b), a);
  EXPECT_EQ(cache.free_pages(), 3);
  cache.Release(a);
  cache.Release(a);
  cache.CheckInvariants();
}

// Goes wrong if the start of a page is found that holds other tokens, or if superseded tails pile up.
TEST(RadixCache, FindsTheLongestStartOfAPage) {
  Pages pages(8);
  RadixCache cache(&pages);
  const Version v{1, 0};
  auto t = Tokens(1, 1);
  std::vector<int32_t> path = Fill(cache, v, t);
  std::vector<int32_t> a = {5, 6, 7, 8}, longer = {5, 6, 7, 8, 9, 9}, other = {5, 6, 1};
  cache.EnterTail(v, path, a, cache.Allocate());
  EXPECT_EQ(cache.free_pages(), 6);
  cache.EnterTail(v, path, longer, cache.Allocate());
  EXPECT_EQ(cache.free_pages(), 6) << "the shorter one is dropped";
  cache.EnterTail(v, path, a, cache.Allocate());
  EXPECT_EQ(cache.free_pages(), 6) << "and not entered again";
  cache.EnterTail(v, path, other, cache.Allocate());
  EXPECT_EQ(cache.free_pages(), 5);
  cache.CheckInvariants();
  auto find = [&](std::vector<int32_t> rest) {
    auto p = cache.FindPartial(v, path, rest);
    if (p.page >= 0) cache.Release(p.page);
    return p.positions;
  };
  EXPECT_EQ(find({5, 6, 7, 8, 9, 1}), 5);
  EXPECT_EQ(find({5, 6, 1, 1}), 3);
  EXPECT_EQ(find({5, 6, 1}), 2) << "one token is left to run";
  EXPECT_EQ(find({4, 6}), 0);
  EXPECT_EQ(cache.FindPartial({1, 1}, {}, t).positions, 0);
  EXPECT_EQ(cache.FindPartial(v, {}, std::span(t).subspan(0, 40)).positions, 39) << "full pages count too";
  cache.CheckInvariants();
}

// Goes wrong in some order of operations nobody thought of.
TEST(RadixCache, RandomOperationsBalance) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 rng(seed);
    Pages pages(12);
    RadixCache cache(&pages);
    std::vector<std::vector<int32_t>> held;
    std::vector<int64_t> made;
    int64_t version = 0;
    for (int i = 0; i < 500; ++i) {
      switch (rng() % 8) {
        case 0:
          if (rng() % 4 == 0) cache.DropOtherVersions({1, ++version});
          break;
        case 1:
        case 2:
        case 3:
          if (!held.empty()) {
            size_t k = rng() % held.size();
            // The last page may stay as a tail, when the pages before it are of this version.
            std::vector<int32_t>& h = held[k];
            if (int32_t page = rng() % 2 ? cache.Allocate() : -1; page >= 0) {
              std::vector<int32_t> tokens(1 + rng() % 63, static_cast<int32_t>(rng() % 3));
              if (made[k] == version) {
                cache.EnterTail({1, version}, h, tokens, page);
                auto partial = cache.FindPartial({1, version}, h, tokens);
                if (partial.page >= 0) cache.Release(partial.page);
              } else {
                cache.Release(page);
              }
            }
            Release(cache, h);
            made.erase(made.begin() + static_cast<int64_t>(k));
            held.erase(held.begin() + static_cast<int64_t>(k));
          }
          break;
        default: {
          auto t = Tokens(1 + static_cast<int>(rng() % 4), static_cast<int>(rng() % 4));
          auto path = cache.Match({1, version}, t);
          bool full = false;
          while (!full && (path.size() + 1) * 64 < t.size()) {
            int32_t page = cache.Allocate();
            full = page < 0;
            if (!full) path.push_back(cache.Insert({1, version}, path, std::span(t).subspan(path.size() * 64, 64), page));
          }
          held.push_back(path);
          made.push_back(version);
        }
      }
      cache.CheckInvariants();
    }
    for (auto& h : held) Release(cache, h);
    cache.CheckInvariants();
    EXPECT_EQ(cache.available_pages(), 12);
  }
}

}  // namespace
}  // namespace temper::engine
