#include "engine/files/file_tensor.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "common/check.h"
#include "engine/bf16.h"
#include "text/utf8.h"

namespace temper::engine {
namespace {

static_assert(std::endian::native == std::endian::little, "tensor files are little-endian and read as they lie");

struct TypeInfo {
  const char* name;
  uint64_t block;  // elements
  uint64_t bytes;  // of a block
};

const TypeInfo& Info(FileType type) {
  static constexpr TypeInfo kInfo[] = {{"F32", 1, 4},    {"F16", 1, 2},    {"BF16", 1, 2},   {"F64", 1, 8},
                                       {"Q8_0", 32, 34}, {"Q4_0", 32, 18}, {"Q4_1", 32, 20}, {"Q5_0", 32, 22},
                                       {"Q5_1", 32, 24}, {"Q4_K", 256, 144}, {"Q5_K", 256, 176}, {"Q6_K", 256, 210}};
  return kInfo[static_cast<size_t>(type)];
}

float HalfToFloat(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000 | mantissa << 13);
  if (exponent == 0) {
    if (mantissa == 0) return std::bit_cast<float>(sign);
    exponent = 1;
    while (!(mantissa & 1024)) mantissa <<= 1, --exponent;  // wraps below 0 and back: only the sum with 112 counts
    mantissa &= 1023;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

template <typename T>
T Load(const std::byte* p) {
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}

float Half(const std::byte* p) { return HalfToFloat(Load<uint16_t>(p)); }
int Byte(const std::byte* p) { return std::to_integer<int>(*p); }
int SignedByte(const std::byte* p) { return Load<int8_t>(p); }

// Blocks of 32 of four or five bits: [scale][minimum, or the middle of the range][fifth bits][nibbles].
void ReadBlock32(const std::byte* p, bool five, bool minimum, float* y) {
  const float d = Half(p), m = minimum ? Half(p + 2) : 0;
  p += minimum ? 4 : 2;
  const uint32_t high = five ? Load<uint32_t>(p) : 0;
  if (five) p += 4;
  const int middle = minimum ? 0 : five ? 16 : 8;
  for (int j = 0; j < 32; ++j) {
    const int low = j < 16 ? Byte(p + j) & 15 : Byte(p + j - 16) >> 4;
    const float q = static_cast<float>((low | static_cast<int>(high >> j & 1) << 4) - middle);
    y[j] = minimum ? q * d + m : q * d;
  }
}

// Blocks of 256 in eights of 32 with six-bit scales and minima, of four bits (Q4_K) or five (Q5_K).
void ReadScaledEighths(const std::byte* p, bool five, float* y) {
  const float d = Half(p), dmin = Half(p + 2);
  const std::byte *packed = p + 4, *high = p + 16, *nibbles = five ? p + 48 : p + 16;
  for (int i = 0; i < 8; ++i) {
    // Of the first four the six bits lie together; of the others four bits lie here and two on top of the first four's.
    int scale = Byte(packed + i % 4), min = Byte(packed + 4 + i % 4);
    if (i < 4) {
      scale &= 63, min &= 63;
    } else {
      const int both = Byte(packed + 8 + i % 4);
      scale = (both & 15) | (scale >> 6) << 4, min = both >> 4 | (min >> 6) << 4;
    }
    const float step = d * static_cast<float>(scale), offset = dmin * static_cast<float>(min);
    for (int j = 0; j < 32; ++j, ++y) {
      int q = Byte(nibbles + i / 2 * 32 + j) >> (i % 2 * 4) & 15;
      if (five) q |= (Byte(high + j) >> i & 1) << 4;
      *y = step * static_cast<float>(q) - offset;
    }
  }
}

// A block of 256 in sixteenths with signed 8-bit scales, of six bits: four low, two high.
void ReadSixBits(const std::byte* p, float* y) {
  const std::byte *low = p, *high = p + 128, *scales = p + 192;
  const float d = Half(p + 208);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, quarter = i % 128 / 32, j = i % 32;
    const int nibble = Byte(low + half * 64 + quarter % 2 * 32 + j) >> (quarter / 2 * 4) & 15;
    const int q = (nibble | (Byte(high + half * 32 + j) >> (2 * quarter) & 3) << 4) - 32;
    y[i] = d * static_cast<float>(SignedByte(scales + i / 16)) * static_cast<float>(q);
  }
}

}  // namespace

const char* FileTypeName(FileType type) { return Info(type).name; }

uint64_t FileTypeBlock(FileType type) { return Info(type).block; }

uint64_t FileTypeBytes(FileType type, uint64_t count) { return count / Info(type).block * Info(type).bytes; }

void ReadElements(FileType type, std::span<const std::byte> in, std::span<float> out) {
  const auto [name, block, bytes] = Info(type);
  TEMPER_CHECK(out.size() % block == 0 && in.size() == FileTypeBytes(type, out.size())) << name;
  const std::byte* p = in.data();
  if (type == FileType::kF32) {
    if (!out.empty()) std::memcpy(out.data(), p, in.size());
    return;
  }
  float* y = out.data();
  for (size_t b = 0; b < out.size() / block; ++b, p += bytes, y += block) {
    switch (type) {
      case FileType::kF32: break;
      case FileType::kF16: *y = Half(p); break;
      case FileType::kBF16: *y = FromBf16(Load<uint16_t>(p)); break;
      case FileType::kF64: *y = static_cast<float>(Load<double>(p)); break;
      case FileType::kQ8_0: {
        const float d = Half(p);
        for (int j = 0; j < 32; ++j) y[j] = static_cast<float>(SignedByte(p + 2 + j)) * d;
        break;
      }
      case FileType::kQ4_0: ReadBlock32(p, false, false, y); break;
      case FileType::kQ4_1: ReadBlock32(p, false, true, y); break;
      case FileType::kQ5_0: ReadBlock32(p, true, false, y); break;
      case FileType::kQ5_1: ReadBlock32(p, true, true, y); break;
      case FileType::kQ4_K: ReadScaledEighths(p, false, y); break;
      case FileType::kQ5_K: ReadScaledEighths(p, true, y); break;
      case FileType::kQ6_K: ReadSixBits(p, y); break;
    }
  }
}

Status CheckApart(std::span<const FileTensor> tensors) {
  std::vector<const FileTensor*> order;
  for (const FileTensor& t : tensors) {
    if (!t.bytes.empty()) order.push_back(&t);
  }
  std::sort(order.begin(), order.end(),
            [](const FileTensor* a, const FileTensor* b) { return a->bytes.data() < b->bytes.data(); });
  for (size_t i = 1; i < order.size(); ++i) {
    const FileTensor &a = *order[i - 1], &b = *order[i];
    if (a.bytes.data() + a.bytes.size() > b.bytes.data()) {
      const auto name = [](const FileTensor& t) { return text::Shown(t.name, 100); };
      return InvalidArgument("the tensors " + name(a) + " and " + name(b) + " overlap");
    }
  }
  return Status::Ok();
}

}  // namespace temper::engine
