#include "text/byte_alphabet.h"

#include <array>

#include "text/utf8.h"

namespace temper::text {
namespace {

constexpr uint32_t kLast = 0x143;  // the largest character of the alphabet

struct Alphabet {
  std::array<uint32_t, 256> point{};
  std::array<int, kLast + 1> byte{};
  Alphabet() {
    byte.fill(-1);
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      point[b] = printable ? b : next++;
      byte[point[b]] = static_cast<int>(b);
    }
  }
};

const Alphabet& TheAlphabet() {
  static const Alphabet alphabet;
  return alphabet;
}

}  // namespace

uint32_t ByteCharacter(uint8_t byte) { return TheAlphabet().point[byte]; }

std::string ToByteAlphabet(std::string_view bytes) {
  std::string out;
  for (char c : bytes) AppendUtf8(ByteCharacter(static_cast<uint8_t>(c)), &out);
  return out;
}

std::optional<std::string> FromByteAlphabet(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = ReadUtf8(text, i);
    const int byte = c.cp <= kLast ? TheAlphabet().byte[c.cp] : -1;
    if (byte < 0) return std::nullopt;
    out.push_back(static_cast<char>(byte));
    i += c.length;
  }
  return out;
}

}  // namespace temper::text
