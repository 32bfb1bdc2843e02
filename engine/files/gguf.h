// GGUF v2 and v3: the model file of llama.cpp. Key-value metadata, a table of tensors, aligned bytes.
//
// Reading trusts nothing; see safetensors.h. Tensor shapes are given rows first (GGUF stores them reversed); names are GGUF's.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "engine/files/mapped_file.h"
#include "engine/files/safetensors.h"
#include "text/tokenizer.h"
#include "text/value.h"

namespace temper::engine {

class GgufFile {
 public:
  // Tensors of a type that is not implemented are an error that names tensor and type; with `foreign` they are left out and listed there.
  static Result<GgufFile> Open(const std::string& path, std::vector<ForeignTensor>* foreign = nullptr);

  const text::Value* Meta(std::string_view key) const;  // nullptr when absent; integers, floats, bools, strings, lists
  const std::map<std::string, text::Value, std::less<>>& metadata() const { return metadata_; }
  const std::vector<FileTensor>& tensors() const { return tensors_; }
  const FileTensor* Find(std::string_view name) const;

  // The tokenizer.ggml.* metadata. InvalidArgument when it is absent or of wrong type.
  Result<text::GgufTokenizer> TokenizerMetadata() const;

 private:
  explicit GgufFile(MappedFile file) : file_(std::move(file)) {}
  Status Parse(std::vector<ForeignTensor>* foreign);
  MappedFile file_;
  std::map<std::string, text::Value, std::less<>> metadata_;
  std::vector<FileTensor> tensors_;
  std::map<std::string, size_t, std::less<>> by_name_;
};

}  // namespace temper::engine
