// Shared by the coverage-guided fuzz targets (libFuzzer, address and undefined-behaviour sanitizers; tests/fuzz/guided.py).
#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace temper {

inline std::string Bytes(const uint8_t* data, size_t size) { return {reinterpret_cast<const char*>(data), size}; }

// A folder in memory, a copy of `model` if there is one; gone with the process.
class GuidedFolder {
 public:
  explicit GuidedFolder(const std::string& model = "") : path_("/dev/shm/temper-fuzz-" + std::to_string(getpid())) {
    std::filesystem::create_directory(path_);
    if (!model.empty()) std::filesystem::copy(model, path_);
  }
  ~GuidedFolder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  // Puts a file there, over the last of its name. Returns its path.
  std::string Put(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ + "/" + name, std::ios::binary | std::ios::trunc) << bytes;
    return path_ + "/" + name;
  }

 private:
  const std::string path_;
};

}  // namespace temper
