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
#include "engine/files/mapped_file.h"

namespace temper::engine {

// What a tensor of any file is made of.
enum class FileType { kF32, kF16, kBF16, kF64, kQ8_0, kQ4_0, kQ4_1 };
const char* FileTypeName(FileType type);
// Bytes of `count` elements (a multiple of 32 for the Q types).
uint64_t FileTypeBytes(FileType type, uint64_t count);
// Widens or dequantises `out.size()` elements; `in` has FileTypeBytes of them. F64 is rounded to float.
void ReadElements(FileType type, std::span<const std::byte> in, std::span<float> out);

struct FileTensor {
  std::string name;
  FileType type = FileType::kF32;
  std::vector<int64_t> shape;  // rows first (Hugging Face's order, also for GGUF)
  uint64_t count = 0;          // elements
  std::span<const std::byte> bytes;
};

class SafetensorsFile {
 public:
  static Result<SafetensorsFile> Open(const std::string& path);

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
