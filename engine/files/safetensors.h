// safetensors: the tensor file of Hugging Face. A JSON header of names, shapes and byte ranges, then the bytes.
//
// Reading trusts nothing: header, shapes and ranges are checked against the size of the file before anything is read, and
// nothing is allocated beyond that size. Errors name file, tensor and field.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "engine/files/file_tensor.h"
#include "engine/files/mapped_file.h"

namespace temper::engine {

class SafetensorsFile {
 public:
  // Tensors of a type that is not implemented are an error that names tensor and type; with `foreign` they are left out and listed there.
  static Result<SafetensorsFile> Open(const std::string& path, std::vector<ForeignTensor>* foreign = nullptr);

  const std::vector<FileTensor>& tensors() const { return tensors_; }  // in order of the header
  const FileTensor* Find(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  explicit SafetensorsFile(MappedFile file) : file_(std::move(file)) {}
  MappedFile file_;
  std::vector<FileTensor> tensors_;
  std::map<std::string, size_t, std::less<>> by_name_;
  std::map<std::string, std::string> metadata_;
};

// A tensor to write: exactly one of the spans is set.
struct TensorToWrite {
  std::string name;
  std::vector<int64_t> shape;
  std::span<const float> f32 = {};
  std::span<const double> f64 = {};
};

// Writes `tensors` in the given order as `type` (F32, F64 or BF16 rounded to nearest even; F64 needs f64 spans) to a temporary
// file, fsyncs it and renames it over `path`. Metadata {"format":"pt"} and `metadata`.
Status WriteSafetensors(const std::string& path, std::span<const TensorToWrite> tensors, FileType type,
                        const std::map<std::string, std::string>& metadata = {});

}  // namespace temper::engine
