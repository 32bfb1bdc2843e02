// A tokenizer.json, and behind its last '}' a text: decoding is UTF-8, and the same in pieces.
#include "common/check.h"
#include "tests/fuzz/guided/guided.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace temper;
  const std::string bytes = Bytes(data, size);
  const size_t end = bytes.rfind('}');
  if (end == std::string::npos) return 0;
  auto tokenizer = text::Tokenizer::FromJson(bytes.substr(0, end + 1));
  if (!tokenizer.ok()) return 0;
  for (const std::string& text : {bytes.substr(end + 1), std::string("abab a's <s>12 \u00e9\u1100\u1161</s>\xff  \n")}) {
    const std::vector<int32_t> ids = tokenizer->Encode(text, {.add_special = true, .parse_special = true});
    const std::string whole = tokenizer->Decode(ids);
    TEMPER_CHECK(text::IsValidUtf8(whole));
    text::StreamDecoder stream(*tokenizer);
    std::string pieces;
    for (int32_t id : ids) pieces += stream.Append(std::span(&id, 1));
    TEMPER_CHECK(pieces + stream.Finish() == whole) << whole;
  }
  return 0;
}
