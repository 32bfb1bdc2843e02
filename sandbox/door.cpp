#include "sandbox/door.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>

#include "common/file.h"
#include "common/strings.h"
#include "sandbox/files.h"
#include "sandbox/service.h"

namespace temper::sandbox {

struct OwnSandboxes::Impl {
  explicit Impl(Janitor j) : janitor(std::move(j)) {}
  Janitor janitor;  // outlives the service
  std::unique_ptr<LocalSandboxService> service;
};

OwnSandboxes::OwnSandboxes(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
OwnSandboxes::~OwnSandboxes() = default;
SandboxService& OwnSandboxes::service() { return *impl_->service; }
const Janitor& OwnSandboxes::janitor() const { return impl_->janitor; }

Result<std::unique_ptr<OwnSandboxes>> OwnSandboxes::Start(const JanitorOptions& options) {
  ASSIGN_OR_RETURN(Janitor janitor, ForkJanitor(options));
  auto impl = std::make_unique<Impl>(std::move(janitor));
  ServiceOptions service;
  service.janitor_fd = impl->janitor.service_fd();
  ASSIGN_OR_RETURN(impl->service, LocalSandboxService::Start(service));
  return std::unique_ptr<OwnSandboxes>(new OwnSandboxes(std::move(impl)));
}

Status ParseLimits(std::string_view text, Limits* limits) {
  static const std::vector<std::string> kKeys = {"memory", "processes", "disk", "files", "cpu_s", "wall_s", "output"};
  for (const std::string& item : Split(text, ',')) {
    size_t equals = item.find('=');
    std::string key = item.substr(0, equals);
    if (std::find(kKeys.begin(), kKeys.end(), key) == kKeys.end()) {
      std::string near = Nearest(key, kKeys);
      return InvalidArgument("limit '" + key + "' is unknown; " + (near.empty() ? "one of " + Join(kKeys, ", ") : "did you mean '" + near + "'?"));
    }
    if (equals == std::string::npos) return InvalidArgument("limit '" + key + "' has no value; write " + key + "=VALUE");
    std::string value = item.substr(equals + 1);
    int64_t number = 0;
    double seconds = 0;
    bool ok;
    if (key == "cpu_s" || key == "wall_s") {
      ok = ParseDouble(value, &seconds) && seconds > 0;
      if (ok) (key == "cpu_s" ? limits->cpu_s : limits->wall_s) = seconds;
    } else if (key == "processes" || key == "files") {
      ok = ParseInt(value, &number) && number > 0;
      if (ok) (key == "processes" ? limits->processes : limits->files) = number;
    } else {
      ok = ParseSize(value, &number) && number > 0;
      if (ok) (key == "memory" ? limits->memory_bytes : key == "disk" ? limits->disk_bytes : limits->output_bytes) = number;
    }
    if (!ok) {
      const char* form = key.ends_with("_s") ? "seconds above 0" : key == "processes" || key == "files" ? "a count above 0" : "a size such as 64MiB";
      return InvalidArgument("limit " + key + "='" + value + "' is not " + form);
    }
  }
  return Status::Ok();
}

Result<std::vector<File>> ReadFolder(const std::string& path, const ExportOptions& options) {
  Fd fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus("folder " + path, errno);
  return TakeFiles(fd.get(), options);
}

Result<Mount> ParseMount(std::string_view text) {
  size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0 || colon + 1 == text.size()) {
    return InvalidArgument("mount '" + std::string(text) + "' is not SOURCE:TARGET");
  }
  return Mount{AbsolutePath(std::string(text.substr(0, colon))), std::string(text.substr(colon + 1))};
}

Result<CgroupMode> ParseCgroupMode(std::string_view text) {
  if (text == "auto") return CgroupMode::kAuto;
  if (text == "v2") return CgroupMode::kV2;
  if (text == "hybrid") return CgroupMode::kHybrid;
  if (text == "none") return CgroupMode::kNone;
  return InvalidArgument("cgroups '" + std::string(text) + "' is not auto, v2, hybrid or none");
}

}  // namespace temper::sandbox
