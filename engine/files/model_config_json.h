// config.json of a Hugging Face folder <-> ModelConfig. Internal to engine/files.
#pragma once

#include <string>
#include <string_view>

#include "common/status.h"
#include "engine/config.h"
#include "engine/files/gguf.h"
#include "engine/files/safetensors.h"

namespace temper::engine {

// Both generations of the file (rope_parameters and dtype; rope_theta, rope_scaling and torch_dtype). InvalidArgument naming the
// key for everything that this engine does not compute.
Result<ModelConfig> ParseConfigJson(std::string_view json);
std::string WriteConfigJson(const ModelConfig& config, FileType type);

// The same from the metadata of a GGUF file of architecture `llama`.
Result<ModelConfig> ConfigFromGguf(const GgufFile& file);

}  // namespace temper::engine
