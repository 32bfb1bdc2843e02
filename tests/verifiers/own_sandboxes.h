// Sandboxes of the test binary's own, made before any thread exists.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "sandbox/door.h"

namespace temper::verifiers {

class OwnEnvironment : public ::testing::Environment {
 public:
  void SetUp() override {
    sandbox::JanitorOptions options;
    options.init_path = TEMPER_BUILD_DIR "/temper-sandbox-init";
    auto own = sandbox::OwnSandboxes::Start(options);
    ASSERT_TRUE(own.ok()) << own.status().ToString();
    own_ = std::move(*own);
  }
  void TearDown() override {
    EXPECT_TRUE(own_->service().List()->empty()) << "a verifier left its sandbox behind";
    own_.reset();
  }
  static sandbox::SandboxService& Service() { return own_->service(); }

 private:
  static inline std::unique_ptr<sandbox::OwnSandboxes> own_;
};
inline const auto* const kOwnEnvironment = ::testing::AddGlobalTestEnvironment(new OwnEnvironment);

}  // namespace temper::verifiers
