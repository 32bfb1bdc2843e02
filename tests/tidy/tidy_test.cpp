// The few hard rules that a reader cannot be asked to check by eye: arrows between parts, heavy headers, banned calls.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace temper {
namespace {

namespace fs = std::filesystem;

struct SourceFile {
  std::string path;  // relative to the root, "/" separated
  std::vector<std::string> lines;
};

std::string PartOf(const std::string& path) { return path.substr(0, path.find('/')); }

std::map<std::string, std::set<std::string>> Layers() {
  std::map<std::string, std::set<std::string>> out;
  std::ifstream in(fs::path(TEMPER_SOURCE_DIR) / "tests/tidy/layers.txt");
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    const size_t colon = line.find(':');
    std::set<std::string>& allowed = out[line.substr(0, colon)];
    std::istringstream rest(line.substr(colon + 1));
    for (std::string word; rest >> word;) allowed.insert(word);
  }
  return out;
}

std::vector<SourceFile> ProductSources() {
  std::vector<SourceFile> out;
  const fs::path root = TEMPER_SOURCE_DIR;
  std::vector<fs::path> roots{root / "main.cpp"};
  for (const auto& [part, allowed] : Layers()) roots.push_back(root / part);
  std::set<fs::path> seen;
  auto add = [&](const fs::path& path) {
    static const std::set<std::string> kEndings = {".h", ".cpp", ".c", ".cu", ".inc"};
    if (!kEndings.count(path.extension().string()) || !seen.insert(path).second) return;
    SourceFile file{fs::relative(path, root).generic_string(), {}};
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) file.lines.push_back(line);
    out.push_back(std::move(file));
  };
  for (const fs::path& path : roots) {
    if (fs::is_regular_file(path)) add(path);
    if (!fs::is_directory(path)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      if (entry.is_regular_file()) add(entry.path());
    }
  }
  return out;
}

// The complaint about one include line of a file, or "".
std::string IncludeComplaint(const std::map<std::string, std::set<std::string>>& layers, const std::string& path,
                             const std::string& included) {
  const std::string from = PartOf(path), to = PartOf(included);
  if (from == to || !(layers.count(to) || included.rfind("temper/v1/", 0) == 0)) return "";
  const std::set<std::string>& allowed = layers.at(from);
  const std::string target = included.rfind("temper/v1/", 0) == 0 ? "proto" : to;
  if (allowed.count("*") || allowed.count(target) || allowed.count(included)) return "";
  for (const std::string& entry : allowed) {
    if (entry.back() == '/' && included.rfind(entry, 0) == 0) return "";
  }
  std::string list;
  for (const std::string& entry : allowed) list += " " + entry;
  return path + " includes " + included + "; allowed for " + from + ":" + list;
}

const std::regex kInclude("^\\s*#\\s*include\\s*\"([^\"]+)\"");

// What could go wrong: a part reaches sideways into another's inside, and neither can change alone any more.
TEST(Tidy, IncludesFollowTheArrows) {
  const auto layers = Layers();
  ASSERT_GT(layers.size(), 10u);
  int seen = 0;
  for (const SourceFile& file : ProductSources()) {
    for (const std::string& line : file.lines) {
      std::smatch match;
      if (!std::regex_search(line, match, kInclude)) continue;
      ++seen;
      EXPECT_EQ(IncludeComplaint(layers, file.path, match[1]), "");
    }
  }
  EXPECT_GT(seen, 20);
}

// What could go wrong: the check above accepts everything.
TEST(Tidy, AForbiddenArrowIsSeen) {
  const auto layers = Layers();
  EXPECT_NE(IncludeComplaint(layers, "engine/x.cpp", "trainer/loss.h"), "");
  EXPECT_NE(IncludeComplaint(layers, "trainer/x.cpp", "gateway/client.h"), "");
  EXPECT_NE(IncludeComplaint(layers, "agents/x.cpp", "datapool/window.h"), "");
  EXPECT_NE(IncludeComplaint(layers, "common/x.cpp", "temper/v1/types.pb.h"), "");
  EXPECT_EQ(IncludeComplaint(layers, "agents/x.cpp", "datapool/client.h"), "");
}

// What could go wrong: a heavy header in a header makes every file that includes it slow to build.
TEST(Tidy, HeavyHeadersStayOutOfHeaders) {
  static const std::regex kHeavy(
      "#\\s*include\\s*[<\"](grpcpp/|grpc/|google/protobuf|boost/|rocksdb/|yaml-cpp/|spdlog/|zmq|CLI/|regex>|filesystem>|iostream>|.*\\.pb\\.h)");
  // For .cpp files only: JSON helpers, the retry loop of gRPC clients, and the one way to reach Asio.
  static const std::set<std::string> kExcepted = {"common/json.h", "common/rpc_call.h", "gateway/http/asio.h"};
  static const std::regex kJson("boost/json(/value|/object|/array|/fwd)?\\.hpp");
  for (const SourceFile& file : ProductSources()) {
    if (file.path.size() < 2 || file.path.substr(file.path.size() - 2) != ".h" || kExcepted.count(file.path)) continue;
    for (const std::string& line : file.lines) {
      EXPECT_FALSE(std::regex_search(line, kHeavy) && !std::regex_search(line, kJson)) << file.path << ": " << line;
    }
    EXPECT_FALSE(file.lines.empty());
    bool once = false;
    for (const std::string& line : file.lines) once |= line.rfind("#pragma once", 0) == 0;
    EXPECT_TRUE(once) << file.path << ": no #pragma once";
  }
}

// What could go wrong: time or threads that a test cannot control, or a note to nobody.
TEST(Tidy, BannedWords) {
  struct Rule {
    std::regex word;
    std::set<std::string> parts;  // where it is allowed
    const char* instead;
  };
  const std::vector<Rule> rules = {
      {std::regex("(steady_clock|system_clock|high_resolution_clock)::now"), {"common"}, "the Clock of common/env.h"},
      {std::regex("\\.detach\\(\\)"), {}, "a joined thread"},
      {std::regex("\\b(TODO|FIXME|XXX)\\b"), {}, "an issue"},
      {std::regex("-ffast-math|_mm\\d*_rsqrt|_mm\\d*_rcp"), {}, "exact operations (docs/numerics.md)"},
  };
  for (const SourceFile& file : ProductSources()) {
    for (size_t i = 0; i < file.lines.size(); ++i) {
      for (const Rule& rule : rules) {
        if (rule.parts.count(PartOf(file.path)) || PartOf(file.path) == "examples") continue;
        EXPECT_FALSE(std::regex_search(file.lines[i], rule.word))
            << file.path << ":" << i + 1 << ": " << file.lines[i] << "\n  use " << rule.instead;
      }
    }
  }
}

// What could go wrong: the README names a command or a file that does not exist.
TEST(Tidy, ReadmeNamesWhatExists) {
  std::ifstream in(fs::path(TEMPER_SOURCE_DIR) / "README.md");
  ASSERT_TRUE(in) << "no README.md";
  std::stringstream text;
  text << in.rdbuf();
  const std::string readme = text.str();
  // It opens with the two doors, and what CI runs is the second.
  std::istringstream block(readme.substr(readme.find("```\n") + 4));
  for (const char* door : {"./temper run configs/quickstart.yaml ", "./temper test "}) {
    std::string line;
    std::getline(block, line);
    EXPECT_EQ(line.rfind(door, 0), 0u) << line;
  }
  EXPECT_LT(readme.find("```\n"), 20u);
  std::ifstream ci(fs::path(TEMPER_SOURCE_DIR) / ".ci/run");
  std::string command;
  for (std::string line; std::getline(ci, line);) command = line;
  EXPECT_EQ(command, "exec ./temper test");
  static const std::regex kPath("\\b((configs|docs|examples|scripts|tests)/[A-Za-z0-9_./-]+)");
  int seen = 0;
  for (auto it = std::sregex_iterator(readme.begin(), readme.end(), kPath); it != std::sregex_iterator(); ++it) {
    std::string path = (*it)[1];
    while (!path.empty() && path.back() == '.') path.pop_back();
    EXPECT_TRUE(fs::exists(fs::path(TEMPER_SOURCE_DIR) / path)) << path;
    ++seen;
  }
  EXPECT_GT(seen, 3);
}

// What could go wrong: docs/tests.md names a test that was renamed or is gone.
TEST(Tidy, TheMapOfTestsNamesTests) {
  std::set<std::string> tests;
  static const std::regex kTest("^(TEST|TEST_F|TEST_P|TYPED_TEST)\\((\\w+), (\\w+)\\)");
  for (const auto& entry : fs::recursive_directory_iterator(fs::path(TEMPER_SOURCE_DIR) / "tests")) {
    if (entry.path().extension() != ".cpp") continue;
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) {
      std::smatch match;
      if (std::regex_search(line, match, kTest)) tests.insert(match[2].str() + "." + match[3].str());
    }
  }
  std::ifstream in(fs::path(TEMPER_SOURCE_DIR) / "docs/tests.md");
  std::stringstream text;
  text << in.rdbuf();
  const std::string map = text.str();
  static const std::regex kName("`([A-Z]\\w*\\.[A-Z]\\w*)`");
  int seen = 0;
  for (auto it = std::sregex_iterator(map.begin(), map.end(), kName); it != std::sregex_iterator(); ++it, ++seen) {
    EXPECT_TRUE(tests.count((*it)[1])) << (*it)[1];
  }
  EXPECT_GT(seen, 200);
}

}  // namespace
}  // namespace temper
