#include "datapool/segment.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <utility>

#include "fmt/format.h"

namespace temper::datapool {
namespace {

constexpr int64_t kAlign = 64;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

}  // namespace

Result<std::unique_ptr<Segment>> Segment::Create() {
  std::unique_ptr<Segment> segment(new Segment());
  segment->fd_ = Fd(memfd_create("temper-lease", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!segment->fd_.valid()) return ErrnoStatus("memfd_create", errno);
  return segment;
}

Result<MemberHandle> Segment::Put(std::string_view bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  const MemberHandle member{end_.fetch_add((size + kAlign - 1) / kAlign * kAlign), size, XXH3_64bits(bytes.data(), bytes.size())};
  for (int64_t done = 0; done < size;) {
    const ssize_t n = pwrite(fd_.get(), bytes.data() + done, static_cast<size_t>(size - done), member.offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(fmt::format("{} bytes of token data in shared memory", size), errno);
    done += n;
  }
  return member;
}

Status Segment::Seal() {
  if (ftruncate(fd_.get(), end_.load()) != 0) return ErrnoStatus("shared memory of a lease", errno);
  if (fcntl(fd_.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) return ErrnoStatus("sealing a memfd", errno);
  struct stat st {};
  if (fstat(fd_.get(), &st) != 0) return ErrnoStatus("fstat", errno);
  handle_ = {getpid(), fd_.get(), st.st_ino, end_.load()};
  return Status::Ok();
}

Result<SegmentView> SegmentView::Open(const SegmentHandle& handle) {
  const std::string path = fmt::format("/proc/{}/fd/{}", handle.pid, handle.fd);
  const Status gone = Unavailable(path + ": the pool has let go of the leased data; lease again");
  Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return errno == ENOENT ? gone : ErrnoStatus(path, errno);
  struct stat st {};
  if (fstat(fd.get(), &st) != 0) return ErrnoStatus(path, errno);
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  // Unsealed memory could shrink under the mapping, and reading it would be a SIGBUS.
  if (st.st_ino != handle.inode || seals < 0 || (seals & kSeals) != kSeals || st.st_size < handle.bytes || handle.bytes < 0) return gone;
  if (handle.bytes == 0) return SegmentView(nullptr, 0);
  void* at = mmap(nullptr, static_cast<size_t>(handle.bytes), PROT_READ, MAP_SHARED | MAP_POPULATE, fd.get(), 0);
  if (at == MAP_FAILED) return ErrnoStatus("mmap of " + path, errno);
  return SegmentView(static_cast<const char*>(at), static_cast<size_t>(handle.bytes));
}

SegmentView::SegmentView(SegmentView&& other) noexcept : at_(std::exchange(other.at_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

SegmentView::~SegmentView() {
  if (at_ != nullptr) munmap(const_cast<char*>(at_), bytes_);
}

Result<std::string> SegmentView::Read(const MemberHandle& member) const {
  const auto size = static_cast<int64_t>(bytes_);
  if (member.offset < 0 || member.bytes < 0 || member.offset > size || member.bytes > size - member.offset) {
    return DataLoss(fmt::format("leased data: bytes {} to {} lie outside a segment of {}", member.offset, member.offset + member.bytes, size));
  }
  std::string out(at_ + member.offset, static_cast<size_t>(member.bytes));
  if (XXH3_64bits(out.data(), out.size()) != member.checksum) {
    return DataLoss(fmt::format("leased data: the checksum of {} bytes at {} does not hold", member.bytes, member.offset));
  }
  return out;
}

}  // namespace temper::datapool
