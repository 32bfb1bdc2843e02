// The janitor process itself (sandbox/janitor.h is its owner's side).
#pragma once

#include <string>

#include "common/file.h"
#include "sandbox/janitor.h"

namespace temper::sandbox {

struct JanitorProcessOptions {
  JanitorOptions janitor;
  std::string job_id;
  std::string init;  // bytes of the init program
  Fd lifeline;       // SEQPACKET to the owner: gets u32 pids to enroll, answers u32 0 or 1; its end is the end
  Fd service;        // SEQPACKET to the sandbox service
};

// Reports "" or an error over the lifeline once ready, serves until the lifeline ends, cleans up. Returns the exit code.
int RunJanitor(JanitorProcessOptions options);

}  // namespace temper::sandbox
