#include "engine/files/gguf.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

#include "text/utf8.h"

namespace temper::engine {
namespace {

constexpr uint64_t kMaxListItems = uint64_t{16} << 20;  // of all metadata lists together: each costs more in memory than in the file
constexpr int kMaxDims = 4;
constexpr size_t kMaxShown = 100;  // bytes of a name in a message

// Reads the file front to back; every length is held against what is left.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  size_t left() const { return bytes_.size() - at_; }
  size_t at() const { return at_; }

  template <typename T>
  Result<T> Number() {
    if (left() < sizeof(T)) return Short();
    T v;
    std::memcpy(&v, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return v;
  }

  Result<std::string> String() {
    ASSIGN_OR_RETURN(const uint64_t size, Number<uint64_t>());
    if (size > left()) return InvalidArgument("a string of " + std::to_string(size) + " bytes is beyond the file");
    std::string out(reinterpret_cast<const char*>(bytes_.data()) + at_, size);
    at_ += size;
    return out;
  }

  // A metadata value of GGUF's type number.
  Result<text::Value> Value(uint32_t type, int depth) {
    switch (type) {
      case 0: return Integer<uint8_t>();
      case 1: return Integer<int8_t>();
      case 2: return Integer<uint16_t>();
      case 3: return Integer<int16_t>();
      case 4: return Integer<uint32_t>();
      case 5: return Integer<int32_t>();
      case 6: {
        ASSIGN_OR_RETURN(const float v, Number<float>());
        return text::Value(static_cast<double>(v));
      }
      case 7: {
        ASSIGN_OR_RETURN(const uint8_t v, Number<uint8_t>());
        return text::Value(v != 0);
      }
      case 8: {
        ASSIGN_OR_RETURN(std::string v, String());
        return text::Value(std::move(v));
      }
      case 9: {
        if (depth > 3) return InvalidArgument("lists nested too deeply");
        ASSIGN_OR_RETURN(const uint32_t item_type, Number<uint32_t>());
        ASSIGN_OR_RETURN(const uint64_t count, Number<uint64_t>());
        if (count > left()) return InvalidArgument("a list of " + std::to_string(count) + " items is beyond the file");
        if ((items_ += count) > kMaxListItems) return InvalidArgument("the lists hold more than " + std::to_string(kMaxListItems) + " items");
        text::List out;
        for (uint64_t i = 0; i < count; ++i) {
          ASSIGN_OR_RETURN(text::Value item, Value(item_type, depth + 1));
          out.push_back(std::move(item));
        }
        return text::Value(std::move(out));
      }
      case 10: return Integer<uint64_t>();
      case 11: return Integer<int64_t>();
      case 12: {
        ASSIGN_OR_RETURN(const double v, Number<double>());
        return text::Value(v);
      }
      default: return InvalidArgument("no such value type " + std::to_string(type));
    }
  }

 private:
  Status Short() const { return InvalidArgument("the file ends at byte " + std::to_string(bytes_.size()) + " within its header"); }

  template <typename T>
  Result<text::Value> Integer() {
    ASSIGN_OR_RETURN(const T v, Number<T>());
    if constexpr (std::is_same_v<T, uint64_t>) {
      if (v > INT64_MAX) return text::Value::BigInt(std::to_string(v));
    }
    return text::Value(static_cast<int64_t>(v));
  }

  std::span<const std::byte> bytes_;
  size_t at_ = 0;
  uint64_t items_ = 0;
};

std::optional<FileType> TypeOf(uint32_t number) {
  switch (number) {
    case 0: return FileType::kF32;
    case 1: return FileType::kF16;
    case 2: return FileType::kQ4_0;
    case 3: return FileType::kQ4_1;
    case 6: return FileType::kQ5_0;
    case 7: return FileType::kQ5_1;
    case 8: return FileType::kQ8_0;
    case 12: return FileType::kQ4_K;
    case 13: return FileType::kQ5_K;
    case 14: return FileType::kQ6_K;
    case 28: return FileType::kF64;
    case 30: return FileType::kBF16;
    default: return std::nullopt;
  }
}

// As ggml calls it.
std::string ForeignTypeName(uint32_t number) {
  static const std::map<uint32_t, const char*> names = {
      {9, "Q8_1"},     {10, "Q2_K"},    {11, "Q3_K"},   {15, "Q8_K"},   {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"},
      {20, "IQ4_NL"},  {21, "IQ3_S"},   {22, "IQ2_S"},  {23, "IQ4_XS"}, {24, "I8"},      {25, "I16"},    {26, "I32"},     {27, "I64"},
      {29, "IQ1_M"},   {34, "TQ1_0"},   {35, "TQ2_0"},  {39, "MXFP4"}};
  auto it = names.find(number);
  return it == names.end() ? std::to_string(number) : it->second;
}

}  // namespace

Result<GgufFile> GgufFile::Open(const std::string& path, std::vector<ForeignTensor>* foreign) {
  ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Open(path));
  GgufFile out(std::move(mapped));
  const Status status = out.Parse(foreign);
  if (!status.ok()) return status.WithContext(path);
  return out;
}

Status GgufFile::Parse(std::vector<ForeignTensor>* foreign) {
  const std::span<const std::byte> bytes = file_.bytes();
  if (bytes.size() < 24 || std::memcmp(bytes.data(), "GGUF", 4) != 0) return InvalidArgument("not a GGUF file");
  Reader in(bytes.subspan(4));
  ASSIGN_OR_RETURN(const uint32_t version, in.Number<uint32_t>());
  if (version != 2 && version != 3) return InvalidArgument("GGUF version " + std::to_string(version) + " is not supported (2 and 3 are)");
  ASSIGN_OR_RETURN(const uint64_t tensor_count, in.Number<uint64_t>());
  ASSIGN_OR_RETURN(const uint64_t key_count, in.Number<uint64_t>());
  if (tensor_count > in.left() / 24) return InvalidArgument(std::to_string(tensor_count) + " tensors are beyond the file");
  if (key_count > in.left() / 13) return InvalidArgument(std::to_string(key_count) + " metadata keys are beyond the file");
  for (uint64_t i = 0; i < key_count; ++i) {
    ASSIGN_OR_RETURN(std::string key, in.String());
    ASSIGN_OR_RETURN(const uint32_t type, in.Number<uint32_t>());
    auto value = in.Value(type, 0);
    if (!value.ok()) return value.status().WithContext("metadata '" + text::Shown(key, kMaxShown) + "'");
    if (!metadata_.emplace(std::move(key), std::move(value).value()).second) return InvalidArgument("a metadata key stands there twice");
  }
  std::vector<uint64_t> offsets;
  for (uint64_t i = 0; i < tensor_count; ++i) {
    FileTensor t;
    ASSIGN_OR_RETURN(t.name, in.String());
    const std::string where = "tensor " + text::Shown(t.name, kMaxShown);
    ASSIGN_OR_RETURN(const uint32_t dims, in.Number<uint32_t>());
    if (dims > kMaxDims) return InvalidArgument(where + ": " + std::to_string(dims) + " dimensions");
    t.count = 1;
    for (uint32_t d = 0; d < dims; ++d) {
      ASSIGN_OR_RETURN(const uint64_t size, in.Number<uint64_t>());
      if (size > INT64_MAX || __builtin_mul_overflow(t.count, size, &t.count)) return InvalidArgument(where + ": its shape is beyond the file");
      t.shape.insert(t.shape.begin(), static_cast<int64_t>(size));
    }
    ASSIGN_OR_RETURN(const uint32_t type, in.Number<uint32_t>());
    const auto known = TypeOf(type);
    if (!known && !foreign) return InvalidArgument(where + ": the tensor type " + ForeignTypeName(type) + " is not supported");
    ASSIGN_OR_RETURN(const uint64_t offset, in.Number<uint64_t>());
    if (!known) {
      foreign->push_back({t.name, ForeignTypeName(type), static_cast<int64_t>(std::min<uint64_t>(t.count, INT64_MAX))});
      continue;
    }
    t.type = *known;
    const auto block = static_cast<int64_t>(FileTypeBlock(t.type));
    if (block > 1 && (t.shape.empty() || t.shape.back() % block != 0)) {
      return InvalidArgument(where + ": its rows are no multiple of " + std::to_string(block));
    }
    offsets.push_back(offset);
    if (!by_name_.emplace(t.name, tensors_.size()).second) return InvalidArgument(where + " stands there twice");
    tensors_.push_back(std::move(t));
  }
  uint64_t alignment = 32;
  if (const text::Value* v = Meta("general.alignment")) {
    if (!v->is_int() || v->as_int() < 1 || v->as_int() > 1 << 20 || (v->as_int() & (v->as_int() - 1))) {
      return InvalidArgument("general.alignment is no power of two");
    }
    alignment = static_cast<uint64_t>(v->as_int());
  }
  const uint64_t data_at = (4 + in.at() + alignment - 1) / alignment * alignment;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    FileTensor& t = tensors_[i];
    const uint64_t room = data_at <= bytes.size() ? bytes.size() - data_at : 0;
    // One element takes at least half a byte, so a count beyond twice the room cannot fit, nor can its bytes overflow.
    if (t.count > 2 * room || offsets[i] > room || FileTypeBytes(t.type, t.count) > room - offsets[i]) {
      return InvalidArgument("tensor " + text::Shown(t.name, kMaxShown) + " lies beyond the file");
    }
    t.bytes = bytes.subspan(data_at + offsets[i], FileTypeBytes(t.type, t.count));
  }
  return CheckApart(tensors_);
}

const text::Value* GgufFile::Meta(std::string_view key) const {
  auto it = metadata_.find(key);
  return it == metadata_.end() ? nullptr : &it->second;
}

const FileTensor* GgufFile::Find(std::string_view name) const {
  auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

Result<text::GgufTokenizer> GgufFile::TokenizerMetadata() const {
  text::GgufTokenizer out;
  auto bad = [&](const std::string& key) { return InvalidArgument(file_.path() + ": metadata '" + key + "' is missing or of wrong type"); };
  auto string = [&](const char* key, std::string fallback) {
    const text::Value* v = Meta(key);
    return v && v->is_string() ? v->as_string() : fallback;
  };
  out.model = string("tokenizer.ggml.model", "");
  out.pre = string("tokenizer.ggml.pre", "default");
  out.chat_template = string("tokenizer.chat_template", "");
  const text::Value* tokens = Meta("tokenizer.ggml.tokens");
  if (!tokens || !tokens->is_list()) return bad("tokenizer.ggml.tokens");
  for (const text::Value& t : tokens->as_list()) {
    if (!t.is_string()) return bad("tokenizer.ggml.tokens");
    out.tokens.push_back(t.as_string());
  }
  if (const text::Value* merges = Meta("tokenizer.ggml.merges")) {
    if (!merges->is_list()) return bad("tokenizer.ggml.merges");
    for (const text::Value& m : merges->as_list()) {
      if (!m.is_string()) return bad("tokenizer.ggml.merges");
      out.merges.push_back(m.as_string());
    }
  }
  if (const text::Value* types = Meta("tokenizer.ggml.token_type")) {
    if (!types->is_list()) return bad("tokenizer.ggml.token_type");
    for (const text::Value& t : types->as_list()) {
      if (!t.is_int()) return bad("tokenizer.ggml.token_type");
      out.token_types.push_back(static_cast<int32_t>(std::clamp<int64_t>(t.as_int(), 0, 100)));
    }
  }
  if (const text::Value* scores = Meta("tokenizer.ggml.scores")) {
    if (!scores->is_list()) return bad("tokenizer.ggml.scores");
    for (const text::Value& s : scores->as_list()) {
      if (!s.is_float() && !s.is_int()) return bad("tokenizer.ggml.scores");
      out.scores.push_back(s.is_int() ? static_cast<float>(s.as_int()) : static_cast<float>(s.as_float()));
    }
  }
  // Of SentencePiece's vocabularies the three have always stood first.
  const bool spm = out.model == "llama";
  auto id = [&](const char* key, std::optional<int32_t> fallback = std::nullopt) -> std::optional<int32_t> {
    const text::Value* v = Meta(key);
    if (!v && fallback && *fallback < static_cast<int32_t>(out.tokens.size())) return fallback;
    if (!v || !v->is_int() || v->as_int() < 0 || v->as_int() >= static_cast<int64_t>(out.tokens.size())) return std::nullopt;
    return static_cast<int32_t>(v->as_int());
  };
  out.bos = id("tokenizer.ggml.bos_token_id", spm ? std::optional(1) : std::nullopt);
  out.eos = id("tokenizer.ggml.eos_token_id", spm ? std::optional(2) : std::nullopt);
  out.unk = id("tokenizer.ggml.unknown_token_id", spm ? std::optional(0) : std::nullopt);
  out.pad = id("tokenizer.ggml.padding_token_id");
  out.eot = id("tokenizer.ggml.eot_token_id");
  auto flag = [&](const char* key, bool fallback) {
    const text::Value* v = Meta(key);
    return v && v->is_bool() ? v->as_bool() : fallback;
  };
  // Absent, it is what llama.cpp takes for the kind.
  static constexpr std::string_view kBeginning[] = {"llama-bpe", "llama3",  "llama-v3", "falcon3",
                                                    "falcon-h1", "pixtral", "lfm2",     "tekken"};
  const bool begins = std::find(std::begin(kBeginning), std::end(kBeginning), out.pre) != std::end(kBeginning);
  out.add_bos = flag("tokenizer.ggml.add_bos_token", spm || begins) && out.bos;
  out.add_eos = flag("tokenizer.ggml.add_eos_token", false) && out.eos;
  if (const text::Value* v = Meta("tokenizer.ggml.add_space_prefix"); v && v->is_bool()) out.add_space_prefix = v->as_bool();
  return out;
}

}  // namespace temper::engine
