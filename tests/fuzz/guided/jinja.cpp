// A template from anywhere is refused, or renders or refuses a conversation, within its limits.
#include "tests/fuzz/guided/guided.h"
#include "text/chat_template.h"
#include "text/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace temper;
  static const text::RenderInput input = [] {
    text::RenderInput in;
    in.messages = text::ParseJson(R"([{"role":"system","content":"Be kind."},{"role":"user","content":[{"type":"text","text":"é"}]},
      {"role":"assistant","content":null,"tool_calls":[{"type":"function","function":{"name":"f","arguments":{"a":1,"b":[2.5,true]}}}]},
      {"role":"tool","content":"12"}])").value();
    in.variables = text::ParseJson(R"({"bos_token":"<s>","x":3,"y":-0.5,"s":"a b\nc","l":[3,1,2],"d":{"k":"v","w":[]},"n":null})").value();
    return in;
  }();
  auto parsed = text::ChatTemplate::Parse(Bytes(data, size));
  if (parsed.ok()) (void)parsed->Render(input).ok();
  return 0;
}
