// The sandbox service as its callers see it. `LocalSandboxService` (sandbox/service.h) is the object itself,
// `ConnectSandboxService` the same over gRPC; the contract tests run on both.
//
// Every function may be called from any thread. Exec blocks its caller until the command has ended (bounded by the
// limits); all others are short. Errors: kNotFound (no such sandbox), kAlreadyExists, kInvalidArgument (the request can
// never work; the message names the field), kResourceExhausted (too many sandboxes), kUnavailable (service or janitor
// gone). A command that fails is no error: ExecResult says how it ended.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "sandbox/types.h"

namespace temper::sandbox {

class SandboxService {
 public:
  virtual ~SandboxService() = default;

  virtual Result<SandboxInfo> Create(const CreateRequest& request) = 0;
  virtual Result<ExecResult> Exec(const ExecRequest& request) = 0;
  // Folders before what is in them, entries of a folder in byte order. Only regular files, links (as links) and folders;
  // sockets, pipes and devices are left out. kResourceExhausted over the bounds of `options`.
  virtual Result<std::vector<File>> Export(const std::string& id, const ExportOptions& options) = 0;
  // Sets the time to live to `ttl_s` from now.
  virtual Status Renew(const std::string& id, double ttl_s) = 0;
  // Kills every process of the sandbox and frees it; returns when all are gone. Commands that run end as kInfra with
  // message "destroyed". An unknown id is OK: destroying twice is no error.
  virtual Status Destroy(const std::string& id) = 0;
  virtual Result<std::vector<SandboxInfo>> List() = 0;
};

// `address` as RpcChannel takes it, e.g. "unix-abstract:NAME". Does not wait for the service to be there: a call made
// before that waits up to 10 s.
std::unique_ptr<SandboxService> ConnectSandboxService(const std::string& address);

}  // namespace temper::sandbox
