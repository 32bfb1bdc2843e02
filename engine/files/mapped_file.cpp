#include "engine/files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "common/file.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TEMPER_ADDRESS_SANITIZER
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define TEMPER_ADDRESS_SANITIZER
#endif
#ifdef TEMPER_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <unistd.h>
#endif

namespace temper::engine {
namespace {

// Under the address sanitizer a read between the end of the file and the end of its last page, which the kernel lets pass, is an
// error too.
void Guard([[maybe_unused]] const void* data, [[maybe_unused]] size_t size, [[maybe_unused]] bool on) {
#ifdef TEMPER_ADDRESS_SANITIZER
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), rest = (page - size % page) % page;
  const char* end = static_cast<const char*>(data) + size;
  if (on) ASAN_POISON_MEMORY_REGION(end, rest);
  else ASAN_UNPOISON_MEMORY_REGION(end, rest);
#endif
}

}  // namespace

Result<MappedFile> MappedFile::Open(const std::string& path) {
  Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus("cannot open " + path, errno);
  struct stat st;
  if (fstat(fd.get(), &st) != 0) return ErrnoStatus("cannot stat " + path, errno);
  if (!S_ISREG(st.st_mode)) return InvalidArgument(path + " is not a regular file");
  MappedFile out;
  out.path_ = path;
  if (st.st_size > 0) {
    void* data = mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_PRIVATE, fd.get(), 0);
    if (data == MAP_FAILED) return ErrnoStatus("cannot map " + path, errno);
    out.data_ = static_cast<const std::byte*>(data);
    out.size_ = static_cast<size_t>(st.st_size);
    Guard(out.data_, out.size_, true);
  }
  return out;
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!data_) return;
  Guard(data_, size_, false);
  munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace temper::engine
