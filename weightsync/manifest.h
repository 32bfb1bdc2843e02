// The manifest of a model's weights: made by the publisher from the configuration, read by a worker that knows nothing else.
#pragma once

#include <string>

#include "common/status.h"
#include "engine/config.h"
#include "weightsync/types.h"

namespace temper::weightsync {

Manifest MakeManifest(const engine::ModelConfig& config, engine::Profile profile);

struct ManifestModel {
  engine::ModelConfig config;
  engine::Profile profile = engine::Profile::kBf16;
};
// What config_json of a manifest says; kInvalidArgument when it is none.
Result<engine::ModelConfig> ReadConfig(const std::string& config_json);
// kInvalidArgument: not a configuration, or bytes, hash or layout are not what this build makes of it.
Result<ManifestModel> ReadManifest(const Manifest& manifest);

}  // namespace temper::weightsync
