// The system calls refused to the payload.
//
// Everything is allowed but a list, because agents compile, debug and run what they like: mounts, namespaces, tracing,
// keyrings, bpf, io_uring, kernel modules, clocks, socket families other than UNIX, INET, INET6 and NETLINK_ROUTE (a vsock
// reaches the host from any network namespace), TIOCSTI, and calls of a foreign architecture (killed).
#pragma once

#include <string>

#include "common/status.h"

namespace temper::sandbox {

// The filter as an array of struct sock_filter, as seccomp(2) takes it.
Result<std::string> CompileSeccompFilter();

}  // namespace temper::sandbox
