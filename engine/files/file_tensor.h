// What tensors of model files are made of: names, shapes, element types, and how each type is read as fp32.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"

namespace temper::engine {

// The Q types are ggml's: blocks of 32 or (K) 256 elements with scales of their own.
enum class FileType { kF32, kF16, kBF16, kF64, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K };
const char* FileTypeName(FileType type);
// Elements of a block: 1, 32 or 256.
uint64_t FileTypeBlock(FileType type);
// Bytes of `count` elements (a multiple of the block).
uint64_t FileTypeBytes(FileType type, uint64_t count);
// Widens or dequantises `out.size()` elements; `in` has FileTypeBytes of them. F64 is rounded to float. A Q type gives the bits
// of the Python package `gguf`: every product and sum rounded to fp32 on its own.
void ReadElements(FileType type, std::span<const std::byte> in, std::span<float> out);

struct FileTensor {
  std::string name;
  FileType type = FileType::kF32;
  std::vector<int64_t> shape;  // rows first (Hugging Face's order, also for GGUF)
  uint64_t count = 0;          // elements
  std::span<const std::byte> bytes;
};

// A tensor whose numbers cannot be read: of a type that is not implemented.
struct ForeignTensor {
  std::string name, type;  // the type as its format calls it
  int64_t count = 0;       // elements
};

// InvalidArgument naming two tensors that share bytes of the file: numbers of one would be those of another, and a small file
// could claim any amount of memory.
Status CheckApart(std::span<const FileTensor> tensors);

}  // namespace temper::engine
