// Tokenizer: byte-pair encoding between text and token ids, byte-level or with SentencePiece's "▁" and byte fallback, from a
// Hugging Face tokenizer.json or from GGUF metadata.
//
// Loading refuses by name every component that is not implemented exactly; nothing is approximated. Immutable after
// loading; every method is thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace temper::text {

// The tokenizer.ggml.* metadata of a GGUF file.
struct GgufTokenizer {
  std::string model;                 // gpt2 = byte-level BPE; llama, gemma4 = SentencePiece's BPE; other kinds are refused
  std::string pre;                   // which pre-tokenizer, of gpt2: smollm, llama-bpe, qwen2, gpt-2, default, deepseek-v3, …
  std::vector<std::string> tokens;
  std::vector<float> scores;         // of llama: the better the earlier merged; empty where there are merges
  std::vector<int32_t> token_types;  // 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; empty = all normal
  std::vector<std::string> merges;   // "a b"
  std::optional<int32_t> bos, eos, unk, pad, eot;
  bool add_bos = false;
  bool add_eos = false;
  std::optional<bool> add_space_prefix;  // absent: as the kind has it (llama does)
  std::string chat_template;
};

struct EncodeOptions {
  bool add_special = false;   // apply the post-processor (BOS and kin)
  bool parse_special = true;  // special tokens in the text become their ids; false: they are ordinary text
};

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool normalized = false;
  bool lstrip = false;
  bool rstrip = false;
  bool single_word = false;
};

class Tokenizer {
 public:
  // `tokenizer_json` is the text of the file. Errors: InvalidArgument naming the component.
  static Result<Tokenizer> FromJson(std::string_view tokenizer_json);
  static Result<Tokenizer> FromGguf(const GgufTokenizer& gguf);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Invalid UTF-8 in `text` is read as U+FFFD, one per maximal bad part. `dropped_bytes`, when given, grows by the bytes the
  // vocabulary has no token for, which are left out as Hugging Face does.
  std::vector<int32_t> Encode(std::string_view text, const EncodeOptions& options = {}, size_t* dropped_bytes = nullptr) const;

  // The ids of a text that goes on behind the token `last`, as they stand in the encoding of the whole. Behind an added token: it
  // may swallow white space, and the next word is not the first of the text. Behind any other the text goes on inside a word or
  // between two, so nothing ("▁", a space) is put in front of it.
  std::vector<int32_t> EncodeAfter(int32_t last, std::string_view text) const;

  // Ids without a token (padding of the model's vocabulary) give nothing. Invalid UTF-8 gives U+FFFD as in Hugging Face: one per
  // maximal bad part, and of tokens for single bytes in a row ("<0xAB>"), one for each as soon as one of them is bad.
  std::string Decode(std::span<const int32_t> ids, bool skip_special = false) const;

  // The raw bytes of one token inside a text, possibly part of a code point; empty for an id without a token.
  std::string_view TokenBytes(int32_t id) const;
  bool HasToken(int32_t id) const;
  bool IsSpecial(int32_t id) const;
  // The id of a token by its content as written in the vocabulary (for added tokens: their text).
  std::optional<int32_t> TokenId(std::string_view token) const;
  // Encode gives no fewer ids than this: the bytes that must show in tokens, over those of the longest token. A look at the bytes
  // alone, to tell early that a text is far too long. 0 where nothing is certain (a pre-tokenizer that drops text, an added token
  // that swallows white space).
  size_t LeastTokens(std::string_view text) const;
  // One past the largest id.
  int32_t size() const;
  // "byte-level BPE", "BPE with byte fallback" or "BPE".
  const char* kind() const;
  const std::vector<AddedToken>& added_tokens() const;

  // The text of a tokenizer.json that Hugging Face libraries load: the one it was loaded from, or made from the GGUF's.
  const std::string& json() const;

 private:
  friend class StreamDecoder;
  struct Impl;
  explicit Tokenizer(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

// Text of a token stream, never splitting a code point: the concatenation of all Append results and Finish equals
// Decode of all ids, however the ids were cut. One stream; not thread-safe; `tokenizer` must outlive it.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = false);
  StreamDecoder(StreamDecoder&&) noexcept;
  StreamDecoder& operator=(StreamDecoder&&) noexcept;
  ~StreamDecoder();
  // The text that became certain with `ids`. Holds back a code point of which bytes are missing, and tokens for single bytes until
  // another token ends their row: one that turns out bad makes all of them U+FFFD.
  std::string Append(std::span<const int32_t> ids);
  // What was held back, as U+FFFD if it never became a code point. Ends the text: the next Append begins another.
  std::string Finish();

 private:
  struct State;
  bool skip_special_;
  std::unique_ptr<State> state_;
};

}  // namespace temper::text
