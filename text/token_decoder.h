// TokenDecoder: the decoder of a tokenizer.json, from the spelling of tokens back to text, token by token.
//
// Problem: some steps look beyond one token (bytes that make a character together, a space stripped from the whole text), and a
// stream must give what the whole gives. Idea: every step is a small machine that keeps what it cannot decide yet; decoding a
// whole is a stream of one piece, so they cannot differ.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "text/replacement.h"
#include "text/value.h"

namespace temper::text {

class TokenDecoder {
 public:
  // ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace and sequences of them; null: tokens are joined by spaces.
  // Errors: InvalidArgument naming what is not supported.
  Status Load(const Value& node);

  // What the steps remember of one text.
  struct Run {
    std::vector<std::string> held;  // by step: bytes that are no text yet
    std::vector<size_t> seen;       // by step: tokens, or code points still to be stripped
    bool any = false;
  };
  Run Begin() const;
  void Feed(std::string_view token, Run* run, std::string* out) const;
  void End(Run* run, std::string* out) const;

  // The bytes of one token inside a text.
  std::string Bytes(std::string_view token) const;

 private:
  enum class Kind { kByteLevel, kByteFallback, kReplace, kStrip, kMetaspace };
  struct Step {
    Kind kind;
    std::optional<Replacement> replacement = {};  // kReplace
    uint32_t character = 0;                       // kStrip, kMetaspace
    size_t count = 0;                             // kStrip: how many at the start
    bool keep_first = false;                      // kMetaspace: the first token keeps its space
    bool fused = false;                           // what arrives are parts of one token: the whole text
  };

  Status Load(const Value& node, bool* fused, int depth);
  void Feed(size_t step, std::string_view token, Run* run, std::string* out) const;
  void EndStep(size_t step, Run* run, std::string* out) const;

  std::vector<Step> steps_;
  bool spaces_between_ = false;
};

}  // namespace temper::text
