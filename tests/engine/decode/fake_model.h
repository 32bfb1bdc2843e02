// A StepModel without arithmetic: logits are a hash of (version, every token of the path), and the path is read back from the
// pages. A page that is missing, stale, shared wrongly or written twice therefore changes what is drawn.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/check.h"
#include "engine/decode/model.h"

namespace temper::engine {

class FakeModel : public StepModel {
 public:
  // `window` as StepModel has it: logits depend on the tokens in it alone.
  FakeModel(int vocab, int max_positions, int pages, int window = 0)
      : vocab_(vocab), max_positions_(max_positions), window_(window), held_(pages, false), slots_(pages) {
    for (int i = pages - 1; i >= 0; --i) free_.push_back(i);
  }

  int vocab() const override { return vocab_; }
  int max_positions() const override { return max_positions_; }
  int window() const override { return window_; }
  int held() const { return static_cast<int>(std::count(held_.begin(), held_.end(), true)); }
  int pages() const override { return static_cast<int>(held_.size()); }

  int32_t AllocatePage() override {
    TEMPER_CHECK(!free_.empty());
    int32_t page = free_.back();
    free_.pop_back();
    held_[page] = true;
    slots_[page].assign(64, {});
    return page;
  }
  void FreePage(int32_t page) override {
    TEMPER_CHECK(held_[page]);
    held_[page] = false;
    free_.push_back(page);
  }

  void CopyPage(int32_t from, int32_t to, int positions) override {
    TEMPER_CHECK(held_[from] && held_[to]);
    for (int i = 0; i < positions; ++i) {
      TEMPER_CHECK(slots_[from][i].used && !slots_[to][i].used);
      slots_[to][i] = slots_[from][i];
    }
  }

  // The fake's weights are a number that rises with each swap.
  void SetWeights(const ComputeWeights&) override { ++generation_; }

  float LogSumExp(std::span<const float> logits) const override {
    double sum = 0;
    for (float x : logits) sum += std::exp(static_cast<double>(x));
    return static_cast<float>(std::log(sum));
  }

  void Run(std::span<const StepRow> rows, std::vector<StepLogits>* out) override {
    ++runs_;
    out->assign(rows.size(), {});
    storage_.assign(rows.size(), {});
    for (size_t r = 0; r < rows.size(); ++r) {
      const StepRow& row = rows[r];
      tokens_run_ += row.tokens.size();
      uint64_t h = 0;
      const int64_t last = row.start + static_cast<int64_t>(row.tokens.size()) - 1;
      const int64_t first = window_ ? std::max<int64_t>(0, last - window_ + 1) : 0;
      // Every token of the step reads its own window, though only the last one's shows.
      if (window_) {
        for (int64_t p = std::max<int64_t>(0, row.start - window_ + 1); p < row.start; ++p) (void)Read(row, p);
      }
      for (int64_t p = first; p < row.start; ++p) h = Mix(h, Read(row, p));
      for (size_t i = 0; i < row.tokens.size(); ++i) {
        int64_t p = row.start + static_cast<int64_t>(i);
        TEMPER_CHECK(p < max_positions_);
        Slot slot{.used = true, .token = row.tokens[i], .generation = generation_};
        Slot& at = At(row, p);
        TEMPER_CHECK(!at.used || at == slot) << "position " << p << " written twice with different tokens";
        at = slot;
        if (p >= first) h = Mix(h, slot);
      }
      if (!row.want_logits) continue;
      storage_[r].resize(vocab_);
      double sum = 0;
      for (int v = 0; v < vocab_; ++v) {
        uint64_t x = Mix(h, Slot{.used = true, .token = v, .generation = generation_});
        storage_[r][v] = static_cast<float>(x >> 40) / float(1 << 24) * 4.0f * row.inv_temperature;
        sum += std::exp(storage_[r][v]);
      }
      (*out)[r] = {storage_[r], static_cast<float>(std::log(sum))};
    }
  }

  int runs() const { return runs_; }
  size_t tokens_run() const { return tokens_run_; }

 private:
  struct Slot {
    bool used = false;
    int32_t token = 0;
    int generation = 0;
    bool operator==(const Slot&) const = default;
  };
  static uint64_t Mix(uint64_t h, const Slot& s) {
    h = (h ^ (static_cast<uint64_t>(s.token) << 20 | static_cast<uint64_t>(s.generation))) * 0x9e3779b97f4a7c15ull;
    h ^= h >> 31;
    h *= 0xbf58476d1ce4e5b9ull;
    return h ^ h >> 29;
  }
  Slot& At(const StepRow& row, int64_t position) {
    TEMPER_CHECK(position / 64 < static_cast<int64_t>(row.pages.size())) << "no page for position " << position;
    int32_t page = row.pages[position / 64];
    TEMPER_CHECK(page >= 0 && held_[page]) << "page " << page << " is free";
    return slots_[page][position % 64];
  }
  Slot Read(const StepRow& row, int64_t position) {
    Slot s = At(row, position);
    TEMPER_CHECK(s.used) << "position " << position << " was never written";
    return s;
  }

  int vocab_, max_positions_, window_;
  std::vector<bool> held_;
  std::vector<std::vector<Slot>> slots_;
  std::vector<int32_t> free_;
  std::vector<std::vector<float>> storage_;
  int generation_ = 0;
  int runs_ = 0;
  size_t tokens_run_ = 0;
};

}  // namespace temper::engine
