#include "text/value.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <unordered_map>

#include "common/check.h"
#include "text/big_integer.h"

namespace temper::text {

namespace {

int DepthOf(const List& items) {
  int deepest = 0;
  for (const Value& v : items) deepest = std::max(deepest, v.depth());
  return deepest + 1;
}

}  // namespace

Value::Value(List v) {
  const int d = DepthOf(v);
  data_ = std::make_shared<const ListData>(ListData{std::move(v), d});
}
Value::Value(Dict v) : data_(std::make_shared<const Dict>(std::move(v))) {}

Value Value::Tuple(List v) {
  Value out;
  const int d = DepthOf(v);
  out.data_ = std::make_shared<const TupleData>(TupleData{std::move(v), d, false});
  return out;
}

Value Value::Group(Value grouper, Value list) {
  Value out;
  List items = {std::move(grouper), std::move(list)};
  const int d = DepthOf(items);
  out.data_ = std::make_shared<const TupleData>(TupleData{std::move(items), d, true});
  return out;
}

Value Value::Markup(std::string v) {
  Value out;
  out.data_ = std::make_shared<const MarkupData>(MarkupData{std::move(v)});
  return out;
}

Value Value::Undefined(std::string what) {
  Value out;
  out.data_ = std::make_shared<const UndefinedData>(UndefinedData{std::move(what)});
  return out;
}

Value Value::BigInt(std::string digits) {
  Value out;
  out.data_ = std::make_shared<const BigIntData>(BigIntData{std::move(digits)});
  return out;
}

Value::Kind Value::kind() const {
  static constexpr Kind kKinds[] = {Kind::kUndefined, Kind::kNone,   Kind::kBool,  Kind::kInt,  Kind::kFloat, Kind::kString,
                                    Kind::kBigInt,    Kind::kList,   Kind::kTuple, Kind::kDict, Kind::kObject, Kind::kString};
  return kKinds[data_.index()];
}

bool Value::is_markup() const { return std::holds_alternative<std::shared_ptr<const MarkupData>>(data_); }

bool Value::is_group() const {
  auto* tuple = std::get_if<std::shared_ptr<const TupleData>>(&data_);
  return tuple && (*tuple)->group;
}

bool Value::Same(const Value& a, const Value& b) {
  if (a.data_.index() != b.data_.index()) return false;
  switch (a.kind()) {
    case Kind::kNone: return true;
    case Kind::kBool: return a.as_bool() == b.as_bool();
    // Python keeps one of each small integer.
    case Kind::kInt: return a.as_int() == b.as_int() && a.as_int() >= -5 && a.as_int() <= 256;
    case Kind::kFloat: return false;
    default: return a.data_ == b.data_;  // the same storage
  }
}

int Value::depth() const {
  switch (kind()) {
    case Kind::kList: return std::get<std::shared_ptr<const ListData>>(data_)->depth;
    case Kind::kTuple: return std::get<std::shared_ptr<const TupleData>>(data_)->depth;
    case Kind::kDict: return as_dict().depth();
    case Kind::kObject: return as_object()->depth;
    default: return 0;
  }
}

bool Value::as_bool() const {
  const bool* v = std::get_if<bool>(&data_);
  TEMPER_CHECK(v != nullptr);
  return *v;
}

int64_t Value::as_int() const {
  const int64_t* v = std::get_if<int64_t>(&data_);
  TEMPER_CHECK(v != nullptr);
  return *v;
}

double Value::as_float() const {
  const double* v = std::get_if<double>(&data_);
  TEMPER_CHECK(v != nullptr);
  return *v;
}

const std::string& Value::as_string() const {
  if (auto* big = std::get_if<std::shared_ptr<const BigIntData>>(&data_)) return (*big)->digits;
  if (auto* markup = std::get_if<std::shared_ptr<const MarkupData>>(&data_)) return (*markup)->text;
  auto* v = std::get_if<std::shared_ptr<const std::string>>(&data_);
  TEMPER_CHECK(v != nullptr);
  return **v;
}

const List& Value::as_list() const {
  if (auto* tuple = std::get_if<std::shared_ptr<const TupleData>>(&data_)) return (*tuple)->items;
  auto* v = std::get_if<std::shared_ptr<const ListData>>(&data_);
  TEMPER_CHECK(v != nullptr);
  return (*v)->items;
}

const Dict& Value::as_dict() const {
  auto* v = std::get_if<std::shared_ptr<const Dict>>(&data_);
  TEMPER_CHECK(v != nullptr);
  return **v;
}

const std::shared_ptr<Object>& Value::as_object() const {
  auto* v = std::get_if<std::shared_ptr<Object>>(&data_);
  TEMPER_CHECK(v != nullptr);
  return *v;
}

const std::string& Value::undefined_what() const {
  static const std::string kNothing;
  auto* v = std::get_if<std::shared_ptr<const UndefinedData>>(&data_);
  return v && *v ? (*v)->what : kNothing;
}

const Value* Value::Find(std::string_view key) const { return is_dict() ? as_dict().Find(key) : nullptr; }

std::string Value::StringOr(std::string_view key, std::string_view fallback) const {
  const Value* v = Find(key);
  return v && v->is_string() ? v->as_string() : std::string(fallback);
}

namespace {

constexpr size_t kLinearUpTo = 8;  // small dicts are searched, larger ones have an index

// Equal for exactly the keys that Python takes for equal.
std::string KeyTag(const Value& key) {
  switch (key.kind()) {
    case Value::Kind::kString: return "s" + key.as_string();
    case Value::Kind::kBool: return key.as_bool() ? "i1" : "i0";
    case Value::Kind::kInt: return "i" + std::to_string(key.as_int());
    case Value::Kind::kBigInt: return "i" + key.as_string();
    case Value::Kind::kFloat: {
      const double v = key.as_float();
      if (std::isfinite(v) && v == std::floor(v)) return "i" + BigInteger::FromDouble(v).ToString();
      return "f" + std::to_string(std::bit_cast<uint64_t>(v));
    }
    case Value::Kind::kNone: return "n";
    case Value::Kind::kUndefined: return "u";
    case Value::Kind::kTuple: {
      std::string out = "t";
      for (const Value& item : key.as_list()) {
        const std::string tag = KeyTag(item);
        out += std::to_string(tag.size()) + ":" + tag;
      }
      return out;
    }
    case Value::Kind::kObject: return "o" + std::to_string(reinterpret_cast<uintptr_t>(key.as_object().get()));
    default: return "?";  // not hashable: the interpreter refuses such keys before
  }
}

}  // namespace

struct Dict::Index {
  std::unordered_map<std::string, size_t> at;
};

Dict::Dict() = default;
Dict::~Dict() = default;
Dict::Dict(Dict&&) noexcept = default;
Dict& Dict::operator=(Dict&&) noexcept = default;
Dict::Dict(const Dict& other)
    : items_(other.items_), index_(other.index_ ? std::make_unique<Index>(*other.index_) : nullptr), depth_(other.depth_) {}
Dict& Dict::operator=(const Dict& other) {
  Dict copy(other);
  return *this = std::move(copy);
}

void Dict::Set(const Value& key, Value value) {
  depth_ = std::max({depth_, key.depth() + 1, value.depth() + 1});
  if (const Value* found = Find(key)) {
    const_cast<Value&>(*found) = std::move(value);  // ours: this method is not const
    return;
  }
  items_.emplace_back(key, std::move(value));
  if (index_) {
    index_->at.emplace(KeyTag(key), items_.size() - 1);
  } else if (items_.size() > kLinearUpTo) {
    index_ = std::make_unique<Index>();
    for (size_t i = 0; i < items_.size(); ++i) index_->at.emplace(KeyTag(items_[i].first), i);
  }
}

const Value* Dict::Find(std::string_view key) const {
  if (index_) {
    auto it = index_->at.find("s" + std::string(key));
    return it == index_->at.end() ? nullptr : &items_[it->second].second;
  }
  for (const auto& [k, v] : items_) {
    if (k.is_string() && k.as_string() == key) return &v;
  }
  return nullptr;
}

const Value* Dict::Find(const Value& key) const {
  if (key.is_string()) return Find(std::string_view(key.as_string()));
  const std::string tag = KeyTag(key);
  if (index_) {
    auto it = index_->at.find(tag);
    return it == index_->at.end() ? nullptr : &items_[it->second].second;
  }
  for (const auto& [k, v] : items_) {
    if (KeyTag(k) == tag) return &v;
  }
  return nullptr;
}

Dict MakeDict(std::initializer_list<std::pair<const char*, Value>> items) {
  Dict out;
  for (const auto& [key, value] : items) out.Set(key, value);
  return out;
}

}  // namespace temper::text
