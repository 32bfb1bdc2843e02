// JSON text <-> Value, the way Python's json module does it.
#pragma once

#include <string>
#include <string_view>

#include "common/status.h"
#include "text/value.h"

namespace temper::text {

// Parses one JSON document (RFC 8259, UTF-8 without BOM; NaN and Infinity refused). Numbers keep their type: digits only are
// integers of any length, anything with '.', 'e' or 'E' is a float (refused when it would be
// infinite). Of duplicate keys the last value wins. At most 512 levels
// deep. Errors: InvalidArgument with line, column and reason.
Result<Value> ParseJson(std::string_view text);

struct JsonStyle {
  bool ensure_ascii = false;
  int indent = -1;                  // < 0: one line
  std::string item_separator;      // empty: Python's default, ", " or "," with indent
  std::string key_separator = ": ";
  bool sort_keys = false;
};

// json.dumps: floats as Python's repr, undefined and objects refused (InvalidArgument), NaN and Infinity spelled as Python does.
Result<std::string> DumpJson(const Value& value, const JsonStyle& style = {});
// DumpJson with separators "," and ":", for values made of JSON only (a bug otherwise).
std::string CompactJson(const Value& value);

// Python's repr(float): shortest digits that parse back, 1.0, 1e-07, 1e+16, inf, nan.
std::string FloatRepr(double v);

}  // namespace temper::text
