#include "common/log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "common/file.h"

namespace temper {
namespace {

// A value with spaces or line ends would break the line into what looks like other fields or other events.
TEST(Log, OneLineAnEvent) {
  const std::string path = testing::TempDir() + "temper_log_" + std::to_string(getpid());
  log::Init("gateway", path);
  log::Info("session sealed", {{"session", "3.1.1"}, {"tokens", 12}, {"ok", true}, {"f", 0.5f}, {"why", "a b\n\"c\""}});
  log::Debug("not shown");
  const std::string text = *ReadFile(path);
  EXPECT_NE(text.find(" info gateway session sealed session=3.1.1 tokens=12 ok=true f=0.5 why=\"a b\\n\\\"c\\\"\"\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("not shown"), std::string::npos);
  log::Init("temper");
  EXPECT_TRUE(RemoveAll(path).ok());
}

}  // namespace
}  // namespace temper
