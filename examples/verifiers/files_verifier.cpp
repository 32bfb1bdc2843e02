// A verifier that looks at files and at nothing else: the work folder must hold exactly the expected tree.
//
// In: the case as JSON on standard input; its task's "hidden" object is {"files": {path: content}, "folders": [path]}.
// Out: one JSON object on file descriptor 3. The work folder is the current folder, a copy of what the agent left.
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <boost/json.hpp>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <string>

namespace {

namespace json = boost::json;

struct Tree {
  std::map<std::string, std::string> files;
  std::set<std::string> folders;
  bool odd = false;  // a link, a device, a pipe: never expected
};

void Read(const std::string& folder, Tree* tree) {
  DIR* dir = opendir(folder.empty() ? "." : folder.c_str());
  if (!dir) return;
  while (dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    const std::string path = folder.empty() ? name : folder + "/" + name;
    struct stat info;
    if (lstat(path.c_str(), &info) != 0) continue;
    if (S_ISDIR(info.st_mode)) {
      tree->folders.insert(path);
      Read(path, tree);
    } else if (S_ISREG(info.st_mode)) {
      std::stringstream content;
      content << std::ifstream(path, std::ios::binary).rdbuf();
      tree->files[path] = content.str();
    } else {
      tree->odd = true;
    }
  }
  closedir(dir);
}

json::object Judge(const json::object& expected) {
  Tree tree;
  Read("", &tree);
  int wrong = tree.odd ? 1 : 0;
  std::string first;
  auto note = [&](const std::string& text) {
    if (wrong++ == 0) first = text;
  };
  for (const auto& [path, content] : expected.at("files").as_object()) {
    auto found = tree.files.find(std::string(path));
    if (found == tree.files.end()) note("missing " + std::string(path));
    else if (found->second != content.as_string()) note("content of " + std::string(path));
    if (found != tree.files.end()) tree.files.erase(found);
  }
  for (const json::value& path : expected.at("folders").as_array()) {
    if (!tree.folders.erase(std::string(path.as_string()))) note("missing folder " + std::string(path.as_string()));
  }
  for (const auto& [path, content] : tree.files) note("unexpected " + path);
  for (const std::string& path : tree.folders) note("unexpected folder " + path);
  const double reward = wrong == 0 ? 1.0 : 0.0;
  return {{"outcome", "scored"},
          {"reward", reward},
          {"components", json::object{{"files", reward}}},
          {"evidence", json::object{{"wrong", wrong}, {"first", first}}}};
}

}  // namespace

int main() {
  std::stringstream text;
  text << std::cin.rdbuf();
  try {
    const json::object the_case = json::parse(text.str()).as_object();
    const std::string verdict = json::serialize(Judge(the_case.at("task").at("hidden").as_object()));
    return write(3, verdict.data(), verdict.size()) == static_cast<ssize_t>(verdict.size()) ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "files-verifier: %s\n", e.what());
    return 1;
  }
}
