#include "job/export.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/kept_set.h"

namespace temper::job {
namespace {

// What could go wrong: a token that two sequences share is trained twice by whoever reads the rows; advantages go to other tokens; given
// tokens are taken for sampled ones.
TEST(Export, SharedTokensCountOnce) {
  trainer::Rollout rollout;
  auto add = [&](int32_t parent, bool sampled, std::vector<int32_t> ids, int32_t call) {
    trainer::TokenRun& run = rollout.runs.emplace_back();
    run.parent = parent;
    run.sampled = sampled;
    run.ids = std::move(ids);
    run.call = call;
    if (sampled) run.logprobs.assign(run.ids.size(), -0.5f);
    run.version.step = 3;
    run.inv_temperature = 2;
  };
  add(-1, false, {1}, 0);
  add(0, true, {2, 3}, 0);   // answered once, continued twice
  add(1, false, {4}, 2);
  add(2, true, {5}, 2);      // the later call stands first
  add(1, true, {6}, 1);
  // In the order of drawing: call 0, call 1, call 2.
  EXPECT_THAT(RowsOf(rollout, R"({"step":1})", {0.1, 0.2, 0.3, 0.4}),
              testing::ElementsAre(R"({"step":1,"sequence":0,"inv_temperature":2,"ids":[1,2,3,4,5],"mask":[0,1,1,0,1],"logprobs":[null,-0.5,-0.5,null,-0.5],)"
                                   R"("versions":[null,3,3,null,3],"advantages":[0,0.1,0.2,0,0.4]})",
                                   R"({"step":1,"sequence":1,"inv_temperature":2,"ids":[1,2,3,6],"mask":[0,0,0,1],"logprobs":[null,-0.5,-0.5,-0.5],)"
                                   R"("versions":[null,3,3,3],"advantages":[0,0,0,0.3]})"));
}

// The rows could lose among which tokens each was drawn: their logprobs would be of an unknown distribution.
TEST(Export, KeptSetsStandBesideTheirTokens) {
  trainer::Rollout rollout;
  rollout.runs.resize(2);
  rollout.runs[0].ids = {1, 7};
  trainer::TokenRun& run = rollout.runs[1];
  run.parent = 0;
  run.sampled = true;
  run.ids = {2, 3};
  run.logprobs = {-0.5f, 0};
  run.kept = {engine::EncodeKept(std::vector<int32_t>{2, 4}, 9), ""};
  EXPECT_THAT(RowsOf(rollout, "{}", {1, 2})[0], testing::HasSubstr(R"("logprobs":[null,null,-0.5,0],"kept":[null,null,[2,4],null],"versions")"));
  run.kept.clear();
  EXPECT_THAT(RowsOf(rollout, "{}", {1, 2})[0], testing::Not(testing::HasSubstr("kept")));
}

}  // namespace
}  // namespace temper::job
