#include "text/replacement.h"

#include <utility>
#include <vector>

#include "text/utf8.h"

namespace temper::text {

Result<Replacement> Replacement::Load(const Component& fields) {
  RETURN_IF_ERROR(fields.Expect({"type", "pattern", "content"}));
  Replacement out;
  ASSIGN_OR_RETURN(out.content_, fields.String("content"));
  const Value* pattern = fields.Find("pattern");
  const Value* text = pattern ? pattern->Find("String") : nullptr;
  const Value* regex = pattern ? pattern->Find("Regex") : nullptr;
  if (text && text->is_string() && !text->as_string().empty()) {
    out.pattern_ = text->as_string();
  } else if (regex && regex->is_string()) {
    auto parsed = Regex::Parse(regex->as_string());
    if (!parsed.ok()) return parsed.status().WithContext("tokenizer.json: " + fields.where() + ".pattern");
    out.regex_ = std::move(parsed).value();
  } else {
    return fields.Bad(".pattern must hold a Regex or a String that is not empty");
  }
  return out;
}

std::string Replacement::Apply(std::string_view text) const {
  std::string out;
  size_t at = 0;
  if (!regex_) {
    for (size_t hit; (hit = text.find(pattern_, at)) != std::string_view::npos; at = hit + pattern_.size()) {
      out.append(text.substr(at, hit - at)).append(content_);
    }
    return out.append(text.substr(at));
  }
  const std::vector<uint32_t> points = ToCodePoints(text);
  for (const auto& [a, b] : regex_->FindAll(points)) {
    out += FromCodePoints(points.data() + at, points.data() + a);
    out += content_;
    at = b;
  }
  return out + FromCodePoints(points.data() + at, points.data() + points.size());
}

}  // namespace temper::text
