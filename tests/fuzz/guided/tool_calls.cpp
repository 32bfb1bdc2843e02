// Whatever a model writes: arguments are JSON, an ill-formed answer is all content, and what is certain was written.
#include "common/check.h"
#include "tests/fuzz/guided/guided.h"
#include "text/json.h"
#include "text/tool_calls.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace temper;
  static const text::Value tools = text::ParseJson(
      R"([{"type":"function","function":{"name":"f","parameters":{"properties":{"a":{"type":"string"}}}}},{"function":{"name":"g"}}])").value();
  const std::string text = Bytes(data, size);
  for (text::ToolFormat format : {text::ToolFormat::kHermes, text::ToolFormat::kTask}) {
    for (bool truncated : {false, true}) {
      const text::ParsedAnswer parsed = text::ParseToolCalls(format, text, tools, truncated);
      TEMPER_CHECK(!parsed.ill_formed || parsed.content == text);
      for (const text::ToolCall& call : parsed.calls) TEMPER_CHECK(text::ParseJson(call.arguments).ok()) << call.arguments;
    }
    TEMPER_CHECK(text::CertainContent(format, text) <= text.size());
  }
  return 0;
}
