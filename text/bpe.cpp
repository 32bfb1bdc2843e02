#include "text/bpe.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <queue>

#include "text/byte_alphabet.h"
#include "text/component.h"
#include "text/utf8.h"

namespace temper::text {
namespace {

constexpr uint32_t kMetaspace = 0x2581;
constexpr size_t kShort = 32;  // symbols up to which looking for the lowest rank beats a heap

// The words a thread met last. One model at a time: another's words push them out.
struct WordCache {
  static constexpr size_t kEntries = 1 << 13;
  static constexpr size_t kMaxBytes = 40, kMaxIds = 10;
  struct Entry {
    uint8_t bytes = 0, ids = 0;
    char word[kMaxBytes];
    int32_t id[kMaxIds];
  };
  uint64_t owner = 0;
  std::vector<Entry> entries;
  Entry& At(std::string_view word) { return entries[std::hash<std::string_view>()(word) % kEntries]; }
};

WordCache& CacheOf(uint64_t owner) {
  thread_local WordCache cache;
  if (cache.owner != owner) {
    cache.entries.assign(WordCache::kEntries, {});
    cache.owner = owner;
  }
  return cache;
}

std::string FallbackToken(uint8_t byte) {
  static constexpr char kDigits[] = "0123456789ABCDEF";
  return std::string("<0x") + kDigits[byte >> 4] + kDigits[byte & 15] + ">";
}

}  // namespace

std::optional<int32_t> Bpe::Find(std::string_view content) const {
  if (!byte_level_) {
    auto it = words_.find(content);
    return it == words_.end() ? std::nullopt : std::optional(it->second);
  }
  const auto bytes = FromByteAlphabet(content);
  const Map& map = bytes ? words_ : others_;
  auto it = bytes ? map.find(*bytes) : map.find(content);
  return it == map.end() ? std::nullopt : std::optional(it->second);
}

Status Bpe::Load(const Value& model, bool byte_level) {
  static std::atomic<uint64_t> serial = 0;
  serial_ = ++serial;
  byte_level_ = byte_level;
  const Component fields(model, "model");
  RETURN_IF_ERROR(fields.Expect({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                                 "byte_fallback", "ignore_merges", "vocab", "merges"}));
  if (model.StringOr("type", "BPE") != "BPE") return fields.Unsupported();
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Value* v = model.Find(key);
    if (v && !v->is_none() && !(v->is_string() && v->as_string().empty())) {
      return fields.Bad(std::string(".") + key + " is not supported");
    }
  }
  if (const Value* v = model.Find("dropout"); v && !v->is_none() && !(v->is_float() && v->as_float() == 0)) {
    return fields.Bad(".dropout is not supported");
  }
  ASSIGN_OR_RETURN(byte_fallback_, fields.Bool("byte_fallback", false));
  ASSIGN_OR_RETURN(ignore_merges_, fields.Bool("ignore_merges", false));
  ASSIGN_OR_RETURN(fuse_unk_, fields.Bool("fuse_unk", false));
  RETURN_IF_ERROR(LoadVocabulary(model));
  if (const Value* v = model.Find("unk_token"); v && !v->is_none()) {
    if (!v->is_string()) return fields.Bad(".unk_token must be a string or null");
    unk_ = Find(v->as_string());  // absent from the vocabulary: Hugging Face fails only when it needs it
  }
  for (uint32_t b = 0; b < 256; ++b) {
    fallback_[b] = byte_fallback_ ? Find(FallbackToken(static_cast<uint8_t>(b))).value_or(-1) : -1;
  }
  for (uint32_t b = 0; b < (byte_level ? 256 : 128); ++b) {
    std::string character;
    AppendUtf8(byte_level ? ByteCharacter(static_cast<uint8_t>(b)) : b, &character);
    starts_[b] = StartOf(character);
  }
  // Without the byte level, characters beyond ASCII are known only when they are met: the bytes must do for all of them.
  complete_ = byte_level ? std::none_of(starts_.begin(), starts_.end(), [](const Start& s) { return s.ids.empty(); })
                         : std::none_of(fallback_.begin(), fallback_.end(), [](int32_t id) { return id < 0; });
  RETURN_IF_ERROR(LoadMerges(model));
  FindCuts();
  return Status::Ok();
}

Status Bpe::LoadVocabulary(const Value& model) {
  const Value* vocab = model.Find("vocab");
  if (!vocab || !vocab->is_dict()) return InvalidArgument("tokenizer.json: model.vocab is missing or not an object");
  // Ids far beyond the number of tokens are refused, so that memory follows the size of the file.
  const int64_t most = static_cast<int64_t>(2 * vocab->as_dict().size() + (1 << 20));
  words_.reserve(vocab->as_dict().size());
  for (const auto& [key, value] : vocab->as_dict().items()) {
    const std::string& content = key.as_string();
    if (!value.is_int()) return InvalidArgument("tokenizer.json: model.vocab['" + content + "'] is not an integer");
    const int64_t id = value.as_int();
    if (id < 0 || id >= most) {
      return InvalidArgument("tokenizer.json: token id " + std::to_string(id) + " is out of range (0.." + std::to_string(most - 1) +
                             ")");
    }
    if (static_cast<size_t>(id) >= contents_.size()) contents_.resize(static_cast<size_t>(id) + 1);
    std::optional<std::string>& place = contents_[static_cast<size_t>(id)];
    if (place) return InvalidArgument("tokenizer.json: two tokens have the id " + std::to_string(id));
    place = content;
    auto bytes = byte_level_ ? FromByteAlphabet(content) : content;
    if (bytes) {
      words_.emplace(std::move(*bytes), static_cast<int32_t>(id));
    } else {
      others_.emplace(content, static_cast<int32_t>(id));
    }
  }
  return Status::Ok();
}

Status Bpe::LoadMerges(const Value& model) {
  const Value* list = model.Find("merges");
  if (!list || !list->is_list()) return InvalidArgument("tokenizer.json: model.merges is missing or not a list");
  const List& items = list->as_list();
  size_t slots = 16;
  while (slots < 2 * items.size()) slots *= 2;
  merges_.assign(slots, {});
  for (size_t i = 0; i < items.size(); ++i) {
    auto where = [&] { return "tokenizer.json: model.merges[" + std::to_string(i) + "]"; };
    std::string_view left, right;
    if (items[i].is_string()) {
      const std::string_view text = items[i].as_string();
      const size_t space = text.find(' ');
      if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
        return InvalidArgument(where() + " must be two tokens with a space between");
      }
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (items[i].is_list() && items[i].as_list().size() == 2 && items[i].as_list()[0].is_string() &&
               items[i].as_list()[1].is_string()) {
      left = items[i].as_list()[0].as_string();
      right = items[i].as_list()[1].as_string();
    } else {
      return InvalidArgument(where() + " must be two tokens");
    }
    const std::string both = std::string(left).append(right);
    const auto a = Find(left), b = Find(right), joined = Find(both);
    if (!a || !b || !joined) {
      const std::string missing = !a ? std::string(left) : !b ? std::string(right) : both;
      return InvalidArgument(where() + ": '" + missing + "' is not in the vocabulary");
    }
    SetMerge({static_cast<uint64_t>(*a) << 32 | static_cast<uint32_t>(*b), static_cast<uint32_t>(i), *joined});
  }
  return Status::Ok();
}

// The last merge of a pair counts.
void Bpe::SetMerge(const Merge& merge) {
  const size_t mask = merges_.size() - 1;
  for (size_t at = merge.pair * 0x9E3779B97F4A7C15ULL >> 20 & mask;; at = (at + 1) & mask) {
    if (merges_[at].pair != UINT64_MAX && merges_[at].pair != merge.pair) continue;
    merges_[at] = merge;
    return;
  }
}

const Bpe::Merge* Bpe::FindMerge(int32_t left, int32_t right) const {
  const uint64_t pair = static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  const size_t mask = merges_.size() - 1;
  for (size_t at = pair * 0x9E3779B97F4A7C15ULL >> 20 & mask;; at = (at + 1) & mask) {
    if (merges_[at].pair == pair) return &merges_[at];
    if (merges_[at].pair == UINT64_MAX) return nullptr;
  }
}

void Bpe::FindCuts() {
  // A character without any token would let its neighbours meet; a merge of what stands for other text says nothing of that text.
  if (byte_level_ || !(complete_ || unk_) || !Find("\u2581")) return;
  std::unordered_set<int32_t> stand_ins(fallback_.begin(), fallback_.end());
  if (unk_) stand_ins.insert(*unk_);
  for (const Merge& m : merges_) {
    if (m.pair == UINT64_MAX) continue;
    if (stand_ins.count(static_cast<int32_t>(m.pair >> 32)) || stand_ins.count(static_cast<int32_t>(m.pair & UINT32_MAX))) return;
    const std::string& content = *contents_[static_cast<size_t>(m.id)];
    uint32_t last = 0;
    for (size_t i = 0; i < content.size();) {
      const Utf8Char c = ReadUtf8(content, i);
      if (c.cp == kMetaspace && i > 0) before_.insert(last);
      last = c.cp;
      i += c.length;
    }
  }
  cuts_ = true;
}

Bpe::Start Bpe::StartOf(std::string_view character) const {
  if (const auto id = Find(character)) return {{*id}, false};
  Start out;
  for (char c : character) {
    const int32_t id = fallback_[static_cast<uint8_t>(c)];
    if (id < 0) return {};
    out.ids.push_back(id);
  }
  out.fallback = true;
  return out;
}

// The symbols of a part before merging; returns the bytes left out.
size_t Bpe::Begin(std::string_view part, std::vector<int32_t>* symbols) const {
  size_t dropped = 0;
  int unknown = 0;  // characters without a token that wait; as in Hugging Face, bytes do not end the waiting
  auto flush = [&] {
    for (; unknown > 0; --unknown) symbols->push_back(*unk_);
  };
  for (size_t i = 0; i < part.size();) {
    const uint8_t byte = static_cast<uint8_t>(part[i]);
    const bool table = byte_level_ || byte < 0x80;
    const size_t length = table ? 1 : ReadUtf8(part, i).length;
    Start found;
    if (!table) found = StartOf(part.substr(i, length));
    const Start& start = table ? starts_[byte] : found;
    i += length;
    if (!start.ids.empty()) {
      if (!start.fallback) flush();
      symbols->insert(symbols->end(), start.ids.begin(), start.ids.end());
    } else if (!unk_) {
      dropped += length;
    } else if (unknown == 0 || fuse_unk_) {
      unknown = 1;
    } else {
      symbols->push_back(*unk_);
    }
  }
  flush();
  return dropped;
}

// Lowest rank first, leftmost among equals.
void Bpe::MergeShort(std::vector<int32_t>* symbols) const {
  std::array<const Merge*, kShort> merge{};  // of symbol i and the next
  std::vector<int32_t>& s = *symbols;
  size_t n = s.size();
  for (size_t i = 0; i + 1 < n; ++i) merge[i] = FindMerge(s[i], s[i + 1]);
  while (n > 1) {
    size_t best = n;
    for (size_t i = 0; i + 1 < n; ++i) {
      if (merge[i] && (best == n || merge[i]->rank < merge[best]->rank)) best = i;
    }
    if (best == n) break;
    s[best] = merge[best]->id;
    for (size_t i = best + 1; i + 1 < n; ++i) s[i] = s[i + 1], merge[i] = merge[i + 1];
    --n;
    merge[best] = best + 1 < n ? FindMerge(s[best], s[best + 1]) : nullptr;
    if (best > 0) merge[best - 1] = FindMerge(s[best - 1], s[best]);
  }
  s.resize(n);
}

void Bpe::MergeLong(std::vector<int32_t>* symbols) const {
  struct Symbol { int32_t id; int prev, next; };
  struct Candidate {
    uint32_t rank;
    int at;
    int32_t id;
    bool operator<(const Candidate& o) const { return rank != o.rank ? rank > o.rank : at > o.at; }
  };
  std::vector<Symbol> s;
  const int n = static_cast<int>(symbols->size());
  for (int i = 0; i < n; ++i) s.push_back({(*symbols)[static_cast<size_t>(i)], i - 1, i + 1 < n ? i + 1 : -1});
  std::priority_queue<Candidate> queue;
  auto at = [&](int i) -> Symbol& { return s[static_cast<size_t>(i)]; };
  auto consider = [&](int left) {
    if (left < 0 || at(left).next < 0) return;
    if (const Merge* m = FindMerge(at(left).id, at(at(left).next).id)) queue.push({m->rank, left, m->id});
  };
  for (int i = 0; i + 1 < n; ++i) consider(i);
  while (!queue.empty()) {
    const Candidate c = queue.top();
    queue.pop();
    Symbol& a = at(c.at);
    if (a.id < 0 || a.next < 0) continue;
    Symbol& b = at(a.next);
    const Merge* m = FindMerge(a.id, b.id);
    if (!m || m->id != c.id) continue;  // made before one of the two changed
    a.id = c.id;
    b.id = -1;
    a.next = b.next;
    if (b.next >= 0) at(b.next).prev = c.at;
    consider(a.prev);
    consider(c.at);
  }
  symbols->clear();
  for (const Symbol& symbol : s) {
    if (symbol.id >= 0) symbols->push_back(symbol.id);
  }
}

void Bpe::EncodePart(std::string_view part, std::vector<int32_t>* out, size_t* dropped) const {
  WordCache::Entry* entry = nullptr;
  if (part.size() <= WordCache::kMaxBytes) {
    entry = &CacheOf(serial_).At(part);
    if (entry->bytes == part.size() && std::memcmp(entry->word, part.data(), part.size()) == 0) {
      out->insert(out->end(), entry->id, entry->id + entry->ids);
      return;
    }
  }
  std::vector<int32_t> symbols;
  symbols.reserve(part.size());
  const size_t left_out = Begin(part, &symbols);
  symbols.size() <= kShort ? MergeShort(&symbols) : MergeLong(&symbols);
  out->insert(out->end(), symbols.begin(), symbols.end());
  *dropped += left_out;
  if (entry && symbols.size() <= WordCache::kMaxIds && left_out == 0) {
    entry->bytes = static_cast<uint8_t>(part.size());
    entry->ids = static_cast<uint8_t>(symbols.size());
    std::memcpy(entry->word, part.data(), part.size());
    std::copy(symbols.begin(), symbols.end(), entry->id);
  }
}

void Bpe::Encode(std::string_view word, std::vector<int32_t>* out, size_t* dropped) const {
  if (word.empty()) return;
  if (ignore_merges_) {
    if (auto it = words_.find(word); it != words_.end()) {
      out->push_back(it->second);
      return;
    }
  }
  if (!cuts_) return EncodePart(word, out, dropped);
  constexpr std::string_view kSpace = "\u2581";
  size_t begin = 0;
  for (size_t at = 1; (at = word.find(kSpace, at)) != std::string_view::npos; at += kSpace.size()) {
    size_t previous = at - 1;
    while (previous > 0 && (static_cast<uint8_t>(word[previous]) & 0xC0) == 0x80) --previous;
    if (before_.count(ReadUtf8(word, previous).cp)) continue;
    EncodePart(word.substr(begin, at - begin), out, dropped);
    begin = at;
  }
  EncodePart(word.substr(begin), out, dropped);
}

size_t Bpe::BytesThatShow(std::string_view text) const {
  if (!byte_level_) return complete_ ? text.size() : 0;
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [&](char c) {
    return !starts_[static_cast<unsigned char>(c)].ids.empty();
  }));
}

}  // namespace temper::text
