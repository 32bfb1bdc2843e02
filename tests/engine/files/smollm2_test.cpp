// The real SmolLM2 (fetched by name, not committed): its tokenizer, built from the GGUF file, must give Hugging Face's ids.
#include <unistd.h>

#include <sstream>

#include "tests/engine/files/files_helpers.h"
#include "text/json.h"

namespace temper::engine {
namespace {

TEST(SmolLM2, TokenizerAndTemplate) {
  const std::string model = std::string(TEMPER_SOURCE_DIR) + "/models/smollm2-135m-instruct";
  ASSERT_TRUE(Exists(model)) << "temper model fetch smollm2-135m-instruct brings it (temper test --long does that)";
  auto files = LoadTextFiles(model);
  ASSERT_TRUE(files.ok()) << files.status().ToString();
  auto text = text::LoadTextModel(*files);
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  std::istringstream lines(ReadFile(GoldenPath("smollm2.cases.jsonl")).value());
  auto ids = [](const text::Value& list) {
    std::vector<int32_t> out;
    for (const text::Value& v : list.as_list()) out.push_back(static_cast<int32_t>(v.as_int()));
    return out;
  };
  for (std::string line; std::getline(lines, line);) {
    const text::Value c = text::ParseJson(line).value();
    SCOPED_TRACE(line);
    const std::string& t = c.Find("text")->as_string();
    EXPECT_EQ(text->tokenizer.Encode(t), ids(*c.Find("ids")));
    EXPECT_EQ(text->tokenizer.Encode(t, {.parse_special = false}), ids(*c.Find("plain")));
    EXPECT_EQ(text->tokenizer.Decode(ids(*c.Find("ids"))), c.Find("decoded")->as_string());
  }
  text::RenderInput in;
  in.messages = text::List{text::MakeDict({{"role", "user"}, {"content", "hi"}})};
  in.add_generation_prompt = true;
  EXPECT_EQ(text->Render(in).value(),
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
}

// 135 million parameters, dequantised and put in order, with the numbers that the file's own library reads.
TEST(SmolLM2, Loads) {
  const std::string model = std::string(TEMPER_SOURCE_DIR) + "/models/smollm2-135m-instruct";
  ASSERT_TRUE(Exists(model)) << "temper model fetch smollm2-135m-instruct brings it (temper test --long does that)";
  auto loaded = LoadModel(model);
  ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
  EXPECT_EQ(loaded->params.flat().size(), 134515008u);
  EXPECT_EQ(loaded->config.rope_theta, 100000);
}

}  // namespace
}  // namespace temper::engine
