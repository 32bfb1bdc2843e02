// A small text side for tests: bytes, a few longer tokens (so that encoding decoded text again gives other ids), a ChatML template
// and Hermes tool calls, written out in C++.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "common/check.h"
#include "gateway/policy_text.h"
#include "text/json.h"

namespace temper::gateway {

class FakePolicy : public PolicyText {
 public:
  static constexpr int32_t kStart = 256, kEnd = 257, kOther = 258, kWords = 260;

  // `strip`: like some templates, leaves out the reasoning of answers before the last user message.
  explicit FakePolicy(bool strip = false) : strip_(strip) {
    for (int i = 0; i < 256; ++i) tokens_.push_back(std::string(1, static_cast<char>(i)));
    tokens_.insert(tokens_.end(), {"<|im_start|>", "<|im_end|>", "<|other|>", "", "ab", "the ", "\n\n", "tool", "{\"", "\"}", "\xc3\xa9"});
  }

  Result<std::string> Render(const text::Value& messages, const text::Value& tools, bool add_generation_prompt,
                             const text::Value& variables) const override {
    if (variables.Find("refuse")) return InvalidArgument("no");
    std::string out;
    if (tools.is_list()) out += "<|im_start|>tools\n" + text::CompactJson(tools) + "<|im_end|>\n";
    const auto& list = messages.as_list();
    size_t last_user = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      if (list[i].StringOr("role", "") == "user") last_user = i;
    }
    for (size_t i = 0; i < list.size(); ++i) {
      out += "<|im_start|>" + list[i].StringOr("role", "") + "\n";
      const std::string reasoning = list[i].StringOr("reasoning_content", "");
      if (!reasoning.empty() && (!strip_ || i > last_user)) out += "<think>" + reasoning + "</think>";
      out += list[i].StringOr("content", "");
      if (const text::Value* calls = list[i].Find("tool_calls")) {
        for (const text::Value& call : calls->as_list()) out += "<tool_call>" + text::CompactJson(*call.Find("function")) + "</tool_call>";
      }
      out += "<|im_end|>\n";
    }
    if (add_generation_prompt) out += "<|im_start|>assistant\n";
    return out;
  }

  std::vector<int32_t> Encode(std::string_view text) const override {
    {
      std::lock_guard lock(mutex_);
      encoded_.emplace_back(text);
    }
    std::vector<int32_t> ids;
    while (!text.empty()) {
      int32_t best = static_cast<unsigned char>(text[0]);
      size_t length = 1;
      for (size_t id = 256; id < tokens_.size(); ++id) {
        if (tokens_[id].size() > length && text.starts_with(tokens_[id])) {
          best = static_cast<int32_t>(id);
          length = tokens_[id].size();
        }
      }
      ids.push_back(best);
      text.remove_prefix(length);
    }
    return ids;
  }
  std::vector<int32_t> EncodeAfter(int32_t, std::string_view text) const override { return Encode(text); }
  size_t LeastTokens(std::string_view text) const override {
    size_t longest = 1;
    for (const std::string& token : tokens_) longest = std::max(longest, token.size());
    return text.size() / longest;
  }
  std::string_view TokenBytes(int32_t id) const override { return tokens_[id]; }
  bool IsSpecial(int32_t id) const override { return id >= kStart && id < kWords; }
  const std::vector<int32_t>& end_ids() const override { return end_ids_; }

  text::ParsedAnswer Parse(std::string_view text, const text::Value&, bool complete) const override {
    text::ParsedAnswer out;
    const std::string whole(text);
    size_t at = whole.find("<tool_call>");
    out.content = whole.substr(0, at);
    while (at != std::string::npos) {
      const size_t end = whole.find("</tool_call>", at);
      auto json = end == std::string::npos ? Result<text::Value>(InvalidArgument("open"))
                                           : text::ParseJson(std::string_view(whole).substr(at + 11, end - at - 11));
      const text::Value* arguments = json.ok() ? json->Find("arguments") : nullptr;
      if (!arguments || !arguments->is_dict() || !complete || json->StringOr("name", "").empty()) {
        return {.content = whole, .calls = {}, .ill_formed = true, .problem = "bad call"};
      }
      out.calls.push_back({json->StringOr("name", ""), text::CompactJson(*arguments)});
      at = whole.find("<tool_call>", end);
    }
    return out;
  }
  size_t CertainContent(std::string_view text, const text::Value&) const override {
    const size_t at = text.find("<tool_call>");
    if (at != std::string_view::npos) return at;
    const std::string_view opener = "<tool_call>";
    for (size_t n = std::min(opener.size() - 1, text.size()); n > 0; --n) {
      if (text.substr(text.size() - n) == opener.substr(0, n)) return text.size() - n;
    }
    return text.size();
  }

  std::string Decode(const std::vector<int32_t>& ids) const {
    std::string out;
    for (int32_t id : ids) out += tokens_[id];
    return out;
  }
  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }
  // Every text that was encoded since the last call.
  std::vector<std::string> TakeEncoded() {
    std::lock_guard lock(mutex_);
    return std::exchange(encoded_, {});
  }

 private:
  const bool strip_;
  std::vector<std::string> tokens_;
  const std::vector<int32_t> end_ids_ = {kEnd};
  mutable std::mutex mutex_;
  mutable std::vector<std::string> encoded_;
};

}  // namespace temper::gateway
