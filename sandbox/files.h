// Files of a work folder, in and out, through a descriptor of it. Never follows a link and never leaves the folder, whatever
// the processes inside do meanwhile.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"
#include "sandbox/types.h"

namespace temper::sandbox {

// Lays `files` into the folder `work_fd`, in order, missing parents made; everything owned by uid:gid. kInvalidArgument
// names a path that is absolute, has an empty, "." or ".." part, or leads through a link; kResourceExhausted when they do
// not fit.
Status PutFiles(int work_fd, const std::vector<File>& files, uint32_t uid, uint32_t gid);
// See SandboxService::Export.
Result<std::vector<File>> TakeFiles(int work_fd, const ExportOptions& options);

}  // namespace temper::sandbox
