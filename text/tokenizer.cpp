#include "text/tokenizer.h"

#include <algorithm>
#include <array>
#include <functional>
#include <unordered_map>

#include "text/bpe.h"
#include "text/component.h"
#include "text/gguf_tokenizer.h"
#include "text/json.h"
#include "text/normalizer.h"
#include "text/pre_tokenizer.h"
#include "text/token_decoder.h"
#include "text/unicode.h"
#include "text/utf8.h"
#include "text/value.h"

namespace temper::text {
namespace {

// Finds added tokens: the longest that begins at a position. Sorted contents, narrowed byte by byte: no larger than the contents.
class TokenFinder {
 public:
  void Add(std::string_view content, size_t index) {
    if (!content.empty()) tokens_.emplace_back(content, index);
  }
  // Once, after the last Add. Of equal contents the last counts.
  void Sort() {
    std::stable_sort(tokens_.begin(), tokens_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [content, index] : tokens_) starts_[static_cast<uint8_t>(content[0])] = true;
  }
  bool empty() const { return tokens_.empty(); }
  // The index of the longest token at text[at], or -1; `length` becomes its bytes.
  long Longest(std::string_view text, size_t at, size_t* length) const {
    if (!starts_[static_cast<uint8_t>(text[at])]) return -1;
    long found = -1;
    auto low = tokens_.begin(), high = tokens_.end();  // those that begin like the text
    for (size_t n = 0; at + n < text.size() && low != high; ++n) {
      const uint8_t byte = static_cast<uint8_t>(text[at + n]);
      const auto before = [&](const Token& t, int value) { return t.first.size() <= n || static_cast<uint8_t>(t.first[n]) < value; };
      low = std::lower_bound(low, high, byte, before);
      high = std::lower_bound(low, high, byte + 1, before);
      for (auto t = low; t != high && t->first.size() == n + 1; ++t) found = static_cast<long>(t->second), *length = n + 1;
    }
    return found;
  }

 private:
  using Token = std::pair<std::string, size_t>;
  std::vector<Token> tokens_;
  std::array<bool, 256> starts_{};
};

// What `single_word` takes for a part of a word.
bool WordAt(std::string_view text, size_t at) { return at < text.size() && Contains(RustWordSet(), ReadUtf8(text, at).cp); }

size_t PreviousChar(std::string_view text, size_t at) {
  do {
    --at;
  } while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80);
  return at;
}

bool WordBefore(std::string_view text, size_t at) { return at > 0 && WordAt(text, PreviousChar(text, at)); }

}  // namespace

struct Tokenizer::Impl {
  std::string json;

  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Bpe model;
  TokenDecoder decoder;
  std::vector<std::string> bytes;  // by id: what the token decodes to inside a text
  std::vector<uint8_t> present;    // by id
  std::vector<uint8_t> special;    // by id
  std::vector<uint8_t> skipped;    // by id: left out of a text without special tokens

  std::vector<AddedToken> added;
  std::vector<std::string> shown;  // of each added token: what it decodes to, its content as the normalizer leaves it
  std::unordered_map<int32_t, size_t> added_at;  // by id: index into `added`
  std::unordered_map<std::string, int32_t> added_ids;
  TokenFinder raw_tokens;         // indices into `added` of tokens sought in the text as it is
  TokenFinder normalized_tokens;  // and in the normalised text

  std::vector<int32_t> prefix, suffix;  // the post-processor, around one sequence
  size_t token_bytes_max = 0;  // no token stands for more bytes of a text; 0 = not known

  // Loading.
  Status Load(const Value& root);
  Status LoadAddedTokens(const Value& list);
  Status LoadPostProcessor(const Value& node, int depth);
  size_t LongestToken() const;

  std::optional<int32_t> Find(std::string_view content) const;
  // The spelling of a token that is there, which the decoder reads.
  const std::string& Content(int32_t id) const;

  // A piece of the text between added tokens.
  using Rest = std::function<void(std::string_view piece, Before before)>;
  void EncodeWithTokens(std::string_view text, Before before, bool parse_special, const TokenFinder& tokens, const Rest& rest,
                        std::vector<int32_t>* out) const;
  void EncodePiece(std::string_view text, Before before, std::vector<int32_t>* out, size_t* dropped) const;
  std::vector<int32_t> Encode(std::string_view text, Before before, bool parse_special, size_t* dropped) const;
};

std::optional<int32_t> Tokenizer::Impl::Find(std::string_view content) const {
  if (auto it = added_ids.find(std::string(content)); it != added_ids.end()) return it->second;
  return model.Find(content);
}

const std::string& Tokenizer::Impl::Content(int32_t id) const {
  if (auto it = added_at.find(id); it != added_at.end()) return shown[it->second];
  return *model.contents()[static_cast<size_t>(id)];
}

Status Tokenizer::Impl::LoadAddedTokens(const Value& list) {
  const auto& contents = model.contents();
  present.resize(contents.size());
  for (size_t id = 0; id < contents.size(); ++id) present[id] = contents[id].has_value();
  if (list.is_undefined() || list.is_none()) return Status::Ok();
  if (!list.is_list()) return InvalidArgument("tokenizer.json: added_tokens must be a list");
  int64_t next = 0;  // the id of the next token that the vocabulary lacks
  for (const bool there : present) next += there;
  for (size_t i = 0; i < list.as_list().size(); ++i) {
    const Value& node = list.as_list()[i];
    const Component fields(node, "added_tokens[" + std::to_string(i) + "]");
    RETURN_IF_ERROR(fields.Expect({"id", "content", "special", "normalized", "lstrip", "rstrip", "single_word"}));
    const Value *id = node.Find("id"), *content = node.Find("content");
    if (!id || !id->is_int() || !content || !content->is_string()) return fields.Bad(" needs an integer id and a string content");
    AddedToken token;
    token.content = content->as_string();
    if (token.content.empty()) continue;  // as Hugging Face does
    ASSIGN_OR_RETURN(token.special, fields.Bool("special", false));
    ASSIGN_OR_RETURN(token.normalized, fields.Bool("normalized", !token.special));
    ASSIGN_OR_RETURN(token.lstrip, fields.Bool("lstrip", false));
    ASSIGN_OR_RETURN(token.rstrip, fields.Bool("rstrip", false));
    ASSIGN_OR_RETURN(token.single_word, fields.Bool("single_word", false));
    // Whatever id the file says, Hugging Face gives a token the vocabulary's, or else the next behind all those given before.
    const auto known = Find(token.content);
    token.id = known ? *known : static_cast<int32_t>(next);
    next = std::max<int64_t>(next, token.id + 1);
    const size_t at = static_cast<size_t>(token.id);
    if (at >= present.size()) present.resize(at + 1);
    if (!known && present[at]) {
      return fields.Bad(" '" + Shown(token.content, 100) + "': its id would be " + std::to_string(token.id) +
                        ", which another token has: the ids of the vocabulary have gaps");
    }
    present[at] = 1;
    added_ids[token.content] = token.id;
    added_at[token.id] = added.size();
    added.push_back(std::move(token));
  }
  for (size_t i = 0; i < added.size(); ++i) {
    shown.push_back(added[i].normalized ? normalizer.Apply(added[i].content) : added[i].content);
    (added[i].normalized ? normalized_tokens : raw_tokens).Add(shown.back(), i);
  }
  raw_tokens.Sort();
  normalized_tokens.Sort();
  return Status::Ok();
}

Status Tokenizer::Impl::LoadPostProcessor(const Value& node, int depth) {
  if (node.is_undefined() || node.is_none()) return Status::Ok();
  const std::string type = node.StringOr("type", "?");
  if (type == "ByteLevel") return Status::Ok();  // changes offsets only
  if (type == "Sequence" && depth <= 8) {
    const Value* list = node.Find("processors");
    if (!list || !list->is_list()) return Component(node, "post_processor").Unsupported();
    for (const Value& child : list->as_list()) RETURN_IF_ERROR(LoadPostProcessor(child, depth + 1));
    return Status::Ok();
  }
  const Value *single = node.Find("single"), *tokens = node.Find("special_tokens");
  if (type != "TemplateProcessing" || !single || !single->is_list() || !tokens) return Component(node, "post_processor").Unsupported();
  std::vector<int32_t> before, after;
  bool seen = false;
  for (const Value& piece : single->as_list()) {
    if (piece.Find("Sequence")) {
      if (seen) return InvalidArgument("tokenizer.json: TemplateProcessing.single with two sequences is not supported");
      seen = true;
      continue;
    }
    const Value* token = piece.Find("SpecialToken");
    const Value* entry = token ? tokens->Find(token->StringOr("id", "")) : nullptr;
    const Value* ids = entry ? entry->Find("ids") : nullptr;
    if (!ids || !ids->is_list()) return InvalidArgument("tokenizer.json: TemplateProcessing.single names no known special token");
    for (const Value& id : ids->as_list()) {
      if (!id.is_int() || id.as_int() < 0 || id.as_int() > INT32_MAX) return InvalidArgument("tokenizer.json: TemplateProcessing has an id out of range");
      (seen ? after : before).push_back(static_cast<int32_t>(id.as_int()));
    }
  }
  if (!seen) return InvalidArgument("tokenizer.json: TemplateProcessing.single without a sequence is not supported");
  prefix.insert(prefix.begin(), before.begin(), before.end());
  suffix.insert(suffix.end(), after.begin(), after.end());
  return Status::Ok();
}

Status Tokenizer::Impl::Load(const Value& root) {
  if (!root.is_dict()) return InvalidArgument("tokenizer.json: not an object");
  auto part = [&](const char* key) {
    const Value* v = root.Find(key);
    return v ? *v : Value();
  };
  RETURN_IF_ERROR(normalizer.Load(part("normalizer")));
  RETURN_IF_ERROR(pre_tokenizer.Load(part("pre_tokenizer")));
  if (pre_tokenizer.needs_start() && !normalizer.empty() && !(normalizer.keeps_start() && pre_tokenizer.start_first())) {
    return InvalidArgument("tokenizer.json: pre_tokenizer(Metaspace).prepend_scheme 'first' is not supported behind this normalizer");
  }
  RETURN_IF_ERROR(model.Load(part("model"), pre_tokenizer.byte_level()));
  RETURN_IF_ERROR(decoder.Load(part("decoder")));
  RETURN_IF_ERROR(LoadAddedTokens(part("added_tokens")));
  RETURN_IF_ERROR(LoadPostProcessor(part("post_processor"), 0));
  bytes.resize(present.size());
  special.resize(present.size());
  skipped.resize(present.size());
  for (size_t id = 0; id < present.size(); ++id) {
    if (present[id]) bytes[id] = decoder.Bytes(Content(static_cast<int32_t>(id)));
  }
  for (size_t i = 0; i < added.size(); ++i) {
    special[static_cast<size_t>(added[i].id)] = added[i].special;
    // Hugging Face looks for what the token decodes to among the contents of special tokens.
    const auto same = added_ids.find(shown[i]);
    skipped[static_cast<size_t>(added[i].id)] = same != added_ids.end() && added[added_at.at(same->second)].special;
  }
  token_bytes_max = LongestToken();
  return Status::Ok();
}

size_t Tokenizer::Impl::LongestToken() const {
  // Normalised, a text may have bytes without a token where it had others.
  if ((!normalizer.empty() && !model.complete()) || pre_tokenizer.drops_text()) return 0;
  size_t longest = 0;
  for (size_t id = 0; id < present.size(); ++id) {
    if (present[id]) longest = std::max({longest, bytes[id].size(), Content(static_cast<int32_t>(id)).size()});
  }
  for (const AddedToken& token : added) {
    if (token.lstrip || token.rstrip) return 0;
  }
  return longest * normalizer.shrink();
}

// Cuts `text` at added tokens; what lies between goes to `rest`.
void Tokenizer::Impl::EncodeWithTokens(std::string_view text, Before before, bool parse_special, const TokenFinder& tokens,
                                       const Rest& rest, std::vector<int32_t>* out) const {
  size_t done = 0;
  for (size_t at = 0; at < text.size() && !tokens.empty();) {
    size_t length = 0;
    const long found = tokens.Longest(text, at, &length);
    if (found < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = added[static_cast<size_t>(found)];
    size_t start = at, stop = at + length;
    at = stop;  // a token may begin with white space that the one before it swallows
    if (token.special && !parse_special) continue;
    if (token.single_word && (WordBefore(text, start) || WordAt(text, stop))) continue;
    if (token.lstrip) {
      while (start > done && Contains(SpaceSet(), ReadUtf8(text, PreviousChar(text, start)).cp)) start = PreviousChar(text, start);
      start = std::max(start, done);
    }
    if (token.rstrip) {
      while (stop < text.size() && Contains(SpaceSet(), ReadUtf8(text, stop).cp)) stop += ReadUtf8(text, stop).length;
    }
    if (start >= stop) continue;  // one of white space only, and the one before it swallowed it all
    if (start > done) rest(text.substr(done, start - done), done == 0 ? before : Before::kAddedToken);
    out->push_back(token.id);
    done = stop;
  }
  if (done < text.size()) rest(text.substr(done), done == 0 ? before : Before::kAddedToken);
}

// One piece between added tokens: pre-tokenizer, then merges.
void Tokenizer::Impl::EncodePiece(std::string_view text, Before before, std::vector<int32_t>* out, size_t* dropped) const {
  if (pre_tokenizer.empty()) return model.Encode(text, out, dropped);
  Words words;
  words.points = ToCodePoints(text);
  words.before = before;
  if (!words.points.empty()) words.spans.emplace_back(0, words.points.size());
  pre_tokenizer.Apply(&words);
  std::string word;
  for (const auto& [begin, end] : words.spans) {
    word.clear();
    for (size_t i = begin; i < end; ++i) AppendUtf8(words.points[i], &word);
    model.Encode(word, out, dropped);
  }
}

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::FromJson(std::string_view tokenizer_json) {
  auto root = ParseJson(tokenizer_json);
  if (!root.ok()) return root.status().WithContext("tokenizer.json");
  auto impl = std::make_unique<Impl>();
  RETURN_IF_ERROR(impl->Load(*root));
  impl->json = std::string(tokenizer_json);
  return Tokenizer(std::unique_ptr<const Impl>(std::move(impl)));
}

Result<Tokenizer> Tokenizer::FromGguf(const GgufTokenizer& gguf) {
  ASSIGN_OR_RETURN(const Value root, TokenizerJsonOf(gguf));
  auto impl = std::make_unique<Impl>();
  if (Status status = impl->Load(root); !status.ok()) return status.WithContext("tokenizer of the GGUF file");
  impl->json = CompactJson(root);
  return Tokenizer(std::unique_ptr<const Impl>(std::move(impl)));
}

std::vector<int32_t> Tokenizer::Impl::Encode(std::string_view text, Before before, bool parse_special, size_t* dropped) const {
  std::string repaired;
  if (!IsValidUtf8(text)) text = repaired = ToValidUtf8(text);
  std::vector<int32_t> out;
  const Rest encode = [&](std::string_view piece, Before what) { EncodePiece(piece, what, &out, dropped); };
  const Rest normalize = [&](std::string_view piece, Before what) {
    std::string normalized;
    if (!normalizer.empty()) piece = normalized = normalizer.Apply(piece, what == Before::kText);
    EncodeWithTokens(piece, what, parse_special, normalized_tokens, encode, &out);
  };
  EncodeWithTokens(text, before, parse_special, raw_tokens, normalize, &out);
  return out;
}

std::vector<int32_t> Tokenizer::Encode(std::string_view text, const EncodeOptions& options, size_t* dropped_bytes) const {
  size_t dropped = 0;
  std::vector<int32_t> out = impl_->Encode(text, Before::kNothing, options.parse_special, &dropped);
  if (options.add_special) {
    out.insert(out.begin(), impl_->prefix.begin(), impl_->prefix.end());
    out.insert(out.end(), impl_->suffix.begin(), impl_->suffix.end());
  }
  if (dropped_bytes) *dropped_bytes += dropped;
  return out;
}

std::vector<int32_t> Tokenizer::EncodeAfter(int32_t last, std::string_view text) const {
  size_t dropped = 0;
  const auto token = impl_->added_at.find(last);
  if (token == impl_->added_at.end()) return impl_->Encode(text, Before::kText, true, &dropped);
  if (impl_->added[token->second].rstrip) {
    while (!text.empty() && Contains(SpaceSet(), ReadUtf8(text, 0).cp)) text.remove_prefix(ReadUtf8(text, 0).length);
  }
  return impl_->Encode(text, Before::kAddedToken, true, &dropped);
}

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special) const {
  StreamDecoder stream(*this, skip_special);
  std::string out = stream.Append(ids);
  return out += stream.Finish();
}

std::string_view Tokenizer::TokenBytes(int32_t id) const { return HasToken(id) ? std::string_view(impl_->bytes[static_cast<size_t>(id)]) : ""; }

bool Tokenizer::HasToken(int32_t id) const { return id >= 0 && id < size() && impl_->present[static_cast<size_t>(id)]; }

bool Tokenizer::IsSpecial(int32_t id) const { return HasToken(id) && impl_->special[static_cast<size_t>(id)]; }

std::optional<int32_t> Tokenizer::TokenId(std::string_view token) const { return impl_->Find(token); }

size_t Tokenizer::LeastTokens(std::string_view text) const {
  return impl_->token_bytes_max == 0 ? 0 : impl_->model.BytesThatShow(text) / impl_->token_bytes_max;
}

const char* Tokenizer::kind() const { return impl_->model.kind(); }
int32_t Tokenizer::size() const { return static_cast<int32_t>(impl_->bytes.size()); }

const std::vector<AddedToken>& Tokenizer::added_tokens() const { return impl_->added; }

const std::string& Tokenizer::json() const { return impl_->json; }

struct StreamDecoder::State {
  const Tokenizer::Impl& tokenizer;
  TokenDecoder::Run run;
};

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool skip_special)
    : skip_special_(skip_special), state_(new State{*tokenizer.impl_, tokenizer.impl_->decoder.Begin()}) {}
StreamDecoder::StreamDecoder(StreamDecoder&&) noexcept = default;
StreamDecoder& StreamDecoder::operator=(StreamDecoder&&) noexcept = default;
StreamDecoder::~StreamDecoder() = default;

std::string StreamDecoder::Append(std::span<const int32_t> ids) {
  const Tokenizer::Impl& t = state_->tokenizer;
  std::string out;
  for (int32_t id : ids) {
    if (id < 0 || static_cast<size_t>(id) >= t.present.size() || !t.present[static_cast<size_t>(id)]) continue;
    if (skip_special_ && t.skipped[static_cast<size_t>(id)]) continue;
    t.decoder.Feed(t.Content(id), &state_->run, &out);
  }
  return out;
}

std::string StreamDecoder::Finish() {
  std::string out;
  state_->tokenizer.decoder.End(&state_->run, &out);
  state_->run = state_->tokenizer.decoder.Begin();
  return out;
}

}  // namespace temper::text
