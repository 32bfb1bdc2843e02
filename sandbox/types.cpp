#include "sandbox/types.h"

#include "common/check.h"

namespace temper::sandbox {

const char* Name(ExecOutcome outcome) {
  switch (outcome) {
    case ExecOutcome::kExited:
      return "exited";
    case ExecOutcome::kSignaled:
      return "signaled";
    case ExecOutcome::kTimeout:
      return "timeout";
    case ExecOutcome::kLimit:
      return "limit";
    case ExecOutcome::kInfra:
      return "infra";
  }
  TEMPER_CHECK(false) << "outcome " << static_cast<int>(outcome);
  return "";
}

}  // namespace temper::sandbox
