#include "engine/decode/decoder.h"

#include <algorithm>
#include <deque>
#include <unordered_map>
#include <utility>

#include "engine/decode/model.h"
#include "engine/decode/radix_cache.h"
#include "engine/decode/random.h"
#include "engine/decode/sampler.h"

namespace temper::engine {
namespace {

constexpr int kPage = RadixCache::kPageTokens;
constexpr float kCertainLogprob = -0.01005033585f;  // log 0.99: above it a token counts for Sampling::repetition_stop
constexpr int kWorthWaiting = 8;  // tokens that another sequence is computing: fewer are sooner computed than waited for

int PagesFor(int64_t tokens) { return static_cast<int>((tokens + kPage - 1) / kPage); }

struct Sequence {
  uint64_t id = 0;
  DecodeRequest request;
  std::vector<int32_t> tokens;  // prompt, then what was drawn
  size_t prompt = 0;
  int64_t computed = 0;         // positions whose keys and values are in the pages
  std::vector<int32_t> pages;
  size_t entered = 0;           // pages that went into the cache
  size_t behind = 0;            // pages given back: every layer's window has passed them (-1 in `pages`)
  bool started = false;
  bool mixed = false;           // keys and values of more than one version (kSpan)
  uint32_t cached_tokens = 0;
  uint32_t certain = 0;         // tokens drawn one after the other that were as good as certain

  int64_t drawn() const { return static_cast<int64_t>(tokens.size() - prompt); }
};

}  // namespace

const char* FinishName(Finish finish) {
  switch (finish) {
    case Finish::kNone: return "";
    case Finish::kStop: return "stop";
    case Finish::kLength: return "length";
    case Finish::kRepetition: return "repetition";
    case Finish::kAbort: return "abort";
  }
  return "";
}

struct Decoder::State {
  State(std::unique_ptr<StepModel> m, const DecoderOptions& o) 
      : model(std::move(m)),
        options(o),
        cache(model.get()),
        sampler([this](std::span<const float> some) { return model->LogSumExp(some); }) {}

  std::unique_ptr<StepModel> model;
  DecoderOptions options;
  RadixCache cache;
  Sampler sampler;
  bool has_version = false;
  Version version;
  uint64_t next_id = 1;
  std::deque<std::unique_ptr<Sequence>> waiting;   // front first
  std::vector<std::unique_ptr<Sequence>> running;  // in order of admission
  std::vector<DecodeEvent> aborted;                // for the next step
  DecoderStats stats;

  // Of one step, kept for their memory.
  struct Planned {
    Sequence* sequence;
    int64_t take;
  };
  std::vector<Planned> plan;
  std::vector<StepRow> rows;
  std::vector<StepLogits> logits;

  // Pages of `s` may go into the cache: they are of one version, and those before them are there.
  bool MayEnter(const Sequence& s) const { return !s.mixed && (s.entered == 0 || (s.entered > s.behind && cache.Cached(s.pages[s.entered - 1]))); }

  // Pages that no token from `position` on sees.
  int PagesBehind(int64_t position) const {
    const int64_t window = model->window();
    return window == 0 ? 0 : static_cast<int>(std::max<int64_t>(0, position - window + 1) / kPage);
  }

  // Gives back the pages that no later token sees, but the one below which the next is entered.
  void DropBehindWindow(Sequence* s) {
    const auto passed = static_cast<size_t>(PagesBehind(s->computed));
    const size_t end = MayEnter(*s) ? std::min(passed, s->entered > 0 ? s->entered - 1 : 0) : passed;
    for (; s->behind < end; ++s->behind) {
      cache.Release(s->pages[s->behind]);
      s->pages[s->behind] = -1;
    }
  }

  // Pages that a sequence of so many tokens holds at once, at the most.
  int PagesOf(int64_t tokens) const {
    const int64_t window = model->window();
    return window == 0 ? PagesFor(tokens) : std::min(PagesFor(tokens), PagesFor(window + options.chunk_tokens) + 2);
  }

  // `keep_tail`: its last page stays in the cache, for a prompt that continues it.
  void ReleasePages(Sequence* s, bool keep_tail) {
    const size_t partial = static_cast<size_t>(s->computed) / kPage;
    const size_t filled = static_cast<size_t>(s->computed) % kPage;
    // From the end, so that a page is never without the page before it.
    for (size_t i = s->pages.size(); i-- > 0;) {
      if (i < s->behind) break;
      if (keep_tail && MayEnter(*s) && i == partial && filled > 0 && s->entered == i) {
        std::span<const int32_t> tokens(s->tokens.data() + i * kPage, filled);
        cache.EnterTail(version, std::span<const int32_t>(s->pages.data(), i), tokens, s->pages[i]);
      } else {
        cache.Release(s->pages[i]);
      }
    }
    s->pages.clear();
    s->computed = 0;
    s->entered = 0;
    s->behind = 0;
    s->mixed = false;
  }

  // What a sequence can start from: cached pages, and the start of a page to be copied.
  struct Prefix {
    std::vector<int32_t> path;
    RadixCache::Partial partial;
    bool wait = false;  // another sequence is just computing more of it

    int64_t positions() const { return static_cast<int64_t>(path.size()) * kPage + partial.positions; }
  };

  Prefix FindPrefix(const Sequence& s) {
    Prefix found;
    found.path = cache.Match(version, s.tokens);
    const size_t base = found.path.size() * kPage;
    found.partial = cache.FindPartial(version, found.path, std::span(s.tokens).subspan(base));
    const int64_t most = static_cast<int64_t>(s.tokens.size()) - 1;
    int64_t coming = 0;
    for (const auto& r : running) {
      // What it has given back, or will not enter, is of no use.
      if (!MayEnter(*r) || r->behind > found.path.size()) continue;
      const int64_t common_max = std::min<int64_t>(most, static_cast<int64_t>(r->tokens.size()));
      // Cheap refusals first: too short to help, or another token where the cached part ends.
      if (common_max <= found.positions() || !std::equal(s.tokens.begin(), s.tokens.begin() + found.positions() + 1, r->tokens.begin())) continue;
      int64_t common = found.positions() + 1;
      while (common < common_max && s.tokens[common] == r->tokens[common]) ++common;
      const int64_t ready = std::min(common, r->computed) - static_cast<int64_t>(base);
      if (ready > found.partial.positions) {
        if (found.partial.page >= 0) cache.Release(found.partial.page);
        found.partial = {r->pages[found.path.size()], static_cast<int>(std::min<int64_t>(ready, kPage))};
        cache.Retain(found.partial.page);
      }
      if (common > r->computed) coming = std::max(coming, common);
    }
    found.wait = coming >= found.positions() + kWorthWaiting;
    return found;
  }

  void Admit() {
    for (size_t i = 0; i < waiting.size() && running.size() < static_cast<size_t>(options.max_batch);) {
      Sequence* s = waiting[i].get();
      Prefix prefix = FindPrefix(*s);
      // Room for everything known plus one token, and one page of growth for each sequence that runs already.
      int need = PagesOf(static_cast<int64_t>(s->tokens.size()) + 1) - (static_cast<int>(prefix.path.size()) - PagesBehind(prefix.positions()));
      // Alone it is always let in: should it fill the pool, it ends there.
      bool fits = running.empty() || cache.available_pages() >= need + static_cast<int>(running.size());
      if (!fits || prefix.wait) {
        if (prefix.partial.page >= 0) cache.Release(prefix.partial.page);
        for (size_t p = prefix.path.size(); p-- > 0;) cache.Release(prefix.path[p]);
        if (!fits) return;  // strictly first come, first served: a short one does not overtake a long one for ever
        ++i;
        continue;
      }
      s->entered = prefix.path.size();
      s->pages = std::move(prefix.path);
      s->computed = static_cast<int64_t>(s->pages.size()) * kPage;
      if (prefix.partial.page >= 0) {
        int32_t own = cache.Allocate();
        if (own >= 0) {
          model->CopyPage(prefix.partial.page, own, prefix.partial.positions);
          s->pages.push_back(own);
          s->computed += prefix.partial.positions;
        }
        cache.Release(prefix.partial.page);
      }
      DropBehindWindow(s);
      if (!s->started) {
        s->started = true;
        s->cached_tokens = static_cast<uint32_t>(s->computed);
        stats.prompt_tokens += s->prompt;
        stats.cached_tokens += s->cached_tokens;
      }
      running.push_back(std::move(waiting[i]));
      waiting.erase(waiting.begin() + static_cast<int64_t>(i));
    }
  }

  // Sends running sequences from `first` on back to the head of the waiting line, in their order.
  void SendBack(size_t first, bool keep_tails) {
    for (size_t i = running.size(); i-- > first;) {
      ReleasePages(running[i].get(), keep_tails);
      waiting.push_front(std::move(running[i]));
    }
    running.resize(first);
  }

  // Pages for positions up to `positions`; takes them from the youngest sequences when none are left. False when even that
  // does not help: the sequence is alone and fills the pool.
  bool Reserve(size_t index, int64_t positions) {
    Sequence* s = running[index].get();
    while (static_cast<int>(s->pages.size()) < PagesFor(positions)) {
      int32_t page = cache.Allocate();
      if (page >= 0) {
        s->pages.push_back(page);
        continue;
      }
      if (running.size() == index + 1) return false;
      ++stats.preemptions;
      SendBack(running.size() - 1, true);
    }
    return true;
  }

  void Emit(std::vector<DecodeEvent>* events, const Sequence& s, Draw draw, Finish finish) {
    events->push_back({.id = s.id,
                       .token = draw.token,
                       .logprob = draw.logprob,
                       .kept = std::move(draw.kept),
                       .version = version,
                       .mixed = s.mixed,
                       .finish = finish,
                       .prompt_tokens = static_cast<uint32_t>(s.prompt),
                       .cached_tokens = s.cached_tokens});
  }

  // Which tokens run in this step: every sequence that lacks one, then prompt chunks up to the budget.
  void Plan(std::vector<DecodeEvent>* events) {
    plan.clear();
    int64_t budget = options.chunk_tokens;
    for (size_t i = 0; i < running.size();) {
      Sequence* s = running[i].get();
      int64_t lacking = static_cast<int64_t>(s->tokens.size()) - s->computed;
      int64_t take = lacking == 1 ? 1 : std::min(lacking, budget);
      if (take == 0) {
        ++i;
        continue;
      }
      if (Reserve(i, s->computed + take)) {
        if (lacking > 1) budget -= take;
        plan.push_back({s, take});
        ++i;
        continue;
      }
      // An older sequence that planned pages keeps them, so only the last one gets here.
      if (i > 0) {
        ++stats.preemptions;
        SendBack(i, true);
        return;
      }
      End(events, i, Finish::kLength);
    }
  }

  // Ends a running sequence that can have no further token, by an event without one.
  void End(std::vector<DecodeEvent>* events, size_t index, Finish finish) {
    Emit(events, *running[index], Draw{-1, 0.0f}, finish);
    ReleasePages(running[index].get(), true);
    running.erase(running.begin() + static_cast<int64_t>(index));
  }

  void EnterFullPages(Sequence* s) {
    while (MayEnter(*s) && static_cast<int64_t>(s->entered + 1) * kPage <= s->computed) {
      std::span<const int32_t> path(s->pages.data(), s->entered);
      std::span<const int32_t> tokens(s->tokens.data() + s->entered * kPage, kPage);
      s->pages[s->entered] = cache.Insert(version, path, tokens, s->pages[s->entered]);
      ++s->entered;
    }
  }

  // Draws the next token of `s`; true when that ends it.
  bool DrawNext(Sequence* s, const StepLogits& row, std::vector<DecodeEvent>* events) {
    const DecodeRequest& r = s->request;
    int64_t position = static_cast<int64_t>(s->tokens.size());
    double uniform = r.sampling.temperature == 0.0f ? 0.0 : UniformAt(r.key, position);
    Draw draw = sampler.Sample(row.logits, row.log_sum_exp, r.sampling, uniform);
    s->tokens.push_back(draw.token);
    ++stats.tokens_sampled;
    // Of the model, before anything was cut: among few kept tokens an unlikely one may be certain.
    s->certain = row.logits[draw.token] - row.log_sum_exp > kCertainLogprob ? s->certain + 1 : 0;
    Finish finish = Finish::kNone;
    if (std::find(r.stop_ids.begin(), r.stop_ids.end(), draw.token) != r.stop_ids.end()) {
      finish = Finish::kStop;
    } else if (r.sampling.repetition_stop > 0 && s->certain >= r.sampling.repetition_stop) {
      finish = Finish::kRepetition;
    } else if (s->drawn() >= static_cast<int64_t>(r.sampling.max_tokens) ||
               static_cast<int>(s->tokens.size()) >= model->max_positions()) {
      finish = Finish::kLength;
    }
    Emit(events, *s, std::move(draw), finish);
    return finish != Finish::kNone;
  }
};

Decoder::Decoder(std::unique_ptr<StepModel> model, const DecoderOptions& options)
    : state_(std::make_unique<State>(std::move(model), options)) {
  TEMPER_CHECK(options.max_batch > 0 && options.chunk_tokens > 0 && options.waiting_max > 0);
}

Decoder::~Decoder() {
  for (auto& s : state_->running) state_->ReleasePages(s.get(), false);
}

Result<uint64_t> Decoder::Add(DecodeRequest request) {
  State& s = *state_;
  const int vocab = s.model->vocab();
  if (request.ids.empty()) return InvalidArgument("ids is empty: a prompt needs at least one token");
  for (const std::vector<int32_t>* list : {&request.ids, &request.stop_ids}) {
    for (size_t i = 0; i < list->size(); ++i) {
      if ((*list)[i] < 0 || (*list)[i] >= vocab) {
        return InvalidArgument(std::string(list == &request.ids ? "ids[" : "stop_ids[") + std::to_string(i) + "] = " +
                               std::to_string((*list)[i]) + " is outside the vocabulary of " + std::to_string(vocab));
      }
    }
  }
  RETURN_IF_ERROR(CheckSampling(request.sampling));
  const bool slides = s.PagesOf(s.model->max_positions()) <= s.model->pages();  // any length fits
  const int64_t limit = slides ? s.model->max_positions() : std::min<int64_t>(s.model->max_positions(), int64_t{s.model->pages()} * kPage);
  if (static_cast<int64_t>(request.ids.size()) >= limit) {
    return InvalidArgument("the prompt has " + std::to_string(request.ids.size()) + " tokens; with one to draw at most " +
                           std::to_string(limit) + " positions fit");
  }
  if (s.waiting.size() >= static_cast<size_t>(s.options.waiting_max)) {
    return ResourceExhausted(std::to_string(s.waiting.size()) + " sequences are waiting already");
  }
  auto sequence = std::make_unique<Sequence>();
  sequence->id = s.next_id++;
  sequence->tokens = request.ids;
  sequence->prompt = request.ids.size();
  sequence->request = std::move(request);
  uint64_t id = sequence->id;
  s.waiting.push_back(std::move(sequence));
  return id;
}

void Decoder::Cancel(uint64_t id) {
  State& s = *state_;
  auto is_it = [id](const std::unique_ptr<Sequence>& q) { return q->id == id; };
  auto r = std::find_if(s.running.begin(), s.running.end(), is_it);
  if (r != s.running.end()) {
    s.End(&s.aborted, static_cast<size_t>(r - s.running.begin()), Finish::kAbort);
    return;
  }
  auto w = std::find_if(s.waiting.begin(), s.waiting.end(), is_it);
  if (w == s.waiting.end()) return;
  s.Emit(&s.aborted, **w, Draw{-1, 0.0f}, Finish::kAbort);
  s.waiting.erase(w);
}

bool Decoder::Step(std::vector<DecodeEvent>* events) {
  State& s = *state_;
  bool worked = !s.aborted.empty();
  events->insert(events->end(), s.aborted.begin(), s.aborted.end());
  s.aborted.clear();
  if (!s.has_version) return worked;
  s.Admit();
  if (s.running.empty()) return worked;
  s.Plan(events);
  if (s.plan.empty()) return true;

  s.rows.clear();
  for (const State::Planned& p : s.plan) {
    const Sequence& q = *p.sequence;
    s.rows.push_back({.tokens = std::span<const int32_t>(q.tokens.data() + q.computed, p.take),
                      .start = q.computed,
                      .pages = q.pages,
                      .want_logits = q.computed + p.take == static_cast<int64_t>(q.tokens.size()),
                      .inv_temperature = InvTemperature(q.request.sampling.temperature)});
    if (p.take > 1 || q.drawn() == 0) s.stats.prefill_tokens += static_cast<uint64_t>(p.take);
  }
  s.model->Run(s.rows, &s.logits);
  ++s.stats.steps;

  std::vector<Sequence*> ended;
  for (size_t i = 0; i < s.plan.size(); ++i) {
    Sequence* q = s.plan[i].sequence;
    q->computed += s.plan[i].take;
    s.EnterFullPages(q);
    s.DropBehindWindow(q);
    if (!s.rows[i].want_logits) continue;
    ++s.stats.batch_rows;
    if (s.DrawNext(q, s.logits[i], events)) ended.push_back(q);
  }
  for (Sequence* q : ended) s.ReleasePages(q, true);
  if (!ended.empty()) {
    std::erase_if(s.running, [&](const std::unique_ptr<Sequence>& r) {
      return std::find(ended.begin(), ended.end(), r.get()) != ended.end();
    });
  }
  return true;
}

Status Decoder::SwapWeights(const ComputeWeights& weights, const Version& version) {
  State& s = *state_;
  if (s.has_version && version <= s.version) {
    return FailedPrecondition("version " + ToString(version) + " is not above " + ToString(s.version) + ", which is served");
  }
  s.model->SetWeights(weights);
  if (s.has_version) {
    ++s.stats.swaps;
    // A sequence without a token of its own loses nothing by starting anew; the others keep their place in line.
    bool keep = s.options.in_flight == InFlight::kSpan;
    std::vector<std::unique_ptr<Sequence>> kept;
    std::vector<std::unique_ptr<Sequence>> back;
    for (auto& q : s.running) {
      if (keep && q->drawn() > 0 && q->computed > 0) {
        q->mixed = true;
        kept.push_back(std::move(q));
      } else {
        back.push_back(std::move(q));
      }
    }
    s.running = std::move(back);
    s.SendBack(0, false);  // its pages are of the former version
    s.running = std::move(kept);
  }
  s.cache.DropOtherVersions(version);
  s.version = version;
  s.has_version = true;
  return Status::Ok();
}

bool Decoder::has_version() const { return state_->has_version; }
Version Decoder::version() const { return state_->version; }

DecoderStats Decoder::stats() const {
  DecoderStats stats = state_->stats;
  stats.running = static_cast<int>(state_->running.size());
  stats.waiting = static_cast<int>(state_->waiting.size());
  stats.free_pages = state_->cache.available_pages();
  stats.total_pages = state_->cache.total_pages();
  return stats;
}

StepModel& Decoder::model() { return *state_->model; }

}  // namespace temper::engine
