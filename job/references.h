// What a job file refers to beyond itself: built-in names, programs, folders, task files.
#pragma once

#include <string>

#include "common/status.h"
#include "job/job.h"

namespace temper::job {

// The folder of the running binary, which {build} stands for.
std::string BuildFolder();

// Whether everything the job names is there, so that a job does not fail after its warm-up for a misspelt path. kInvalidArgument
// begins with the key. Programs inside a sandbox that do not come from {build} or a mount are not looked for.
Status CheckReferences(const Job& job, const std::string& build_folder);

}  // namespace temper::job
