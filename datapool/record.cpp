#include "datapool/record.h"

#include <xxhash.h>
#include <zstd.h>

#include <algorithm>
#include <memory>

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

// Of this thread: making one costs more than compressing a short record.
ZSTD_CCtx* Context() {
  static thread_local const std::unique_ptr<ZSTD_CCtx, size_t (*)(ZSTD_CCtx*)> context(ZSTD_createCCtx(), &ZSTD_freeCCtx);
  return context.get();
}

// Log-probabilities are noise to a compressor: what they leave to gain would cost more time, at each write and read, than it saves.
bool Worthwhile(size_t packed, size_t plain) { return packed < plain - plain / 8; }

// Judged from pieces all over a record, so that one that gains nothing is not compressed in vain.
bool Compresses(std::string_view bytes) {
  constexpr size_t kShort = 2048, kPieces = 4, kPieceMost = 4096;
  if (bytes.size() < kShort) return !bytes.empty();
  const size_t piece = std::min(bytes.size() / 16, kPieceMost);
  char sample[kPieces * kPieceMost], packed[ZSTD_COMPRESSBOUND(sizeof sample)];
  for (size_t i = 0; i < kPieces; ++i) bytes.copy(sample + i * piece, piece, (bytes.size() - piece) * i / (kPieces - 1));
  const size_t n = ZSTD_compressCCtx(Context(), packed, sizeof packed, sample, kPieces * piece, kLevel);
  return !ZSTD_isError(n) && Worthwhile(n, kPieces * piece);
}

Status Damaged(const AttemptId& id, const char* what) {
  return DataLoss(fmt::format("record {}.{}.{} does not verify: {}", id.group, id.rollout, id.attempt, what));
}

}  // namespace

std::string PackRecord(const AttemptId& id, std::string_view bytes) {
  std::string out = kMagic;
  out.resize(kHeadBytes);
  size_t packed = 0;
  if (Compresses(bytes)) {
    out.resize(kHeadBytes + ZSTD_compressBound(bytes.size()));
    packed = ZSTD_compressCCtx(Context(), out.data() + kHeadBytes, out.size() - kHeadBytes, bytes.data(), bytes.size(), kLevel);
  }
  const bool compressed = packed > 0 && !ZSTD_isError(packed) && Worthwhile(packed, bytes.size());
  if (compressed) {
    out.resize(kHeadBytes + packed);
  } else {
    out.resize(kHeadBytes);
    out.append(bytes);
  }
  const char form = compressed ? kZstd : kPlain;
  std::string numbers;
  PutBig(numbers, bytes.size(), 8);
  PutBig(numbers, Checksum(id, form, bytes.size(), std::string_view(out).substr(kHeadBytes)), 8);
  out[kMagicBytes] = form;
  out.replace(kMagicBytes + 1, numbers.size(), numbers);
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
