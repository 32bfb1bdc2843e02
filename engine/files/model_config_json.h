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

// The architecture a GGUF file names; InvalidArgument for one that is not implemented. `llama` is Llama and Mistral.
Result<Family> GgufFamily(const GgufFile& file);
// A config from the metadata of a GGUF file.
Result<ModelConfig> ConfigFromGguf(const GgufFile& file);

}  // namespace temper::engine
