#include "sandbox/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "common/file.h"
#include "common/strings.h"

namespace temper::sandbox {
namespace {

constexpr int kDepthMax = 128;

// "" is the folder itself.
Fd OpenBeneath(int folder, const std::string& path, uint64_t flags, uint64_t mode = 0) {
  open_how how = {};
  how.flags = flags | O_CLOEXEC;
  how.mode = mode;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV;
  for (int tries = 0; tries < 16; ++tries) {
    int fd = static_cast<int>(syscall(SYS_openat2, folder, path.empty() ? "." : path.c_str(), &how, sizeof how));
    // EAGAIN: something was renamed meanwhile and the kernel could not be sure.
    if (fd >= 0 || errno != EAGAIN) return Fd(fd);
  }
  return Fd();
}

Status CheckPath(const std::string& path) {
  auto bad = [&](const char* why) { return InvalidArgument("file path '" + path + "' " + why); };
  if (path.empty()) return bad("is empty");
  if (path.size() > 4000) return bad("is too long");
  if (path.find('\0') != std::string::npos) return bad("has a NUL");
  int parts = 0;
  for (const std::string& part : Split(path, '/')) {
    if (part.empty()) return bad("is absolute or has an empty part");
    if (part == "." || part == "..") return bad("has a '.' or '..' part");
    if (part.size() > 255) return bad("has a part of more than 255 bytes");
    if (++parts > kDepthMax) return bad("is too deep");
  }
  return Status::Ok();
}

Status Failed(const std::string& path) {
  if (errno == ELOOP || errno == EXDEV || errno == ENOTDIR) return InvalidArgument("file path '" + path + "' leads through a link or a file");
  return ErrnoStatus("file '" + path + "'", errno);
}

Status PutFile(int work_fd, const File& file, uint32_t uid, uint32_t gid) {
  RETURN_IF_ERROR(CheckPath(file.path));
  // Parents, then the entry in its own folder.
  Fd folder = OpenBeneath(work_fd, "", O_RDONLY | O_DIRECTORY);
  if (!folder.valid()) return Failed(file.path);
  std::vector<std::string> parts = Split(file.path, '/');
  for (size_t i = 0; i + 1 < parts.size(); ++i) {
    if (mkdirat(folder.get(), parts[i].c_str(), 0700) == 0) {
      if (fchownat(folder.get(), parts[i].c_str(), uid, gid, AT_SYMLINK_NOFOLLOW) != 0) return Failed(file.path);
      if (fchmodat(folder.get(), parts[i].c_str(), 02775, 0) != 0) return Failed(file.path);
    } else if (errno != EEXIST) {
      return Failed(file.path);
    }
    Fd next = OpenBeneath(folder.get(), parts[i], O_RDONLY | O_DIRECTORY);
    if (!next.valid()) return Failed(file.path);
    folder = std::move(next);
  }
  const char* name = parts.back().c_str();
  switch (file.kind) {
    case File::Kind::kLink:
      if (file.bytes.empty() || file.bytes.size() > 4000 || file.bytes.find('\0') != std::string::npos) {
        return InvalidArgument("link '" + file.path + "' has an impossible target");
      }
      if (symlinkat(file.bytes.c_str(), folder.get(), name) != 0) return Failed(file.path);
      if (fchownat(folder.get(), name, uid, gid, AT_SYMLINK_NOFOLLOW) != 0) return Failed(file.path);
      return Status::Ok();
    case File::Kind::kFolder: {
      if (mkdirat(folder.get(), name, 0700) != 0 && errno != EEXIST) return Failed(file.path);
      Fd fd = OpenBeneath(folder.get(), name, O_RDONLY | O_DIRECTORY);
      if (!fd.valid() || fchown(fd.get(), uid, gid) != 0 || fchmod(fd.get(), (file.mode & 0777) | 02000) != 0) {
        return Failed(file.path);
      }
      return Status::Ok();
    }
    case File::Kind::kRegular: {
      Fd fd = OpenBeneath(folder.get(), name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
      if (!fd.valid()) return Failed(file.path);
      RETURN_IF_ERROR(WriteAll(fd.get(), file.bytes).WithContext("file '" + file.path + "'"));
      if (fchown(fd.get(), uid, gid) != 0 || fchmod(fd.get(), file.mode & 0777) != 0) return Failed(file.path);
      return Status::Ok();
    }
  }
  return InvalidArgument("file '" + file.path + "' is of no kind");
}

class Taker {
 public:
  Taker(const ExportOptions& options) : options_(options) {}

  Status Folder(Fd fd, const std::string& path, int depth) {
    if (depth > kDepthMax) return ResourceExhausted("folder '" + path + "' is too deep");
    std::unique_ptr<DIR, int (*)(DIR*)> dir(fdopendir(fd.get()), &closedir);
    if (!dir) return ErrnoStatus("folder '" + path + "'", errno);
    fd.Release();
    std::vector<std::string> names;
    while (dirent* e = readdir(dir.get())) {
      if (!std::strcmp(e->d_name, ".") || !std::strcmp(e->d_name, "..")) continue;
      names.emplace_back(e->d_name);
      if (static_cast<int64_t>(names.size() + files.size()) > options_.files_max) {
        return ResourceExhausted("more than " + std::to_string(options_.files_max) + " files");
      }
    }
    std::sort(names.begin(), names.end());
    int folder = dirfd(dir.get());
    for (const std::string& name : names) RETURN_IF_ERROR(Entry(folder, name, path.empty() ? name : path + "/" + name, depth));
    return Status::Ok();
  }

  Status Entry(int folder, const std::string& name, const std::string& path, int depth) {
    struct stat st;
    // Gone meanwhile is no error: it is as if it had gone before.
    if (fstatat(folder, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0) return errno == ENOENT ? Status::Ok() : ErrnoStatus(path, errno);
    if (static_cast<int64_t>(files.size()) >= options_.files_max) {
      return ResourceExhausted("more than " + std::to_string(options_.files_max) + " files");
    }
    File file;
    file.path = path;
    file.mode = st.st_mode & 0777;
    if (S_ISLNK(st.st_mode)) {
      char target[4096];
      ssize_t n = readlinkat(folder, name.c_str(), target, sizeof target);
      if (n < 0) return errno == ENOENT || errno == EINVAL ? Status::Ok() : ErrnoStatus(path, errno);
      file.kind = File::Kind::kLink;
      file.bytes.assign(target, static_cast<size_t>(n));
      RETURN_IF_ERROR(Charge(file));
      files.push_back(std::move(file));
      return Status::Ok();
    }
    if (S_ISDIR(st.st_mode)) {
      Fd fd = OpenBeneath(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
      if (!fd.valid()) return errno == ENOENT || errno == ENOTDIR || errno == ELOOP ? Status::Ok() : ErrnoStatus(path, errno);
      file.kind = File::Kind::kFolder;
      RETURN_IF_ERROR(Charge(file));
      files.push_back(std::move(file));
      return Folder(std::move(fd), path, depth + 1);
    }
    if (!S_ISREG(st.st_mode)) return Status::Ok();
    Fd fd = OpenBeneath(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    if (!fd.valid()) return errno == ENOENT || errno == ELOOP || errno == ENXIO ? Status::Ok() : ErrnoStatus(path, errno);
    if (fstat(fd.get(), &st) != 0) return ErrnoStatus(path, errno);
    if (!S_ISREG(st.st_mode)) return Status::Ok();
    file.mode = st.st_mode & 0777;
    // A file can be larger than what it takes on disk, so its size is asked before it is read.
    if (st.st_size > options_.bytes_max - bytes_) return TooLarge();
    auto content = ReadAll(fd.get(), options_.bytes_max - bytes_);
    if (!content.ok()) return TooLarge();
    file.bytes = std::move(*content);
    RETURN_IF_ERROR(Charge(file));
    files.push_back(std::move(file));
    return Status::Ok();
  }

  std::vector<File> files;

 private:
  Status TooLarge() const { return ResourceExhausted("files of more than " + std::to_string(options_.bytes_max) + " bytes"); }
  Status Charge(const File& file) {
    bytes_ += static_cast<int64_t>(file.bytes.size() + file.path.size());
    return bytes_ > options_.bytes_max ? TooLarge() : Status::Ok();
  }
  ExportOptions options_;
  int64_t bytes_ = 0;
};

}  // namespace

Status PutFiles(int work_fd, const std::vector<File>& files, uint32_t uid, uint32_t gid) {
  for (const File& file : files) RETURN_IF_ERROR(PutFile(work_fd, file, uid, gid));
  return Status::Ok();
}

Result<std::vector<File>> TakeFiles(int work_fd, const ExportOptions& options) {
  Taker taker(options);
  if (options.path.empty()) {
    Fd fd = OpenBeneath(work_fd, "", O_RDONLY | O_DIRECTORY);
    if (!fd.valid()) return ErrnoStatus("work folder", errno);
    RETURN_IF_ERROR(taker.Folder(std::move(fd), "", 0));
    return std::move(taker.files);
  }
  RETURN_IF_ERROR(CheckPath(options.path));
  std::string parent = options.path.find('/') == std::string::npos ? "" : DirName(options.path);
  Fd folder = OpenBeneath(work_fd, parent, O_RDONLY | O_DIRECTORY);
  if (!folder.valid()) return errno == ENOENT ? NotFound("no file '" + options.path + "'") : Failed(options.path);
  RETURN_IF_ERROR(taker.Entry(folder.get(), BaseName(options.path), options.path, 0));
  if (taker.files.empty()) return NotFound("no regular file, folder or link '" + options.path + "'");
  return std::move(taker.files);
}

}  // namespace temper::sandbox
