// Files. Free functions act on the machine's file system; FileSystem is the same behind an interface, for code whose tests
// make writes fail. Errors carry the path and errno's text. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace temper {

// An owned file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.Release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { Reset(); }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release();
  void Reset();

 private:
  int fd_ = -1;
};

// Whole content; refuses files above max_bytes.
Result<std::string> ReadFile(const std::string& path, int64_t max_bytes = int64_t{1} << 40);
// After OK the file has exactly these bytes, also after a power cut; before, the old content or none. The temporary lies
// beside the file.
Status WriteFileAtomic(const std::string& path, std::string_view bytes);
// Not durable, not atomic: for what can be made again.
Status WriteFile(const std::string& path, std::string_view bytes);
Status AppendFile(const std::string& path, std::string_view bytes);
// With all parents; OK when it exists.
Status MakeDirs(const std::string& path);
bool Exists(const std::string& path);
bool IsDirectory(const std::string& path);
// Names in a folder without `.` and `..`, sorted.
Result<std::vector<std::string>> ListDir(const std::string& path);
// A file or a folder with everything in it; links are removed, not followed. OK when there is nothing.
Status RemoveAll(const std::string& path);
Status Rename(const std::string& from, const std::string& to);
// Makes the entries of a folder durable.
Status SyncDir(const std::string& path);
Result<int64_t> FileSize(const std::string& path);
std::string DirName(const std::string& path);
std::string BaseName(const std::string& path);
// Absolute form of a path, by the working folder; nothing needs to exist.
std::string AbsolutePath(const std::string& path);

// Retry EINTR and short counts. WriteAll never raises SIGPIPE on sockets only if the caller ignores it.
Status WriteAll(int fd, std::string_view bytes);
Result<std::string> ReadAll(int fd, int64_t max_bytes = int64_t{1} << 40);
// "what: strerror (errno N)" with a code that fits the errno.
Status ErrnoStatus(const std::string& what, int error);
// exclusive advisory lock on path (created if absent), held by the descriptor; kFailedPrecondition when another holds it.
Result<Fd> LockFile(const std::string& path);
// Whether some process holds that lock. True as well where the file cannot be opened for a reason other than its absence: nobody
// is said to be gone by mistake. Holds a shared lock for an instant, so LockFile may fail beside it: whoever takes a lock that is
// looked at tries more than once.
bool LockHeld(const std::string& path);

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual Result<std::string> Read(const std::string& path) = 0;
  virtual Status WriteAtomic(const std::string& path, std::string_view bytes) = 0;
  virtual Status Append(const std::string& path, std::string_view bytes) = 0;
  virtual Status MakeDirs(const std::string& path) = 0;
  virtual bool Exists(const std::string& path) = 0;
  virtual Result<std::vector<std::string>> List(const std::string& path) = 0;
  virtual Status RemoveAll(const std::string& path) = 0;
  virtual Status Rename(const std::string& from, const std::string& to) = 0;
};

// The machine's, by the functions above.
class PosixFileSystem final : public FileSystem {
 public:
  Result<std::string> Read(const std::string& path) override { return ReadFile(path); }
  Status WriteAtomic(const std::string& path, std::string_view bytes) override { return WriteFileAtomic(path, bytes); }
  Status Append(const std::string& path, std::string_view bytes) override { return AppendFile(path, bytes); }
  Status MakeDirs(const std::string& path) override { return temper::MakeDirs(path); }
  bool Exists(const std::string& path) override { return temper::Exists(path); }
  Result<std::vector<std::string>> List(const std::string& path) override { return ListDir(path); }
  Status RemoveAll(const std::string& path) override { return temper::RemoveAll(path); }
  Status Rename(const std::string& from, const std::string& to) override { return temper::Rename(from, to); }
  static PosixFileSystem& Get();
};

}  // namespace temper
