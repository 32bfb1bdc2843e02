#include "gateway/policy_text.h"

#include <utility>

#include "text/text_model.h"

namespace temper::gateway {
namespace {

class ModelText : public PolicyText {
 public:
  explicit ModelText(text::TextModel model) : model_(std::move(model)) {}

  Result<std::string> Render(const text::Value& messages, const text::Value& tools, bool add_generation_prompt,
                             const text::Value& variables) const override {
    return model_.Render({.messages = model_.ShowCalls(messages),
                          .tools = tools,
                          .add_generation_prompt = add_generation_prompt,
                          .variables = variables,
                          .now_s = {}});
  }
  std::vector<int32_t> Encode(std::string_view text) const override { return model_.tokenizer.Encode(text); }
  std::vector<int32_t> EncodeAfter(int32_t last, std::string_view text) const override {
    return model_.tokenizer.EncodeAfter(last, text);
  }
  size_t LeastTokens(std::string_view text) const override { return model_.tokenizer.LeastTokens(text); }
  std::string_view TokenBytes(int32_t id) const override { return model_.tokenizer.TokenBytes(id); }
  bool IsSpecial(int32_t id) const override { return model_.tokenizer.IsSpecial(id); }
  const std::vector<int32_t>& end_ids() const override { return model_.end_ids; }
  text::ParsedAnswer Parse(std::string_view text, const text::Value& tools, bool complete) const override {
    return text::ParseToolCalls(model_.tool_format, text, tools, complete);
  }
  size_t CertainContent(std::string_view text, const text::Value&) const override {
    return text::CertainContent(model_.tool_format, text);
  }

 private:
  const text::TextModel model_;
};

}  // namespace

std::unique_ptr<PolicyText> NewPolicyText(text::TextModel model) { return std::make_unique<ModelText>(std::move(model)); }

}  // namespace temper::gateway
