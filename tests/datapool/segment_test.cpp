// The token data of a lease in memory that two processes share.
#include "datapool/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "fmt/format.h"

namespace temper::datapool {
namespace {

std::string PathOf(const SegmentHandle& h) { return fmt::format("/proc/{}/fd/{}", h.pid, h.fd); }

// What could go wrong: bytes come back changed, or somebody can change them, or shrink them under a reader.
TEST(Segment, IsReadAsWrittenAndNeverChanges) {
  auto segment = *Segment::Create();
  std::vector<std::string> texts = {"one", "", std::string(100'000, 'x'), "last"};
  std::vector<MemberHandle> members;
  for (const std::string& text : texts) members.push_back(*segment->Put(text));
  ASSERT_TRUE(segment->Seal().ok());
  auto view = SegmentView::Open(segment->handle());
  ASSERT_TRUE(view.ok()) << view.status().message();
  for (size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(*view->Read(members[i]), texts[i]);
  const int fd = open(PathOf(segment->handle()).c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(pwrite(fd, "X", 1, 0), -1);
  EXPECT_EQ(ftruncate(fd, 0), -1);
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  close(fd);
  EXPECT_FALSE(segment->Put("late").ok());
  segment.reset();
  EXPECT_EQ(*view->Read(members[2]), texts[2]) << "a reader keeps what it has mapped";
}

// What could go wrong: other bytes than those leased are taken for them.
TEST(Segment, RefusesWhatDoesNotVerify) {
  auto segment = *Segment::Create();
  const MemberHandle a = *segment->Put("token data"), b = *segment->Put("token dat_");
  ASSERT_TRUE(segment->Seal().ok());
  auto view = SegmentView::Open(segment->handle());
  ASSERT_TRUE(view.ok());
  const MemberHandle confused[] = {{b.offset, a.bytes, a.checksum}, {a.offset, a.bytes - 1, a.checksum}, {a.offset, a.bytes, a.checksum + 1},
                                   {-1, 2, 0},  {0, -1, 0}, {0, int64_t{1} << 40, 0}, {INT64_MAX, INT64_MAX, 0}, {int64_t{1} << 40, 0, 0}};
  for (const MemberHandle& m : confused) EXPECT_EQ(view->Read(m).status().code(), StatusCode::kDataLoss) << m.offset << "+" << m.bytes;
  SegmentHandle other = segment->handle();
  ++other.inode;
  EXPECT_EQ(SegmentView::Open(other).status().code(), StatusCode::kUnavailable) << "another file under the same number";
  other = segment->handle();
  other.bytes += 1;
  EXPECT_EQ(SegmentView::Open(other).status().code(), StatusCode::kUnavailable) << "longer than it is";
  auto open_one = *Segment::Create();
  ASSERT_TRUE(open_one->Put("x").ok());
  EXPECT_EQ(SegmentView::Open(open_one->handle()).status().code(), StatusCode::kUnavailable) << "not whole yet";
}

// What could go wrong: after a crash of the pool a reader loses what it maps, or something stays behind.
TEST(Segment, OutlivesItsPoolForItsReaderAlone) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t pool = fork();
  if (pool == 0) {
    auto segment = *Segment::Create();
    const MemberHandle member = *segment->Put("of the dead");
    if (!segment->Seal().ok()) _exit(1);
    const SegmentHandle handle = segment->handle();
    if (write(ends[1], &handle, sizeof handle) < 0 || write(ends[1], &member, sizeof member) < 0) _exit(1);
    pause();
  }
  SegmentHandle handle;
  MemberHandle member;
  ASSERT_EQ(read(ends[0], &handle, sizeof handle), static_cast<ssize_t>(sizeof handle));
  ASSERT_EQ(read(ends[0], &member, sizeof member), static_cast<ssize_t>(sizeof member));
  {
    auto view = SegmentView::Open(handle);
    ASSERT_TRUE(view.ok()) << view.status().message();
    kill(pool, SIGKILL);
    waitpid(pool, nullptr, 0);
    EXPECT_EQ(*view->Read(member), "of the dead");
  }
  EXPECT_EQ(SegmentView::Open(handle).status().code(), StatusCode::kUnavailable);
  close(ends[0]);
  close(ends[1]);
}

}  // namespace
}  // namespace temper::datapool
