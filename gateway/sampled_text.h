// The text of one growing answer: how much of it a client may see already, and what it says in the end.
//
// Problem: a streamed answer must equal the whole one however it was cut, although tokens split code points, a stop string may
// be half there, and text may turn out to begin a tool call. Idea: show only what no later token can take back.
//
// Pure; one answer; not thread-safe. `text` must outlive it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gateway/policy_text.h"
#include "gateway/types.h"

namespace temper::gateway {

class SampledText {
 public:
  SampledText(const PolicyText& text, text::Value tools, std::vector<std::string> stop)
      : text_(text), tools_(std::move(tools)), stop_(std::move(stop)) {}

  // Takes one drawn token. False: a stop string is complete, this was the last token that counts.
  bool Append(int32_t id);
  // Text that became certain since the last call.
  std::string TakeVisible();

  bool stopped() const { return stopped_; }

  struct Said {
    std::string content;
    std::vector<ToolCall> tool_calls;  // without ids
    bool ill_formed = false;
  };
  // The whole answer. `complete`: it ended by itself, not by its length. What TakeVisible gave is a prefix of `content`.
  Said Finish(bool complete);

 private:
  void AppendBytes(std::string_view bytes);

  const PolicyText& text_;
  const text::Value tools_;
  const std::vector<std::string> stop_;
  std::string held_;  // bytes of an unfinished code point
  std::string all_;   // valid UTF-8, special tokens left out, cut before a stop string
  size_t shown_ = 0;
  bool stopped_ = false;
};

}  // namespace temper::gateway
