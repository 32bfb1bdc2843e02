// GPT-2's byte alphabet, in which byte-level vocabularies spell raw bytes: a printable character for every byte.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace temper::text {

// The character that stands for `byte`.
uint32_t ByteCharacter(uint8_t byte);
std::string ToByteAlphabet(std::string_view bytes);
// The bytes that `text` spells; nullopt when a character of it is none of the alphabet.
std::optional<std::string> FromByteAlphabet(std::string_view text);

}  // namespace temper::text
