// A pattern, up to the first zero byte, and the text it is looked for in: matches lie in order inside the text.
#include "common/check.h"
#include "tests/fuzz/guided/guided.h"
#include "text/regex.h"
#include "text/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace temper;
  const std::string bytes = Bytes(data, size);
  const size_t end = std::min(bytes.find('\0'), bytes.size());
  auto regex = text::Regex::Parse(bytes.substr(0, end));
  if (!regex.ok()) return 0;
  const auto points = text::ToCodePoints(bytes.substr(std::min(end + 1, bytes.size())));
  size_t last = 0;
  for (const auto& [begin, after] : regex->FindAll(points)) {
    TEMPER_CHECK(last <= begin && begin <= after && after <= points.size());
    last = after;
  }
  return 0;
}
