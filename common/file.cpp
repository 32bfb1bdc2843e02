#include "common/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

namespace temper {

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    Reset();
    fd_ = other.Release();
  }
  return *this;
}

int Fd::Release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

void Fd::Reset() {
  if (fd_ >= 0) close(Release());
}

Status ErrnoStatus(const std::string& what, int error) {
  StatusCode code = StatusCode::kInternal;
  switch (error) {
    case ENOENT: case ENOTDIR: code = StatusCode::kNotFound; break;
    case EEXIST: case ENOTEMPTY: code = StatusCode::kAlreadyExists; break;
    case EACCES: case EPERM: case EROFS: code = StatusCode::kPermissionDenied; break;
    case ENOSPC: case EDQUOT: case EMFILE: case ENFILE: case ENOMEM: code = StatusCode::kResourceExhausted; break;
    case EADDRINUSE: case EISDIR: code = StatusCode::kFailedPrecondition; break;
    case ECONNREFUSED: case ECONNRESET: case EPIPE: code = StatusCode::kUnavailable; break;
    default: break;
  }
  return {code, what + ": " + std::strerror(error)};
}

Status WriteAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0) {
      if (errno == EINTR) continue;
      return ErrnoStatus("write", errno);
    }
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return Status::Ok();
}

Result<std::string> ReadAll(int fd, int64_t max_bytes) {
  std::string bytes;
  struct stat st;
  if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size <= max_bytes) bytes.reserve(static_cast<size_t>(st.st_size) + 1);
  char buffer[65536];
  for (;;) {
    const ssize_t n = read(fd, buffer, sizeof buffer);
    if (n < 0) {
      if (errno == EINTR) continue;
      return ErrnoStatus("read", errno);
    }
    if (n == 0) return bytes;
    if (static_cast<int64_t>(bytes.size()) + n > max_bytes) {
      return ResourceExhausted("more than " + std::to_string(max_bytes) + " bytes");
    }
    bytes.append(buffer, static_cast<size_t>(n));
  }
}

Result<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(path, errno);
  auto bytes = ReadAll(fd.get(), max_bytes);
  if (!bytes.ok()) return bytes.status().WithContext(path);
  return bytes;
}

namespace {

Status WriteWith(const std::string& path, std::string_view bytes, int flags) {
  Fd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0644));
  if (!fd.valid()) return ErrnoStatus(path, errno);
  return WriteAll(fd.get(), bytes).WithContext(path);
}

}  // namespace

Status WriteFile(const std::string& path, std::string_view bytes) { return WriteWith(path, bytes, O_TRUNC); }
Status AppendFile(const std::string& path, std::string_view bytes) { return WriteWith(path, bytes, O_APPEND); }

Status WriteFileAtomic(const std::string& path, std::string_view bytes) {
  static std::atomic<unsigned> serial{0};
  const std::string temporary = path + ".tmp" + std::to_string(getpid()) + "." + std::to_string(serial++);
  Fd fd(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!fd.valid()) return ErrnoStatus(path, errno);
  Status status = WriteAll(fd.get(), bytes);
  if (status.ok() && fsync(fd.get()) != 0) status = ErrnoStatus("fsync", errno);
  fd.Reset();
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) status = ErrnoStatus("rename", errno);
  if (!status.ok()) {
    unlink(temporary.c_str());
    return status.WithContext(path);
  }
  return SyncDir(DirName(path));
}

Status SyncDir(const std::string& path) {
  Fd fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(path, errno);
  if (fsync(fd.get()) != 0) return ErrnoStatus(path + ": fsync", errno);
  return Status::Ok();
}

Status MakeDirs(const std::string& path) {
  for (size_t at = 1; at <= path.size(); ++at) {
    if (at != path.size() && path[at] != '/') continue;
    const std::string prefix = path.substr(0, at);
    if (mkdir(prefix.c_str(), 0755) != 0 && errno != EEXIST) return ErrnoStatus(prefix, errno);
  }
  if (!IsDirectory(path)) return AlreadyExists(path + ": exists and is no folder");
  return Status::Ok();
}

bool Exists(const std::string& path) {
  struct stat st;
  return lstat(path.c_str(), &st) == 0;
}

bool IsDirectory(const std::string& path) {
  struct stat st;
  return stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode);
}

Result<std::vector<std::string>> ListDir(const std::string& path) {
  DIR* dir = opendir(path.c_str());
  if (!dir) return ErrnoStatus(path, errno);
  std::vector<std::string> names;
  while (dirent* entry = readdir(dir)) {
    if (std::strcmp(entry->d_name, ".") && std::strcmp(entry->d_name, "..")) names.emplace_back(entry->d_name);
  }
  closedir(dir);
  std::sort(names.begin(), names.end());
  return names;
}

Status RemoveAll(const std::string& path) {
  struct stat st;
  if (lstat(path.c_str(), &st) != 0) return errno == ENOENT ? Status::Ok() : ErrnoStatus(path, errno);
  if (S_ISDIR(st.st_mode)) {
    ASSIGN_OR_RETURN(std::vector<std::string> names, ListDir(path));
    for (const std::string& name : names) RETURN_IF_ERROR(RemoveAll(path + "/" + name));
    if (rmdir(path.c_str()) != 0) return ErrnoStatus(path, errno);
    return Status::Ok();
  }
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return ErrnoStatus(path, errno);
  return Status::Ok();
}

Status Rename(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) != 0) return ErrnoStatus(from + " -> " + to, errno);
  return SyncDir(DirName(to));
}

Result<int64_t> FileSize(const std::string& path) {
  struct stat st;
  if (stat(path.c_str(), &st) != 0) return ErrnoStatus(path, errno);
  return static_cast<int64_t>(st.st_size);
}

std::string DirName(const std::string& path) {
  const size_t at = path.find_last_of('/');
  if (at == std::string::npos) return ".";
  return at == 0 ? "/" : path.substr(0, at);
}

std::string BaseName(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

std::string AbsolutePath(const std::string& path) {
  if (!path.empty() && path[0] == '/') return path;
  char* folder = getcwd(nullptr, 0);
  std::string result = folder ? std::string(folder) : std::string(".");
  std::free(folder);
  return path.empty() || path == "." ? result : result + "/" + path;
}

Result<Fd> LockFile(const std::string& path) {
  Fd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!fd.valid()) return ErrnoStatus(path, errno);
  if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return FailedPrecondition(path + ": locked by another process");
    return ErrnoStatus(path + ": flock", errno);
  }
  return fd;
}

bool LockHeld(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return errno != ENOENT && errno != ENOTDIR;
  return flock(fd.get(), LOCK_SH | LOCK_NB) != 0;
}

PosixFileSystem& PosixFileSystem::Get() {
  static PosixFileSystem files;
  return files;
}

}  // namespace temper
