#include "common/json.h"

#include <boost/json/basic_parser_impl.hpp>
#include <boost/json/src.hpp>
#include <charconv>
#include <cmath>
#include <iterator>
#include <optional>
#include <utility>

#include "common/strings.h"

namespace temper {
namespace {

const char* KindName(const json::value& value) {
  switch (value.kind()) {
    case json::kind::null: return "null";
    case json::kind::bool_: return "a boolean";
    case json::kind::int64:
    case json::kind::uint64:
    case json::kind::double_: return "a number";
    case json::kind::string: return "a string";
    case json::kind::array: return "an array";
    case json::kind::object: return "an object";
  }
  return "?";
}

// Builds a value as boost::json::parser does, but reads doubles to the nearest value (Boost 1.81 may be an ulp off) and
// refuses an object with the same key twice (Boost keeps the last).
class Handler {
 public:
  static constexpr size_t max_object_size = size_t{1} << 24;
  static constexpr size_t max_array_size = size_t{1} << 30;
  static constexpr size_t max_key_size = size_t{1} << 20;
  static constexpr size_t max_string_size = size_t{1} << 30;
  using Error = json::error_code;

  bool on_document_begin(Error&) { return true; }
  bool on_document_end(Error&) { return true; }
  bool on_object_begin(Error&) { return true; }
  bool on_object_end(size_t n, Error& error) {
    json::object object;
    object.reserve(n);
    for (size_t i = n; i > 0; --i) {
      if (!object.emplace(keys_[keys_.size() - i], std::move(values_[values_.size() - i])).second) {
        duplicate_ = keys_[keys_.size() - i];
        error = json::error::syntax;
        return false;
      }
    }
    keys_.resize(keys_.size() - n);
    values_.resize(values_.size() - n);
    return Push(std::move(object));
  }
  bool on_array_begin(Error&) { return true; }
  bool on_array_end(size_t n, Error&) {
    json::array array(std::make_move_iterator(values_.end() - static_cast<ptrdiff_t>(n)), std::make_move_iterator(values_.end()));
    values_.resize(values_.size() - n);
    return Push(std::move(array));
  }
  bool on_key_part(json::string_view part, size_t, Error&) { return Part(part); }
  bool on_key(json::string_view part, size_t, Error&) {
    Part(part);
    keys_.push_back(std::exchange(part_, {}));
    return true;
  }
  bool on_string_part(json::string_view part, size_t, Error&) { return Part(part); }
  bool on_string(json::string_view part, size_t, Error&) {
    Part(part);
    return Push(json::string(std::exchange(part_, {})));
  }
  bool on_number_part(json::string_view part, Error&) { return Part(part); }
  bool on_int64(int64_t value, json::string_view, Error&) {
    part_.clear();
    return Push(value);
  }
  bool on_uint64(uint64_t value, json::string_view, Error&) {
    part_.clear();
    return Push(value);
  }
  bool on_double(double value, json::string_view part, Error&) {
    Part(part);
    const std::string text = std::exchange(part_, {});
    // Out of range leaves Boost's value: infinity or zero.
    std::from_chars(text.data(), text.data() + text.size(), value);
    return Push(value);
  }
  bool on_bool(bool value, Error&) { return Push(value); }
  bool on_null(Error&) { return Push(nullptr); }
  bool on_comment_part(json::string_view, Error&) { return true; }
  bool on_comment(json::string_view, Error&) { return true; }

  json::value Take() { return std::move(values_.back()); }
  const std::optional<std::string>& duplicate() const { return duplicate_; }

 private:
  bool Part(json::string_view part) {
    part_.append(part.data(), part.size());
    return true;
  }
  template <typename T>
  bool Push(T&& value) {
    values_.emplace_back(std::forward<T>(value));
    return true;
  }

  std::vector<json::value> values_;  // finished values whose container is still open
  std::vector<std::string> keys_;
  std::string part_;
  std::optional<std::string> duplicate_;
};

}  // namespace

Result<json::value> ParseJson(std::string_view text) {
  json::parse_options options;
  options.max_depth = 64;
  json::error_code error;
  json::basic_parser<Handler> parser(options);
  const size_t used = parser.write_some(false, text.data(), text.size(), error);
  if (parser.handler().duplicate()) return InvalidArgument("key '" + *parser.handler().duplicate() + "' twice in one object");
  if (error) return InvalidArgument("not JSON at byte " + std::to_string(used) + ": " + error.message());
  if (!Trim(text.substr(used)).empty()) return InvalidArgument("unexpected text after the JSON value, at byte " + std::to_string(used));
  return parser.handler().Take();
}

std::string PrintJson(const json::value& value) {
  JsonWriter writer;
  writer.Value(value);
  return writer.Take();
}

void JsonWriter::Separate() {
  if (comma_) text_ += ',';
  comma_ = true;
}

JsonWriter& JsonWriter::BeginObject() {
  Separate();
  text_ += '{';
  comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::EndObject() {
  text_ += '}';
  comma_ = true;
  return *this;
}

JsonWriter& JsonWriter::BeginArray() {
  Separate();
  text_ += '[';
  comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::EndArray() {
  text_ += ']';
  comma_ = true;
  return *this;
}

JsonWriter& JsonWriter::Key(std::string_view key) {
  String(key);
  text_ += ':';
  comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::String(std::string_view text) {
  Separate();
  text_ += '"';
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = text[i];
    switch (c) {
      case '"': text_ += "\\\""; continue;
      case '\\': text_ += "\\\\"; continue;
      case '\n': text_ += "\\n"; continue;
      case '\r': text_ += "\\r"; continue;
      case '\t': text_ += "\\t"; continue;
      default: break;
    }
    if (c < 0x20) {
      text_ += "\\u00" + HexEncode(text.substr(i, 1));
    } else if (c < 0x80) {
      text_ += static_cast<char>(c);
    } else {
      size_t length = 0;
      for (size_t n = 2; n <= 4 && i + n <= text.size() && !length; ++n) {
        if (IsUtf8(text.substr(i, n))) length = n;
      }
      if (length) {
        text_ += text.substr(i, length);
        i += length - 1;
      } else {
        text_ += "\xef\xbf\xbd";
      }
    }
  }
  text_ += '"';
  return *this;
}

JsonWriter& JsonWriter::Int(int64_t value) {
  Separate();
  text_ += std::to_string(value);
  return *this;
}

JsonWriter& JsonWriter::Uint(uint64_t value) {
  Separate();
  text_ += std::to_string(value);
  return *this;
}

JsonWriter& JsonWriter::Float(float value) {
  if (!std::isfinite(value)) return Null();
  Separate();
  text_ += FormatFloat(value);
  return *this;
}

JsonWriter& JsonWriter::Double(double value) {
  if (!std::isfinite(value)) return Null();
  Separate();
  text_ += FormatDouble(value);
  return *this;
}

JsonWriter& JsonWriter::Bool(bool value) {
  Separate();
  text_ += value ? "true" : "false";
  return *this;
}

JsonWriter& JsonWriter::Null() {
  Separate();
  text_ += "null";
  return *this;
}

JsonWriter& JsonWriter::Value(const json::value& value) {
  switch (value.kind()) {
    case json::kind::null: return Null();
    case json::kind::bool_: return Bool(value.get_bool());
    case json::kind::int64: return Int(value.get_int64());
    case json::kind::uint64: return Uint(value.get_uint64());
    case json::kind::double_: return Double(value.get_double());
    case json::kind::string: return String(std::string_view(value.get_string().data(), value.get_string().size()));
    case json::kind::array:
      BeginArray();
      for (const json::value& item : value.get_array()) Value(item);
      return EndArray();
    case json::kind::object:
      BeginObject();
      for (const auto& member : value.get_object()) {
        Key(std::string_view(member.key().data(), member.key().size()));
        Value(member.value());
      }
      return EndObject();
  }
  return *this;
}

Status JsonRef::Error(std::string_view what) const {
  return InvalidArgument((path_.empty() ? std::string("input") : path_) + ": " + std::string(what));
}

Result<JsonRef> JsonRef::Field(std::string_view key) const {
  const std::string path = path_.empty() ? std::string(key) : path_ + "." + std::string(key);
  if (!value_->is_object()) return Error(std::string("expected an object, got ") + KindName(*value_));
  const json::value* found = value_->get_object().if_contains(json::string_view(key.data(), key.size()));
  if (!found) return InvalidArgument(path + ": missing");
  return JsonRef(*found, path);
}

bool JsonRef::Has(std::string_view key) const {
  return value_->is_object() && value_->get_object().if_contains(json::string_view(key.data(), key.size())) != nullptr;
}

Result<std::vector<JsonRef>> JsonRef::Items() const {
  if (!value_->is_array()) return Error(std::string("expected an array, got ") + KindName(*value_));
  std::vector<JsonRef> items;
  const json::array& array = value_->get_array();
  items.reserve(array.size());
  for (size_t i = 0; i < array.size(); ++i) items.emplace_back(array[i], path_ + "[" + std::to_string(i) + "]");
  return items;
}

Result<std::string> JsonRef::String() const {
  if (!value_->is_string()) return Error(std::string("expected a string, got ") + KindName(*value_));
  return std::string(value_->get_string().data(), value_->get_string().size());
}

Result<double> JsonRef::Double() const {
  double number = 0;
  if (value_->is_int64()) number = static_cast<double>(value_->get_int64());
  else if (value_->is_uint64()) number = static_cast<double>(value_->get_uint64());
  else if (value_->is_double()) number = value_->get_double();
  else return Error(std::string("expected a number, got ") + KindName(*value_));
  if (!std::isfinite(number)) return Error("the number is not finite");
  return number;
}

Result<int64_t> JsonRef::Int() const {
  if (value_->is_int64()) return value_->get_int64();
  if (value_->is_double()) {
    const double number = value_->get_double();
    if (number == std::floor(number) && std::abs(number) <= 0x1p53) return static_cast<int64_t>(number);
  }
  if (value_->is_number()) return Error("expected a whole number that fits 64 bits, got " + PrintJson(*value_));
  return Error(std::string("expected a whole number, got ") + KindName(*value_));
}

Result<bool> JsonRef::Bool() const {
  if (!value_->is_bool()) return Error(std::string("expected true or false, got ") + KindName(*value_));
  return value_->get_bool();
}

Result<std::vector<int64_t>> JsonRef::Ints() const {
  ASSIGN_OR_RETURN(std::vector<JsonRef> items, Items());
  std::vector<int64_t> values;
  values.reserve(items.size());
  for (const JsonRef& item : items) {
    ASSIGN_OR_RETURN(int64_t value, item.Int());
    values.push_back(value);
  }
  return values;
}

Result<std::vector<double>> JsonRef::Doubles() const {
  ASSIGN_OR_RETURN(std::vector<JsonRef> items, Items());
  std::vector<double> values;
  values.reserve(items.size());
  for (const JsonRef& item : items) {
    ASSIGN_OR_RETURN(double value, item.Double());
    values.push_back(value);
  }
  return values;
}

namespace {

template <typename T, typename Get>
Result<T> FieldOr(const JsonRef& ref, std::string_view key, T fallback, Get get) {
  if (!ref.value().is_object() || ref.Has(key)) {
    ASSIGN_OR_RETURN(JsonRef field, ref.Field(key));
    if (!field.is_null()) return get(field);
  }
  return fallback;
}

}  // namespace

Result<std::string> JsonRef::StringOr(std::string_view key, std::string fallback) const {
  return FieldOr<std::string>(*this, key, std::move(fallback), [](const JsonRef& f) { return f.String(); });
}
Result<double> JsonRef::DoubleOr(std::string_view key, double fallback) const {
  return FieldOr<double>(*this, key, fallback, [](const JsonRef& f) { return f.Double(); });
}
Result<int64_t> JsonRef::IntOr(std::string_view key, int64_t fallback) const {
  return FieldOr<int64_t>(*this, key, fallback, [](const JsonRef& f) { return f.Int(); });
}
Result<bool> JsonRef::BoolOr(std::string_view key, bool fallback) const {
  return FieldOr<bool>(*this, key, fallback, [](const JsonRef& f) { return f.Bool(); });
}

Status JsonRef::OnlyKeys(const std::vector<std::string>& keys) const {
  if (!value_->is_object()) return Error(std::string("expected an object, got ") + KindName(*value_));
  for (const auto& member : value_->get_object()) {
    const std::string key(member.key().data(), member.key().size());
    bool known = false;
    for (const std::string& k : keys) known = known || k == key;
    if (known) continue;
    const std::string near = Nearest(key, keys);
    return Error("unknown key '" + key + "'" + (near.empty() ? "" : " (did you mean '" + near + "'?)"));
  }
  return Status::Ok();
}

}  // namespace temper
