// Small string work that the standard library lacks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace temper {

// "a,b,,c" -> {"a","b","","c"}; "" -> {""}.
std::vector<std::string> Split(std::string_view text, char separator);
std::string Join(const std::vector<std::string>& parts, std::string_view separator);
// Without leading and trailing spaces, tabs and line ends.
std::string_view Trim(std::string_view text);

// Whole-string parses, independent of the locale; false (and *out untouched) when any byte is left over or the value does
// not fit. ParseDouble takes finite decimal numbers only.
bool ParseDouble(std::string_view text, double* out);
bool ParseInt(std::string_view text, int64_t* out);
// "4096", "64KiB", "1.5 GiB" -> bytes; the result must be a whole number below 2^63.
bool ParseSize(std::string_view text, int64_t* out);
// 1536 -> "1.5 KiB".
std::string FormatSize(int64_t bytes);

// Shortest decimal that parses back to the same value, never more than 9 (float) or 17 (double) digits; `nan`, `inf`.
std::string FormatFloat(float value);
std::string FormatDouble(double value);

// Number of single-character insertions, deletions, replacements and neighbour swaps between a and b.
int EditDistance(std::string_view a, std::string_view b);
// The candidate nearest to `word`, or "" when none is near enough to be a likely typing error.
std::string Nearest(std::string_view word, const std::vector<std::string>& candidates);

std::string HexEncode(std::string_view bytes);
// True when the text is well-formed UTF-8 (no surrogates, no overlong forms).
bool IsUtf8(std::string_view text);

}  // namespace temper
