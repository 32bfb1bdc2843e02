// Value: what a chat template computes with, and the order-preserving JSON document of this project.
//
// Problem: the rendered prompt must be byte for byte what Python prints, so 1 and 1.0, 1e-07 and integers of any length keep
// their form, and objects keep the order of their keys. Idea: Python's data model, small. Values are immutable (as in
// the immutable sandbox of Hugging Face) and share their storage, so a copy costs a pointer. Thread-safe to read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace temper::text {

class Value;
class Dict;
using List = std::vector<Value>;

// Anything a template can hold that is not JSON: namespace, loop, macro, function, range. Its behaviour is the interpreter's.
class Object {
 public:
  virtual ~Object() = default;
  int depth = 0;  // of the values it holds; see Value::depth
};

class Value {
 public:
  enum class Kind : uint8_t { kUndefined, kNone, kBool, kInt, kBigInt, kFloat, kString, kList, kTuple, kDict, kObject };

  Value() = default;  // undefined
  Value(std::nullptr_t) : data_(nullptr) {}                      // NOLINT: implicit by design, like the rest
  Value(bool v) : data_(v) {}                                    // NOLINT
  Value(int v) : data_(static_cast<int64_t>(v)) {}               // NOLINT
  Value(int64_t v) : data_(v) {}                                 // NOLINT
  Value(double v) : data_(v) {}                                  // NOLINT
  Value(const char* v) : Value(std::string(v)) {}                // NOLINT
  Value(std::string_view v) : Value(std::string(v)) {}           // NOLINT
  Value(std::string v) : data_(std::make_shared<const std::string>(std::move(v))) {}  // NOLINT
  Value(List v);                                                 // NOLINT
  Value(Dict v);                                                 // NOLINT
  Value(std::shared_ptr<Object> v) : data_(std::move(v)) {}      // NOLINT
  static Value Tuple(List v);
  // A pair of groupby: a tuple whose items have names too, `grouper` and `list`.
  static Value Group(Value grouper, Value list);
  // A text that is escaped already (Python's markupsafe.Markup): a string to all but those who escape.
  static Value Markup(std::string v);
  // An undefined value that remembers what was missing, for the error of its first use.
  static Value Undefined(std::string what);
  // Decimal digits with an optional '-', beyond int64.
  static Value BigInt(std::string digits);

  Kind kind() const;
  bool is_undefined() const { return kind() == Kind::kUndefined; }
  bool is_none() const { return kind() == Kind::kNone; }
  bool is_bool() const { return kind() == Kind::kBool; }
  bool is_int() const { return kind() == Kind::kInt; }
  bool is_float() const { return kind() == Kind::kFloat; }
  bool is_string() const { return kind() == Kind::kString; }
  bool is_markup() const;
  bool is_tuple() const { return kind() == Kind::kTuple; }
  bool is_group() const;
  bool is_list() const { return kind() == Kind::kList; }
  bool is_dict() const { return kind() == Kind::kDict; }

  // Each requires its kind (a bug otherwise).
  bool as_bool() const;
  int64_t as_int() const;
  double as_float() const;
  const std::string& as_string() const;  // also the digits of a kBigInt
  const List& as_list() const;           // also of a kTuple
  const Dict& as_dict() const;
  const std::shared_ptr<Object>& as_object() const;
  const std::string& undefined_what() const;

  // How many lists, dicts and objects lie within each other here: 0 for a number or a string. Taking a value apart recurses as
  // deep, so whoever builds values in a loop bounds it.
  int depth() const;
  // Whether both are one stored thing, or values of which there is only one.
  static bool Same(const Value& a, const Value& b);

  // The member `key` of a dict; nullptr when this is no dict or has no such key.
  const Value* Find(std::string_view key) const;
  // The member as a string, or `fallback` when absent or not a string.
  std::string StringOr(std::string_view key, std::string_view fallback) const;

 private:
  struct UndefinedData { std::string what; };
  struct BigIntData { std::string digits; };
  struct ListData { List items; int depth; };
  struct TupleData { List items; int depth; bool group; };
  struct MarkupData { std::string text; };
  std::variant<std::shared_ptr<const UndefinedData>, std::nullptr_t, bool, int64_t, double, std::shared_ptr<const std::string>,
               std::shared_ptr<const BigIntData>, std::shared_ptr<const ListData>, std::shared_ptr<const TupleData>,
               std::shared_ptr<const Dict>, std::shared_ptr<Object>, std::shared_ptr<const MarkupData>>
      data_;
};

// A dict in order of insertion. Keys are Values that Python can hash (JSON has only strings); 1, 1.0 and true are one key, as in
// Python.
class Dict {
 public:
  Dict();
  ~Dict();
  Dict(const Dict&);
  Dict(Dict&&) noexcept;
  Dict& operator=(const Dict&);
  Dict& operator=(Dict&&) noexcept;

  // Inserts, or replaces the value in place of the first insertion.
  void Set(const Value& key, Value value);
  const Value* Find(std::string_view key) const;
  const Value* Find(const char* key) const { return Find(std::string_view(key)); }
  const Value* Find(const Value& key) const;
  size_t size() const { return items_.size(); }
  const std::vector<std::pair<Value, Value>>& items() const { return items_; }
  int depth() const { return depth_; }  // as Value::depth

 private:
  struct Index;
  std::vector<std::pair<Value, Value>> items_;
  std::unique_ptr<Index> index_;
  int depth_ = 1;
};

// {{"key", value}, …}
Dict MakeDict(std::initializer_list<std::pair<const char*, Value>> items);

}  // namespace temper::text
