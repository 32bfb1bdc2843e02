#include "common/file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

#include "common/process.h"

namespace temper {
namespace {

class FileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "temper_file_XXXXXX";
    ASSERT_TRUE(mkdtemp(pattern.data()));
    dir_ = pattern;
  }
  void TearDown() override { EXPECT_TRUE(RemoveAll(dir_).ok()); }
  std::string dir_;
};

// A reader must see the old or the new content, and no temporary may stay behind.
TEST_F(FileTest, AtomicWriteReplaces) {
  const std::string path = dir_ + "/f";
  ASSERT_TRUE(WriteFileAtomic(path, "one").ok());
  ASSERT_TRUE(WriteFileAtomic(path, std::string("two\0x", 5)).ok());
  EXPECT_EQ(*ReadFile(path), std::string("two\0x", 5));
  EXPECT_EQ(*ListDir(dir_), std::vector<std::string>{"f"});
  EXPECT_EQ(*FileSize(path), 5);
}

// Each failure must name the path, and a failed write must leave the old file and no temporary.
TEST_F(FileTest, FailuresNameThePath) {
  EXPECT_EQ(ReadFile(dir_ + "/none").status().code(), StatusCode::kNotFound);
  EXPECT_NE(ReadFile(dir_ + "/none").status().message().find("/none"), std::string::npos);
  EXPECT_EQ(WriteFileAtomic(dir_ + "/no/f", "x").code(), StatusCode::kNotFound);
  ASSERT_TRUE(MakeDirs(dir_ + "/d/e").ok());
  EXPECT_FALSE(WriteFileAtomic(dir_ + "/d", "x").ok());
  EXPECT_EQ(*ListDir(dir_), std::vector<std::string>{"d"});
  ASSERT_TRUE(WriteFile(dir_ + "/f", "12345").ok());
  EXPECT_EQ(ReadFile(dir_ + "/f", 4).status().code(), StatusCode::kResourceExhausted);
  EXPECT_FALSE(MakeDirs(dir_ + "/f").ok());
  EXPECT_FALSE(ListDir(dir_ + "/f").ok());
}

// Following a link while deleting would delete what the link points to.
TEST_F(FileTest, RemoveAllDoesNotFollowLinks) {
  ASSERT_TRUE(MakeDirs(dir_ + "/keep").ok());
  ASSERT_TRUE(WriteFile(dir_ + "/keep/f", "x").ok());
  ASSERT_TRUE(MakeDirs(dir_ + "/gone/sub").ok());
  ASSERT_EQ(symlink((dir_ + "/keep").c_str(), (dir_ + "/gone/sub/link").c_str()), 0);
  ASSERT_TRUE(RemoveAll(dir_ + "/gone").ok());
  EXPECT_FALSE(Exists(dir_ + "/gone"));
  EXPECT_TRUE(Exists(dir_ + "/keep/f"));
  EXPECT_TRUE(RemoveAll(dir_ + "/gone").ok());
}

// Two jobs in one folder would destroy each other's state.
TEST_F(FileTest, LockIsExclusive) {
  auto lock = LockFile(dir_ + "/lock");
  ASSERT_TRUE(lock.ok());
  EXPECT_EQ(LockFile(dir_ + "/lock").status().code(), StatusCode::kFailedPrecondition);
  lock->Reset();
  EXPECT_TRUE(LockFile(dir_ + "/lock").ok());
}

// Names at the edges of a path are easily cut wrong.
TEST(Path, Parts) {
  EXPECT_EQ(DirName("/a/b"), "/a");
  EXPECT_EQ(DirName("/a"), "/");
  EXPECT_EQ(DirName("a"), ".");
  EXPECT_EQ(BaseName("/a/b"), "b");
  EXPECT_EQ(AbsolutePath("/x"), "/x");
  EXPECT_EQ(AbsolutePath("x")[0], '/');
}

// Zeros would make memory plans and reports meaningless.
TEST(Process, NumbersArePlausible) {
  EXPECT_GT(RssBytes(), 1 << 20);
  EXPECT_GE(PeakRssBytes(), RssBytes() / 2);
  EXPECT_GT(MemoryAvailableBytes(), 0);
  EXPECT_GE(CpuCount(), 1);
  EXPECT_GE(ProcessCpuS(), 0);
  EXPECT_EQ(IsoTime(0), "1970-01-01T00:00:00Z");
}

}  // namespace
}  // namespace temper
