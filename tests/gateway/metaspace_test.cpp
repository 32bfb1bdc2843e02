// A session over tokenizers that mark the first word of a text (Llama 2's): what follows an answer is encoded as what it is in the
// whole, not as a text of its own.
#include <gtest/gtest.h>

#include <algorithm>

#include "gateway/policy_text.h"
#include "gateway/sampled_text.h"
#include "gateway/session.h"
#include "temper/v1/gateway.pb.h"
#include "tests/text/golden.h"
#include "text/text_model.h"

namespace temper::gateway {
namespace {

// Words stand right behind the end token.
constexpr char kTemplate[] =
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ bos_token + m.content + eos_token }}"
    "{% else %}{{ 'quick ' + m.content + ' fox' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ bos_token }}{% endif %}";

text::TextModel Model(const std::string& tokenizer) {
  text::TextFiles files;
  files.tokenizer_json = text::ReadFile(text::GoldenPath(tokenizer));
  files.tokenizer_config_json = R"({"bos_token": "<s>", "eos_token": "</s>"})";
  files.chat_template_jinja = kTemplate;
  return text::LoadTextModel(files).value();
}

TEST(SessionMetaspace, WhatFollowsAnAnswerIsEncodedAsInTheWhole) {
  for (const char* name : {"llama2_metaspace.json", "llama2.json", "gemma.json", "spm_unknown.json"}) {
    SCOPED_TRACE(name);
    const text::TextModel model = Model(name);
    const auto policy = NewPolicyText(Model(name));
    OpenOptions options;
    options.session = "1.1.1";
    Session session(options, "key", 1000, *policy, {.context_tokens = 10000});
    ChatRequest request;
    request.model = "m";
    request.messages = {{.role = Role::kUser, .content = "the quick"}};
    for (int turn = 0; turn < 3; ++turn) {
      auto planned = session.Begin(request, static_cast<uint64_t>(turn), 1);
      ASSERT_TRUE(std::holds_alternative<Plan>(planned));
      const Plan& plan = std::get<Plan>(planned);
      const auto whole = policy->Render(TemplateMessages(request.messages, request.messages.size()), request.tools, true, {});
      ASSERT_TRUE(whole.ok()) << whole.status().ToString();
      // Up to the last answer the stored ids stand, which may spell it in another way.
      const int32_t end = *model.tokenizer.TokenId("</s>");
      auto behind = [&](const std::vector<int32_t>& ids) {
        return std::vector<int32_t>(std::find(ids.rbegin(), ids.rend(), end).base(), ids.end());
      };
      EXPECT_EQ(behind(plan.prompt_ids), behind(model.tokenizer.Encode(*whole))) << *whole;
      EXPECT_EQ(std::count(plan.prompt_ids.begin(), plan.prompt_ids.end(), end), turn);
      EXPECT_EQ(plan.anchor_run >= 0, turn > 0) << "the stored ids of the answer stand in the prompt";
      Span span;
      span.version = {1, 0};
      span.ids = policy->EncodeAfter(plan.prompt_ids.back(), "the lazy dog</s>");
      span.logprobs.assign(span.ids.size(), -0.5f);
      SampledText sampled(*policy, request.tools, {});
      for (int32_t id : span.ids) sampled.Append(id);
      Drawn drawn;
      drawn.spans = {span};
      drawn.finish = "stop";
      drawn.content = sampled.Finish(true).content;
      const Answer answer = session.Commit(plan, {drawn}, {.end_s = 2});
      request.messages.push_back({.role = Role::kAssistant, .content = answer.choices[0].content});
      request.messages.push_back({.role = Role::kUser, .content = "the brown"});
    }
  }
}

}  // namespace
}  // namespace temper::gateway
