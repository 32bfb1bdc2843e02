#include "engine/buffer.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace temper::engine {
namespace {

constexpr size_t kLargePage = size_t{2} << 20;

// Below a few large pages, what is rounded and cleared for them costs more than they save.
std::align_val_t AlignmentOf(size_t bytes) { return std::align_val_t(bytes < 2 * kLargePage ? 64 : kLargePage); }

}  // namespace

std::byte* AllocateBytes(size_t bytes) {
  auto* p = static_cast<std::byte*>(::operator new[](bytes, AlignmentOf(bytes)));
  if (AlignmentOf(bytes) == std::align_val_t(kLargePage)) AskForLargePages(p, bytes);
  return p;
}

void FreeBytes(std::byte* p, size_t bytes) { ::operator delete[](p, AlignmentOf(bytes)); }

void AskForLargePages(std::byte* p, size_t bytes) {
  // Whole pages within the memory: none of them is then larger than what was asked for. A refusal changes nothing but speed.
  const auto begin = (reinterpret_cast<uintptr_t>(p) + kLargePage - 1) / kLargePage * kLargePage;
  const auto end = (reinterpret_cast<uintptr_t>(p) + bytes) / kLargePage * kLargePage;
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace temper::engine
