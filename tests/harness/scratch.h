#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "common/file.h"

namespace temper {

/// A folder of this process alone, gone at its end: two people may test on one machine, and nothing is left in /tmp.
inline std::string ScratchFolder(const std::string& name) {
  struct Root {
    std::string path = testing::TempDir() + "temper_scratch_" + std::to_string(getpid());
    ~Root() { (void)RemoveAll(path); }
  };
  static const Root root;
  const std::string path = root.path + "/" + name;
  EXPECT_TRUE(RemoveAll(path).ok());
  EXPECT_TRUE(MakeDirs(path).ok());
  return path;
}

}  // namespace temper
