// Base64 of RFC 4648 with padding.
#pragma once

#include <string>
#include <string_view>

namespace temper {

std::string Base64Encode(std::string_view bytes);
// False on any character outside the alphabet, wrong padding or length; `out` is then untouched.
bool Base64Decode(std::string_view text, std::string* out);

}  // namespace temper
