#include "common/lock.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>

#include "common/file.h"

namespace temper {

bool LockHeld(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return errno != ENOENT && errno != ENOTDIR;
  return flock(fd.get(), LOCK_SH | LOCK_NB) != 0;
}

}  // namespace temper
