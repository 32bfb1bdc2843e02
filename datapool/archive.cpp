#include "datapool/archive.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <span>
#include <string_view>

#include "datapool/record.h"
#include "datapool/store_keys.h"
#include "fmt/format.h"

namespace temper::datapool {
namespace {

constexpr std::string_view kMagic = "TA1\n", kEnding = ".records";
constexpr size_t kKeyBytes = 17, kHeadBytes = kKeyBytes + 8;

Status ReadAt(int fd, const std::string& path, int64_t offset, std::span<char> out) {
  for (size_t done = 0; done < out.size();) {
    const ssize_t n = pread(fd, out.data() + done, out.size() - done, offset + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(path, errno);
    if (n == 0) return DataLoss(path + ": cut short");
    done += static_cast<size_t>(n);
  }
  return Status::Ok();
}

}  // namespace

Status WriteArchive(const std::string& dir, int64_t step, const std::vector<std::pair<AttemptId, std::string>>& records) {
  std::string bytes(kMagic);
  for (const auto& [id, record] : records) {
    bytes += TrajectoryKey(id);
    PutBig(bytes, record.size(), 8);
    bytes += record;
  }
  RETURN_IF_ERROR(MakeDirs(dir));
  RETURN_IF_ERROR(SyncDir(DirName(dir)));
  return WriteFileAtomic(fmt::format("{}/step-{:08}{}", dir, step, kEnding), bytes);
}

Result<Archive> Archive::Open(const std::string& dir) {
  Archive archive;
  if (!Exists(dir)) return archive;
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDir(dir));
  for (const std::string& name : names) {
    if (!name.ends_with(kEnding)) continue;
    const std::string path = dir + "/" + name;
    const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd.valid()) return ErrnoStatus(path, errno);
    ASSIGN_OR_RETURN(const int64_t size, FileSize(path));
    char magic[kMagic.size()] = {};
    RETURN_IF_ERROR(ReadAt(fd.get(), path, 0, magic));
    if (std::string_view(magic, sizeof magic) != kMagic) return DataLoss(path + ": no archive of this version");
    for (auto at = static_cast<int64_t>(kMagic.size()); at < size;) {
      char head[kHeadBytes] = {};
      RETURN_IF_ERROR(ReadAt(fd.get(), path, at, head));
      const std::optional<AttemptId> id = ParseTrajectoryKey({head, kKeyBytes});
      const auto bytes = static_cast<int64_t>(GetBig({head + kKeyBytes, sizeof head - kKeyBytes}));
      at += static_cast<int64_t>(kHeadBytes);
      if (!id || bytes < 0 || bytes > size - at) return DataLoss(fmt::format("{}: damaged at byte {}", path, at));
      archive.records_[*id] = {path, {at, bytes}};
      at += bytes;
    }
  }
  return archive;
}

Result<std::string> Archive::Read(const AttemptId& id) const {
  const auto it = records_.find(id);
  if (it == records_.end()) return NotFound(fmt::format("no archived record of {}.{}.{}", id.group, id.rollout, id.attempt));
  const auto& [path, place] = it->second;
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(path, errno);
  std::string record(static_cast<size_t>(place.second), '\0');
  RETURN_IF_ERROR(ReadAt(fd.get(), path, place.first, record));
  return UnpackRecord(id, record);
}

}  // namespace temper::datapool
