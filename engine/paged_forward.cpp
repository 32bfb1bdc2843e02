#include "engine/paged_forward.h"

#include <vector>

#include "common/check.h"
#include "engine/forward.h"

namespace temper::engine {

struct PagedForward::State {
  State(Engine& e, KvPool& p) : engine(e), pool(p), pass(e) {}
  Engine& engine;
  KvPool& pool;
  ForwardPass pass;
  Plan plan;
  std::vector<int32_t> wanted;  // rows of the plan
  std::vector<HeadRow> head;    // those, as the pass leaves them
  Buffer logits;
  std::vector<float> log_sum_exp;
};

PagedForward::PagedForward(Engine& engine, KvPool& pool) : state_(std::make_unique<State>(engine, pool)) {}
PagedForward::~PagedForward() = default;

std::span<const float> PagedForward::log_sum_exp() const { return state_->log_sum_exp; }

std::span<const float> PagedForward::hidden() const {
  return {state_->pass.final_x(), state_->wanted.size() * state_->pool.config().width};
}

std::span<const float> PagedForward::Run(const ComputeWeights& weights, std::span<const PagedSequence> sequences) {
  State& s = *state_;
  const ModelConfig& c = weights.config();
  TEMPER_CHECK(weights.profile() == s.pool.profile()) << "weights and pages of different profiles";
  Plan& plan = s.plan;
  plan.Clear();
  s.wanted.clear();
  s.head.clear();
  const int tile_tokens = TileTokens(c);
  for (const PagedSequence& q : sequences) {
    const auto n = static_cast<int>(q.tokens.size());
    TEMPER_CHECK(n > 0 && q.start >= 0 && q.start + n <= c.max_positions)
        << n << " tokens at position " << q.start << ", max_positions " << c.max_positions;
    const int needed = (q.start + n + kPagePositions - 1) / kPagePositions;
    TEMPER_CHECK(static_cast<int>(q.pages.size()) >= needed) << q.pages.size() << " pages, " << needed << " needed";
    const int first_row = plan.rows();
    const auto table = static_cast<int32_t>(plan.tables.size());
    plan.tables.insert(plan.tables.end(), q.pages.begin(), q.pages.begin() + needed);
    for (int i = 0; i < n; ++i) {
      const int position = q.start + i;
      TEMPER_CHECK(q.tokens[i] >= 0 && q.tokens[i] < c.vocab) << "token " << q.tokens[i] << ", vocab " << c.vocab;
      plan.token.push_back(q.tokens[i]);
      plan.position.push_back(position);
      plan.slot_begin.push_back(static_cast<int32_t>(plan.slots.size()));
      const int page = q.pages[position / kPagePositions];
      TEMPER_CHECK(s.pool.references(page) == 1) << "page " << page << " is shared: copy it before writing";
      plan.slots.push_back({page, position % kPagePositions});
    }
    for (int i = 0; i < n; i += tile_tokens) {
      const int tokens = std::min(tile_tokens, n - i);
      plan.tiles.push_back({first_row + i, tokens, q.start + i, table, (q.start + i + tokens - 1) / kPagePositions + 1});
    }
    for (int32_t i : q.logits) {
      TEMPER_CHECK(i >= 0 && i < n) << "logits of token " << i << " of " << n;
      s.head.push_back({static_cast<int32_t>(s.wanted.size()), q.inv_temperature});
      s.wanted.push_back(first_row + i);
    }
  }
  plan.slot_begin.push_back(static_cast<int32_t>(plan.slots.size()));
  s.log_sum_exp.assign(s.head.size(), 0);
  if (plan.rows() == 0) return {};
  s.pass.LayersFor(weights, s.pool, plan, s.wanted);
  const size_t count = s.head.size() * c.vocab;
  float* logits = s.logits.Get<float>(count);
  s.pass.Head(weights, s.head, logits, s.log_sum_exp.data(), {});
  return {logits, count};
}

}  // namespace temper::engine
