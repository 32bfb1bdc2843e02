// UTF-8 and code points. Invalid input is read as U+FFFD, one per maximal bad part (Unicode 3.9, table 3-8), everywhere.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace temper::text {

struct Utf8Char {
  uint32_t cp = 0xFFFD;
  uint32_t length = 1;  // bytes read; for an invalid part, its length
  bool valid = false;
  bool cut = false;     // invalid only because the text ends: a prefix of a valid character
};

// The character at `s[i]`; requires i < s.size().
Utf8Char ReadUtf8(std::string_view s, size_t i);
void AppendUtf8(uint32_t cp, std::string* out);
bool IsValidUtf8(std::string_view s);
// `s` with every invalid part replaced by U+FFFD.
std::string ToValidUtf8(std::string_view s);
// For a message: valid UTF-8 on one line, every control character as \xAB, an ellipsis for what is beyond `most` bytes. A name
// from a file must neither end the message (NUL), nor begin another line, nor speak to the terminal.
std::string Shown(std::string_view s, size_t most = SIZE_MAX);
std::vector<uint32_t> ToCodePoints(std::string_view s);
std::string FromCodePoints(const uint32_t* begin, const uint32_t* end);
// Number of code points.
size_t CodePointCount(std::string_view s);

}  // namespace temper::text
