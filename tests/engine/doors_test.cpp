// `temper engine score` and `temper engine grad` as a user meets them: files in, lines out, exit codes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/commands.h"
#include "engine/files/model_file.h"
#include "engine/files/safetensors.h"
#include "tests/engine/golden_model.h"
#include "tests/engine/test_models.h"

namespace temper::engine {
namespace {

struct Answer {
  int code;
  std::vector<std::string> lines;
  std::string errors;
};

class Doors : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + fmt::format("engine_doors_{}", getpid());
    config_ = TinyConfig();
    params_ = TestParameters(config_, 8);
    ASSERT_TRUE(SaveHuggingFace(folder_ + "/model", config_, params_, {}, FileType::kF32).ok());
  }
  void TearDown() override { EXPECT_TRUE(RemoveAll(folder_).ok()); }

  std::string Write(const std::string& name, const std::string& text) {
    const std::string path = folder_ + "/" + name;
    EXPECT_TRUE(WriteFile(path, text).ok());
    return path;
  }

  Answer Call(const std::string& name, std::vector<std::string> arguments) {
    for (const Command& command : Commands()) {
      if (name != command.name) continue;
      std::string program = "temper engine " + name;
      std::vector<char*> argv = {program.data()};
      for (std::string& a : arguments) argv.push_back(a.data());
      testing::internal::CaptureStdout();
      testing::internal::CaptureStderr();
      Answer answer;
      answer.code = command.run(static_cast<int>(argv.size()), argv.data());
      std::fflush(stdout);
      answer.lines = Split(testing::internal::GetCapturedStdout(), '\n');
      answer.errors = testing::internal::GetCapturedStderr();
      if (!answer.lines.empty() && answer.lines.back().empty()) answer.lines.pop_back();
      return answer;
    }
    ADD_FAILURE() << "no door " << name;
    return {};
  }

  std::string model() const { return folder_ + "/model"; }

  std::string folder_;
  ModelConfig config_;
  Parameters params_;
};

// Could go wrong: a mode, a path or a thread count prints other digits; a bad line spoils its neighbours.
TEST_F(Doors, ScoreSaysTheSameInEveryMode) {
  const std::string in = Write("in", "{\"ids\":[1,2,3,4,5,6,7]}\n{\"ids\":[]}\n{\"ids\":[1,2,9,300]}\nnonsense\n"
                                     "{\"ids\":[1,2,3,9],\"temperature\":0.5}\n");
  const Answer flat = Call("score", {model(), "--in", in, "--top", "2"});
  EXPECT_EQ(flat.code, 1);
  ASSERT_EQ(flat.lines.size(), 5u);
  EXPECT_TRUE(flat.lines[0].starts_with("{\"logprobs\":[null,")) << flat.lines[0];
  EXPECT_NE(flat.lines[0].find("\"top\":[[["), std::string::npos);
  for (int i : {1, 2, 3}) EXPECT_TRUE(flat.lines[i].starts_with("{\"error\":{\"kind\":")) << flat.lines[i];
  EXPECT_NE(flat.lines[2].find("ids[3] = 300"), std::string::npos) << flat.lines[2];
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
           {"--mode", "tree"}, {"--mode=decode"}, {"--mode", "prefill:3"}, {"--threads", "1"}, {"--cpu", "avx2"}}) {
    std::vector<std::string> arguments = {model(), "--in", in, "--top", "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    EXPECT_EQ(Call("score", arguments).lines, flat.lines) << more[0];
  }
  EXPECT_EQ(Call("score", {model(), "--in", Write("good", "{\"ids\":[5]}\n")}).lines, std::vector<std::string>{"{\"logprobs\":[null]}"});
  EXPECT_EQ(Call("score", {model(), "--in", Write("good", "{\"ids\":[5]}\n"), "--numerics", "f64"}).code, 0);
}

// Could go wrong: kept sets are read by one mode alone, stand beside other tokens, or a list that is none is taken for one.
TEST_F(Doors, KeptSetsOfScoreAndGrad) {
  const std::string in = Write("in", "{\"ids\":[1,2,3,4],\"kept\":[null,[2,5],null,[0,4,9]]}\n{\"ids\":[1,2,3,4],\"kept\":[null,null,[3],null]}\n"
                                     "{\"ids\":[1,2],\"kept\":[null,[3]]}\n{\"ids\":[1,2],\"kept\":[null]}\n{\"ids\":[1,2,3,4]}\n");
  const Answer flat = Call("score", {model(), "--in", in, "--numerics", "f32"});
  EXPECT_EQ(flat.code, 1);
  ASSERT_EQ(flat.lines.size(), 5u);
  EXPECT_NE(flat.lines[2].find("kept"), std::string::npos) << flat.lines[2];
  EXPECT_NE(flat.lines[3].find("1 entries for 2 tokens"), std::string::npos) << flat.lines[3];
  const auto logprob = [&](size_t line, size_t i) { return ParseJson(flat.lines[line])->at("logprobs").at(i).to_number<double>(); };
  EXPECT_EQ(logprob(1, 2), 0) << "one token alone";
  EXPECT_EQ(logprob(1, 1), logprob(4, 1));
  EXPECT_EQ(logprob(0, 2), logprob(4, 2));
  EXPECT_GT(logprob(0, 1), logprob(4, 1));
  EXPECT_GT(logprob(0, 3), logprob(4, 3));
  for (const char* mode : {"tree", "decode", "prefill:2"}) {
    EXPECT_EQ(Call("score", {model(), "--in", in, "--numerics", "f32", "--mode", mode}).lines, flat.lines) << mode;
  }
  const Answer exact = Call("score", {model(), "--in", in, "--numerics", "f64"});
  for (size_t i = 1; i < 4; ++i) EXPECT_NEAR(ParseJson(exact.lines[0])->at("logprobs").at(i).to_number<double>(), logprob(0, i), 1e-5);

  const std::string out = folder_ + "/g.safetensors";
  const std::string rows = Write("rows", "{\"rows\":[{\"ids\":[1,2,3,4],\"coef\":[0,1,0.5,2],\"kept\":[null,[2,5],null,[0,4,9]]},"
                                         "{\"ids\":[1,2,3,4],\"coef\":[0,1,0.5,2]}]}");
  for (const char* merge : {"on", "off"}) {
    const Answer grad = Call("grad", {model(), "--in", rows, "--out", out, "--tree", merge, "--numerics", "f32"});
    ASSERT_EQ(grad.code, 0) << grad.errors;
    const json::value answer = *ParseJson(grad.lines[0]);
    for (size_t i = 1; i < 4; ++i) {
      EXPECT_EQ(answer.at("logprobs").at(0).at(i).to_number<double>(), logprob(0, i));
      EXPECT_EQ(answer.at("logprobs").at(1).at(i).to_number<double>(), logprob(4, i));
    }
    // The root alone is shared: token 2 was drawn from two sets.
    EXPECT_EQ(answer.at("tree_tokens").as_int64(), std::string(merge) == "on" ? 7 : 8);
  }
  const Answer bad = Call("grad", {model(), "--in", Write("bad", "{\"rows\":[{\"ids\":[1,2],\"coef\":[0,1],\"kept\":[null,[2,2]]}]}"), "--out", out});
  EXPECT_EQ(bad.code, 2);
  EXPECT_NE(bad.errors.find("rows[0].kept[1]"), std::string::npos) << bad.errors;
}

// Could go wrong: a mistake of the user is taken for something else.
TEST_F(Doors, BadUsageIsTwo) {
  const std::string in = Write("in", "{\"ids\":[1]}\n");
  EXPECT_EQ(Call("score", {}).code, 2);
  EXPECT_EQ(Call("score", {model()}).code, 2);
  EXPECT_EQ(Call("score", {model(), "--in", folder_ + "/absent"}).code, 2);
  EXPECT_EQ(Call("score", {folder_ + "/absent", "--in", in}).code, 2);
  EXPECT_EQ(Call("score", {model(), "--in", in, "--mode", "prefill:0"}).code, 2);
  EXPECT_EQ(Call("score", {model(), "--in", in, "--cpu", "mmx"}).code, 2);
  EXPECT_EQ(Call("score", {model(), "--in", in, "--top", "x"}).code, 2);
  const Answer typo = Call("score", {model(), "--in", in, "--tpo", "1"});
  EXPECT_EQ(typo.code, 2);
  EXPECT_NE(typo.errors.find("--top"), std::string::npos) << typo.errors;
  EXPECT_EQ(Call("grad", {model(), "--in", in}).code, 2);
  const std::string out = folder_ + "/g.safetensors";
  for (const char* text : {"{}", "[]", "{\"rows\":[]}", "{\"rows\":[{\"ids\":[1,2],\"coef\":[1]}]}",
                           "{\"rows\":[{\"ids\":[1,2],\"coef\":[0,1],\"temperature\":0}]}",
                           "{\"rows\":[{\"ids\":[1,-1],\"coef\":[0,1]}]}",
                           "{\"trees\":[{\"parent\":[1,0],\"token\":[1,2],\"coef\":[0,1]}]}",
                           "{\"trees\":[{\"parent\":[-1,5],\"token\":[1,2],\"coef\":[0,1]}]}"}) {
    const Answer answer = Call("grad", {model(), "--in", Write("bad", text), "--out", out});
    EXPECT_EQ(answer.code, 2) << text;
    EXPECT_NE(answer.errors.find("bad"), std::string::npos) << answer.errors;
  }
  EXPECT_EQ(Call("grad", {model(), "--in", Write("ok", "{\"rows\":[{\"ids\":[1,2],\"coef\":[0,1]}]}"), "--out",
                          folder_ + "/no/such/g"}).code, 1);
}

// Could go wrong: a number that no float holds, or weights that are none, come out as null or as those of another temperature.
TEST_F(Doors, NumbersThatAreNoneAreRefused) {
  const std::string out = folder_ + "/g.safetensors";
  for (const char* numerics : {"f32", "bf16", "f64"}) {
    for (const char* t : {"1e300", "1e31", "1e-31", "1e-320", "0", "-1"}) {
      const std::string line = fmt::format("{{\"ids\":[1,2],\"temperature\":{}}}\n", t);
      const Answer score = Call("score", {model(), "--in", Write("in", line), "--numerics", numerics});
      EXPECT_EQ(score.code, 1);
      EXPECT_NE(score.lines.at(0).find("expected a number from 1e-30 to 1e30"), std::string::npos) << score.lines[0];
      const std::string rows = fmt::format("{{\"rows\":[{{\"ids\":[1,2],\"coef\":[0,1],\"temperature\":{}}}]}}", t);
      const Answer grad = Call("grad", {model(), "--in", Write("in", rows), "--out", out, "--numerics", numerics});
      EXPECT_EQ(grad.code, 2);
      EXPECT_NE(grad.errors.find("expected a number from 1e-30 to 1e30"), std::string::npos) << grad.errors;
    }
    const std::string ends = Write("in", "{\"ids\":[1,2],\"temperature\":1e-30}\n{\"ids\":[1,2],\"temperature\":1e30}\n");
    EXPECT_EQ(Call("score", {model(), "--in", ends, "--numerics", numerics}).code, 0);
    const auto grad = [&](const char* coef, double temperature) {
      const std::string rows =
          fmt::format("{{\"rows\":[{{\"ids\":[1,2],\"coef\":[0,{}],\"temperature\":{}}}]}}", coef, temperature);
      return Call("grad", {model(), "--in", Write("in", rows), "--out", out, "--numerics", numerics});
    };
    const Answer large = grad("-1e308", 1);
    EXPECT_EQ(large.code, 2);
    EXPECT_NE(large.errors.find("rows[0].coef: [1] = -1e+308"), std::string::npos) << large.errors;
    EXPECT_NE(large.errors.find("from -1e+30 to 1e+30"), std::string::npos) << large.errors;
    EXPECT_EQ(grad("1e30", 1).code, 0);
    if (std::string(numerics) == "f64") continue;  // where the product of both is a number
    EXPECT_TRUE(RemoveAll(out).ok());
    const Answer steep = grad("1e30", 1e-30);
    EXPECT_EQ(steep.code, 1);
    EXPECT_NE(steep.errors.find("is not finite"), std::string::npos) << steep.errors;
    EXPECT_FALSE(Exists(out));
  }
  params_.tensor(3)[5] = NAN;
  ASSERT_TRUE(SaveHuggingFace(folder_ + "/nan", config_, params_, {}, FileType::kF32).ok());
  const std::string lines = Write("in", "{\"ids\":[1,2,3]}\n{\"ids\":[1]}\n");
  const Answer score = Call("score", {folder_ + "/nan", "--in", lines, "--mode", "tree"});
  EXPECT_EQ(score.code, 1);
  EXPECT_NE(score.lines.at(0).find("line 1: the log-probability of ids[1]"), std::string::npos) << score.lines[0];
  EXPECT_EQ(score.lines.at(1), "{\"logprobs\":[null]}");
}

// Could go wrong: some input crashes the program instead of being refused.
TEST_F(Doors, MangledInputIsAnsweredOrRefused) {
  std::mt19937_64 rng(1);
  const std::string score = "{\"ids\":[1,2,3],\"temperature\":1}\n{\"ids\":[5,6],\"temperature\":0.5}\n";
  const std::string grad = "{\"trees\":[{\"parent\":[-1,0,1,1],\"token\":[5,6,7,8],\"coef\":[0,1,2,3],\"temperature\":[1,1,1,2]}]}";
  for (int i = 0; i < 120; ++i) {
    std::string text = i % 2 ? score : grad;
    for (uint64_t n = 1 + rng() % 4; n; --n) {
      const size_t at = rng() % text.size();
      switch (rng() % 4) {
        case 0: text[at] = "[]{},:\"0-19e.\n"[rng() % 15]; break;
        case 1: text.erase(at, 1 + rng() % 3); break;
        case 2: text.insert(at, text.substr(rng() % text.size(), rng() % 8)); break;
        default: text[at] = static_cast<char>(rng()); break;
      }
      if (text.empty()) text = "x";
    }
    const std::string in = Write("mangled", text);
    const Answer answer = i % 2 ? Call("score", {model(), "--in", in})
                                : Call("grad", {model(), "--in", in, "--out", folder_ + "/g.safetensors"});
    EXPECT_TRUE(answer.code >= 0 && answer.code <= 2) << text;
    EXPECT_TRUE(answer.code != 2 || !answer.errors.empty()) << text;
  }
}

// Could go wrong: rows, the same as a tree in any order of nodes, merged or not, in chunks or whole, give other gradients.
TEST_F(Doors, GradOfRowsAndTrees) {
  const std::string rows = Write("rows", "{\"rows\":[{\"ids\":[1,2,3,4],\"coef\":[9,0.5,1,-1]},{\"ids\":[1,2,7],\"coef\":[0,0.25,2]}]}");
  // The same tree with its nodes shuffled: 0:4 1:root 2:7 3:3 4:2.
  const std::string tree = Write("tree", "{\"trees\":[{\"parent\":[3,-1,4,4,1],\"token\":[4,1,7,3,2],\"coef\":[-1,0,2,1,0.75]}]}");
  const auto grad = [&](const std::string& in, std::vector<std::string> more, Answer* answer) {
    const std::string out = folder_ + "/g.safetensors";
    std::vector<std::string> arguments = {model(), "--in", in, "--out", out, "--numerics", "f64"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    *answer = Call("grad", arguments);
    EXPECT_EQ(answer->code, 0) << answer->errors;
    std::vector<double> all;
    auto file = SafetensorsFile::Open(out);
    EXPECT_TRUE(file.ok());
    for (const TensorSpec& spec : TensorSpecs(config_)) {
      const FileTensor* t = file->Find(spec.name);
      EXPECT_NE(t, nullptr) << spec.name;
      EXPECT_EQ(t->shape, spec.shape);
      EXPECT_EQ(t->type, FileType::kF64);
      std::vector<double> values(t->count);
      std::memcpy(values.data(), t->bytes.data(), t->bytes.size());
      all.insert(all.end(), values.begin(), values.end());
    }
    EXPECT_EQ(file->tensors().size(), TensorSpecs(config_).size());  // a tied head has no tensor of its own
    return all;
  };
  Answer first, other;
  const auto want = grad(rows, {}, &first);
  ASSERT_EQ(first.lines.size(), 1u);
  const json::value line = *ParseJson(first.lines[0]);
  const JsonRef ref(line);
  EXPECT_EQ(*(*ref.Field("logical_tokens")).Int(), 7);
  EXPECT_EQ(*(*ref.Field("tree_tokens")).Int(), 5);
  EXPECT_TRUE(std::isfinite(*(*ref.Field("objective")).Double()));
  EXPECT_GT(*(*ref.Field("peak_bytes")).Int(), 0);
  const auto logprobs = *(*ref.Field("logprobs")).Items();
  ASSERT_EQ(logprobs.size(), 2u);
  EXPECT_TRUE((*logprobs[0].Items())[0].is_null());
  const auto near = [&](const std::vector<double>& got) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      error += std::pow(want[i] - got[i], 2);
      norm += want[i] * want[i];
    }
    EXPECT_GT(norm, 0);
    EXPECT_LT(std::sqrt(error / norm), 1e-12);
  };
  near(grad(tree, {}, &other));
  near(grad(rows, {"--tree", "off"}, &other));
  const json::value apart = *ParseJson(other.lines[0]);
  EXPECT_EQ(*(*JsonRef(apart).Field("tree_tokens")).Int(), 7);
  near(grad(tree, {"--tree", "off"}, &other));
  near(grad(rows, {"--chunk", "3"}, &other));
  // The default profile writes F32 of the same.
  ASSERT_EQ(Call("grad", {model(), "--in", rows, "--out", folder_ + "/b.safetensors"}).code, 0);
  auto file = SafetensorsFile::Open(folder_ + "/b.safetensors");
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->tensors()[0].type, FileType::kF32);
}

// Could go wrong: what `engine grad` writes is not the gradient that PyTorch computes for the same rows.
TEST_F(Doors, GradIsPyTorchs) {
  const json::value golden = *ParseJson(*ReadFile(TEMPER_SOURCE_DIR "/tests/golden/engine/llama_f64.json"));
  const ModelConfig config = GoldenConfig(golden.at("config"));
  const Parameters params = GoldenParameters(config, static_cast<uint64_t>(golden.at("seed").as_int64()));
  ASSERT_TRUE(SaveHuggingFace(folder_ + "/golden", config, params, {}, FileType::kF32).ok());
  json::array rows;
  for (size_t i = 0; i < golden.at("rows").as_array().size(); ++i) {
    rows.push_back(json::object{{"ids", golden.at("rows").at(i)}, {"coef", golden.at("coef").at(i)}, {"temperature", golden.at("temperature")}});
  }
  const std::string in = Write("golden.json", PrintJson(json::object{{"rows", rows}})), out = folder_ + "/golden.safetensors";
  for (const auto& [numerics, limit] : {std::pair{"f64", 1e-9}, {"f32", 1e-5}}) {
    for (const char* tree : {"on", "off"}) {
      const Answer answer = Call("grad", {folder_ + "/golden", "--in", in, "--out", out, "--numerics", numerics, "--tree", tree});
      ASSERT_EQ(answer.code, 0) << answer.errors;
      auto file = SafetensorsFile::Open(out);
      ASSERT_TRUE(file.ok());
      for (const TensorSpec& spec : TensorSpecs(config)) {
        const FileTensor* tensor = file->Find(spec.name);
        ASSERT_NE(tensor, nullptr) << spec.name;
        const json::array& want = golden.at("gradient").at(spec.name).as_array();
        ASSERT_EQ(static_cast<int64_t>(want.size()), tensor->count);
        double error = 0, norm = 0;
        for (size_t j = 0; j < want.size(); ++j) {
          double got = 0;
          if (tensor->type == FileType::kF64) {
            std::memcpy(&got, tensor->bytes.data() + j * 8, 8);
          } else {
            float single = 0;
            std::memcpy(&single, tensor->bytes.data() + j * 4, 4);
            got = single;
          }
          error += std::pow(got - want[j].to_number<double>(), 2);
          norm += std::pow(want[j].to_number<double>(), 2);
        }
        EXPECT_LT(std::sqrt(error / norm), limit) << spec.name << " " << numerics << " tree " << tree;
      }
    }
  }
}

}  // namespace
}  // namespace temper::engine
