// The read-only root folder that sandboxes of one kind share.
//
// A template is a small tmpfs with the system folders bound in read-only, a minimal /etc and /dev, the init, and empty
// places for /proc, /work, /tmp and /dev/shm. It is built once for each (rootfs, mounts) and attached in the janitor's own
// mount namespace; each sandbox gets it with its copy of that namespace and pivots into it. Single files (a task file is
// another one for every sandbox) are not part of it: it only has places for them, which each sandbox covers by itself.
#pragma once

#include <string>
#include <vector>

#include "common/status.h"
#include "sandbox/types.h"

namespace temper::sandbox {

// Shows `source` at `target` read-only, with what is mounted below it, without devices and set-user-id programs.
Status BindReadOnly(const std::string& source, const std::string& target);

class RootTemplates {
 public:
  // `base` is an empty folder of the janitor's private mount namespace; `init` the bytes of the init program.
  RootTemplates(std::string base, std::string init) : base_(std::move(base)), init_(std::move(init)) {}

  struct Root {
    std::string path;             // of the template
    std::vector<Mount> of_files;  // still to be bound, at path + target
  };
  // The least recently used of more than 16 templates is unmounted. kInvalidArgument names a source that is not there or a
  // target that is not allowed.
  Result<Root> Get(const std::string& rootfs, const std::vector<Mount>& mounts);

 private:
  struct Entry {
    std::string rootfs;
    std::vector<Mount> mounts;  // source "" = the place of a file
    std::string path;
    uint64_t used = 0;
  };
  Status Build(const std::string& path, const std::string& rootfs, const std::vector<Mount>& mounts);

  std::string base_, init_;
  std::vector<Entry> entries_;
  uint64_t clock_ = 0;
  int next_ = 0;
};

}  // namespace temper::sandbox
