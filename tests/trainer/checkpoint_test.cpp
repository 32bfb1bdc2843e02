#include "trainer/checkpoint.h"

#include <gtest/gtest.h>
#include <limits.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "common/file.h"
#include "common/json.h"
#include "common/rng.h"
#include "tests/fuzz/mutate.h"
#include "tests/harness/tiny_model.h"

// What reaches the disk, in order: this program's fsync and rename are called instead of the C library's.
namespace {
std::vector<std::string> disk_log;
}  // namespace

extern "C" int fsync(int fd) {
  char path[PATH_MAX];
  const ssize_t n = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof path);
  disk_log.push_back("sync " + std::string(path, static_cast<size_t>(std::max<ssize_t>(n, 0))));
  return static_cast<int>(syscall(SYS_fsync, fd));
}

extern "C" int rename(const char* from, const char* to) noexcept {
  disk_log.push_back("rename " + std::string(from) + " " + to);
  return static_cast<int>(syscall(SYS_rename, from, to));
}

namespace temper::trainer {
namespace {

text::TextFiles SomeText() {
  text::TextFiles files;
  files.tokenizer_json = R"({"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}})";
  return files;
}

// Every number of it follows from `step`.
Checkpoint Of(const engine::ModelConfig& config, int64_t step) {
  Checkpoint c;
  c.step = step;
  c.sft_tokens = 100 + step;
  c.plan_json = "{\"max_chunk_nodes\":" + std::to_string(64 + step) + "}";
  c.params = engine::InitParameters(config, static_cast<uint64_t>(step));
  engine::Parameters m(c.params.config()), v(c.params.config());
  Rng rng(static_cast<uint64_t>(step) + 1000);
  for (float& x : m.flat()) x = static_cast<float>(rng.Normal());
  for (float& x : v.flat()) x = static_cast<float>(rng.Uniform());
  c.optimizer.Restore(7 * step, std::move(m), std::move(v));
  return c;
}

Checkpoint At(int64_t step) { return Of(TinyModel(40), step); }

// The same with as few weights as a model can have, for a test that loads it thousands of times.
Checkpoint SmallAt(int64_t step) {
  engine::ModelConfig config = TinyModel(4);
  config.layers = 1;
  config.width = config.ffn = 8;
  config.heads = 1;
  config.head_dim = 8;
  return Of(config, step);
}

std::vector<float> Flat(const engine::Parameters& p) { return {p.flat().begin(), p.flat().end()}; }

class CheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    run_ = testing::TempDir() + "checkpoint-" + std::to_string(getpid());
    ASSERT_TRUE(RemoveAll(run_).ok());
  }
  void TearDown() override { ASSERT_TRUE(RemoveAll(run_).ok()); }
  void Save(int64_t step, int keep = 3) {
    const Status status = SaveCheckpoint(run_, At(step), SomeText(), keep);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  std::vector<std::string> Folders() const { return ListDir(run_ + "/checkpoints").value(); }
  int64_t Newest() const {
    Result<Checkpoint> loaded = LoadNewestCheckpoint(run_);
    return loaded.ok() ? loaded->step : -1;
  }
  // Replaces one piece of a checkpoint's list of contents, and its hash.
  void Edit(int64_t step, const std::string& from, const std::string& to) {
    const std::string path = run_ + "/checkpoints/" + std::to_string(step) + "/checkpoint.json";
    std::string text = ReadFile(path).value();
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << text;
    ASSERT_TRUE(WriteFile(path, SealManifest(Unsealed(text.replace(at, from.size(), to)))).ok());
  }
  // The list of contents as it was before its hash was written into it.
  static std::string Unsealed(const std::string& text) { return text.substr(0, text.rfind(",\"hash\"")) + "}"; }
  std::string run_;
};

// A field that is not stored, or comes back as another, makes a resumed run a different one.
TEST_F(CheckpointTest, ComesBackAsItWas) {
  Save(5);
  const Checkpoint saved = At(5), loaded = LoadNewestCheckpoint(run_).value();
  EXPECT_EQ(loaded.step, 5);
  EXPECT_EQ(loaded.sft_tokens, 105);
  EXPECT_EQ(loaded.plan_json, saved.plan_json);
  EXPECT_EQ(loaded.optimizer.steps(), 35);
  EXPECT_EQ(Flat(loaded.params), Flat(saved.params));
  EXPECT_EQ(Flat(loaded.optimizer.first_moment()), Flat(saved.optimizer.first_moment()));
  EXPECT_EQ(Flat(loaded.optimizer.second_moment()), Flat(saved.optimizer.second_moment()));
}

// A power cut right after the rename could leave a checkpoint under its final name whose bytes never reached the disk, or no
// checkpoint at all though the pool was told that there is one.
TEST_F(CheckpointTest, EveryByteIsOnDiskBeforeTheNameAndTheNameBeforeTheReturn) {
  ASSERT_TRUE(MakeDirs(run_ + "/checkpoints").ok());
  disk_log.clear();
  Save(5);
  const std::string folder = run_ + "/checkpoints", writing = folder + "/.writing-5", done = folder + "/5";
  const auto place = [](const std::string& entry) { return std::find(disk_log.begin(), disk_log.end(), entry) - disk_log.begin(); };
  const ptrdiff_t named = place("rename " + writing + " " + done), end = std::ssize(disk_log);
  ASSERT_LT(named, end) << "not renamed";
  const std::vector<std::string> files = ListDir(done).value();
  for (const std::string& file : files) {
    if (file == "checkpoint.json") continue;
    EXPECT_LT(place("sync " + writing + "/" + file), named) << file;
  }
  // The list of contents is written beside its name, too.
  const auto list = std::find_if(disk_log.begin(), disk_log.end(), [&](const std::string& entry) {
    return entry.rfind("rename " + writing + "/checkpoint.json.", 0) == 0;
  });
  ASSERT_NE(list, disk_log.end());
  const std::string written = list->substr(7, list->find(' ', 7) - 7);
  EXPECT_LT(place("sync " + written), list - disk_log.begin());
  EXPECT_LT(list - disk_log.begin(), named);
  // Names: the files' in the folder before it gets its own, its own before Save returns.
  EXPECT_TRUE(std::find(list, disk_log.begin() + named, "sync " + writing) != disk_log.begin() + named);
  EXPECT_TRUE(std::find(disk_log.begin() + named, disk_log.end(), "sync " + folder) != disk_log.end());
}

// A checkpoint that was made before a rollback would be resumed from, though its steps are no longer part of the run.
TEST_F(CheckpointTest, WhatIsNewerThanARollbackGoes) {
  for (int64_t step : {2, 4, 6}) Save(step);
  Save(4);
  EXPECT_EQ(Folders(), (std::vector<std::string>{"2", "4"}));
  EXPECT_EQ(Newest(), 4);
  for (int64_t step : {8, 10}) Save(step);
  EXPECT_EQ(Folders(), (std::vector<std::string>{"10", "4", "8"}));
}

// A save that fails half way could take the good checkpoint of the same step with it, or be loaded as half a one.
TEST_F(CheckpointTest, AFailedSaveLeavesTheFormerOne) {
  Save(2);
  Checkpoint bad = At(2);
  bad.plan_json = "{";  // found out after the weights are written
  EXPECT_FALSE(SaveCheckpoint(run_, bad, SomeText(), 3).ok());
  EXPECT_EQ(Newest(), 2);
  bad.step = 4;
  EXPECT_FALSE(SaveCheckpoint(run_, bad, SomeText(), 3).ok());
  EXPECT_EQ(Newest(), 2);
  // What it left behind is no part of the next one.
  ASSERT_TRUE(WriteFile(run_ + "/checkpoints/.writing-4/stray", "x").ok());
  Save(4);
  EXPECT_FALSE(Exists(run_ + "/checkpoints/4/stray"));
  EXPECT_EQ(Folders(), (std::vector<std::string>{"2", "4"}));
}

// A checkpoint under another name, of another format or with a piece missing could pass for the newest.
TEST_F(CheckpointTest, WhatIsNotWhatItSaysIsPassedOver) {
  for (int64_t step : {2, 4}) Save(step);
  ASSERT_TRUE(Rename(run_ + "/checkpoints/4", run_ + "/checkpoints/9").ok());
  EXPECT_EQ(Newest(), 2);
  Save(4);
  Edit(4, "\"format\":2", "\"format\":3");
  EXPECT_EQ(Newest(), 2);
  Save(4);
  const std::string path = run_ + "/checkpoints/4/checkpoint.json";
  json::value manifest = ParseJson(Unsealed(ReadFile(path).value())).value();
  manifest.at("files").as_object().erase("optimizer.safetensors");  // not listed, so never compared
  ASSERT_TRUE(WriteFile(path, SealManifest(PrintJson(manifest))).ok());
  EXPECT_EQ(Newest(), 2);
  Edit(2, "\"step\":2", "\"step\":3");
  EXPECT_EQ(LoadNewestCheckpoint(run_).status().code(), StatusCode::kNotFound);
}

// One digit that a bad disk or a hand has changed (so many optimizer steps, say) would go on as another run.
TEST_F(CheckpointTest, OneChangedByteOfTheListIsNoticed) {
  ASSERT_TRUE(SaveCheckpoint(run_, SmallAt(2), SomeText(), 1).ok());
  const std::string path = run_ + "/checkpoints/2/checkpoint.json", good = ReadFile(path).value();
  EXPECT_EQ(good, SealManifest(Unsealed(good)));
  for (size_t at = 0; at < good.size(); ++at) {
    std::string text = good;
    text[at] = text[at] == '3' ? '4' : '3';
    ASSERT_TRUE(RemoveAll(path).ok());
    ASSERT_TRUE(WriteFile(path, text).ok());
    EXPECT_EQ(LoadNewestCheckpoint(run_).status().code(), StatusCode::kNotFound) << text;
  }
}

// A list of contents that has the right hash and is nonsense (made by another program, or by a mistake of ours) could end a resume
// with a crash, or let it go on with numbers that no run has.
TEST_F(CheckpointTest, SurvivesMutatedLists) {
  const Checkpoint saved = SmallAt(2);
  ASSERT_TRUE(SaveCheckpoint(run_, saved, SomeText(), 1).ok());
  const std::string path = run_ + "/checkpoints/2/checkpoint.json", good = Unsealed(ReadFile(path).value());
  const std::vector<std::string> words = {"null", "{}", "[]", "{\"a\":[1]}", "1e400", "-1", "1.5", "9223372036854775808", "true", "2",
                                          ",", "\"\"", "\"x\"", "\"..\"", "\"/\"", "\"config.json\"", "\"step\"",
                                          "\"model.safetensors\""};
  Rng rng(41);
  int loaded = 0, refused = 0;
  for (int i = 0; i < 2000; ++i) {
    const std::string text = SealManifest(i ? Mutated(good, words, rng) : good);
    SCOPED_TRACE(text);
    ASSERT_TRUE(RemoveAll(path).ok());  // some file systems flush a file that is cut and written again
    ASSERT_TRUE(WriteFile(path, text).ok());
    const Result<Checkpoint> back = LoadNewestCheckpoint(run_);
    ++(back.ok() ? loaded : refused);
    if (!back.ok()) {
      ASSERT_EQ(back.status().code(), StatusCode::kNotFound) << back.status().ToString();
      continue;
    }
    ASSERT_EQ(back->step, 2);
    ASSERT_GE(back->sft_tokens, 0);
    ASSERT_GE(back->optimizer.steps(), 0);
    ASSERT_TRUE(ParseJson(back->plan_json).value().is_object()) << back->plan_json;
    ASSERT_EQ(Flat(back->params), Flat(saved.params));
    ASSERT_EQ(Flat(back->optimizer.second_moment()), Flat(saved.optimizer.second_moment()));
  }
  EXPECT_GT(loaded, 20);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace temper::trainer
