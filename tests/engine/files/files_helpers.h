// Temporary folders and small models for tests of model files.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "common/file.h"
#include "engine/files/model_file.h"
#include "text/task_vocabulary.h"

namespace temper::engine {

// A folder of this test, emptied at the start and removed at the end.
class TestDir {
 public:
  TestDir() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    path_ = testing::TempDir() + "temper_files_" + info->test_suite_name() + "_" + info->name() + "_" + std::to_string(getpid());
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~TestDir() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string GoldenPath(const std::string& name) { return std::string(TEMPER_SOURCE_DIR) + "/tests/golden/engine_files/" + name; }

inline ModelConfig SmallConfig(bool tied = true) {
  ModelConfig c;
  c.vocab = 270;
  c.layers = 2;
  c.width = 16;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 8;
  c.ffn = 24;
  c.max_positions = 64;
  c.rope_theta = 5000;
  c.tied = tied;
  c.bos_id = 3;
  c.eos_ids = {256};
  return c;
}

inline text::TextFiles SmallText() {
  const std::vector<std::string> words = {"some words"};
  const text::TaskTextFiles files = text::MakeTaskVocabulary(words);
  text::TextFiles out;
  out.tokenizer_json = files.tokenizer_json;
  out.tokenizer_config_json = files.tokenizer_config_json;
  return out;
}

inline void SaveSmall(const std::string& dir, bool tied = true) {
  const ModelConfig c = SmallConfig(tied);
  const Status saved = SaveHuggingFace(dir, c, InitParameters(c, 5), SmallText(), FileType::kF32);
  TEMPER_CHECK(saved.ok()) << saved.ToString();
}

}  // namespace temper::engine
