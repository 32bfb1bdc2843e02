// The sandbox service in this process. One loop thread owns all state: channels to the janitor and to each sandbox's
// init, captured output, relays, timers. Calls post to it and wait.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "common/metrics.h"
#include "sandbox/client.h"

namespace temper::sandbox {

struct ServiceOptions {
  int janitor_fd = -1;  // Janitor::service_fd() or an inherited duplicate; not owned, must outlive the service
  // TCP address "HOST:PORT" of the gateway's agent plane, to which sandboxes with `relay` are connected; "" refuses them.
  // While it does not answer, a connection waits (retried every 0.1 s for 60 s).
  std::string gateway_address;
  // Gets gauges "sandboxes", "relay_connections" and counters "sandboxes_created", "sandbox_commands", "relay_bytes" when set.
  // Not owned.
  temper::Metrics* metrics = nullptr;
};

class LocalSandboxService final : public SandboxService {
 public:
  // Resets the janitor: sandboxes of a former service on the same channel are killed.
  static Result<std::unique_ptr<LocalSandboxService>> Start(const ServiceOptions& options);
  ~LocalSandboxService() override;

  Result<SandboxInfo> Create(const CreateRequest& request) override;
  Result<ExecResult> Exec(const ExecRequest& request) override;
  Result<std::vector<File>> Export(const std::string& id, const ExportOptions& options) override;
  Status Renew(const std::string& id, double ttl_s) override;
  Status Destroy(const std::string& id) override;
  Result<std::vector<SandboxInfo>> List() override;

  // Exec without a blocked thread: `done` is called once, from the loop thread, and must not block.
  void ExecAsync(const ExecRequest& request, std::function<void(Result<ExecResult>)> done);

  // Destroys every sandbox, ends every command (kInfra "destroyed") and refuses new ones. Idempotent; the destructor does it.
  void Close();

 private:
  class Loop;
  explicit LocalSandboxService(std::unique_ptr<Loop> loop);
  std::unique_ptr<Loop> loop_;
};

}  // namespace temper::sandbox
