#include "text/gguf_tokenizer.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "text/utf8.h"

namespace temper::text {
namespace {

// tokenizer.ggml.token_type
enum TokenType { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kByte = 6 };

constexpr const char* kMeta = "\u2581";  // stands for a space
constexpr size_t kMaxToken = 1024;       // bytes of a token whose merges are to be found: the work grows with the square

// What follows the words in the patterns of most families.
#define TEMPER_TAIL "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define TEMPER_CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define TEMPER_UPPER "\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}"
#define TEMPER_LOWER "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"

constexpr const char* kLlama3 = TEMPER_CONTRACTIONS
    "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" TEMPER_TAIL;
constexpr const char* kQwen2 = TEMPER_CONTRACTIONS
    "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" TEMPER_TAIL;
constexpr const char* kQwen35 = TEMPER_CONTRACTIONS
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" TEMPER_TAIL;
constexpr const char* kTekken =
    "[^\\r\\n\\p{L}\\p{N}]?[" TEMPER_UPPER "]*[" TEMPER_LOWER "]+|[^\\r\\n\\p{L}\\p{N}]?[" TEMPER_UPPER "]+[" TEMPER_LOWER "]*|"
    "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" TEMPER_TAIL;
constexpr const char* kO200k =
    "[^\\r\\n\\p{L}\\p{N}]?[" TEMPER_UPPER "]*[" TEMPER_LOWER "]+" TEMPER_CONTRACTIONS "?|"
    "[^\\r\\n\\p{L}\\p{N}]?[" TEMPER_UPPER "]+[" TEMPER_LOWER "]*" TEMPER_CONTRACTIONS "?|"
    "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" TEMPER_TAIL;
constexpr const char* kKimiK2 =
    "\\p{Han}+|"
    "[^\\r\\n\\p{L}\\p{N}]?[" TEMPER_UPPER "&&[^\\p{Han}]]*[" TEMPER_LOWER "&&[^\\p{Han}]]+" TEMPER_CONTRACTIONS "?|"
    "[^\\r\\n\\p{L}\\p{N}]?[" TEMPER_UPPER "&&[^\\p{Han}]]+[" TEMPER_LOWER "&&[^\\p{Han}]]*" TEMPER_CONTRACTIONS "?|"
    "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" TEMPER_TAIL;
// The letters of the scripts that have case, as DeepSeek LLM lists them.
constexpr const char* kDeepseekLetters =
    "\\s?[A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF\u0370-\u0373\u0376\u0377"
    "\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F\u0531-\u0556"
    "\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77\u1D79-\u1D9A\u1E00-\u1F15"
    "\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE"
    "\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC\u2102\u2107\u210A-\u2113"
    "\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184"
    "\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2\u2CF3\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E"
    "\uAB70-\uABBF\uFB00-\uFB06\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A\U00010400-\U0001044F\U000104B0-\U000104D3"
    "\U000104D8-\U000104FB\U00010C80-\U00010CB2\U00010CC0-\U00010CF2\U000118A0-\U000118DF\U0001E900-\U0001E943]+";
constexpr const char* kDeepseekCjk = "[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+";

#undef TEMPER_TAIL
#undef TEMPER_CONTRACTIONS
#undef TEMPER_UPPER
#undef TEMPER_LOWER

Value Typed(const char* type) { return MakeDict({{"type", type}}); }

Value SplitAt(const char* regex) {
  return MakeDict({{"type", "Split"}, {"pattern", MakeDict({{"Regex", regex}})}, {"behavior", "Isolated"}, {"invert", false}});
}

Value ByteLevel(bool use_regex) {
  return MakeDict({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}});
}

Value EachDigit() { return MakeDict({{"type", "Digits"}, {"individual_digits", true}}); }

Value Replace(const char* from, const char* to) {
  return MakeDict({{"type", "Replace"}, {"pattern", MakeDict({{"String", from}})}, {"content", to}});
}

Value PreSequence(List stages) { return MakeDict({{"type", "Sequence"}, {"pretokenizers", std::move(stages)}}); }

// What stands for a `tokenizer.ggml.pre` in tokenizer.json.
struct PreKind {
  Value pre_tokenizer;
  Value normalizer = nullptr;
  bool ignore_merges = false;
};

std::optional<PreKind> PreKindOf(const std::string& pre) {
  auto is = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* name) { return pre == name; });
  };
  auto split = [](const char* regex) { return PreSequence({SplitAt(regex), ByteLevel(false)}); };
  if (is({"gpt-2", "gpt2", "phi-2"})) return PreKind{ByteLevel(true)};
  if (is({"olmo", "mpt"})) return PreKind{ByteLevel(true), Typed("NFC")};
  if (is({"smollm", "starcoder", "refact"})) return PreKind{PreSequence({EachDigit(), ByteLevel(true)})};
  if (is({"command-r"})) return PreKind{PreSequence({EachDigit(), ByteLevel(true)}), Typed("NFC")};
  if (is({"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"})) {
    return PreKind{split(kLlama3), nullptr, true};
  }
  if (is({"dbrx", "smaug-bpe"})) return PreKind{split(kLlama3)};
  if (is({"qwen2", "deepseek-r1-qwen"})) return PreKind{split(kQwen2), Typed("NFC")};
  if (is({"qwen35"})) return PreKind{split(kQwen35), Typed("NFC")};
  if (is({"tekken"})) return PreKind{split(kTekken), nullptr, true};
  if (is({"gpt-4o", "llama4", "minimax-m2"})) return PreKind{split(kO200k)};
  if (is({"kimi-k2"})) return PreKind{split(kKimiK2)};
  if (is({"deepseek-llm"})) {
    return PreKind{PreSequence({SplitAt("[\\r\\n]"), SplitAt(kDeepseekLetters),
                                SplitAt("\\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+"), SplitAt("\\s+$"),
                                SplitAt(kDeepseekCjk), EachDigit(), ByteLevel(false)})};
  }
  if (is({"deepseek-coder"})) {
    return PreKind{PreSequence({SplitAt("[\\r\\n]"), SplitAt("\\s?\\p{L}+"), SplitAt("\\s?\\p{P}+"), SplitAt(kDeepseekCjk),
                                EachDigit(), ByteLevel(false)})};
  }
  if (is({"deepseek-v3"})) {
    return PreKind{PreSequence({SplitAt("\\p{N}{1,3}"), SplitAt("[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"),
                                SplitAt("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|"
                                        "[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|"
                                        "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"),
                                ByteLevel(false)})};
  }
  if (is({"default", ""})) {  // what llama.cpp does for files of an unnamed kind
    return PreKind{PreSequence({SplitAt("[\\p{P}\\$\\+<=>\\^~\\|]+"),
                                SplitAt("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)"),
                                SplitAt("\\p{N}+"), SplitAt("[0-9][0-9][0-9]"), ByteLevel(false)})};
  }
  return std::nullopt;
}

// A vocabulary without merges implies them: every way to put a token together from two, the best token first. Among equals the
// longer left part goes first when large ranks are best, the shorter one when small ones are, as in transformers.
List ImpliedMerges(const std::vector<std::string>& tokens, const std::vector<bool>& usable, const std::vector<double>& rank,
                   bool large_first) {
  std::unordered_map<std::string_view, size_t> ids;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (usable[i]) ids.emplace(tokens[i], i);
  }
  struct Merge {
    double rank;
    size_t left_length, right_length;  // code points
    size_t left, right;
  };
  std::vector<Merge> merges, local;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!usable[i]) continue;
    const std::string_view token = tokens[i];
    const size_t points = CodePointCount(token);
    local.clear();
    size_t length = 0;
    for (size_t at = 0; at < token.size();) {
      at += ReadUtf8(token, at).length;
      if (++length == points) break;
      const auto left = ids.find(token.substr(0, at)), right = ids.find(token.substr(at));
      if (left == ids.end() || right == ids.end()) continue;
      local.push_back({rank[i], length, points - length, left->second, right->second});
    }
    std::sort(local.begin(), local.end(), [](const Merge& a, const Merge& b) {
      return a.left != b.left ? a.left < b.left : a.right < b.right;
    });
    merges.insert(merges.end(), local.begin(), local.end());
  }
  std::stable_sort(merges.begin(), merges.end(), [large_first](const Merge& x, const Merge& y) {
    const Merge &a = large_first ? y : x, &b = large_first ? x : y;
    if (a.rank != b.rank) return a.rank < b.rank;
    if (a.left_length != b.left_length) return a.left_length < b.left_length;
    return a.right_length < b.right_length;
  });
  List out;
  out.reserve(merges.size());
  for (const Merge& m : merges) out.push_back(List{tokens[m.left], tokens[m.right]});
  return out;
}

// What begins and ends a text, for add_special.
Result<Value> PostProcessor(const GgufTokenizer& g, Value fallback) {
  if (!g.add_bos && !g.add_eos) return fallback;
  List single;
  Dict tokens;
  auto add = [&](const std::optional<int32_t>& id) {
    if (!id || *id < 0 || static_cast<size_t>(*id) >= g.tokens.size()) return false;
    const std::string& content = g.tokens[static_cast<size_t>(*id)];
    single.push_back(MakeDict({{"SpecialToken", MakeDict({{"id", content}, {"type_id", 0}})}}));
    tokens.Set(content, MakeDict({{"id", content}, {"ids", List{static_cast<int64_t>(*id)}}, {"tokens", List{content}}}));
    return true;
  };
  bool known = !g.add_bos || add(g.bos);
  single.push_back(MakeDict({{"Sequence", MakeDict({{"id", "A"}, {"type_id", 0}})}}));
  known = (!g.add_eos || add(g.eos)) && known;
  if (!known) return InvalidArgument("tokenizer.ggml.add_bos_token or add_eos_token without the id of that token");
  List pair = single;
  pair.push_back(MakeDict({{"Sequence", MakeDict({{"id", "B"}, {"type_id", 0}})}}));
  return Value(MakeDict({{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", tokens}}));
}

Value Root(List added, Value normalizer, Value pre_tokenizer, Value post_processor, Value decoder, Value model) {
  return MakeDict({{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}, {"added_tokens", std::move(added)},
                   {"normalizer", std::move(normalizer)}, {"pre_tokenizer", std::move(pre_tokenizer)},
                   {"post_processor", std::move(post_processor)}, {"decoder", std::move(decoder)}, {"model", std::move(model)}});
}

Value Model(const Value& unk, bool spm, bool ignore_merges, Dict vocab, List merges) {
  return MakeDict({{"type", "BPE"}, {"dropout", nullptr}, {"unk_token", unk}, {"continuing_subword_prefix", nullptr},
                   {"end_of_word_suffix", nullptr}, {"fuse_unk", spm}, {"byte_fallback", spm}, {"ignore_merges", ignore_merges},
                   {"vocab", std::move(vocab)}, {"merges", std::move(merges)}});
}

}  // namespace

Result<Value> TokenizerJsonOf(const GgufTokenizer& g) {
  const bool spm = g.model == "llama" || g.model == "gemma4";
  if (!spm && g.model != "gpt2") {
    return InvalidArgument("tokenizer.ggml.model '" + g.model + "' is not supported (gpt2, llama and gemma4 are)");
  }
  std::optional<PreKind> kind;
  if (!spm) {
    kind = PreKindOf(g.pre);
    if (!kind) return InvalidArgument("tokenizer.ggml.pre '" + g.pre + "' is not supported");
  }
  auto per_token = [&](const char* name, size_t entries) -> Status {
    if (entries == 0 || entries == g.tokens.size()) return Status::Ok();
    return InvalidArgument(std::string("tokenizer.ggml.") + name + " has " + std::to_string(entries) + " entries for " +
                           std::to_string(g.tokens.size()) + " tokens");
  };
  RETURN_IF_ERROR(per_token("token_type", g.token_types.size()));
  RETURN_IF_ERROR(per_token("scores", g.scores.size()));
  if (std::any_of(g.scores.begin(), g.scores.end(), [](float s) { return std::isnan(s); })) {
    return InvalidArgument("tokenizer.ggml.scores holds what is no number");
  }

  // Gemma's files spell its tokens of many spaces with real spaces, and their scores do not follow its merges: the order does.
  const auto of_spaces = [](const std::string& t) { return !t.empty() && t.find_first_not_of(' ') == std::string::npos; };
  const bool gemma = g.model == "llama" && std::any_of(g.tokens.begin(), g.tokens.end(), of_spaces);
  std::vector<std::string> tokens = g.tokens;
  Dict vocab;
  List added;
  std::vector<bool> usable(tokens.size(), true);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string where = "tokenizer.ggml.tokens[" + std::to_string(i) + "]";
    std::string& token = tokens[i];
    if (!IsValidUtf8(token)) return InvalidArgument(where + " is not UTF-8");
    const int32_t type = g.token_types.empty() ? kNormal : g.token_types[i];
    const bool spaces = gemma && of_spaces(token);
    if (spaces) {
      const size_t count = token.size();
      token.clear();
      for (size_t k = 0; k < count; ++k) token += kMeta;
    }
    if (vocab.Find(std::string_view(token))) return InvalidArgument(where + " '" + token + "' stands there twice");
    vocab.Set(token, static_cast<int64_t>(i));
    if ((type == kControl || type == kUserDefined || type == kUnknown) && !spaces) {
      added.push_back(MakeDict({{"id", static_cast<int64_t>(i)}, {"content", token}, {"single_word", false}, {"lstrip", false},
                                {"rstrip", false}, {"normalized", false}, {"special", type != kUserDefined}}));
    }
    // What stands for bytes, or for no text at all, is never put together from pieces of text.
    usable[i] = type != kControl && type != kUnknown && type != kByte && (spm || type != kUserDefined);
  }
  List merges;
  for (const std::string& m : g.merges) {
    if (!IsValidUtf8(m)) return InvalidArgument("tokenizer.ggml.merges holds text that is not UTF-8");
    merges.push_back(m);
  }
  if (g.merges.empty() && (g.model == "llama" || g.pre == "kimi-k2")) {
    std::vector<double> rank(tokens.size());
    const bool by_score = g.model == "llama" && !gemma;
    if (by_score && g.scores.empty()) return InvalidArgument("tokenizer.ggml.scores is missing, and so is tokenizer.ggml.merges");
    for (size_t i = 0; i < rank.size(); ++i) {
      const double place = static_cast<double>(i);
      rank[i] = by_score ? static_cast<double>(g.scores[i]) : gemma ? -place : place;
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (!usable[i] || tokens[i].size() <= kMaxToken) continue;
      return InvalidArgument("tokenizer.ggml.tokens[" + std::to_string(i) + "] is longer than " + std::to_string(kMaxToken) + " bytes");
    }
    merges = ImpliedMerges(tokens, usable, rank, g.model == "llama");
  }

  if (!spm) {
    ASSIGN_OR_RETURN(Value post, PostProcessor(g, ByteLevel(false)));
    Value decoder = MakeDict({{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}});
    return Root(std::move(added), kind->normalizer, kind->pre_tokenizer, std::move(post), std::move(decoder),
                Model(nullptr, false, kind->ignore_merges, std::move(vocab), std::move(merges)));
  }
  ASSIGN_OR_RETURN(Value post, PostProcessor(g, nullptr));
  const bool prefix = g.add_space_prefix.value_or(g.model == "llama");
  List decoders = {Replace(kMeta, " "), Typed("ByteFallback"), Typed("Fuse")};
  Value normalizer = Replace(" ", kMeta);
  if (prefix) {
    const Value prepend = MakeDict({{"type", "Prepend"}, {"prepend", kMeta}});
    normalizer = MakeDict({{"type", "Sequence"}, {"normalizers", List{prepend, normalizer}}});
    decoders.push_back(MakeDict({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}));
  }
  Value unk = nullptr;
  if (g.unk && *g.unk >= 0 && static_cast<size_t>(*g.unk) < tokens.size()) unk = tokens[static_cast<size_t>(*g.unk)];
  return Root(std::move(added), std::move(normalizer), nullptr, std::move(post),
              MakeDict({{"type", "Sequence"}, {"decoders", std::move(decoders)}}),
              Model(unk, true, false, std::move(vocab), std::move(merges)));
}

}  // namespace temper::text
