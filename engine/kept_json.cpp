#include "engine/kept_json.h"

#include <limits>

#include <fmt/format.h>

#include "common/check.h"
#include "engine/kept_set.h"

namespace temper::engine {

void WriteKept(JsonWriter& w, std::span<const std::string> kept) {
  w.BeginArray();
  std::vector<int32_t> ids;
  for (const std::string& bytes : kept) {
    if (bytes.empty()) {
      w.Null();
      continue;
    }
    const Status read = DecodeKept(bytes, std::numeric_limits<int32_t>::max(), &ids);
    TEMPER_CHECK(read.ok()) << read.ToString();
    w.Ints(ids);
  }
  w.EndArray();
}

Result<std::vector<std::string>> ReadKept(const JsonRef& list, std::span<const int32_t> tokens, int vocab) {
  ASSIGN_OR_RETURN(const auto entries, list.Items());
  if (entries.size() != tokens.size()) return list.Error(fmt::format("{} entries for {} tokens", entries.size(), tokens.size()));
  std::vector<std::string> kept;
  for (size_t i = 0; i < entries.size(); ++i) {
    kept.emplace_back();
    if (entries[i].value().is_null()) continue;
    ASSIGN_OR_RETURN(const std::vector<int64_t> values, entries[i].Ints());
    if (values.empty()) return entries[i].Error("no token is kept");
    std::vector<int32_t> ids;
    for (size_t k = 0; k < values.size(); ++k) {
      if (values[k] < 0 || values[k] >= vocab) {
        return entries[i].Error(fmt::format("[{}] = {} is outside the vocabulary of {}", k, values[k], vocab));
      }
      if (k > 0 && values[k] <= values[k - 1]) return entries[i].Error(fmt::format("[{}] = {} does not rise", k, values[k]));
      ids.push_back(static_cast<int32_t>(values[k]));
    }
    kept.back() = EncodeKept(ids, vocab);
    const Status check = CheckKept(kept.back(), vocab, tokens[i]);
    if (!check.ok()) return entries[i].Error(check.message());
  }
  return kept;
}

}  // namespace temper::engine
