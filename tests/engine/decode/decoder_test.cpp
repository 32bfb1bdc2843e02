// The scheduler: whatever the batch, the pages, the order of arrival and the swaps, a sequence draws what it draws alone.
#include "engine/decode/decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "engine/weights.h"
#include "tests/engine/decode/fake_model.h"

namespace temper::engine {
namespace {

constexpr int kVocab = 50;

struct Drawn {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<Version> versions;
  std::vector<bool> mixed;
  Finish finish = Finish::kNone;
  uint32_t cached = 0;
  bool operator==(const Drawn& o) const { return ids == o.ids && logprobs == o.logprobs && finish == o.finish; }
};

void Collect(const std::vector<DecodeEvent>& events, std::map<uint64_t, Drawn>* out) {
  for (const DecodeEvent& e : events) {
    Drawn& d = (*out)[e.id];
    EXPECT_EQ(d.finish, Finish::kNone) << "an event after the end of sequence " << e.id;
    if (e.token >= 0) {
      d.ids.push_back(e.token);
      d.logprobs.push_back(e.logprob);
      d.versions.push_back(e.version);
      d.mixed.push_back(e.mixed);
    }
    d.finish = e.finish;
    d.cached = e.cached_tokens;
  }
}

std::map<uint64_t, Drawn> RunAll(Decoder& decoder, int steps_max = 100000) {
  std::map<uint64_t, Drawn> out;
  std::vector<DecodeEvent> events;
  for (int i = 0; i < steps_max; ++i) {
    events.clear();
    if (!decoder.Step(&events)) return out;
    Collect(events, &out);
  }
  ADD_FAILURE() << "the decoder does not come to an end";
  return out;
}

DecodeRequest RandomRequest(std::mt19937_64& rng, const std::vector<int32_t>& shared) {
  DecodeRequest r;
  size_t keep = rng() % (shared.size() + 1);
  r.ids.assign(shared.begin(), shared.begin() + keep);
  size_t more = 1 + rng() % 100;
  for (size_t i = 0; i < more; ++i) r.ids.push_back(static_cast<int32_t>(rng() % kVocab));
  r.sampling.temperature = rng() % 4 == 0 ? 0.0f : rng() % 2 ? 1.0f : 0.7f;
  r.sampling.max_tokens = 1 + rng() % 120;
  if (rng() % 3 == 0) r.sampling.top_k = 1 + rng() % 20;
  if (rng() % 3 == 0) r.stop_ids = {static_cast<int32_t>(rng() % kVocab)};
  r.key = {.seed = 1, .domain = 2, .a = rng() % 1000, .b = 0, .call = 0, .choice = 0};
  return r;
}

std::unique_ptr<Decoder> MakeDecoder(int pages, DecoderOptions options, int window = 0) {
  return std::make_unique<Decoder>(std::make_unique<FakeModel>(kVocab, 4096, pages, window), options);
}

Drawn Alone(const DecodeRequest& request, int window = 0) {
  auto d = MakeDecoder(64, {.max_batch = 1, .chunk_tokens = 4096}, window);
  EXPECT_TRUE(d->SwapWeights({}, {1, 0}).ok());
  uint64_t id = *d->Add(request);
  return RunAll(*d)[id];
}

// Goes wrong if batch mates, chunk borders, shared pages, eviction or preemption leak into a sequence.
TEST(Decoder, DrawsWhatItDrawsAlone) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 rng(seed);
    std::vector<int32_t> shared(200);
    for (int32_t& t : shared) t = static_cast<int32_t>(rng() % kVocab);
    DecoderOptions options{.max_batch = 1 + static_cast<int>(rng() % 12), .chunk_tokens = 1 + static_cast<int>(rng() % 200)};
    auto decoder = MakeDecoder(8 + static_cast<int>(rng() % 30), options);
    ASSERT_TRUE(decoder->SwapWeights({}, {1, 0}).ok());
    std::map<uint64_t, DecodeRequest> requests;
    std::map<uint64_t, Drawn> out;
    std::vector<DecodeEvent> events;
    for (int i = 0; i < 25; ++i) {
      DecodeRequest r = RandomRequest(rng, shared);
      Result<uint64_t> id = decoder->Add(r);
      ASSERT_TRUE(id.ok()) << id.status().ToString();
      requests[*id] = r;
      for (uint64_t s = rng() % 30; s > 0; --s) decoder->Step(&events);
    }
    Collect(events, &out);
    std::map<uint64_t, Drawn> rest = RunAll(*decoder);
    for (auto& [id, d] : rest) {
      Drawn& o = out[id];
      o.ids.insert(o.ids.end(), d.ids.begin(), d.ids.end());
      o.logprobs.insert(o.logprobs.end(), d.logprobs.begin(), d.logprobs.end());
      o.finish = d.finish;
    }
    for (auto& [id, r] : requests) EXPECT_EQ(out[id], Alone(r)) << "sequence " << id;
    DecoderStats stats = decoder->stats();
    EXPECT_EQ(stats.running + stats.waiting, 0);
    EXPECT_EQ(stats.free_pages, stats.total_pages) << "pages leaked";
  }
}

// Goes wrong if page shortage can dead-lock, or if preempted sequences are lost: 6 pages for 10 sequences of up to 4 pages.
TEST(Decoder, PreemptsWhenPagesRunOut) {
  auto decoder = MakeDecoder(6, {.max_batch = 8});
  ASSERT_TRUE(decoder->SwapWeights({}, {1, 0}).ok());
  std::map<uint64_t, DecodeRequest> requests;
  for (uint64_t i = 0; i < 10; ++i) {
    DecodeRequest r{.ids = {static_cast<int32_t>(i), 1, 2}, .sampling = {.max_tokens = 200}, .stop_ids = {}, .key = {.a = i}};
    requests[*decoder->Add(r)] = r;
  }
  auto out = RunAll(*decoder);
  EXPECT_GT(decoder->stats().preemptions, 0u);
  for (auto& [id, r] : requests) EXPECT_EQ(out[id], Alone(r));
}

// Goes wrong if a sequence longer than the pool hangs instead of ending.
TEST(Decoder, EndsASequenceThatFillsThePool) {
  auto decoder = MakeDecoder(2, {});
  ASSERT_TRUE(decoder->SwapWeights({}, {1, 0}).ok());
  uint64_t id = *decoder->Add({.ids = {1}, .sampling = {.max_tokens = 1000}, .stop_ids = {}, .key = {}});
  auto out = RunAll(*decoder);
  EXPECT_EQ(out[id].finish, Finish::kLength);
  EXPECT_EQ(out[id].ids.size(), 128u);  // 128 positions hold keys, the last token drawn needs none
}

// Goes wrong if a newcomer waits until those that run are done: a batch is open at every step.
TEST(Decoder, ANewcomerDrawsBesideThoseThatRun) {
  auto decoder = MakeDecoder(64, {.max_batch = 4});
  ASSERT_TRUE(decoder->SwapWeights({}, {1, 0}).ok());
  const uint64_t old = *decoder->Add({.ids = {1}, .sampling = {.max_tokens = 300}, .stop_ids = {}, .key = {}});
  std::vector<DecodeEvent> events;
  for (int i = 0; i < 20; ++i) decoder->Step(&events);
  const uint64_t young = *decoder->Add({.ids = {2}, .sampling = {.max_tokens = 5}, .stop_ids = {}, .key = {.a = 1}});
  events.clear();
  for (int i = 0; i < 6; ++i) decoder->Step(&events);
  std::map<uint64_t, Drawn> out;
  Collect(events, &out);
  EXPECT_EQ(out[young].ids.size(), 5u);
  EXPECT_EQ(out[young].finish, Finish::kLength);
  EXPECT_GE(out[old].ids.size(), 5u) << "and those that run draw on";
  EXPECT_EQ(out[old].finish, Finish::kNone);
}

// Goes wrong if a shared prompt is computed once a sequence: eight siblings must cost one prompt, not eight.
TEST(Decoder, SiblingsShareOnePrefill) {
  auto model = std::make_unique<FakeModel>(kVocab, 4096, 100);
  FakeModel* fake = model.get();
  Decoder decoder(std::move(model), {.max_batch = 16, .chunk_tokens = 64});
  ASSERT_TRUE(decoder.SwapWeights({}, {1, 0}).ok());
  std::vector<int32_t> prompt(64 * 4 + 1);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i * 7 % kVocab);
  for (uint64_t i = 0; i < 8; ++i) {
    ASSERT_TRUE(decoder.Add({.ids = prompt, .sampling = {.max_tokens = 1}, .stop_ids = {}, .key = {.a = i}}).ok());
  }
  auto out = RunAll(decoder);
  EXPECT_EQ(out.size(), 8u);
  EXPECT_EQ(fake->tokens_run(), prompt.size() + 7u);
  EXPECT_EQ(decoder.stats().cached_tokens, 7u * 64 * 4);
  EXPECT_EQ(decoder.stats().prompt_tokens, 8u * prompt.size());
}

// Goes wrong if the next turn of a conversation computes again what the last one left: only its new tokens may run.
TEST(Decoder, TheNextTurnStartsWhereTheLastEnded) {
  auto model = std::make_unique<FakeModel>(kVocab, 4096, 100);
  FakeModel* fake = model.get();
  Decoder decoder(std::move(model), {});
  ASSERT_TRUE(decoder.SwapWeights({}, {1, 0}).ok());
  std::vector<int32_t> known(90, 3);
  for (int turn = 0; turn < 6; ++turn) {
    const size_t before = fake->tokens_run();
    DecodeRequest r{.ids = known, .sampling = {.max_tokens = 10}, .key = {.a = static_cast<uint64_t>(turn)}};
    uint64_t id = *decoder.Add(r);
    Drawn d = RunAll(decoder)[id];
    EXPECT_EQ(d, Alone(r));
    // The last token drawn was never run, and the tool's twenty are new: 21 to run, and nine of ten to draw from.
    if (turn > 0) {
      EXPECT_EQ(fake->tokens_run() - before, 21u + 9u);
    }
    known.insert(known.end(), d.ids.begin(), d.ids.end());
    known.insert(known.end(), 20, turn);
  }
  EXPECT_EQ(decoder.stats().free_pages, 100);
}

// Goes wrong if a token after a swap is drawn from keys of the old version (retract), or is not marked (span).
TEST(Decoder, SwapRetractsOrMarks) {
  for (InFlight mode : {InFlight::kRetract, InFlight::kSpan}) {
    auto decoder = MakeDecoder(64, {.max_batch = 4, .in_flight = mode});
    ASSERT_TRUE(decoder->SwapWeights({}, {1, 0}).ok());
    std::vector<int32_t> prompt(150, 3);
    uint64_t id = *decoder->Add({.ids = prompt, .sampling = {.max_tokens = 100}, .stop_ids = {}, .key = {.a = 5}});
    std::map<uint64_t, Drawn> out;
    std::vector<DecodeEvent> events;
    for (int i = 0; i < 40; ++i) decoder->Step(&events);
    size_t before = events.size();
    ASSERT_GT(before, 10u);
    ASSERT_TRUE(decoder->SwapWeights({}, {1, 1}).ok());
    while (decoder->Step(&events)) {
    }
    Collect(events, &out);
    const Drawn& d = out[id];
    ASSERT_EQ(d.ids.size(), 100u);
    for (size_t i = 0; i < d.ids.size(); ++i) {
      EXPECT_EQ(d.versions[i], (i < before ? Version{1, 0} : Version{1, 1})) << i;
      EXPECT_EQ(d.mixed[i], mode == InFlight::kSpan && i >= before) << i;
    }
    // Under retract the rest is what a fresh decoder at the new version draws after the same tokens.
    std::vector<int32_t> known = prompt;
    known.insert(known.end(), d.ids.begin(), d.ids.begin() + static_cast<int64_t>(before));
    auto fresh = MakeDecoder(64, {});
    ASSERT_TRUE(fresh->SwapWeights({}, {1, 0}).ok());
    ASSERT_TRUE(fresh->SwapWeights({}, {1, 1}).ok());
    DecodeRequest rest{.ids = known, .sampling = {.max_tokens = static_cast<uint32_t>(100 - before)}, .stop_ids = {}, .key = {.a = 5}};
    uint64_t id2 = *fresh->Add(rest);
    auto out2 = RunAll(*fresh);
    std::vector<int32_t> tail(d.ids.begin() + static_cast<int64_t>(before), d.ids.end());
    if (mode == InFlight::kRetract) {
      EXPECT_EQ(out2[id2].ids, tail);
    } else {
      EXPECT_NE(out2[id2].ids, tail);
    }
    EXPECT_EQ(decoder->stats().free_pages, 64);
  }
}

// Goes wrong if a new sequence takes keys from one that runs on over a swap (span): those are of two versions.
TEST(Decoder, NewcomersTakeNothingFromMixedSequences) {
  auto decoder = MakeDecoder(64, {.in_flight = InFlight::kSpan});
  ASSERT_TRUE(decoder->SwapWeights({}, {1, 0}).ok());
  DecodeRequest old{.ids = std::vector<int32_t>(100, 3), .sampling = {.max_tokens = 200}, .key = {.a = 1}};
  uint64_t running = *decoder->Add(old);
  std::vector<DecodeEvent> events;
  for (int i = 0; i < 50; ++i) decoder->Step(&events);
  ASSERT_TRUE(decoder->SwapWeights({}, {1, 1}).ok());
  DecodeRequest young{.ids = old.ids, .sampling = {.max_tokens = 30}, .key = {.a = 2}};
  uint64_t id = *decoder->Add(young);
  auto out = RunAll(*decoder);
  auto fresh = MakeDecoder(64, {});
  ASSERT_TRUE(fresh->SwapWeights({}, {1, 0}).ok());
  ASSERT_TRUE(fresh->SwapWeights({}, {1, 1}).ok());
  uint64_t alone = *fresh->Add(young);
  EXPECT_EQ(out[id], RunAll(*fresh)[alone]);
  EXPECT_EQ(out[id].cached, 0u);
  EXPECT_TRUE(out[running].mixed.back());
  EXPECT_FALSE(out[id].mixed.back());
}

// Goes wrong if the prefix cache answers across versions, or versions can go backwards.
TEST(Decoder, CacheNeverCrossesVersions) {
  auto decoder = MakeDecoder(64, {});
  ASSERT_TRUE(decoder->SwapWeights({}, {1, 5}).ok());
  std::vector<int32_t> prompt(200, 7);
  auto add = [&] { return *decoder->Add({.ids = prompt, .sampling = {.max_tokens = 1}, .stop_ids = {}, .key = {}}); };
  add();
  RunAll(*decoder);
  uint64_t again = add();
  EXPECT_EQ(RunAll(*decoder)[again].cached, 199u) << "three pages and a copy of seven positions";
  EXPECT_EQ(decoder->SwapWeights({}, {1, 5}).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(decoder->SwapWeights({}, {1, 4}).code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(decoder->SwapWeights({}, {2, 0}).ok());
  uint64_t after = add();
  EXPECT_EQ(RunAll(*decoder)[after].cached, 0u);
}

// Goes wrong if a cancelled sequence keeps its pages, draws on, or is never reported; waiting ones too.
TEST(Decoder, CancelEndsAtOnce) {
  auto decoder = MakeDecoder(64, {.max_batch = 1});
  uint64_t first = *decoder->Add({.ids = {1}, .sampling = {.max_tokens = 50}, .stop_ids = {}, .key = {}});
  uint64_t second = *decoder->Add({.ids = {2}, .sampling = {.max_tokens = 50}, .stop_ids = {}, .key = {}});
  std::vector<DecodeEvent> events;
  EXPECT_FALSE(decoder->Step(&events)) << "ran without weights";
  ASSERT_TRUE(decoder->SwapWeights({}, {1, 0}).ok());
  for (int i = 0; i < 5; ++i) decoder->Step(&events);
  decoder->Cancel(first);
  decoder->Cancel(second);
  decoder->Cancel(77);
  size_t drawn = events.size();
  EXPECT_TRUE(decoder->Step(&events));
  EXPECT_FALSE(decoder->Step(&events));
  ASSERT_EQ(events.size(), drawn + 2);
  EXPECT_EQ(events[drawn].id, first);
  EXPECT_EQ(events[drawn].token, -1);
  EXPECT_EQ(events[drawn].finish, Finish::kAbort);
  EXPECT_EQ(events[drawn + 1].id, second);
  EXPECT_EQ(decoder->stats().free_pages, 64);
}

// A model that says token 0 of four: with probability .9901 at the positions that are `sure`, with .9899 elsewhere.
class NearlySureModel : public FakeModel {
 public:
  explicit NearlySureModel(std::vector<bool> sure) : FakeModel(4, 4096, 64), sure_(std::move(sure)) {}
  void Run(std::span<const StepRow> rows, std::vector<StepLogits>* out) override {
    FakeModel::Run(rows, out);
    logits_.assign(rows.size(), {});
    for (size_t r = 0; r < rows.size(); ++r) {
      const size_t next = static_cast<size_t>(rows[r].start) + rows[r].tokens.size();
      const double p = sure_.at(next) ? 0.9901 : 0.9899;
      logits_[r] = {static_cast<float>(std::log(3 * p / (1 - p))), 0, 0, 0};
      (*out)[r] = {logits_[r], LogSumExp(logits_[r])};
    }
  }

 private:
  const std::vector<bool> sure_;
  std::vector<std::vector<float>> logits_;
};

// Goes wrong if the repetition stop of M1 does not fire exactly at the Nth token in a row above .99: one at most .99 begins the count anew,
// prompt tokens count for nothing, and a swap of weights changes nothing.
TEST(Decoder, RepetitionStopFiresAtTheNthInARow) {
  struct Case {
    std::vector<std::pair<int, bool>> stretches;  // from the first drawn token on
    uint32_t stop;
    size_t tokens;  // drawn when it ends
    Finish finish;
    Sampling sampling = {.temperature = 0};
  };
  for (const Case& c : std::vector<Case>{{{{3001, true}}, 3000, 3000, Finish::kRepetition},
                                         {{{3000, true}}, 3000, 3000, Finish::kRepetition},
                                         {{{2999, true}, {1, false}, {500, true}}, 3000, 3500, Finish::kLength},
                                         {{{30, true}, {1, false}, {40, true}}, 31, 62, Finish::kRepetition},
                                         {{{7, false}, {9, true}}, 5, 12, Finish::kRepetition},
                                         {{{100, true}}, 1, 1, Finish::kRepetition},
                                         {{{100, true}}, 0, 100, Finish::kLength},
                                         // Among two kept tokens the same one has .993: what counts is the model's.
                                         {{{100, false}}, 3, 100, Finish::kLength, {.temperature = 1, .top_k = 2}}}) {
    constexpr int kPrompt = 3;
    std::vector<bool> sure(kPrompt, true);
    for (const auto& [n, is_sure] : c.stretches) sure.insert(sure.end(), n, is_sure);
    for (const bool swap : {false, true}) {
      Decoder decoder(std::make_unique<NearlySureModel>(sure), {.max_batch = 4});
      ASSERT_TRUE(decoder.SwapWeights({}, {1, 0}).ok());
      DecodeRequest r;
      r.ids = {1, 2, 3};
      r.sampling = c.sampling;
      r.sampling.max_tokens = static_cast<uint32_t>(sure.size() - kPrompt);
      r.sampling.repetition_stop = c.stop;
      ASSERT_TRUE(decoder.Add(r).ok());
      std::vector<DecodeEvent> events;
      for (int step = 0; decoder.Step(&events); ++step) {
        if (!swap || step != 20) continue;
        ASSERT_TRUE(decoder.SwapWeights({}, {1, 1}).ok());
      }
      EXPECT_EQ(events.size(), c.tokens);
      EXPECT_EQ(events.back().finish, c.finish);
    }
  }
}

// Goes wrong if bad requests reach the kernels, where they would abort the worker.
TEST(Decoder, RefusesBadRequests) {
  auto decoder = MakeDecoder(4, {.waiting_max = 1});
  auto code = [&](DecodeRequest r) { return decoder->Add(std::move(r)).status().code(); };
  EXPECT_EQ(code({.ids = {}, .sampling = {}, .stop_ids = {}, .key = {}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.ids = {-1}, .sampling = {}, .stop_ids = {}, .key = {}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.ids = {kVocab}, .sampling = {}, .stop_ids = {}, .key = {}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.ids = {1}, .sampling = {}, .stop_ids = {kVocab}, .key = {}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.ids = std::vector<int32_t>(256, 1), .sampling = {}, .stop_ids = {}, .key = {}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.ids = {1}, .sampling = {.top_p = 0}, .stop_ids = {}, .key = {}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.ids = {1}, .sampling = {.max_tokens = 0}, .stop_ids = {}, .key = {}}), StatusCode::kInvalidArgument);
  EXPECT_TRUE(decoder->Add({.ids = {1}, .sampling = {}, .stop_ids = {}, .key = {}}).ok());
  EXPECT_EQ(code({.ids = {1}, .sampling = {}, .stop_ids = {}, .key = {}}), StatusCode::kResourceExhausted);
}

// Goes wrong if a page is given back that a later token still sees, is kept for nothing, or is found in the cache with a hole above it.
TEST(DecoderWindow, DrawsTheSameWithFewerPages) {
  for (const int window : {1, 20, 64, 65, 100, 200}) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
      SCOPED_TRACE(testing::Message() << "window " << window << ", seed " << seed);
      std::mt19937_64 rng(seed * 31 + static_cast<uint64_t>(window));
      std::vector<int32_t> shared(500);
      for (int32_t& t : shared) t = static_cast<int32_t>(rng() % 5);
      const int chunk = 1 + static_cast<int>(rng() % 90);
      const int one = (window + chunk + 63) / 64 + 2;  // pages of one sequence, whatever its length
      auto decoder = MakeDecoder(one + static_cast<int>(rng() % 8), {.max_batch = 1 + static_cast<int>(rng() % 5), .chunk_tokens = chunk}, window);
      ASSERT_TRUE(decoder->SwapWeights({}, {1, 0}).ok());
      std::vector<DecodeRequest> requests;
      std::vector<uint64_t> ids;
      for (int i = 0; i < 10; ++i) {
        requests.push_back(RandomRequest(rng, shared));
        ids.push_back(*decoder->Add(requests.back()));
      }
      auto out = RunAll(*decoder);
      for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(out[ids[i]], Alone(requests[i], window)) << i;
      EXPECT_EQ(decoder->stats().free_pages, decoder->stats().total_pages);
    }
  }
}

// Goes wrong if a prefix is not reused where its pages are still there, or a sequence takes pages of those that only it has passed.
TEST(DecoderWindow, PrefixesStayUntilPagesAreNeeded) {
  const std::vector<int32_t> prompt(640, 7);
  const DecodeRequest request{.ids = prompt, .sampling = {.max_tokens = 3}, .stop_ids = {}, .key = {}};
  auto roomy = MakeDecoder(64, {.chunk_tokens = 64}, 100);
  ASSERT_TRUE(roomy->SwapWeights({}, {1, 0}).ok());
  (void)*roomy->Add(request);
  RunAll(*roomy);
  const uint64_t again = *roomy->Add(request);
  EXPECT_GE(RunAll(*roomy)[again].cached, 576u);
  // Six pages for ten: the front of the prefix goes, and what is behind the gap is not found.
  auto tight = MakeDecoder(6, {.chunk_tokens = 64}, 100);
  ASSERT_TRUE(tight->SwapWeights({}, {1, 0}).ok());
  const uint64_t first = *tight->Add(request);
  const Drawn drawn = RunAll(*tight)[first];
  EXPECT_EQ(drawn.finish, Finish::kLength);
  const uint64_t second = *tight->Add(request);
  const Drawn repeated = RunAll(*tight)[second];
  EXPECT_EQ(repeated, drawn);
  EXPECT_LE(repeated.cached, 6u * 64);
}

// Goes wrong if cancels, swaps and shortage together break a count or lose a sequence: every one ends exactly once.
TEST(Decoder, SurvivesRandomLife) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 rng(seed * 77 + 1);
    std::vector<int32_t> shared(150);
    for (int32_t& t : shared) t = static_cast<int32_t>(rng() % 5);
    const int window = seed % 2 ? 0 : 1 + static_cast<int>(rng() % 150);
    auto decoder = MakeDecoder(6 + static_cast<int>(rng() % 10),
                               {.max_batch = 1 + static_cast<int>(rng() % 6), .chunk_tokens = 1 + static_cast<int>(rng() % 90),
                                .in_flight = rng() % 2 ? InFlight::kSpan : InFlight::kRetract}, window);
    int64_t version = 0;
    ASSERT_TRUE(decoder->SwapWeights({}, {1, version}).ok());
    std::vector<uint64_t> ids;
    std::map<uint64_t, Drawn> out;
    std::vector<DecodeEvent> events;
    for (int i = 0; i < 400; ++i) {
      switch (rng() % 12) {
        case 0: ids.push_back(*decoder->Add(RandomRequest(rng, shared))); break;
        case 1:
          if (!ids.empty()) decoder->Cancel(ids[rng() % ids.size()]);
          break;
        case 2:
          if (rng() % 5 == 0) {
            ASSERT_TRUE(decoder->SwapWeights({}, {1, ++version}).ok());
          }
          break;
        default: decoder->Step(&events);
      }
    }
    while (decoder->Step(&events)) {
    }
    Collect(events, &out);
    for (uint64_t id : ids) EXPECT_NE(out[id].finish, Finish::kNone) << id;
    EXPECT_EQ(decoder->stats().free_pages, decoder->stats().total_pages);
    for (auto& [id, d] : out) EXPECT_TRUE(std::is_sorted(d.versions.begin(), d.versions.end()));
  }
}

}  // namespace
}  // namespace temper::engine
