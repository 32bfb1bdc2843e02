// A model file from anywhere must not crash, hang or fill the process: mutations of good files, and lengths that lie.
#include <unistd.h>

#include <cstring>
#include <random>

#include "common/process.h"
#include "engine/files/gguf.h"
#include "engine/files/safetensors.h"
#include "tests/engine/files/files_helpers.h"
#include "tests/fuzz/mutate.h"
#include "text/json.h"
#include "text/utf8.h"

namespace temper::engine {
namespace {

// Overwrites bytes of the first `zone` bytes: single bits, rubbish, and 8-byte lengths that are tempting.
std::string Mutate(std::string bytes, size_t zone, std::mt19937_64& rng) {
  static constexpr uint64_t kLengths[] = {0, 1, 255, 1 << 20, uint64_t{1} << 31, uint64_t{1} << 40, UINT64_MAX, UINT64_MAX / 2, UINT64_MAX / 4 + 1};
  zone = std::min(zone, bytes.size());
  for (int e = 1 + static_cast<int>(rng() % 3); e > 0; --e) {
    const size_t at = rng() % zone;
    switch (rng() % 4) {
      case 0: bytes[at] ^= static_cast<char>(1 << (rng() % 8)); break;
      case 1: bytes[at] = static_cast<char>(rng()); break;
      case 2: {
        const uint64_t v = kLengths[rng() % std::size(kLengths)];
        std::memcpy(bytes.data() + at, &v, std::min<size_t>(8, bytes.size() - at));
        break;
      }
      default: bytes.resize(at + 1); zone = bytes.size(); break;
    }
  }
  return bytes;
}

TEST(Fuzz, Gguf) {
  const TestDir dir;
  std::mt19937_64 rng(1);
  const std::string good = ReadFile(GoldenPath("tiny.gguf")).value();
  for (int i = 0; i < 500; ++i) {
    ASSERT_TRUE(WriteFile(dir / "x.gguf", Mutate(good, i % 2 ? 4000 : 20000, rng)).ok());
    auto model = LoadModel(dir / "x.gguf");
    if (model.ok()) (void)text::LoadTextModel(model->text).ok();
  }
  for (const char* family : {"llama", "gemma2", "gemma3_caps"}) {
    const std::string file =
        ReadFile(std::string(TEMPER_SOURCE_DIR) + "/tests/golden/engine/families_gguf/" + family + ".gguf").value();
    for (int i = 0; i < 250; ++i) {
      ASSERT_TRUE(WriteFile(dir / "x.gguf", Mutate(file, i % 2 ? 1500 : 5000, rng)).ok());
      (void)LoadModel(dir / "x.gguf").ok();
    }
  }
  const std::string quants = ReadFile(GoldenPath("quants.gguf")).value();  // every element type, no model
  for (int i = 0; i < 500; ++i) {
    ASSERT_TRUE(WriteFile(dir / "x.gguf", Mutate(quants, i % 2 ? 700 : 20000, rng)).ok());
    const auto file = GgufFile::Open(dir / "x.gguf");
    if (!file.ok()) continue;
    for (const FileTensor& t : file->tensors()) {
      std::vector<float> values(t.count);
      ReadElements(t.type, t.bytes, values);
    }
  }
  EXPECT_LT(PeakRssBytes(), int64_t{1} << 30);
}

TEST(Fuzz, Safetensors) {
  const TestDir dir;
  std::mt19937_64 rng(2);
  SaveSmall(dir / "m");
  std::vector<std::string> good = {ReadFile(dir / "m/model.safetensors").value()};
  const ModelConfig config = SmallConfig();
  ASSERT_TRUE(SaveHuggingFace(dir / "bf16", config, InitParameters(config, 5), SmallText(), FileType::kBF16).ok());
  good.push_back(ReadFile(dir / "bf16/model.safetensors").value());
  good.push_back(good.back());
  for (size_t at = 0; (at = good.back().find("\"BF16\"", at)) != std::string::npos;) good.back().replace(at, 6, "\"F16\" ");
  // The folder's config ties: a stored head that equals the embedding, and one that does not.
  Parameters headed = InitParameters(SmallConfig(false), 5);
  for (const bool equal : {false, true}) {
    if (equal) std::ranges::copy(headed.tensor(0), headed.tensor(static_cast<size_t>(headed.Find("lm_head.weight"))).begin());
    ASSERT_TRUE(SaveHuggingFace(dir / "headed", headed.config(), headed, {}, FileType::kF32).ok());
    good.push_back(ReadFile(dir / "headed/model.safetensors").value());
  }
  for (int i = 0; i < 800; ++i) {
    ASSERT_TRUE(WriteFile(dir / "m/model.safetensors", Mutate(good[rng() % good.size()], i % 2 ? 64 : 3000, rng)).ok());
    (void)LoadModel(dir / "m").ok();
  }
  EXPECT_LT(PeakRssBytes(), int64_t{1} << 30);
}

// The index of a model in several files: names of files are bytes from outside, too.
TEST(Fuzz, SafetensorsIndex) {
  const TestDir dir;
  Rng rng(4);
  SaveSmall(dir / "m");
  const std::string bytes = ReadFile(dir / "m/model.safetensors").value();
  for (const char* shard : {"a", "b"}) ASSERT_TRUE(WriteFile(dir / "m" + ("/" + std::string(shard)), bytes).ok());
  text::Dict map;
  const SafetensorsFile whole = SafetensorsFile::Open(dir / "m/model.safetensors").value();
  for (const FileTensor& t : whole.tensors()) map.Set(t.name, rng.Chance(0.5) ? "a" : "b");
  ASSERT_TRUE(RemoveAll(dir / "m/model.safetensors").ok());
  const std::string good = text::CompactJson(text::MakeDict({{"weight_map", std::move(map)}}));
  int loaded = 0;
  for (int i = 0; i < 800; ++i) {
    const std::vector<std::string> words = {"..", "../m/a", "/", "a", "b", "", "config.json", "model.norm.weight", "1", "{"};
    std::string index = good;
    if (i % 4 > 1) index = Mutated(good, words, rng);
    if (i % 4 == 1) index.replace(index.find("\"a\"", rng.Below(index.rfind("\"a\"") + 1)), 3, "\"" + words[rng.Below(7)] + "\"");
    ASSERT_TRUE(WriteFile(dir / "m/model.safetensors.index.json", index).ok());
    const bool ok = LoadModel(dir / "m").ok();
    loaded += ok;
    // That path is the very folder, and would load; but a name that leaves the folder is refused before it is followed.
    EXPECT_FALSE(ok && index.find("../m/a") != std::string::npos) << index;
  }
  EXPECT_GE(loaded, 200);  // the undamaged ones
  EXPECT_LT(loaded, 800);
}

TEST(Fuzz, ConfigJson) {
  const TestDir dir;
  std::mt19937_64 rng(3);
  SaveSmall(dir / "m");
  const std::string families = std::string(TEMPER_SOURCE_DIR) + "/tests/golden/engine/families/";
  std::vector<std::string> folders = {dir / "m"};
  for (const char* family : {"qwen2", "gemma2", "gemma3_caps"}) {
    folders.push_back(dir / family);
    std::filesystem::copy(families + family, folders.back());
  }
  for (const std::string& folder : folders) {
    const std::string good = ReadFile(folder + "/config.json").value();
    for (int i = 0; i < 400; ++i) {
      std::string bad = good;
      for (int e = 1 + static_cast<int>(rng() % 3); e > 0; --e) {
        const size_t at = rng() % bad.size();
        switch (rng() % 3) {
          case 0: bad[at] = static_cast<char>('0' + rng() % 10); break;
          case 1: bad.insert(at, std::to_string(rng() % 2 ? 7 : 2000000000)); break;
          default: bad.erase(at, rng() % 8); break;
        }
      }
      ASSERT_TRUE(WriteFile(folder + "/config.json", bad).ok());
      (void)LoadModel(folder).ok();
    }
  }
  EXPECT_LT(PeakRssBytes(), int64_t{1} << 30);
}

// A name with a NUL would end the message before its point, one with an escape or a line break speak for the program.
TEST(HostileFiles, NamesAreShownOnOneLine) {
  const TestDir dir;
  std::string bytes = ReadFile(GoldenPath("tiny.gguf")).value();
  const std::string name = "blk.1.attn_q.weight";
  const size_t at = bytes.find(name);
  ASSERT_NE(at, std::string::npos);
  bytes.replace(at, name.size(), std::string("x\0y\x1b[31m\nerror:\xc2\x9b\xff\x7f", 19));
  bytes[at + name.size() + 4 + 2 * 8] = 10;  // after the name two dimensions, then the type: one that is refused
  ASSERT_TRUE(WriteFile(dir / "a.gguf", bytes).ok());
  const std::string said = LoadModel(dir / "a.gguf").status().message();
  EXPECT_NE(said.find("x\\x00y\\x1B[31m\\x0Aerror:\\x9B\uFFFD\\x7F: the tensor type Q2_K"), std::string::npos) << said;
  const auto summary = SummariseTensors(dir / "a.gguf");
  ASSERT_TRUE(summary.ok()) << summary.status().ToString();
  EXPECT_EQ(summary->unsupported.at(0).find('\0'), std::string::npos);
  const std::string json = R"({"a\u0000b":{"dtype":"I8\u001b","shape":[4],"data_offsets":[0,4]}})";
  const uint64_t size = json.size();
  std::string header(8, '\0');
  std::memcpy(header.data(), &size, 8);
  ASSERT_TRUE(WriteFile(dir / "b.safetensors", header + json + std::string(4, '\0')).ok());
  const std::string dtype = SafetensorsFile::Open(dir / "b.safetensors").status().message();
  EXPECT_NE(dtype.find("tensor a\\x00b: the dtype 'I8\\x1B' is not supported"), std::string::npos) << dtype;
  EXPECT_EQ(text::Shown(std::string(200, 'x'), 100), std::string(100, 'x') + "…");
}

// Each length that lies must be named, at once and without allocating for it.
TEST(HostileFiles, LengthsBeyondTheFile) {
  const TestDir dir;
  std::string header(8, '\0');
  const uint64_t huge = uint64_t{1} << 60;
  std::memcpy(header.data(), &huge, 8);
  ASSERT_TRUE(WriteFile(dir / "a.safetensors", header + "{}").ok());
  EXPECT_NE(SafetensorsFile::Open(dir / "a.safetensors").status().message().find("beyond the file"), std::string::npos);
  auto with_header = [&](const std::string& json) {
    const uint64_t size = json.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &size, 8);
    EXPECT_TRUE(WriteFile(dir / "b.safetensors", bytes + json + std::string(16, '\0')).ok());
    return SafetensorsFile::Open(dir / "b.safetensors").status();
  };
  EXPECT_TRUE(with_header(R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})").ok());
  for (const char* bad : {R"({"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}})", R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[4,20]}})",
                          R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]}})", R"({"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}})",
                          R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}})", R"({"a":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}})",
                          R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                          R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                          R"({"a":{"dtype":"F32","shape":[4]}})", R"([])", R"({"a":1})"}) {
    EXPECT_FALSE(with_header(bad).ok()) << bad;
  }
  const std::string gguf = ReadFile(GoldenPath("tiny.gguf")).value();
  for (size_t at : {size_t{8}, size_t{16}, size_t{24}}) {  // tensors, keys, length of the first key
    std::string bad = gguf;
    std::memcpy(bad.data() + at, &huge, 8);
    ASSERT_TRUE(WriteFile(dir / "c.gguf", bad).ok());
    EXPECT_NE(GgufFile::Open(dir / "c.gguf").status().message().find("beyond the file"), std::string::npos);
  }
  // The second tensor's offset becomes that of the first: both lie within the file.
  std::string shared = ReadFile(GoldenPath("quants.gguf")).value();
  const size_t name = shared.find("F16", shared.find("F32"));
  ASSERT_NE(name, std::string::npos);
  const size_t offset_at = name + 3 + 4 + 16 + 4;  // after its name, dimensions and type
  uint64_t offset = 0;
  std::memcpy(&offset, shared.data() + offset_at, 8);
  ASSERT_GT(offset, 0u);
  offset -= 32;
  std::memcpy(shared.data() + offset_at, &offset, 8);
  ASSERT_TRUE(WriteFile(dir / "c.gguf", shared).ok());
  EXPECT_NE(GgufFile::Open(dir / "c.gguf").status().message().find("F32 and F16 overlap"), std::string::npos);
  ASSERT_TRUE(WriteFile(dir / "c.gguf", gguf.substr(0, gguf.size() - 100)).ok());
  EXPECT_NE(LoadModel(dir / "c.gguf").status().message().find("beyond the file"), std::string::npos);
}

}  // namespace
}  // namespace temper::engine
