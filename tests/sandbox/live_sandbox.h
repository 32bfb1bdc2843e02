// For tests with real sandboxes: requests in short, and a service over a janitor that the test binary forked before any thread.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "sandbox/service.h"
#include "sandbox/types.h"

namespace temper::sandbox {

inline CreateRequest Request(const std::string& id = "a") {
  CreateRequest q;
  q.id = id;
  q.limits.memory_bytes = 128 << 20;
  q.limits.disk_bytes = 16 << 20;
  q.limits.wall_s = 20;
  return q;
}

inline ExecRequest Sh(const std::string& script, Role role = Role::kAgent, const std::string& id = "a") {
  ExecRequest q;
  q.id = id;
  q.argv = {"sh", "-c", script};
  q.role = role;
  return q;
}

class SandboxTest : public ::testing::Test {
 protected:
  void StartService(const CreateRequest& q, const ServiceOptions& o) {
    auto started = LocalSandboxService::Start(o);
    ASSERT_TRUE(started.ok()) << started.status().ToString();
    service_ = std::move(*started);
    auto info = service_->Create(q);
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    enforced_ = info->enforced;
  }
  ExecResult Run(const ExecRequest& e) {
    auto r = service_->Exec(e);
    EXPECT_TRUE(r.ok()) << r.status().ToString();
    return r.ok() ? *r : ExecResult{};
  }
  ExecResult Run(const std::string& script, Role role = Role::kAgent) { return Run(Sh(script, role)); }
  ExecResult Python(const std::string& program, Role role = Role::kAgent) {
    ExecRequest e = Sh("", role);
    e.argv = {"python3", "-c", program};
    return Run(e);
  }
  std::unique_ptr<LocalSandboxService> service_;
  Enforced enforced_;
};

}  // namespace temper::sandbox
