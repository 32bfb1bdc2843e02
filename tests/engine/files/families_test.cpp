// Every family of models, from the folder that transformers writes to the gradient: tests/golden/engine/families_f64.py.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/files/model_config_json.h"
#include "engine/files/safetensors.h"
#include "engine/layer.h"
#include "engine/reference.h"
#include "engine/rope.h"
#include "engine/train_pass.h"
#include "tests/engine/files/files_helpers.h"
#include "tests/engine/test_models.h"
#include "text/json.h"

namespace temper::engine {
namespace {

const std::string kFolder = TEMPER_SOURCE_DIR "/tests/golden/engine/";

class Families : public testing::TestWithParam<const char*> {
 protected:
  std::string folder() const { return kFolder + "families/" + GetParam(); }
};

double Number(const text::Value& v) { return v.is_int() ? static_cast<double>(v.as_int()) : v.as_float(); }

// Could go wrong: a part of the family is missing, is computed where it does not belong, or its gradient is not its own.
TEST_P(Families, TransformersFloat64) {
  auto model = LoadModel(folder());
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  const text::Value golden = text::ParseJson(ReadFile(folder() + "/golden.json").value()).value();
  const auto gradient = SafetensorsFile::Open(folder() + "/gradient.safetensors");
  ASSERT_TRUE(gradient.ok()) << gradient.status().ToString();
  const Parameters& params = model->params;
  const double inverse_temperature = 1 / golden.Find("temperature")->as_float();

  TreeBuilder builder;
  std::vector<std::vector<int32_t>> handles;
  const auto t = static_cast<float>(inverse_temperature);
  const text::List &rows = golden.Find("rows")->as_list(), &coefs = golden.Find("coef")->as_list();
  for (const text::Value& row : rows) {
    std::vector<int32_t> ids;
    for (const text::Value& id : row.as_list()) ids.push_back(static_cast<int32_t>(id.as_int()));
    handles.push_back(builder.AddRow(ids, std::span(&t, 1)));
  }
  std::vector<int32_t> index;
  const TreeBatch tree = builder.Build(&index);
  EXPECT_LT(tree.size(), tree.logical_tokens);
  std::vector<double> coef(tree.size(), 0);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < handles[i].size(); ++j) coef[index[handles[i][j]]] += Number(coefs[i].as_list()[j]);
  }
  ReferenceOptions options;
  const std::vector<double> inverse(tree.size(), inverse_temperature);
  options.coef = coef;
  options.inv_temperature = inverse;
  options.gradient = true;
  const ReferenceResult result = RunReference(params, tree, options);
  EXPECT_NEAR(result.objective, Number(*golden.Find("objective")), 1e-10);

  auto engine = MakeEngine(CpuPath::kAuto, 2);
  TrainPass pass(*engine);
  const ComputeWeights weights = ComputeWeights::FromParameters(params, Profile::kF32);
  const auto fast = pass.Forward(weights, tree);
  ASSERT_TRUE(fast.ok()) << fast.status().ToString();
  Gradients grads(model->config);
  pass.Backward(std::vector<float>(coef.begin(), coef.end()), grads);

  const text::List& logprobs = golden.Find("logprobs")->as_list();
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 1; j < handles[i].size(); ++j) {
      const int node = index[handles[i][j]];
      const double want = Number(logprobs[i].as_list()[j]);
      EXPECT_NEAR(result.logprobs[node], want, 1e-11) << i << " " << j;
      EXPECT_NEAR((*fast)[node], want, 2e-5) << i << " " << j;
    }
  }
  EXPECT_EQ(gradient->tensors().size(), params.tensors().size());
  for (size_t i = 0; i < params.tensors().size(); ++i) {
    const TensorSpec& spec = params.tensors()[i];
    const FileTensor* want = gradient->Find(spec.name);
    ASSERT_TRUE(want) << spec.name;
    ASSERT_EQ(want->type, FileType::kF64);
    ASSERT_EQ(want->shape, spec.shape) << spec.name;
    double error = 0, error32 = 0, norm = 0;
    for (int64_t j = 0; j < spec.size; ++j) {
      double x;
      std::memcpy(&x, want->bytes.data() + j * 8, 8);
      error += std::pow(result.gradient[spec.offset + j] - x, 2);
      error32 += std::pow(grads.tensor(i)[j] - x, 2);
      norm += x * x;
    }
    EXPECT_LT(std::sqrt(error / norm), 1e-9) << spec.name;
    EXPECT_LT(std::sqrt(error32 / norm), 1e-5) << spec.name;
  }
}

// Could go wrong: a saved model is another one when it is loaded again.
TEST_P(Families, SavedAndLoadedAgain) {
  const TestDir dir;
  const ModelFile model = LoadModel(folder()).value();
  ASSERT_TRUE(SaveHuggingFace(dir / "m", model.config, model.params, {}, FileType::kF32).ok());
  const auto again = LoadModel(dir / "m");
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  EXPECT_TRUE(again->config == model.config);
  EXPECT_TRUE(std::ranges::equal(again->params.flat(), model.params.flat()));
}

// Could go wrong: the same model in a GGUF file is another one: names, permuted rows, gains with their 1, metadata of the family.
TEST_P(Families, GgufIsTheSameModel) {
  const std::string name = GetParam();
  const ModelFile folder_model = LoadModel(folder()).value();
  const auto gguf = LoadModel(kFolder + "families_gguf/" + name + ".gguf");
  ASSERT_TRUE(gguf.ok()) << gguf.status().ToString();
  // What GGUF does not say is what llama.cpp takes it to be.
  ModelConfig want = folder_model.config;
  const bool gemma = want.family == Family::kGemma2 || want.family == Family::kGemma3;
  if (gemma) want.query_scalar = want.head_dim;
  if (want.family == Family::kQwen2) want.window = 0, want.windowed.clear();
  if (want.family == Family::kLlama) {
    want.rope_theta = 500000;
    want.rope_scaling = {.kind = RopeScaling::Kind::kLlama3, .factor = 8};
  }
  EXPECT_TRUE(gguf->config == want);
  ASSERT_EQ(gguf->params.tensors().size(), folder_model.params.tensors().size());
  for (size_t i = 0; i < gguf->params.tensors().size(); ++i) {
    const TensorSpec& spec = gguf->params.tensors()[i];
    const auto got = gguf->params.tensor(i), expected = folder_model.params.tensor(i);
    if (spec.gain && gemma) {
      for (size_t j = 0; j < got.size(); ++j) EXPECT_NEAR(got[j], expected[j], 1.2e-7) << spec.name;
    } else {
      EXPECT_TRUE(std::ranges::equal(got, expected)) << spec.name;
    }
  }
}

// Could go wrong: something that changes what is computed is ignored instead of refused.
TEST(FamilyConfig, RefusesByName) {
  struct Change {
    const char *family, *from, *to, *message;
  };
  const Change kChanges[] = {
      {"gemma3", "\"gemma3_text\"", "\"gemma3\"", "model_type 'gemma3'"},
      {"gemma3", "gelu_pytorch_tanh", "gelu", "hidden_activation 'gelu'"},
      {"gemma3", "\"use_bidirectional_attention\": false", "\"use_bidirectional_attention\": true", "use_bidirectional_attention"},
      {"gemma3", "\"sliding_window\": 7", "\"sliding_window\": 0", "sliding_window is not positive"},
      {"gemma3", "\"sliding_window\": 7", "\"sliding_window\": \"7\"", "sliding_window"},
      {"gemma3", "\"full_attention\",", "\"chunked_attention\",", "layer_types of 'chunked_attention'"},
      {"gemma3", "\"full_attention\",", "", "layer_types"},
      {"gemma3", "\"query_pre_attn_scalar\": 10", "\"query_pre_attn_scalar\": 0", "query_pre_attn_scalar"},
      {"gemma3", "\"rope_type\": \"default\"", "\"rope_type\": \"linear\", \"factor\": 2", "rope_parameters.sliding_attention that scales"},
      {"gemma3", "\"final_logit_softcapping\": null", "\"final_logit_softcapping\": -1", "logit_cap"},
      {"qwen2", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2MoeForCausalLM"},
      {"qwen2", "\"yarn\"", "\"mrope\"", "mrope"},
      {"qwen2", "\"factor\": 3.0", "\"factor\": -3.0", "factor"},
      {"qwen2", "\"model_type\": \"qwen2\"", "\"model_type\": \"qwen2_moe\"", "qwen2_moe"},
      {"qwen3", "\"attention_bias\": false", "\"attention_bias\": true", "attention_bias"},
      {"qwen3", "\"use_cache\": true", "\"final_logit_softcapping\": 30.0", "final_logit_softcapping"},
      {"mistral", "\"sliding_window\": 11", "\"sliding_window\": null, \"layer_types\": [\"sliding_attention\", \"full_attention\", \"full_attention\"]",
       "layer_types"},
      {"mistral", "\"use_cache\": true", "\"layer_types\": [\"sliding_attention\", \"full_attention\", \"full_attention\"]", "layer_types"},
      {"llama", "\"use_cache\": true", "\"sliding_window\": 4096", "sliding_window"},
      {"llama", "\"use_cache\": true", "\"partial_rotary_factor\": 0.5", "partial_rotary_factor"},
      {"gemma2", "\"sliding_window\": 7", "\"sliding_window\": null", "sliding_window of null"},
      {"gemma2", "\"attention_bias\": false", "\"attention_bias\": true", "attention_bias"},
      {"llama", "\"mlp_bias\": false", "\"mlp_bias\": true", "mlp_bias"},
  };
  for (const auto& [family, from, to, message] : kChanges) {
    std::string json = ReadFile(kFolder + "families/" + family + "/config.json").value();
    ASSERT_TRUE(ParseConfigJson(json).ok());
    const size_t at = json.find(from);
    ASSERT_NE(at, std::string::npos) << family << " " << from;
    const auto config = ParseConfigJson(json.replace(at, std::strlen(from), to));
    ASSERT_FALSE(config.ok()) << family << " " << to;
    EXPECT_NE(config.status().message().find(message), std::string::npos) << to << ": " << config.status().message();
  }
}

// Could go wrong: a folder of the older form of config.json, as most published models have it, means another model.
TEST(FamilyConfig, OlderForms) {
  const auto gemma = ParseConfigJson(
      R"({"architectures":["Gemma3ForCausalLM"],"model_type":"gemma3_text","vocab_size":262144,"hidden_size":1152,"intermediate_size":6912,
          "num_hidden_layers":26,"num_attention_heads":4,"num_key_value_heads":1,"head_dim":256,"hidden_activation":"gelu_pytorch_tanh",
          "max_position_embeddings":32768,"rms_norm_eps":1e-06,"rope_theta":1000000,"rope_local_base_freq":10000,"rope_scaling":null,
          "sliding_window":512,"sliding_window_pattern":6,"query_pre_attn_scalar":256,"attn_logit_softcapping":null,
          "final_logit_softcapping":null,"attention_bias":false,"bos_token_id":2,"eos_token_id":[1,106],"pad_token_id":0,
          "cache_implementation":"hybrid","torch_dtype":"bfloat16"})");
  ASSERT_TRUE(gemma.ok()) << gemma.status().ToString();
  EXPECT_TRUE(gemma->tied);
  EXPECT_EQ(gemma->query_scalar, 256);
  EXPECT_EQ(gemma->rope_theta, 1e6);
  for (int l = 0; l < 26; ++l) {
    EXPECT_EQ(LayerOf(*gemma, l).window, l % 6 == 5 ? 0 : 512) << l;
    EXPECT_EQ(LayerOf(*gemma, l).rope, l % 6 == 5 ? 0 : 1) << l;
  }
  const auto qwen = ParseConfigJson(
      R"({"architectures":["Qwen2ForCausalLM"],"model_type":"qwen2","vocab_size":151936,"hidden_size":896,"intermediate_size":4864,
          "num_hidden_layers":24,"num_attention_heads":14,"num_key_value_heads":2,"hidden_act":"silu","max_position_embeddings":32768,
          "max_window_layers":21,"sliding_window":32768,"use_sliding_window":false,"rms_norm_eps":1e-06,"rope_theta":1000000.0,
          "tie_word_embeddings":true,"bos_token_id":151643,"eos_token_id":151645,"torch_dtype":"bfloat16","use_mrope":false})");
  ASSERT_TRUE(qwen.ok()) << qwen.status().ToString();
  EXPECT_EQ(qwen->head_dim, 64);
  EXPECT_EQ(LayerOf(*qwen, 23).window, 0);
  EXPECT_TRUE(LayerOf(*qwen, 0).qkv_bias);
}

// Could go wrong: what a config leaves out, sets to null or says twice is not what transformers (5.24) takes it for.
TEST(FamilyConfig, AbsentNullAndTwice) {
  const auto parse = [](const std::string& type, const std::string& more, int heads = 8) {
    const auto config = ParseConfigJson(R"({"model_type":")" + type + R"(","vocab_size":64,"hidden_size":64,
        "intermediate_size":96,"num_hidden_layers":3,"max_position_embeddings":4096,"num_attention_heads":)" + std::to_string(heads) + more + "}");
    EXPECT_TRUE(config.ok()) << type << more << config.status().ToString();
    return config.ok() ? *config : ModelConfig();
  };
  const ModelConfig mistral = parse("mistral", "");
  EXPECT_EQ(mistral.window, 4096);
  EXPECT_EQ(mistral.kv_heads, 8);
  EXPECT_EQ(parse("mistral", R"(,"sliding_window":null,"num_key_value_heads":null)").window, 0);
  const ModelConfig many = parse("mistral", R"(,"num_key_value_heads":null)", 16);
  EXPECT_EQ(many.kv_heads, 16);
  EXPECT_EQ(many.head_dim, 4);
  EXPECT_EQ(parse("mistral", R"(,"head_dim":null,"attention_bias":true)").head_dim, 8);
  EXPECT_EQ(parse("qwen2", R"(,"use_sliding_window":true,"sliding_window":null)").window, 0);
  EXPECT_EQ(parse("qwen2", R"(,"use_sliding_window":true,"max_window_layers":1)").windowed, (std::vector<uint8_t>{0, 1, 1}));
  EXPECT_EQ(parse("qwen2", R"(,"use_sliding_window":false,"sliding_window":512,"attention_bias":true)").window, 0);
  const ModelConfig gemma2 = parse("gemma2", "");
  EXPECT_EQ(gemma2.windowed, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_EQ(gemma2.score_cap, 50);
  EXPECT_EQ(gemma2.logit_cap, 30);
  EXPECT_EQ(gemma2.head_dim, 256);
  EXPECT_TRUE(gemma2.tied);
  EXPECT_EQ(SpecOf(gemma2).ropes, 1);
  const ModelConfig uncapped = parse("gemma2", R"(,"attn_logit_softcapping":null,"final_logit_softcapping":null)");
  EXPECT_EQ(uncapped.score_cap + uncapped.logit_cap, 0);
  const ModelConfig gemma3 = parse("gemma3_text", R"(,"attn_logit_softcapping":50.0,"final_logit_softcapping":20.0)");
  EXPECT_EQ(gemma3.score_cap, 0);
  EXPECT_EQ(gemma3.logit_cap, 20);
  const ModelConfig twice = parse("llama", R"(,"rope_theta":7000.0,"rope_scaling":{"type":"linear","factor":2},
                                             "rope_parameters":{"rope_type":"default","rope_theta":9000.0})");
  EXPECT_EQ(twice.rope_scaling.kind, RopeScaling::Kind::kLinear);
  EXPECT_EQ(twice.rope_theta, 7000);
  const ModelConfig empty = parse("llama", R"(,"rope_scaling":{},"rope_parameters":{"rope_type":"default","rope_theta":9000.0})");
  EXPECT_EQ(empty.rope_theta, 9000);
  const ModelConfig outside = parse("llama", R"(,"original_max_position_embeddings":512,
      "rope_scaling":{"rope_type":"yarn","factor":8.0,"original_max_position_embeddings":1024})");
  EXPECT_EQ(outside.rope_scaling.original_max_positions, 1024);
  const ModelConfig local = parse("gemma3_text", R"(,"rope_local_base_freq":5000,"rope_theta":2e6,
      "rope_scaling":{"rope_type":"linear","factor":8.0})");
  EXPECT_EQ(local.local_rope_theta, 5000);
  EXPECT_EQ(local.rope_theta, 2e6);
  EXPECT_EQ(local.rope_scaling.factor, 8);
}

// Could go wrong: scaled frequencies of an unknown kind are taken for some other scaling.
TEST(RopeScaling, UnknownFrequenciesOfGgufAreRefused) {
  const TestDir dir;
  std::string bytes = ReadFile(kFolder + "families_gguf/llama.gguf").value();
  const float divisors[] = {1, 1, 8};
  const size_t at = bytes.find(std::string(reinterpret_cast<const char*>(divisors), sizeof divisors));
  ASSERT_NE(at, std::string::npos);
  const float other = 3;
  std::memcpy(bytes.data() + at + 4, &other, 4);
  ASSERT_TRUE(WriteFile(dir / "x.gguf", bytes).ok());
  EXPECT_NE(LoadModel(dir / "x.gguf").status().message().find("rope_freqs.weight"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(All, Families, testing::Values("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gemma3_caps"),
                         [](const auto& which) { return std::string(which.param); });

// Could go wrong: a kind of scaling turns by other angles than the model was trained with.
TEST(RopeScaling, FrequenciesOfTransformers) {
  const text::Value golden = text::ParseJson(ReadFile(kFolder + "ropes.json").value()).value();
  for (const text::Value& c : golden.Find("cases")->as_list()) {
    SCOPED_TRACE(text::CompactJson(*c.Find("config")->Find("rope_parameters")));
    text::Dict json = c.Find("config")->as_dict();
    json.Set("architectures", nullptr);
    auto config = ParseConfigJson(text::CompactJson(json));
    ASSERT_TRUE(config.ok()) << config.status().ToString();
    const std::vector<double> got = InverseFrequencies(*config, 0);
    const text::List& want = c.Find("inverse")->as_list();
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], Number(want[i]), 1e-13 * Number(want[i])) << i;
    EXPECT_NEAR(AngleFactor(*config, 0), Number(*c.Find("factor")), 1e-15);
    const auto saved = ParseConfigJson(WriteConfigJson(*config, FileType::kF32));
    ASSERT_TRUE(saved.ok()) << saved.status().ToString();
    EXPECT_TRUE(*saved == *config);
  }
}

}  // namespace
}  // namespace temper::engine
