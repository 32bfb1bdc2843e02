#include "text/utf8.h"

namespace temper::text {

Utf8Char ReadUtf8(std::string_view s, size_t i) {
  auto byte = [&](size_t k) { return static_cast<uint8_t>(s[k]); };
  const uint8_t b0 = byte(i);
  if (b0 < 0x80) return {b0, 1, true, false};
  int need = 0;
  uint8_t low = 0x80, high = 0xBF;  // bounds of the second byte: no overlong forms, no surrogates, nothing above U+10FFFF
  if (b0 >= 0xC2 && b0 <= 0xDF) {
    need = 1;
  } else if (b0 >= 0xE0 && b0 <= 0xEF) {
    need = 2;
    if (b0 == 0xE0) low = 0xA0;
    if (b0 == 0xED) high = 0x9F;
  } else if (b0 >= 0xF0 && b0 <= 0xF4) {
    need = 3;
    if (b0 == 0xF0) low = 0x90;
    if (b0 == 0xF4) high = 0x8F;
  } else {
    return {};
  }
  uint32_t cp = b0 & (0x3F >> need);
  for (int k = 1; k <= need; ++k) {
    if (i + k >= s.size()) return {0xFFFD, static_cast<uint32_t>(k), false, true};
    const uint8_t b = byte(i + k);
    if (b < low || b > high) return {0xFFFD, static_cast<uint32_t>(k), false, false};
    low = 0x80, high = 0xBF;
    cp = cp << 6 | (b & 0x3F);
  }
  return {cp, static_cast<uint32_t>(need + 1), true, false};
}

void AppendUtf8(uint32_t cp, std::string* out) {
  if (cp < 0x80) {
    out->push_back(static_cast<char>(cp));
  } else if (cp < 0x800) {
    out->push_back(static_cast<char>(0xC0 | cp >> 6));
    out->push_back(static_cast<char>(0x80 | (cp & 0x3F)));
  } else if (cp < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | cp >> 12));
    out->push_back(static_cast<char>(0x80 | (cp >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (cp & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | cp >> 18));
    out->push_back(static_cast<char>(0x80 | (cp >> 12 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (cp >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (cp & 0x3F)));
  }
}

bool IsValidUtf8(std::string_view s) {
  for (size_t i = 0; i < s.size();) {
    const Utf8Char c = ReadUtf8(s, i);
    if (!c.valid) return false;
    i += c.length;
  }
  return true;
}

std::string ToValidUtf8(std::string_view s) {
  std::string out;
  out.reserve(s.size());
  for (size_t i = 0; i < s.size();) {
    const Utf8Char c = ReadUtf8(s, i);
    if (c.valid) {
      out.append(s.substr(i, c.length));
    } else {
      AppendUtf8(0xFFFD, &out);
    }
    i += c.length;
  }
  return out;
}

std::string Shown(std::string_view s, size_t most) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  for (size_t i = 0; i < s.size();) {
    const Utf8Char c = ReadUtf8(s, i);
    if (i + c.length > most) return out + "…";
    i += c.length;
    if (c.cp < 0x20 || (c.cp >= 0x7F && c.cp < 0xA0)) {
      out.append({'\\', 'x', kDigits[c.cp >> 4], kDigits[c.cp & 15]});
    } else {
      AppendUtf8(c.cp, &out);
    }
  }
  return out;
}

std::vector<uint32_t> ToCodePoints(std::string_view s) {
  std::vector<uint32_t> out;
  out.reserve(s.size());
  for (size_t i = 0; i < s.size();) {
    const Utf8Char c = ReadUtf8(s, i);
    out.push_back(c.cp);
    i += c.length;
  }
  return out;
}

std::string FromCodePoints(const uint32_t* begin, const uint32_t* end) {
  std::string out;
  out.reserve(static_cast<size_t>(end - begin));
  for (; begin != end; ++begin) AppendUtf8(*begin, &out);
  return out;
}

size_t CodePointCount(std::string_view s) {
  size_t n = 0;
  for (size_t i = 0; i < s.size(); ++n) i += ReadUtf8(s, i).length;
  return n;
}

}  // namespace temper::text
