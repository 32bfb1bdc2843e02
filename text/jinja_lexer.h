// Source -> tokens of a template. White space is cut as Jinja does under trim_blocks and lstrip_blocks. Internal to the parser.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace temper::text::jinja {

enum class TokenKind : uint8_t {
  kData, kVariableBegin, kVariableEnd, kBlockBegin, kBlockEnd, kName, kString, kInteger, kFloat, kOperator, kEof,
};

struct Token {
  TokenKind kind = TokenKind::kEof;
  std::string text;  // of a string without its quotes and escapes, of a number in decimal digits
  int line = 0;
};

// The last token is kEof. Throws TemplateError.
std::vector<Token> Tokens(std::string_view source);

}  // namespace temper::text::jinja
