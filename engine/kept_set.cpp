#include "engine/kept_set.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "common/check.h"

namespace temper::engine {
namespace {

constexpr char kGaps = 1, kBits = 2;

size_t VarintBytes(uint32_t value) {
  size_t n = 1;
  for (; value >= 0x80; value >>= 7) ++n;
  return n;
}

// Of the bits form, without its first byte.
size_t BitBytes(int32_t last) { return static_cast<size_t>(last) / 8 + 1; }

// Of the gaps form, without its first byte.
size_t GapBytes(std::span<const int32_t> ids) {
  size_t n = 0;
  int32_t before = -1;
  for (int32_t id : ids) n += VarintBytes(static_cast<uint32_t>(id - std::exchange(before, id) - 1));
  return n;
}

Status Bad(const std::string& what) { return InvalidArgument("kept set: " + what); }

Status DecodeGaps(std::string_view bytes, int vocab, std::vector<int32_t>* ids) {
  int64_t id = -1;
  for (size_t at = 0; at < bytes.size();) {
    uint64_t gap = 0;
    for (int shift = 0;; shift += 7) {
      if (at == bytes.size()) return Bad("ends inside a number");
      const auto byte = static_cast<uint8_t>(bytes[at++]);
      gap |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) {
        if (byte == 0 && shift > 0) return Bad("a number with a superfluous byte");
        break;
      }
      if (shift == 28) return Bad("a number of more than 32 bits");
    }
    id += static_cast<int64_t>(gap) + 1;
    if (id >= vocab) return Bad(fmt::format("token {} is outside the vocabulary of {}", id, vocab));
    ids->push_back(static_cast<int32_t>(id));
  }
  return Status::Ok();
}

Status DecodeBits(std::string_view bytes, int vocab, std::vector<int32_t>* ids) {
  if (bytes.empty() || bytes.back() == 0) return Bad("ends with no bit set");
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (auto byte = static_cast<uint8_t>(bytes[i]); byte; byte = static_cast<uint8_t>(byte & (byte - 1))) {
      const int64_t id = static_cast<int64_t>(i) * 8 + __builtin_ctz(byte);
      if (id >= vocab) return Bad(fmt::format("token {} is outside the vocabulary of {}", id, vocab));
      ids->push_back(static_cast<int32_t>(id));
    }
  }
  return Status::Ok();
}

}  // namespace

std::string EncodeKept(std::span<const int32_t> ids, int vocab) {
  TEMPER_CHECK(!ids.empty() && ids.front() >= 0 && ids.back() < vocab) << ids.size() << " ids of " << vocab;
  if (ids.size() == static_cast<size_t>(vocab)) return "";
  std::string out;
  const size_t bits = BitBytes(ids.back()), gaps = GapBytes(ids);
  if (bits < gaps) {
    out.assign(1 + bits, 0);
    out[0] = kBits;
    for (int32_t id : ids) out[1 + static_cast<size_t>(id) / 8] |= static_cast<char>(1 << (id % 8));
    return out;
  }
  out.reserve(1 + gaps);
  out += kGaps;
  int32_t before = -1;
  for (int32_t id : ids) {
    auto gap = static_cast<uint32_t>(id - std::exchange(before, id) - 1);
    for (; gap >= 0x80; gap >>= 7) out += static_cast<char>(0x80 | (gap & 0x7f));
    out += static_cast<char>(gap);
  }
  return out;
}

Status DecodeKept(std::string_view bytes, int vocab, std::vector<int32_t>* ids) {
  ids->clear();
  if (bytes.empty()) return Bad("no bytes");
  const char form = bytes[0];
  bytes.remove_prefix(1);
  if (form != kGaps && form != kBits) return Bad(fmt::format("form {} is unknown", static_cast<uint8_t>(form)));
  RETURN_IF_ERROR(form == kGaps ? DecodeGaps(bytes, vocab, ids) : DecodeBits(bytes, vocab, ids));
  if (ids->empty()) return Bad("no token is kept");
  if (ids->size() == static_cast<size_t>(vocab)) return Bad("all tokens are kept: that is written as no bytes");
  const bool bits_are_shorter = BitBytes(ids->back()) < GapBytes(*ids);
  if (bits_are_shorter != (form == kBits)) return Bad("the other form is the one to write it in");
  return Status::Ok();
}

Status CheckKept(std::string_view bytes, int vocab, int32_t token) {
  if (bytes.empty()) return Status::Ok();
  std::vector<int32_t> ids;
  RETURN_IF_ERROR(DecodeKept(bytes, vocab, &ids));
  if (std::binary_search(ids.begin(), ids.end(), token)) return Status::Ok();
  return Bad(fmt::format("token {} was drawn and is not in it", token));
}

KeptLogits::KeptLogits(std::string_view bytes, const float* row) {
  const Status read = DecodeKept(bytes, std::numeric_limits<int32_t>::max(), &ids);
  TEMPER_CHECK(read.ok()) << read.ToString();
  values.reserve(ids.size());
  for (int32_t id : ids) values.push_back(row[id]);
}

void KeptLogits::Scatter(float* row) const {
  for (size_t i = 0; i < ids.size(); ++i) row[ids[i]] = values[i];
}

}  // namespace temper::engine
