#include "text/tokenizer.h"

#include <algorithm>
#include <array>
#include <functional>
#include <queue>
#include <unordered_map>
#include <unordered_set>

#include "text/json.h"
#include "text/regex.h"
#include "text/unicode.h"
#include "text/utf8.h"
#include "text/value.h"

namespace temper::text {
namespace {

constexpr const char* kGpt2Regex =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

// GPT-2's byte alphabet: a printable code point for every byte.
struct ByteAlphabet {
  std::array<uint32_t, 256> point{};
  std::unordered_map<uint32_t, uint8_t> byte;
  ByteAlphabet() {
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      point[b] = printable ? b : next++;
      byte[point[b]] = static_cast<uint8_t>(b);
    }
  }
};

const ByteAlphabet& Alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

// The bytes a token of the vocabulary stands for; nullopt when it is not written in the byte alphabet.
std::optional<std::string> FromByteAlphabet(std::string_view token) {
  std::string out;
  for (size_t i = 0; i < token.size();) {
    const Utf8Char c = ReadUtf8(token, i);
    auto it = Alphabet().byte.find(c.cp);
    if (it == Alphabet().byte.end()) return std::nullopt;
    out.push_back(static_cast<char>(it->second));
    i += c.length;
  }
  return out;
}

enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct Segment {
  size_t begin, end;  // code points
  bool match;
};

// One step of the pre-tokenizer: cuts a piece at the matches of a regular expression.
struct SplitStage {
  Regex regex;
  Behavior behavior;
  bool invert;

  void Apply(std::span<const uint32_t> text, size_t begin, size_t end, std::vector<std::pair<size_t, size_t>>* out) const {
    std::vector<Segment> segments;
    size_t at = begin;
    for (const auto& [a, b] : regex.FindAll(text.subspan(begin, end - begin))) {
      if (begin + a > at) segments.push_back({at, begin + a, invert});
      segments.push_back({begin + a, begin + b, !invert});
      at = begin + b;
    }
    if (at < end) segments.push_back({at, end, invert});
    if (behavior == Behavior::kMergedWithNext) std::reverse(segments.begin(), segments.end());
    std::vector<Segment> joined;
    for (const Segment& s : segments) {
      bool join = false;
      if (!joined.empty()) {
        if (behavior == Behavior::kContiguous) join = s.match == joined.back().match;
        if (behavior == Behavior::kMergedWithPrevious || behavior == Behavior::kMergedWithNext) join = s.match && !joined.back().match;
      }
      if (join) {
        joined.back().begin = std::min(joined.back().begin, s.begin);
        joined.back().end = std::max(joined.back().end, s.end);
        joined.back().match = s.match;
      } else if (behavior != Behavior::kRemoved || !s.match) {
        joined.push_back(s);
      }
    }
    if (behavior == Behavior::kMergedWithNext) std::reverse(joined.begin(), joined.end());
    for (const Segment& s : joined) out->emplace_back(s.begin, s.end);
  }
};

enum class Normalizer { kNfc, kNfd };

// Finds added tokens: the longest that begins at a position.
class TokenTrie {
 public:
  TokenTrie() : nodes_(1) {}
  void Add(std::string_view content, size_t index) {
    uint32_t at = 0;
    for (char c : content) {
      auto [it, is_new] = nodes_[at].next.try_emplace(c, static_cast<uint32_t>(nodes_.size()));
      const uint32_t to = it->second;
      if (is_new) nodes_.emplace_back();
      at = to;
    }
    nodes_[at].token = static_cast<long>(index);
    if (!content.empty()) starts_[static_cast<uint8_t>(content[0])] = true;
  }
  bool empty() const { return nodes_.size() == 1; }
  // The index of the longest token at text[at], or -1; `length` becomes its bytes.
  long Longest(std::string_view text, size_t at, size_t* length) const {
    if (!starts_[static_cast<uint8_t>(text[at])]) return -1;
    long found = -1;
    uint32_t node = 0;
    for (size_t i = at; i < text.size(); ++i) {
      auto it = nodes_[node].next.find(text[i]);
      if (it == nodes_[node].next.end()) break;
      node = it->second;
      if (nodes_[node].token >= 0) found = nodes_[node].token, *length = i + 1 - at;
    }
    return found;
  }

 private:
  struct Node {
    std::unordered_map<char, uint32_t> next;
    long token = -1;
  };
  std::vector<Node> nodes_;
  std::array<bool, 256> starts_{};
};

// What `single_word` takes for a part of a word: \w of Rust's regex, not of the pre-tokenizer's engine.
bool WordAt(std::string_view text, size_t at) {
  static const CodeSet set = [] {
    // The circled letters are the alphabetic code points beyond letters, letter numbers and marks.
    CodeSet out = {{0x200C, 0x200D}, {0x24B6, 0x24E9}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}};
    for (const char* name : {"L", "Nl", "M", "Nd", "Pc"}) out = Union(out, *UnicodeProperty(name));
    return out;
  }();
  return at < text.size() && Contains(set, ReadUtf8(text, at).cp);
}

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

  std::vector<std::string> bytes;        // by id: what the token decodes to
  std::vector<uint8_t> present;          // by id
  std::vector<uint8_t> special;          // by id
  std::unordered_map<std::string, int32_t> by_bytes;    // tokens written in the byte alphabet
  std::unordered_map<std::string, int32_t> by_content;  // other tokens of the vocabulary
  std::array<int32_t, 256> byte_id{};
  struct Merge { uint32_t rank; int32_t id; };
  std::unordered_map<uint64_t, Merge> merges;
  bool ignore_merges = false;
  std::optional<int32_t> unk;
  bool fuse_unk = false;

  std::vector<AddedToken> added;
  std::unordered_map<std::string, int32_t> added_ids;
  TokenTrie raw_tokens;         // indices into `added` of tokens sought in the text as it is
  TokenTrie normalized_tokens;  // and in the normalised text

  std::vector<Normalizer> normalizers;
  std::vector<SplitStage> stages;  // before ByteLevel
  bool byte_level = false;
  bool add_prefix_space = false;
  std::optional<Regex> byte_level_regex;

  std::vector<int32_t> prefix, suffix;  // the post-processor, around one sequence
  size_t token_bytes_max = 0;  // no token stands for more bytes of a text; 0 = not known

  // Loading.
  Status Load(const Value& root);
  Status LoadModel(const Value& model);
  Status LoadAddedTokens(const Value& list);
  Status LoadNormalizer(const Value& node, int depth);
  Status LoadPreTokenizer(const Value& node, int depth);
  Status LoadPostProcessor(const Value& node, int depth);
  Status LoadDecoder(const Value& node, int depth) const;
  Status AddSplit(Regex regex, Behavior behavior, bool invert);
  size_t LongestToken() const;
  std::optional<int32_t> Find(std::string_view content) const;
  Status Place(int64_t id, size_t most);

  // Encoding.
  void EncodeWithTokens(std::string_view text, bool parse_special, const TokenTrie& trie,
                        const std::function<void(std::string_view)>& rest, std::vector<int32_t>* out) const;
  void EncodePiece(std::string_view text, std::vector<int32_t>* out, size_t* dropped) const;
  void EncodeWord(std::string_view word, std::vector<int32_t>* out, size_t* dropped) const;
};

namespace {

// The fields of one component of tokenizer.json; every field it does not take is refused.
class Component {
 public:
  Component(const Value& node, std::string where) : node_(node), where_(std::move(where)) {}

  Status Expect(std::initializer_list<std::string_view> known) const {
    if (!node_.is_dict()) return InvalidArgument("tokenizer.json: " + where_ + " must be an object");
    for (const auto& [key, value] : node_.as_dict().items()) {
      const std::string& name = key.as_string();
      if (std::find(known.begin(), known.end(), name) == known.end()) {
        return InvalidArgument("tokenizer.json: " + where_ + "." + name + " is not supported");
      }
    }
    return Status::Ok();
  }
  Result<bool> Bool(std::string_view key, bool fallback) const {
    const Value* v = node_.Find(key);
    if (!v || v->is_none()) return fallback;
    if (!v->is_bool()) return InvalidArgument("tokenizer.json: " + where_ + "." + std::string(key) + " must be true or false");
    return v->as_bool();
  }

 private:
  const Value& node_;
  std::string where_;
};

Status Unsupported(const std::string& what, const Value& node) {
  return InvalidArgument("tokenizer.json: " + what + " '" + node.StringOr("type", "?") + "' is not supported");
}

}  // namespace

std::optional<int32_t> Tokenizer::Impl::Find(std::string_view content) const {
  if (auto it = added_ids.find(std::string(content)); it != added_ids.end()) return it->second;
  if (auto raw = FromByteAlphabet(content)) {
    auto it = by_bytes.find(*raw);
    if (it != by_bytes.end()) return it->second;
    return std::nullopt;
  }
  auto it = by_content.find(std::string(content));
  if (it != by_content.end()) return it->second;
  return std::nullopt;
}

// Makes room for `id`; ids far beyond the number of tokens are refused, so that memory follows the size of the file.
Status Tokenizer::Impl::Place(int64_t id, size_t most) {
  if (id < 0 || static_cast<uint64_t>(id) >= most) {
    return InvalidArgument("tokenizer.json: token id " + std::to_string(id) + " is out of range (0.." + std::to_string(most - 1) + ")");
  }
  const size_t i = static_cast<size_t>(id);
  if (i >= bytes.size()) {
    bytes.resize(i + 1);
    present.resize(i + 1);
    special.resize(i + 1);
  }
  return Status::Ok();
}

Status Tokenizer::Impl::LoadModel(const Value& model) {
  const Component fields(model, "model");
  RETURN_IF_ERROR(fields.Expect({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                                 "byte_fallback", "ignore_merges", "vocab", "merges"}));
  if (model.StringOr("type", "BPE") != "BPE") return Unsupported("model", model);
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Value* v = model.Find(key);
    if (v && !v->is_none() && !(v->is_string() && v->as_string().empty())) {
      return InvalidArgument(std::string("tokenizer.json: model.") + key + " is not supported");
    }
  }
  if (const Value* v = model.Find("dropout"); v && !v->is_none() && !(v->is_float() && v->as_float() == 0)) {
    return InvalidArgument("tokenizer.json: model.dropout is not supported");
  }
  ASSIGN_OR_RETURN(const bool byte_fallback, fields.Bool("byte_fallback", false));
  if (byte_fallback) return InvalidArgument("tokenizer.json: model.byte_fallback is not supported");
  ASSIGN_OR_RETURN(ignore_merges, fields.Bool("ignore_merges", false));
  ASSIGN_OR_RETURN(fuse_unk, fields.Bool("fuse_unk", false));

  const Value* vocab = model.Find("vocab");
  if (!vocab || !vocab->is_dict()) return InvalidArgument("tokenizer.json: model.vocab is missing or not an object");
  const size_t most = 2 * vocab->as_dict().size() + (1 << 20);
  for (const auto& [key, value] : vocab->as_dict().items()) {
    const std::string& content = key.as_string();
    if (!value.is_int()) return InvalidArgument("tokenizer.json: model.vocab['" + content + "'] is not an integer");
    RETURN_IF_ERROR(Place(value.as_int(), most));
    const size_t id = static_cast<size_t>(value.as_int());
    if (present[id]) return InvalidArgument("tokenizer.json: two tokens have the id " + std::to_string(id));
    present[id] = 1;
    if (auto raw = FromByteAlphabet(content)) {
      by_bytes.emplace(*raw, static_cast<int32_t>(id));
      bytes[id] = std::move(*raw);
    } else {
      by_content.emplace(content, static_cast<int32_t>(id));
      bytes[id] = content;
    }
  }
  for (int b = 0; b < 256; ++b) {
    auto it = by_bytes.find(std::string(1, static_cast<char>(b)));
    byte_id[static_cast<size_t>(b)] = it == by_bytes.end() ? -1 : it->second;
  }

  if (const Value* v = model.Find("unk_token"); v && !v->is_none()) {
    if (!v->is_string()) return InvalidArgument("tokenizer.json: model.unk_token must be a string or null");
    unk = Find(v->as_string());  // absent from the vocabulary: Hugging Face fails only when it needs it
  }

  const Value* list = model.Find("merges");
  if (!list || !list->is_list()) return InvalidArgument("tokenizer.json: model.merges is missing or not a list");
  const List& items = list->as_list();
  merges.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const std::string where = "tokenizer.json: model.merges[" + std::to_string(i) + "]";
    std::string left, right;
    if (items[i].is_string()) {
      const std::string& text = items[i].as_string();
      const size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        return InvalidArgument(where + " must be two tokens with a space between");
      }
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (items[i].is_list() && items[i].as_list().size() == 2 && items[i].as_list()[0].is_string() &&
               items[i].as_list()[1].is_string()) {
      left = items[i].as_list()[0].as_string();
      right = items[i].as_list()[1].as_string();
    } else {
      return InvalidArgument(where + " must be two tokens");
    }
    const auto a = Find(left), b = Find(right), joined = Find(left + right);
    if (!a || !b || !joined) {
      return InvalidArgument(where + ": '" + (!a ? left : !b ? right : left + right) + "' is not in the vocabulary");
    }
    merges[static_cast<uint64_t>(*a) << 32 | static_cast<uint32_t>(*b)] = {static_cast<uint32_t>(i), *joined};
  }
  return Status::Ok();
}

Status Tokenizer::Impl::LoadAddedTokens(const Value& list) {
  if (list.is_undefined() || list.is_none()) return Status::Ok();
  if (!list.is_list()) return InvalidArgument("tokenizer.json: added_tokens must be a list");
  const size_t most = bytes.size() + 2 * list.as_list().size() + (1 << 20);
  for (size_t i = 0; i < list.as_list().size(); ++i) {
    const Value& node = list.as_list()[i];
    const std::string where = "added_tokens[" + std::to_string(i) + "]";
    const Component fields(node, where);
    RETURN_IF_ERROR(fields.Expect({"id", "content", "special", "normalized", "lstrip", "rstrip", "single_word"}));
    const Value *id = node.Find("id"), *content = node.Find("content");
    if (!id || !id->is_int() || !content || !content->is_string()) {
      return InvalidArgument("tokenizer.json: " + where + " needs an integer id and a string content");
    }
    AddedToken token;
    token.content = content->as_string();
    if (token.content.empty()) continue;  // as Hugging Face does
    ASSIGN_OR_RETURN(token.special, fields.Bool("special", false));
    ASSIGN_OR_RETURN(token.normalized, fields.Bool("normalized", !token.special));
    ASSIGN_OR_RETURN(token.lstrip, fields.Bool("lstrip", false));
    ASSIGN_OR_RETURN(token.rstrip, fields.Bool("rstrip", false));
    ASSIGN_OR_RETURN(token.single_word, fields.Bool("single_word", false));
    RETURN_IF_ERROR(Place(id->as_int(), most));
    token.id = static_cast<int32_t>(id->as_int());
    const size_t at = static_cast<size_t>(token.id);
    const auto known = Find(token.content);
    if (known ? *known != token.id : present[at] != 0) {
      return InvalidArgument("tokenizer.json: " + where + " '" + token.content + "': its id " + std::to_string(token.id) +
                             " contradicts the vocabulary");
    }
    present[at] = 1;
    special[at] = token.special;
    bytes[at] = FromByteAlphabet(token.content).value_or(token.content);  // the decoder makes no difference for added tokens
    added_ids[token.content] = token.id;
    added.push_back(std::move(token));
  }
  for (size_t i = 0; i < added.size(); ++i) {
    if (!added[i].normalized) {
      raw_tokens.Add(added[i].content, i);
      continue;
    }
    std::string content = added[i].content;
    for (Normalizer n : normalizers) content = n == Normalizer::kNfc ? ToNfc(content) : ToNfd(content);
    normalized_tokens.Add(content, i);
  }
  return Status::Ok();
}

Status Tokenizer::Impl::LoadNormalizer(const Value& node, int depth) {
  if (node.is_undefined() || node.is_none()) return Status::Ok();
  const std::string type = node.StringOr("type", "?");
  if (type == "NFC" || type == "NFD") {
    normalizers.push_back(type == "NFC" ? Normalizer::kNfc : Normalizer::kNfd);
    return Status::Ok();
  }
  const Value* list = node.Find("normalizers");
  if (type != "Sequence" || !list || !list->is_list() || depth > 8) return Unsupported("normalizer", node);
  for (const Value& child : list->as_list()) RETURN_IF_ERROR(LoadNormalizer(child, depth + 1));
  return Status::Ok();
}

Status Tokenizer::Impl::AddSplit(Regex regex, Behavior behavior, bool invert) {
  if (byte_level) return InvalidArgument("tokenizer.json: a pre_tokenizer after ByteLevel is not supported");
  if (stages.size() >= 32) return InvalidArgument("tokenizer.json: more than 32 pre_tokenizers");
  stages.push_back({std::move(regex), behavior, invert});
  return Status::Ok();
}

Status Tokenizer::Impl::LoadPreTokenizer(const Value& node, int depth) {
  if (node.is_undefined() || node.is_none()) return Status::Ok();
  const std::string type = node.StringOr("type", "?");
  const Component fields(node, "pre_tokenizer(" + type + ")");
  if (type == "Sequence" && depth <= 8) {
    const Value* list = node.Find("pretokenizers");
    if (!list || !list->is_list()) return Unsupported("pre_tokenizer", node);
    for (const Value& child : list->as_list()) RETURN_IF_ERROR(LoadPreTokenizer(child, depth + 1));
    return Status::Ok();
  }
  if (type == "ByteLevel") {
    RETURN_IF_ERROR(fields.Expect({"type", "add_prefix_space", "trim_offsets", "use_regex"}));
    if (byte_level) return InvalidArgument("tokenizer.json: a pre_tokenizer after ByteLevel is not supported");
    byte_level = true;
    ASSIGN_OR_RETURN(add_prefix_space, fields.Bool("add_prefix_space", true));
    ASSIGN_OR_RETURN(const bool use_regex, fields.Bool("use_regex", true));
    if (use_regex) {
      ASSIGN_OR_RETURN(Regex regex, Regex::Parse(kGpt2Regex));
      byte_level_regex = std::move(regex);
    }
    return Status::Ok();
  }
  if (type == "Digits") {
    RETURN_IF_ERROR(fields.Expect({"type", "individual_digits"}));
    ASSIGN_OR_RETURN(const bool individual, fields.Bool("individual_digits", false));
    ASSIGN_OR_RETURN(Regex regex, Regex::Parse("\\p{N}"));
    return AddSplit(std::move(regex), individual ? Behavior::kIsolated : Behavior::kContiguous, false);
  }
  if (type == "Split") {
    RETURN_IF_ERROR(fields.Expect({"type", "pattern", "behavior", "invert"}));
    ASSIGN_OR_RETURN(const bool invert, fields.Bool("invert", false));
    static constexpr std::pair<const char*, Behavior> kBehaviors[] = {{"Removed", Behavior::kRemoved},
                                                                       {"Isolated", Behavior::kIsolated},
                                                                       {"MergedWithPrevious", Behavior::kMergedWithPrevious},
                                                                       {"MergedWithNext", Behavior::kMergedWithNext},
                                                                       {"Contiguous", Behavior::kContiguous}};
    const std::string name = node.StringOr("behavior", "?");
    const auto* behavior = std::find_if(std::begin(kBehaviors), std::end(kBehaviors), [&](const auto& b) { return name == b.first; });
    if (behavior == std::end(kBehaviors)) return InvalidArgument("tokenizer.json: Split.behavior '" + name + "' is not supported");
    const Value* pattern = node.Find("pattern");
    if (pattern && pattern->Find("Regex") && pattern->Find("Regex")->is_string()) {
      auto regex = Regex::Parse(pattern->Find("Regex")->as_string());
      if (!regex.ok()) return regex.status().WithContext("tokenizer.json: Split.pattern");
      return AddSplit(std::move(regex).value(), behavior->second, invert);
    }
    if (pattern && pattern->Find("String") && pattern->Find("String")->is_string()) {
      return AddSplit(Regex::Literal(pattern->Find("String")->as_string()), behavior->second, invert);
    }
    return InvalidArgument("tokenizer.json: Split.pattern must hold Regex or String");
  }
  return Unsupported("pre_tokenizer", node);
}

Status Tokenizer::Impl::LoadPostProcessor(const Value& node, int depth) {
  if (node.is_undefined() || node.is_none()) return Status::Ok();
  const std::string type = node.StringOr("type", "?");
  if (type == "ByteLevel") return Status::Ok();  // changes offsets only
  if (type == "Sequence" && depth <= 8) {
    const Value* list = node.Find("processors");
    if (!list || !list->is_list()) return Unsupported("post_processor", node);
    for (const Value& child : list->as_list()) RETURN_IF_ERROR(LoadPostProcessor(child, depth + 1));
    return Status::Ok();
  }
  const Value *single = node.Find("single"), *tokens = node.Find("special_tokens");
  if (type != "TemplateProcessing" || !single || !single->is_list() || !tokens) return Unsupported("post_processor", node);
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

Status Tokenizer::Impl::LoadDecoder(const Value& node, int depth) const {
  const std::string type = node.StringOr("type", "?");
  if (type == "ByteLevel") return Status::Ok();
  const Value* list = node.Find("decoders");
  if (type == "Sequence" && list && list->is_list() && list->as_list().size() == 1 && depth < 8) {
    return LoadDecoder(list->as_list()[0], depth + 1);
  }
  return Unsupported("decoder", node);
}

Status Tokenizer::Impl::Load(const Value& root) {
  if (!root.is_dict()) return InvalidArgument("tokenizer.json: not an object");
  auto part = [&](const char* key) {
    const Value* v = root.Find(key);
    return v ? *v : Value();
  };
  RETURN_IF_ERROR(LoadModel(part("model")));
  RETURN_IF_ERROR(LoadNormalizer(part("normalizer"), 0));
  RETURN_IF_ERROR(LoadPreTokenizer(part("pre_tokenizer"), 0));
  if (!byte_level) return InvalidArgument("tokenizer.json: a pre_tokenizer without ByteLevel is not supported");
  RETURN_IF_ERROR(LoadDecoder(part("decoder"), 0));
  RETURN_IF_ERROR(LoadAddedTokens(part("added_tokens")));
  RETURN_IF_ERROR(LoadPostProcessor(part("post_processor"), 0));
  token_bytes_max = LongestToken();
  return Status::Ok();
}

size_t Tokenizer::Impl::LongestToken() const {
  // Normalised, a text may have bytes without a token where it had others.
  if (!normalizers.empty() && std::count(byte_id.begin(), byte_id.end(), -1) > 0) return 0;
  for (const SplitStage& stage : stages) {
    if (stage.behavior == Behavior::kRemoved) return 0;
  }
  size_t longest = 0;
  for (const std::string& token : bytes) longest = std::max(longest, token.size());
  for (const AddedToken& token : added) {
    if (token.lstrip || token.rstrip) return 0;
    longest = std::max(longest, token.content.size());
  }
  // Composition makes a text shorter, to a third at most (a Hangul syllable of three letters).
  return normalizers.empty() ? longest : 3 * longest;
}

// Cuts `text` at added tokens; what lies between goes to `rest`.
void Tokenizer::Impl::EncodeWithTokens(std::string_view text, bool parse_special, const TokenTrie& trie,
                                       const std::function<void(std::string_view)>& rest, std::vector<int32_t>* out) const {
  if (trie.empty()) {
    if (!text.empty()) rest(text);
    return;
  }
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    size_t length = 0;
    const long found = trie.Longest(text, at, &length);
    if (found < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = added[static_cast<size_t>(found)];
    size_t start = at, stop = at + length;
    at = stop;
    if (token.special && !parse_special) continue;
    if (token.single_word && (WordBefore(text, start) || WordAt(text, stop))) continue;
    if (token.lstrip) {
      while (start > done && Contains(SpaceSet(), ReadUtf8(text, PreviousChar(text, start)).cp)) start = PreviousChar(text, start);
    }
    if (token.rstrip) {
      while (stop < text.size() && Contains(SpaceSet(), ReadUtf8(text, stop).cp)) stop += ReadUtf8(text, stop).length;
      at = stop;
    }
    if (start > done) rest(text.substr(done, start - done));
    out->push_back(token.id);
    done = stop;
  }
  if (done < text.size()) rest(text.substr(done));
}

// One piece between added tokens: pre-tokenizer, then merges.
void Tokenizer::Impl::EncodePiece(std::string_view text, std::vector<int32_t>* out, size_t* dropped) const {
  const std::vector<uint32_t> points = ToCodePoints(text);
  std::vector<std::pair<size_t, size_t>> pieces = {{0, points.size()}}, next;
  for (const SplitStage& stage : stages) {
    next.clear();
    for (const auto& [begin, end] : pieces) stage.Apply(points, begin, end, &next);
    pieces.swap(next);
  }
  auto word = [&](const uint32_t* begin, const uint32_t* end) {
    if (begin != end) EncodeWord(FromCodePoints(begin, end), out, dropped);
  };
  std::vector<uint32_t> with_space;
  for (const auto& [begin, end] : pieces) {
    const uint32_t *first = points.data() + begin, *last = points.data() + end;
    if (add_prefix_space && first != last && *first != ' ') {
      with_space.assign(1, ' ');
      with_space.insert(with_space.end(), first, last);
      first = with_space.data(), last = first + with_space.size();
    }
    if (!byte_level_regex) {
      word(first, last);
      continue;
    }
    const std::span<const uint32_t> piece(first, last);
    size_t at = 0;
    for (const auto& [a, b] : byte_level_regex->FindAll(piece)) {
      word(first + at, first + a);
      word(first + a, first + b);
      at = b;
    }
    word(first + at, last);
  }
}

// Byte-pair merges of one word, lowest rank first, leftmost among equals.
void Tokenizer::Impl::EncodeWord(std::string_view word, std::vector<int32_t>* out, size_t* dropped) const {
  if (ignore_merges || word.size() == 1) {
    if (auto it = by_bytes.find(std::string(word)); it != by_bytes.end()) {
      out->push_back(it->second);
      return;
    }
  }
  struct Symbol { int32_t id; int prev, next; };
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  bool last_was_unknown = false;
  for (char c : word) {
    int32_t id = byte_id[static_cast<uint8_t>(c)];
    const bool unknown = id < 0;
    if (unknown) {
      if (!unk) {
        ++*dropped;
        continue;
      }
      id = *unk;
    }
    if (!(unknown && fuse_unk && last_was_unknown)) {
      const int n = static_cast<int>(symbols.size());
      if (n) symbols.back().next = n;
      symbols.push_back({id, n - 1, -1});
    }
    last_was_unknown = unknown;
  }
  struct Candidate {
    uint32_t rank;
    int at;
    int32_t id;
    bool operator<(const Candidate& o) const { return rank != o.rank ? rank > o.rank : at > o.at; }
  };
  std::priority_queue<Candidate> queue;
  auto consider = [&](int left) {
    if (left < 0 || symbols[static_cast<size_t>(left)].next < 0) return;
    const Symbol& a = symbols[static_cast<size_t>(left)];
    auto it = merges.find(static_cast<uint64_t>(a.id) << 32 | static_cast<uint32_t>(symbols[static_cast<size_t>(a.next)].id));
    if (it != merges.end()) queue.push({it->second.rank, left, it->second.id});
  };
  for (int i = 0; i + 1 < static_cast<int>(symbols.size()); ++i) consider(i);
  while (!queue.empty()) {
    const Candidate c = queue.top();
    queue.pop();
    Symbol& a = symbols[static_cast<size_t>(c.at)];
    if (a.id < 0 || a.next < 0) continue;
    Symbol& b = symbols[static_cast<size_t>(a.next)];
    auto it = merges.find(static_cast<uint64_t>(a.id) << 32 | static_cast<uint32_t>(b.id));
    if (it == merges.end() || it->second.id != c.id) continue;  // made before one of the two changed
    a.id = c.id;
    b.id = -1;
    a.next = b.next;
    if (b.next >= 0) symbols[static_cast<size_t>(b.next)].prev = c.at;
    consider(a.prev);
    consider(c.at);
  }
  for (const Symbol& s : symbols) {
    if (s.id >= 0) out->push_back(s.id);
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

std::vector<int32_t> Tokenizer::Encode(std::string_view text, const EncodeOptions& options, size_t* dropped_bytes) const {
  const Impl& t = *impl_;
  std::string repaired;
  if (!IsValidUtf8(text)) text = repaired = ToValidUtf8(text);
  std::vector<int32_t> out;
  size_t dropped = 0;
  if (options.add_special) out = t.prefix;
  auto encode = [&](std::string_view piece) { t.EncodePiece(piece, &out, &dropped); };
  auto normalize = [&](std::string_view piece) {
    std::string text_of_piece;
    if (!t.normalizers.empty()) {
      text_of_piece = piece;
      for (Normalizer n : t.normalizers) text_of_piece = n == Normalizer::kNfc ? ToNfc(text_of_piece) : ToNfd(text_of_piece);
      piece = text_of_piece;
    }
    t.EncodeWithTokens(piece, options.parse_special, t.normalized_tokens, encode, &out);
  };
  t.EncodeWithTokens(text, options.parse_special, t.raw_tokens, normalize, &out);
  if (options.add_special) out.insert(out.end(), t.suffix.begin(), t.suffix.end());
  if (dropped_bytes) *dropped_bytes += dropped;
  return out;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (int32_t id : ids) {
    if (!(skip_special && IsSpecial(id))) bytes += TokenBytes(id);
  }
  return ToValidUtf8(bytes);
}

std::string_view Tokenizer::TokenBytes(int32_t id) const { return HasToken(id) ? std::string_view(impl_->bytes[static_cast<size_t>(id)]) : ""; }

bool Tokenizer::HasToken(int32_t id) const { return id >= 0 && id < size() && impl_->present[static_cast<size_t>(id)]; }

bool Tokenizer::IsSpecial(int32_t id) const { return HasToken(id) && impl_->special[static_cast<size_t>(id)]; }

std::optional<int32_t> Tokenizer::TokenId(std::string_view token) const { return impl_->Find(token); }

size_t Tokenizer::LeastTokens(std::string_view text) const {
  if (impl_->token_bytes_max == 0) return 0;
  // Bytes without a token are left out.
  const size_t kept = static_cast<size_t>(std::count_if(text.begin(), text.end(), [&](char c) {
    return impl_->byte_id[static_cast<unsigned char>(c)] >= 0;
  }));
  return kept / impl_->token_bytes_max;
}

int32_t Tokenizer::size() const { return static_cast<int32_t>(impl_->bytes.size()); }

const std::vector<AddedToken>& Tokenizer::added_tokens() const { return impl_->added; }

const std::string& Tokenizer::json() const { return impl_->json; }

namespace {

Value SplitAt(const char* regex) {
  return MakeDict({{"type", "Split"}, {"pattern", MakeDict({{"Regex", regex}})}, {"behavior", "Isolated"}, {"invert", false}});
}

Value ByteLevel(bool use_regex) {
  return MakeDict({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}});
}

// What stands for a `tokenizer.ggml.pre` in tokenizer.json.
struct PreKind {
  Value pre_tokenizer;
  Value normalizer = nullptr;
  bool ignore_merges = false;
};

std::optional<PreKind> PreKindOf(const std::string& pre) {
  auto sequence = [](List stages) { return MakeDict({{"type", "Sequence"}, {"pretokenizers", std::move(stages)}}); };
  if (pre == "gpt-2" || pre == "gpt2" || pre == "olmo" || pre == "phi-2" || pre == "mpt") return PreKind{ByteLevel(true)};
  if (pre == "smollm" || pre == "starcoder" || pre == "refact" || pre == "command-r") {
    return PreKind{sequence({MakeDict({{"type", "Digits"}, {"individual_digits", true}}), ByteLevel(true)})};
  }
  if (pre == "llama-bpe" || pre == "llama3" || pre == "llama-v3") {
    PreKind kind{sequence({SplitAt("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
                                   "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"),
                           ByteLevel(false)})};
    kind.ignore_merges = true;
    return kind;
  }
  if (pre == "qwen2" || pre == "deepseek-r1-qwen") {
    PreKind kind{sequence({SplitAt("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
                                   "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"),
                           ByteLevel(false)})};
    kind.normalizer = MakeDict({{"type", "NFC"}});
    return kind;
  }
  if (pre == "deepseek-v3") {
    return PreKind{sequence({SplitAt("\\p{N}{1,3}"), SplitAt("[一-龥\u3040-ゟ゠-ヿ]+"),
                             SplitAt("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
                                     " ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"),
                             ByteLevel(false)})};
  }
  if (pre == "default" || pre.empty()) {  // what llama.cpp does for files of an unnamed kind
    return PreKind{sequence({SplitAt("[\\p{P}\\$\\+<=>\\^~\\|]+"),
                             SplitAt("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)"), SplitAt("\\p{N}+"),
                             SplitAt("[0-9][0-9][0-9]"), ByteLevel(false)})};
  }
  return std::nullopt;
}

}  // namespace

Result<Tokenizer> Tokenizer::FromGguf(const GgufTokenizer& g) {
  if (g.model != "gpt2") return InvalidArgument("tokenizer.ggml.model '" + g.model + "' is not supported (gpt2 is)");
  const auto kind = PreKindOf(g.pre);
  if (!kind) return InvalidArgument("tokenizer.ggml.pre '" + g.pre + "' is not supported");
  if (!g.token_types.empty() && g.token_types.size() != g.tokens.size()) {
    return InvalidArgument("tokenizer.ggml.token_type has " + std::to_string(g.token_types.size()) + " entries for " +
                           std::to_string(g.tokens.size()) + " tokens");
  }
  Dict vocab;
  List added;
  for (size_t i = 0; i < g.tokens.size(); ++i) {
    const std::string& token = g.tokens[i];
    if (!IsValidUtf8(token)) return InvalidArgument("tokenizer.ggml.tokens[" + std::to_string(i) + "] is not UTF-8");
    if (vocab.Find(std::string_view(token))) return InvalidArgument("tokenizer.ggml.tokens[" + std::to_string(i) + "] '" + token + "' stands there twice");
    vocab.Set(token, static_cast<int64_t>(i));
    const int32_t type = g.token_types.empty() ? 1 : g.token_types[i];
    if (type == 3 || type == 4) {
      added.push_back(MakeDict({{"id", static_cast<int64_t>(i)}, {"content", token}, {"single_word", false}, {"lstrip", false},
                              {"rstrip", false}, {"normalized", false}, {"special", type == 3}}));
    }
  }
  List merges;
  for (const std::string& m : g.merges) {
    if (!IsValidUtf8(m)) return InvalidArgument("tokenizer.ggml.merges holds text that is not UTF-8");
    merges.push_back(m);
  }
  auto template_piece = [&](int32_t id, List* single, Dict* tokens) {
    const std::string& content = g.tokens[static_cast<size_t>(id)];
    single->push_back(MakeDict({{"SpecialToken", MakeDict({{"id", content}, {"type_id", 0}})}}));
    tokens->Set(content, MakeDict({{"id", content}, {"ids", List{static_cast<int64_t>(id)}}, {"tokens", List{content}}}));
  };
  auto in_range = [&](const std::optional<int32_t>& id) { return id && *id >= 0 && static_cast<size_t>(*id) < g.tokens.size(); };
  if ((g.add_bos && !in_range(g.bos)) || (g.add_eos && !in_range(g.eos))) {
    return InvalidArgument("tokenizer.ggml.add_bos_token or add_eos_token without the id of that token");
  }
  Value post = ByteLevel(false);
  if (g.add_bos || g.add_eos) {
    List single;
    Dict tokens;
    if (g.add_bos) template_piece(*g.bos, &single, &tokens);
    single.push_back(MakeDict({{"Sequence", MakeDict({{"id", "A"}, {"type_id", 0}})}}));
    if (g.add_eos) template_piece(*g.eos, &single, &tokens);
    List pair = single;
    pair.push_back(MakeDict({{"Sequence", MakeDict({{"id", "B"}, {"type_id", 0}})}}));
    post = MakeDict({{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", tokens}});
  }
  const Dict root = MakeDict(
      {{"version", "1.0"},
       {"truncation", nullptr},
       {"padding", nullptr},
       {"added_tokens", added},
       {"normalizer", kind->normalizer},
       {"pre_tokenizer", kind->pre_tokenizer},
       {"post_processor", post},
       {"decoder", MakeDict({{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}})},
       {"model", MakeDict({{"type", "BPE"}, {"dropout", nullptr}, {"unk_token", nullptr}, {"continuing_subword_prefix", nullptr},
                         {"end_of_word_suffix", nullptr}, {"fuse_unk", false}, {"byte_fallback", false},
                         {"ignore_merges", kind->ignore_merges}, {"vocab", vocab}, {"merges", merges}})}});
  auto tokenizer = FromJson(CompactJson(root));
  if (!tokenizer.ok()) return tokenizer.status().WithContext("tokenizer of the GGUF file");
  return tokenizer;
}

std::string ToByteAlphabet(std::string_view bytes) {
  std::string out;
  for (char c : bytes) AppendUtf8(Alphabet().point[static_cast<uint8_t>(c)], &out);
  return out;
}

std::string StreamDecoder::Append(std::span<const int32_t> ids) {
  for (int32_t id : ids) {
    if (!(skip_special_ && tokenizer_.IsSpecial(id))) held_ += tokenizer_.TokenBytes(id);
  }
  std::string out;
  size_t at = 0;
  while (at < held_.size()) {
    const Utf8Char c = ReadUtf8(held_, at);
    if (c.cut) break;
    AppendUtf8(c.cp, &out);
    at += c.length;
  }
  held_.erase(0, at);
  return out;
}

std::string StreamDecoder::Finish() {
  const std::string out = ToValidUtf8(held_);
  held_.clear();
  return out;
}

}  // namespace temper::text
