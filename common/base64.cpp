#include "common/base64.h"

#include <cstdint>

namespace temper {
namespace {

constexpr char kAlphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

}  // namespace

std::string Base64Encode(std::string_view bytes) {
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t v = 0;
    for (size_t j = 0; j < 3; ++j) v = v << 8 | (i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0u);
    for (size_t j = 0; j < 4; ++j) out.push_back(i + j > bytes.size() ? '=' : kAlphabet[v >> (18 - 6 * j) & 63]);
  }
  return out;
}

bool Base64Decode(std::string_view text, std::string* out) {
  if (text.size() % 4 != 0) return false;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  for (size_t i = 0; i < text.size(); i += 4) {
    uint32_t v = 0;
    int padding = 0;
    for (size_t j = 0; j < 4; ++j) {
      char c = text[i + j];
      const bool last = i + 4 == text.size();
      if (c == '=' && last && j >= 2) {
        ++padding;
        v <<= 6;
        continue;
      }
      const char* at = c && !padding ? std::char_traits<char>::find(kAlphabet, 64, c) : nullptr;
      if (!at) return false;
      v = v << 6 | static_cast<uint32_t>(at - kAlphabet);
    }
    // Bits that the padding cuts off must be zero, so that each byte string has one text.
    if (padding && (v & ((1u << (8 * padding)) - 1))) return false;
    for (int j = 0; j < 3 - padding; ++j) bytes.push_back(static_cast<char>(v >> (16 - 8 * j)));
  }
  *out = std::move(bytes);
  return true;
}

}  // namespace temper
