// Models on disk: a Hugging Face folder or a GGUF file -> config, parameters, text files; and back to a folder.
//
// MODEL, everywhere a command or a job takes one: a Hugging Face folder, a GGUF file, a checkpoint folder of ours (which is a
// Hugging Face folder with more files), a run folder (its newest checkpoint), or the name of a fetched model (models/NAME).
//
// Files are not trusted: everything is checked against the size of the files before it is read or allocated; errors name file,
// tensor or field. Functions are thread-safe.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/config.h"
#include "engine/files/safetensors.h"
#include "engine/parameters.h"
#include "text/text_model.h"

namespace temper::engine {

struct ModelFile {
  ModelConfig config;
  Parameters params;       // fp32 after widening or dequantisation
  text::TextFiles text;    // text::LoadTextModel makes the tokenizer; may be empty (then it says what is missing)
  std::string path;        // the folder or file that MODEL named
  std::string format;      // "safetensors" | "gguf"
};

// NotFound when nothing is called so; InvalidArgument when the model is broken or of an architecture not implemented.
Result<ModelFile> LoadModel(const std::string& model);
// The same without parameters: reads headers only (`params` stays empty).
Result<ModelFile> LoadModelConfig(const std::string& model);
// Only the text files.
Result<text::TextFiles> LoadTextFiles(const std::string& model);

// The folder or file that MODEL names (see above).
Result<std::string> ResolveModel(const std::string& model);

// What lies in the files of a model, supported or not. `path`: what ResolveModel gives.
struct TensorSummary {
  struct Type {
    int64_t tensors = 0, elements = 0, bytes = 0;
  };
  std::string format;        // "safetensors" | "gguf"
  std::string architecture;  // as the file calls it
  std::map<std::string, Type> types;  // foreign ones too; their bytes are not known
  std::optional<ModelConfig> config;  // where the architecture is supported
  // All that keeps it from being loaded: the architecture or a part of it, types of tensors, tensors missing or too many.
  std::vector<std::string> unsupported;
  // What is computed otherwise than a reader of the config might expect.
  std::vector<std::string> notes;
};
// InvalidArgument: a broken file.
Result<TensorSummary> SummariseTensors(const std::string& path);

// Writes `dir` (created when absent) as a Hugging Face folder: config.json, model.safetensors, and the text files; transformers
// loads it and gives the same logits. `type`: kF32 or kBF16. A GGUF tokenizer is written as tokenizer.json. model.safetensors
// and config.json are each written to a temporary file and renamed.
Status SaveHuggingFace(const std::string& dir, const ModelConfig& config, const Parameters& params, const text::TextFiles& text,
                       FileType type);

}  // namespace temper::engine
