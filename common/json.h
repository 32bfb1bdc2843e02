// JSON on top of Boost.JSON: parsing with limits, exact printing, and reading fields with errors that name their path.
// Heavy: include it in .cpp files only.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace temper {

namespace json = boost::json;

// Strict: one value, nothing after it, nesting at most 64, UTF-8 checked, no duplicate keys within an object.
Result<json::value> ParseJson(std::string_view text);
// Compact; doubles as %.17g shortest form that parses back to the same value. NaN and infinity become null.
std::string PrintJson(const json::value& value);

// Writes JSON text piece by piece; commas are its business. For rows of floats, which a json::value would widen.
//   JsonWriter w; w.BeginObject().Key("ids").Ints(ids).Key("logprobs").Floats(lps).EndObject(); w.text()
// NaN and infinity print as null.
class JsonWriter {
 public:
  JsonWriter& BeginObject();
  JsonWriter& EndObject();
  JsonWriter& BeginArray();
  JsonWriter& EndArray();
  JsonWriter& Key(std::string_view key);
  JsonWriter& String(std::string_view text);  // invalid UTF-8 becomes U+FFFD
  JsonWriter& Int(int64_t value);
  JsonWriter& Uint(uint64_t value);
  JsonWriter& Float(float value);    // at most 9 digits, parses back to the same float
  JsonWriter& Double(double value);  // at most 17 digits, parses back to the same double
  JsonWriter& Bool(bool value);
  JsonWriter& Null();
  JsonWriter& Value(const json::value& value);
  template <typename Container>
  JsonWriter& Ints(const Container& values) {
    BeginArray();
    for (auto v : values) Int(static_cast<int64_t>(v));
    return EndArray();
  }
  template <typename Container>
  JsonWriter& Floats(const Container& values) {
    BeginArray();
    for (auto v : values) Float(static_cast<float>(v));
    return EndArray();
  }
  template <typename Container>
  JsonWriter& Doubles(const Container& values) {
    BeginArray();
    for (auto v : values) Double(static_cast<double>(v));
    return EndArray();
  }
  const std::string& text() const { return text_; }
  std::string Take() { return std::move(text_); }

 private:
  void Separate();
  std::string text_;
  bool comma_ = false;
};

// A value and where it stands ("groups[0].rollouts[1].reward"): getters fail with that path in the message. Refers to the
// value, which must outlive it.
class JsonRef {
 public:
  explicit JsonRef(const json::value& value, std::string path = "") : value_(&value), path_(std::move(path)) {}

  const json::value& value() const { return *value_; }
  const std::string& path() const { return path_; }
  bool is_null() const { return value_->is_null(); }

  // Member of an object; kInvalidArgument when this is no object or has no such key.
  Result<JsonRef> Field(std::string_view key) const;
  // True when this is an object with that key (a null counts as present).
  bool Has(std::string_view key) const;
  // Elements of an array.
  Result<std::vector<JsonRef>> Items() const;

  Result<std::string> String() const;
  Result<double> Double() const;   // any number; finite
  Result<int64_t> Int() const;     // whole numbers, also written 1.0 or 1e3
  Result<bool> Bool() const;
  Result<std::vector<int64_t>> Ints() const;
  Result<std::vector<double>> Doubles() const;

  // Field(key), or the default when absent or null.
  Result<std::string> StringOr(std::string_view key, std::string fallback) const;
  Result<double> DoubleOr(std::string_view key, double fallback) const;
  Result<int64_t> IntOr(std::string_view key, int64_t fallback) const;
  Result<bool> BoolOr(std::string_view key, bool fallback) const;

  // Fails on the first key of this object that is not listed, with the nearest listed one as a hint.
  Status OnlyKeys(const std::vector<std::string>& keys) const;
  // InvalidArgument("path: what").
  Status Error(std::string_view what) const;

 private:
  const json::value* value_;
  std::string path_;
};

}  // namespace temper
