// What the doors that run a sandbox share: a service with a janitor of its own, and the form of limits on a command line.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "sandbox/client.h"
#include "sandbox/janitor.h"

namespace temper::sandbox {

// A sandbox service that needs no supervisor: forks a janitor and serves in this process. Start it from the main thread
// before any thread exists. Its end removes every sandbox; so does the end of the process, however it comes.
class OwnSandboxes {
 public:
  static Result<std::unique_ptr<OwnSandboxes>> Start(const JanitorOptions& options = {});
  ~OwnSandboxes();
  SandboxService& service();
  const Janitor& janitor() const;

 private:
  struct Impl;
  explicit OwnSandboxes(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// "memory=64MiB,processes=32,cpu_s=1.5": changes only what is named. kInvalidArgument names the wrong key (with the nearest
// right one) or value.
Status ParseLimits(std::string_view text, Limits* limits);
// A host folder as files of a work folder. Links are read, not followed.
Result<std::vector<File>> ReadFolder(const std::string& path, const ExportOptions& options = {});
// "SOURCE:TARGET"; SOURCE is made absolute.
Result<Mount> ParseMount(std::string_view text);
// "auto", "v2", "hybrid", "none".
Result<CgroupMode> ParseCgroupMode(std::string_view text);

}  // namespace temper::sandbox
