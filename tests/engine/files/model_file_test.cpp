// A model read wrongly runs and scores nonsense that looks like a bad policy: every tensor must be the file's, or an error must say
// why not.
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "engine/bf16.h"
#include "engine/files/gguf.h"
#include "engine/files/safetensors.h"
#include "engine/layer.h"
#include "engine/score.h"
#include "tests/engine/files/files_helpers.h"
#include "text/json.h"

namespace temper::engine {
namespace {

std::string Replace(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  TEMPER_CHECK(at != std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

// What is saved must come back bit for bit, with config, tokenizer and template.
TEST(HuggingFaceFolder, RoundTrip) {
  for (bool tied : {true, false}) {
    const TestDir dir;
    ModelConfig c = SmallConfig(tied);
    c.rope_scaling.kind = tied ? RopeScaling::Kind::kNone : RopeScaling::Kind::kLlama3;
    c.rope_scaling.factor = 8;
    c.eos_ids = tied ? std::vector<int>{256} : std::vector<int>{1, 2};
    const Parameters params = InitParameters(c, 5);
    ASSERT_TRUE(SaveHuggingFace(dir / "m", c, params, SmallText(), FileType::kF32).ok());
    auto loaded = LoadModel(dir / "m");
    ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
    EXPECT_TRUE(std::ranges::equal(loaded->params.flat(), params.flat()));
    EXPECT_EQ(loaded->config.eos_ids, c.eos_ids);
    EXPECT_EQ(loaded->config.rope_theta, c.rope_theta);
    EXPECT_EQ(loaded->config.rope_scaling.kind, c.rope_scaling.kind);
    EXPECT_EQ(loaded->config.tied, tied);
    EXPECT_EQ(loaded->format, "safetensors");
    const auto text = text::LoadTextModel(loaded->text);
    ASSERT_TRUE(text.ok()) << text.status().ToString();
    EXPECT_EQ(text->end_ids, std::vector<int32_t>{256});
    // Saved as bf16, every weight is the rounded one.
    ASSERT_TRUE(SaveHuggingFace(dir / "b", c, params, SmallText(), FileType::kBF16).ok());
    const auto rounded = LoadModel(dir / "b");
    ASSERT_TRUE(rounded.ok());
    for (size_t i = 0; i < params.flat().size(); ++i) ASSERT_EQ(rounded->params.flat()[i], FromBf16(ToBf16(params.flat()[i])));
  }
}

// A folder that ties by its config and stores a head: as transformers 5 has it, two that differ are two, and one alone is both.
TEST(HuggingFaceFolder, AStoredHeadOfATiedModel) {
  const TestDir dir;
  const ModelConfig c = SmallConfig(true);
  Parameters params = InitParameters(c, 5);
  for (float& x : params.tensor(0)) x = FromBf16(ToBf16(x));  // so that the head in another type is the same numbers
  ASSERT_TRUE(SaveHuggingFace(dir / "m", c, params, SmallText(), FileType::kF32).ok());
  const std::vector<float> embedding(params.tensor(0).begin(), params.tensor(0).end());
  // The weights, with `head` beside them as a file of its own, and with or without the embedding.
  const auto store = [&](const std::vector<float>& head, FileType type, bool with_embedding = true,
                         std::vector<int64_t> shape = {270, 16}) {
    std::vector<TensorToWrite> tensors;
    text::Dict map;
    for (size_t i = with_embedding ? 0 : 1; i < params.tensors().size(); ++i) {
      tensors.push_back({params.tensors()[i].name, params.tensors()[i].shape, params.tensor(i), {}});
      map.Set(params.tensors()[i].name, "a.safetensors");
    }
    map.Set("lm_head.weight", "b.safetensors");
    std::filesystem::remove(dir / "m/model.safetensors");
    EXPECT_TRUE(WriteSafetensors(dir / "m/a.safetensors", tensors, FileType::kF32).ok());
    const std::vector<TensorToWrite> alone = {{"lm_head.weight", shape, head, {}}};
    EXPECT_TRUE(WriteSafetensors(dir / "m/b.safetensors", alone, type).ok());
    const std::string index = text::CompactJson(text::MakeDict({{"weight_map", map}}));
    EXPECT_TRUE(WriteFile(dir / "m/model.safetensors.index.json", index).ok());
  };
  const auto expect = [&](bool tied, const std::vector<float>& head, const char* note) {
    const auto model = LoadModel(dir / "m");
    ASSERT_TRUE(model.ok()) << model.status().ToString();
    EXPECT_EQ(model->config.tied, tied);
    EXPECT_EQ(LoadModelConfig(dir / "m")->config.tied, tied);
    EXPECT_TRUE(std::ranges::equal(model->params.tensor(HeadIndex(model->config)), head));
    const int last = model->params.Find("model.layers.1.mlp.down_proj.weight");
    EXPECT_TRUE(std::ranges::equal(model->params.tensor(last), params.tensor(last)));
    const auto summary = SummariseTensors(dir / "m");
    ASSERT_TRUE(summary.ok());
    EXPECT_TRUE(summary->unsupported.empty()) << summary->unsupported[0];
    ASSERT_EQ(summary->notes.size(), 1u);
    EXPECT_NE(summary->notes[0].find(note), std::string::npos) << summary->notes[0];
    // Saved, it says what it is.
    ASSERT_TRUE(SaveHuggingFace(dir / "again", model->config, model->params, {}, FileType::kF32).ok());
    const auto again = LoadModel(dir / "again");
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_TRUE(again->config == model->config);
    EXPECT_TRUE(std::ranges::equal(again->params.flat(), model->params.flat()));
    EXPECT_TRUE(SummariseTensors(dir / "again")->notes.empty());
  };
  store(embedding, FileType::kF32);
  expect(true, embedding, "one copy is kept");
  store(embedding, FileType::kBF16);
  expect(true, embedding, "one copy is kept");
  std::vector<float> other = embedding;
  other.back() = std::nextafter(other.back(), 1.0f);
  store(other, FileType::kF32);
  expect(false, other, "differs from the embedding");
  store(other, FileType::kF32, false);
  params.tensor(0).back() = other.back();
  expect(true, other, "the file has no other");
  store(std::vector<float>(16, 1), FileType::kF32, true, {1, 16});
  EXPECT_NE(LoadModel(dir / "m").status().message().find("lm_head.weight has the shape [1, 16]"), std::string::npos);
}

// transformers' own folder (sharded, newer config.json): its logits must be ours.
TEST(HuggingFaceFolder, LogprobsOfTransformers) {
  auto model = LoadModel(GoldenPath("hf"));
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  EXPECT_EQ(model->config.eos_ids, (std::vector<int>{1, 2}));
  const text::Value golden = text::ParseJson(ReadFile(GoldenPath("hf_logits.json")).value()).value();
  ScoreRow row;
  for (const text::Value& id : golden.Find("ids")->as_list()) row.ids.push_back(static_cast<int32_t>(id.as_int()));
  const RowScores scores = ScoreReference(model->params, {row}, {})[0];
  const text::List& want = golden.Find("logprobs")->as_list();
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(scores.logprobs[i + 1], want[i].as_float(), 2e-6) << i;
}

uint32_t Crc32(std::span<const float> values) {
  uint32_t crc = 0xFFFFFFFF;
  for (const std::byte b : std::as_bytes(values)) {
    crc ^= std::to_integer<uint32_t>(b);
    for (int k = 0; k < 8; ++k) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
  }
  return ~crc;
}

// Wrong block order, wrong rounding or Q and K left permuted would give a model that answers, but badly.
TEST(Gguf, EveryTensorAsGgufReadsIt) {
  auto model = LoadModel(GoldenPath("tiny.gguf"));
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  const text::Value golden = text::ParseJson(ReadFile(GoldenPath("tiny_expected.json")).value()).value();
  EXPECT_EQ(golden.as_dict().size(), model->params.tensors().size());
  for (const auto& [name, want] : golden.as_dict().items()) {
    SCOPED_TRACE(name.as_string());
    const int i = model->params.Find(name.as_string());
    ASSERT_GE(i, 0);
    const auto got = model->params.tensor(static_cast<size_t>(i));
    for (size_t k = 0; k < 4; ++k) EXPECT_EQ(got[k], static_cast<float>(want.Find("first")->as_list()[k].as_float()));
    EXPECT_EQ(Crc32(got), want.Find("crc32")->as_int());
  }
  EXPECT_TRUE(model->config.tied);
  EXPECT_EQ(model->config.rms_eps, 1e-5);  // the number that was meant, not its float
  const auto text = text::LoadTextModel(model->text);
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  EXPECT_EQ(text->tokenizer.Encode("<|im_start|> ab12", {}).size(), 4u);
  EXPECT_EQ(text->end_ids, std::vector<int32_t>{2});
}

// A block read in another order, or a product and a sum rounded together, would be a slightly other model.
TEST(Gguf, EveryElementTypeAsGgufReadsIt) {
  auto file = GgufFile::Open(GoldenPath("quants.gguf"));
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  const text::Value golden = text::ParseJson(ReadFile(GoldenPath("quants_expected.json")).value()).value();
  EXPECT_EQ(golden.as_dict().size(), 11u);
  EXPECT_EQ(golden.as_dict().size(), file->tensors().size());
  for (const FileTensor& t : file->tensors()) {
    SCOPED_TRACE(t.name);
    EXPECT_EQ(t.name, FileTypeName(t.type));
    const text::Value* want = golden.Find(t.name);
    ASSERT_TRUE(want);
    std::vector<float> got(t.count);
    ReadElements(t.type, t.bytes, got);
    for (size_t k = 0; k < 4; ++k) EXPECT_EQ(got[k], static_cast<float>(want->Find("first")->as_list()[k].as_float()));
    EXPECT_EQ(Crc32(got), want->Find("crc32")->as_int());
  }
}

// An exported GGUF model must be the same model.
TEST(Gguf, ExportIsTheSameModel) {
  const TestDir dir;
  const ModelFile gguf = LoadModel(GoldenPath("tiny.gguf")).value();
  ASSERT_TRUE(SaveHuggingFace(dir / "out", gguf.config, gguf.params, gguf.text, FileType::kF32).ok());
  const ModelFile folder = LoadModel(dir / "out").value();
  EXPECT_TRUE(std::ranges::equal(folder.params.flat(), gguf.params.flat()));
  const auto a = text::LoadTextModel(gguf.text), b = text::LoadTextModel(folder.text);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a->tokenizer.Encode("x ab 12 <|im_end|>"), b->tokenizer.Encode("x ab 12 <|im_end|>"));
  text::RenderInput in;
  in.messages = text::List{text::MakeDict({{"role", "user"}, {"content", "hi"}})};
  EXPECT_EQ(a->Render(in).value(), b->Render(in).value());
}

// Both generations of config.json must mean the same model.
TEST(ConfigJson, BothGenerations) {
  const TestDir dir;
  SaveSmall(dir / "m");
  const auto set = [&](const std::string& json) {
    ASSERT_TRUE(WriteFile(dir / "m/config.json", json).ok());
    auto model = LoadModelConfig(dir / "m");
    ASSERT_TRUE(model.ok()) << model.status().ToString();
    EXPECT_EQ(model->config.rope_theta, 5000);
    EXPECT_EQ(model->config.rope_scaling.kind, RopeScaling::Kind::kLinear);
    EXPECT_EQ(model->config.rope_scaling.factor, 2);
    EXPECT_EQ(model->config.head_dim, 8);
    EXPECT_EQ(model->config.kv_heads, 2);
  };
  const std::string common =
      R"("model_type":"llama","architectures":["LlamaForCausalLM"],"vocab_size":270,"hidden_size":16,"intermediate_size":24,"num_hidden_layers":2,
      "num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,"max_position_embeddings":64,"rms_norm_eps":1e-05,"tie_word_embeddings":true)";
  set("{" + common + R"(,"torch_dtype":"float32","rope_theta":5000.0,"rope_scaling":{"type":"linear","factor":2.0}})");
  set("{" + common + R"(,"dtype":"float32","layer_types":["full_attention","full_attention"],"rope_parameters":{"rope_type":"linear","rope_theta":5000.0,"factor":2.0}})");
}

// What the engine does not compute must be refused by name, not ignored.
TEST(ConfigJson, RefusesByName) {
  const TestDir dir;
  SaveSmall(dir / "m");
  const std::string good = ReadFile(dir / "m/config.json").value();
  const std::tuple<const char*, const char*, const char*> kChanges[] = {
      {"\"model_type\": \"llama\"", "\"model_type\": \"mamba\"", "model_type"},
      {"\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", "hidden_act"},
      {"\"attention_bias\": false", "\"attention_bias\": true", "attention_bias"},
      {"\"rope_type\": \"default\"", "\"rope_type\": \"longrope\"", "longrope"},
      {"\"rope_type\": \"default\"", "\"rope_type\": \"yarn\"", "factor is missing"},
      {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", "model.layers.2"},
      {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", "model.layers.1"},
      {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1000", "layers"},
      {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 2000000000", "layers"},
      {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": \"2\"", "num_hidden_layers"},
      {"\"vocab_size\": 270", "\"vocab_size\": 271", "embed_tokens"},
      {"\"vocab_size\": 270", "\"vocab_size\": -1", "vocab"},
      {"\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false", "lm_head.weight is missing"},
      {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", "kv_heads"},
      {"\"hidden_size\": 16", "\"sliding_window\": 4096, \"hidden_size\": 16", "sliding_window"},
      {"\"hidden_size\": 16", "\"quantization_config\": {}, \"hidden_size\": 16", "quantization_config"},
      {"\"hidden_size\": 16", "\"layer_types\": [\"sliding_attention\"], \"hidden_size\": 16", "layer_types"},
      {"{", "{{", "config.json"},
  };
  for (const auto& [from, to, message] : kChanges) {
    ASSERT_TRUE(WriteFile(dir / "m/config.json", Replace(good, from, to)).ok());
    auto model = LoadModel(dir / "m");
    ASSERT_FALSE(model.ok()) << to;
    EXPECT_NE(model.status().message().find(message), std::string::npos) << to << ": " << model.status().message();
  }
}

// An index that points out of its folder would read any file of the machine.
TEST(HuggingFaceFolder, ShardsStayInside) {
  const TestDir dir;
  SaveSmall(dir / "m");
  SaveSmall(dir / "other");
  std::filesystem::rename(dir / "m/model.safetensors", dir / "m/shard.safetensors");
  auto index = [&](const std::string& shard) {
    text::Dict map;
    for (const TensorSpec& spec : TensorSpecs(SmallConfig())) map.Set(spec.name, shard);
    ASSERT_TRUE(WriteFile(dir / "m/model.safetensors.index.json", text::CompactJson(text::MakeDict({{"weight_map", map}}))).ok());
  };
  index("shard.safetensors");
  EXPECT_TRUE(LoadModel(dir / "m").ok());
  for (const std::string& bad : {std::string("../other/model.safetensors"), dir / "other/model.safetensors", std::string("a/../../other/model.safetensors"),
                                 std::string(""), std::string("..")}) {
    index(bad);
    auto model = LoadModel(dir / "m");
    ASSERT_FALSE(model.ok()) << bad;
    EXPECT_NE(model.status().message().find("outside the folder"), std::string::npos) << model.status().message();
  }
  index("absent.safetensors");
  EXPECT_FALSE(LoadModel(dir / "m").ok());
}

// MODEL may be a folder, a file, a run or a folder with one GGUF file.
TEST(ResolveModel, WhatAPathNames) {
  const TestDir dir;
  SaveSmall(dir / "run/checkpoints/9");
  SaveSmall(dir / "run/checkpoints/10");
  std::filesystem::create_directories(dir / "run/checkpoints/11");  // not whole: no config.json
  EXPECT_EQ(ResolveModel(dir / "run").value(), dir / "run/checkpoints/10");
  std::filesystem::create_directories(dir / "fetched");
  std::filesystem::copy(GoldenPath("tiny.gguf"), dir / "fetched/x.gguf");
  EXPECT_EQ(ResolveModel(dir / "fetched").value(), dir / "fetched/x.gguf");
  EXPECT_EQ(ResolveModel(dir / "fetched/x.gguf").value(), dir / "fetched/x.gguf");
  EXPECT_EQ(ResolveModel("no-such-model").status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(ResolveModel(dir.path()).ok());
}

// Doubles and halves must come through as they lie; a reader of the gradient door's file sees what was written.
TEST(Safetensors, WritesAndReads) {
  const TestDir dir;
  const std::vector<double> values = {1.0 / 3, -0.0, 1e-300, 5};
  ASSERT_TRUE(WriteSafetensors(dir / "g.safetensors", std::vector<TensorToWrite>{{"a", {2, 2}, {}, values}, {"e", {0, 3}, {}, {}}}, FileType::kF64, {{"note", "x"}}).ok());
  const auto file = SafetensorsFile::Open(dir / "g.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  ASSERT_EQ(file->tensors().size(), 2u);
  EXPECT_EQ(file->metadata().at("note"), "x");
  EXPECT_EQ(file->Find("a")->shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(std::memcmp(file->Find("a")->bytes.data(), values.data(), 32), 0);
  // Halves: zero, subnormal, one, largest, infinity, NaN.
  const uint16_t halves[] = {0x8000, 0x0001, 0x3C00, 0x7BFF, 0xFC00, 0x7E00};
  float out[6];
  ReadElements(FileType::kF16, std::as_bytes(std::span(halves)), out);
  EXPECT_TRUE(out[0] == 0 && std::signbit(out[0]));
  EXPECT_EQ(out[1], std::ldexp(1.0f, -24));
  EXPECT_EQ(out[2], 1);
  EXPECT_EQ(out[3], 65504);
  EXPECT_EQ(out[4], -INFINITY);
  EXPECT_TRUE(std::isnan(out[5]));
}

}  // namespace
}  // namespace temper::engine
