// Byte-pair encoding: the vocabulary and the merges of a tokenizer.json, and the tokens of a word.
//
// Problem: merging pair by pair is slow, and texts repeat their words. Idea: short words are merged by looking for the lowest
// rank again and again, long ones with a heap, and each thread remembers the words it met last. Where "▁" stands for a space
// and no pre-tokenizer cuts, the text is one word; it is cut in front of "▁" where no token can reach across.
// Immutable after loading; thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "common/status.h"
#include "text/value.h"

namespace temper::text {

class Bpe {
 public:
  // `model` is the part of that name of a tokenizer.json. `byte_level`: words come as bytes, which the vocabulary spells in the
  // byte alphabet. Errors: InvalidArgument naming what is wrong or not supported.
  Status Load(const Value& model, bool byte_level);

  // The tokens of `word`, UTF-8 (byte_level: any bytes). `dropped` grows by the bytes without a token, which are left out.
  void Encode(std::string_view word, std::vector<int32_t>* out, size_t* dropped) const;

  std::optional<int32_t> Find(std::string_view content) const;
  // By id; nullopt where there is none.
  const std::vector<std::optional<std::string>>& contents() const { return contents_; }
  // How many bytes of `text` (which has not been through the normalizer) surely show in tokens.
  size_t BytesThatShow(std::string_view text) const;
  // Every byte has a token.
  bool complete() const { return complete_; }
  const char* kind() const { return byte_level_ ? "byte-level BPE" : byte_fallback_ ? "BPE with byte fallback" : "BPE"; }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
  };
  using Map = std::unordered_map<std::string, int32_t, Hash, std::equal_to<>>;
  struct Merge {
    uint64_t pair = UINT64_MAX;  // left id, right id
    uint32_t rank = 0;
    int32_t id = 0;
  };
  // What one character is before merging.
  struct Start {
    std::vector<int32_t> ids;  // its token, or those of its bytes; empty: unknown
    bool fallback = false;
  };

  Status LoadVocabulary(const Value& model);
  Status LoadMerges(const Value& model);
  Start StartOf(std::string_view character) const;
  const Merge* FindMerge(int32_t left, int32_t right) const;
  void SetMerge(const Merge& merge);
  void FindCuts();
  void EncodePart(std::string_view part, std::vector<int32_t>* out, size_t* dropped) const;
  size_t Begin(std::string_view part, std::vector<int32_t>* symbols) const;
  void MergeShort(std::vector<int32_t>* symbols) const;
  void MergeLong(std::vector<int32_t>* symbols) const;

  bool byte_level_ = false;
  bool ignore_merges_ = false;
  bool byte_fallback_ = false;
  bool fuse_unk_ = false;
  bool complete_ = false;
  std::optional<int32_t> unk_;
  std::vector<std::optional<std::string>> contents_;
  Map words_;   // what can be a token of a word, as words come
  Map others_;  // byte_level: contents that are not spelled in the byte alphabet
  std::array<int32_t, 256> fallback_{};  // "<0xAB>", or -1
  std::array<Start, 256> starts_;        // by byte: byte_level, or ASCII
  std::vector<Merge> merges_;            // a hash table, open addressing
  bool cuts_ = false;                    // a word may be cut in front of "▁", unless behind one of `before_`
  std::unordered_set<uint32_t> before_;
  uint64_t serial_ = 0;                  // names this model in the caches of threads
};

}  // namespace temper::text
