// The fields of one component of tokenizer.json. Every field a component does not take is refused by name.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>

#include "common/status.h"
#include "text/utf8.h"
#include "text/value.h"

namespace temper::text {

class Component {
 public:
  // `kind` is where it stands ("normalizer"); `node` must outlive this.
  Component(const Value& node, std::string_view kind)
      : node_(node), type_(node.StringOr("type", "?")), where_(std::string(kind) + (type_ == "?" ? "" : "(" + type_ + ")")) {}

  const std::string& type() const { return type_; }
  const std::string& where() const { return where_; }  // for messages: "normalizer(Replace)"
  const Value* Find(std::string_view key) const { return node_.Find(key); }
  Status Bad(const std::string& what) const { return InvalidArgument("tokenizer.json: " + where_ + what); }
  Status Unsupported() const { return Bad(" is not supported"); }

  Status Expect(std::initializer_list<std::string_view> known) const {
    if (!node_.is_dict()) return Bad(" must be an object");
    for (const auto& [key, value] : node_.as_dict().items()) {
      const std::string& name = key.as_string();
      if (std::find(known.begin(), known.end(), name) == known.end()) return Bad("." + name + " is not supported");
    }
    return Status::Ok();
  }
  Result<bool> Bool(std::string_view key, bool fallback) const {
    const Value* v = node_.Find(key);
    if (!v || v->is_none()) return fallback;
    if (!v->is_bool()) return Bad("." + std::string(key) + " must be true or false");
    return v->as_bool();
  }
  Result<std::string> String(std::string_view key) const {
    const Value* v = node_.Find(key);
    if (!v || !v->is_string()) return Bad("." + std::string(key) + " must be a string");
    return v->as_string();
  }
  // A string of exactly one code point.
  Result<uint32_t> Character(std::string_view key) const {
    ASSIGN_OR_RETURN(const std::string text, String(key));
    if (CodePointCount(text) != 1) return Bad("." + std::string(key) + " must be one character");
    return ReadUtf8(text, 0).cp;
  }
  // The components of a Sequence.
  Result<const List*> Children(std::string_view key) const {
    const Value* v = node_.Find(key);
    if (!v || !v->is_list()) return Bad("." + std::string(key) + " must be a list");
    return &v->as_list();
  }

 private:
  const Value& node_;
  std::string type_;
  std::string where_;
};

}  // namespace temper::text
