#include "datapool/record.h"

#include <xxhash.h>
#include <zstd.h>

#include "datapool/store_keys.h"
#include "fmt/format.h"

namespace temper::datapool {
namespace {

constexpr char kMagic[] = "TR1";
constexpr size_t kMagicBytes = 3, kHeadBytes = kMagicBytes + 1 + 8 + 8;  // magic, form, size, checksum
constexpr char kPlain = 0, kZstd = 1;
constexpr int kLevel = 1;  // token ids and log-probabilities gain little from more
// Larger ones are damage; the size comes before the checksum is known to hold.
constexpr uint64_t kMaxBytes = uint64_t{4} << 30;

uint64_t Checksum(const AttemptId& id, char form, uint64_t size, std::string_view payload) {
  std::string head = TrajectoryKey(id);
  head.push_back(form);
  PutBig(head, size, 8);
  return XXH3_64bits_withSeed(payload.data(), payload.size(), XXH3_64bits(head.data(), head.size()));
}

Status Damaged(const AttemptId& id, const char* what) {
  return DataLoss(fmt::format("record {}.{}.{} does not verify: {}", id.group, id.rollout, id.attempt, what));
}

}  // namespace

std::string PackRecord(const AttemptId& id, std::string_view bytes) {
  std::string payload(ZSTD_compressBound(bytes.size()), '\0');
  const size_t packed = ZSTD_compress(payload.data(), payload.size(), bytes.data(), bytes.size(), kLevel);
  const bool shorter = !ZSTD_isError(packed) && packed < bytes.size();
  if (shorter) {
    payload.resize(packed);
  } else {
    payload.assign(bytes);
  }
  const char form = shorter ? kZstd : kPlain;
  std::string out = kMagic;
  out.reserve(kHeadBytes + payload.size());
  out.push_back(form);
  PutBig(out, bytes.size(), 8);
  PutBig(out, Checksum(id, form, bytes.size(), payload), 8);
  out += payload;
  return out;
}

Result<std::string> UnpackRecord(const AttemptId& id, std::string_view stored) {
  if (stored.size() < kHeadBytes || stored.substr(0, kMagicBytes) != kMagic) return Damaged(id, "no record of this version");
  const char form = stored[kMagicBytes];
  const uint64_t size = GetBig(stored.substr(kMagicBytes + 1, 8));
  const uint64_t checksum = GetBig(stored.substr(kMagicBytes + 9, 8));
  const std::string_view payload = stored.substr(kHeadBytes);
  if (checksum != Checksum(id, form, size, payload)) return Damaged(id, "checksum");
  if (form == kPlain) return size == payload.size() ? Result<std::string>(std::string(payload)) : Damaged(id, "size");
  if (form != kZstd || size > kMaxBytes) return Damaged(id, "form");
  std::string out(size, '\0');
  const size_t got = ZSTD_decompress(out.data(), out.size(), payload.data(), payload.size());
  if (ZSTD_isError(got) || got != size) return Damaged(id, "compressed data");
  return out;
}

}  // namespace temper::datapool
