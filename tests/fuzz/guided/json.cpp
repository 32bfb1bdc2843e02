// What is read is printed the same for ever.
#include "common/check.h"
#include "tests/fuzz/guided/guided.h"
#include "text/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace temper;
  auto value = text::ParseJson(Bytes(data, size));
  if (!value.ok()) return 0;
  const std::string printed = text::DumpJson(*value).value();
  TEMPER_CHECK(text::DumpJson(text::ParseJson(printed).value()).value() == printed) << printed;
  return 0;
}
