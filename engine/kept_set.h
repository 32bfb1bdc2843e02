// The tokens that a truncating sampler (top-k, top-p, min-p) left to draw from, as they are recorded with the token drawn.
//
// Problem: the logprob of a truncated draw is that of the softmax over the kept tokens; a trainer that is to compute it again needs to
// know them, one set a token. Idea: bytes that are one of two forms, whichever is shorter, and none at all where nothing was cut. A set
// has exactly one spelling, so sets are equal where their bytes are, and a reader refuses every other spelling.
//
//   nothing                             the whole vocabulary
//   01, gaps                            ids rising; the first id, then each id less the one before it less 1, each a varint (LEB128:
//                                       seven bits a byte, low bits first, the top bit says that more follow, no superfluous byte)
//   02, bits                            id i is bit i % 8 of byte i / 8; the last byte is not zero
//
// The first form where both are equally long. At most 1 + vocab / 8 bytes, rounded up.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace temper::engine {

// `ids` rising, inside the vocabulary, not empty. All of the vocabulary gives no bytes.
std::string EncodeKept(std::span<const int32_t> ids, int vocab);

// The ids, rising. InvalidArgument: bytes that EncodeKept does not write for this vocabulary. Allocates at most eight ids a byte. Not for
// the empty spelling, which lists nothing.
Status DecodeKept(std::string_view bytes, int vocab, std::vector<int32_t>* ids);

// Whether bytes are the set of a draw of `token`: empty, or such a set with the token in it.
Status CheckKept(std::string_view bytes, int vocab, int32_t token);

// The logits of a set side by side, in order of their ids: what is summed over the vocabulary where nothing was cut is summed over these
// by the same kernels. `bytes` were checked before, are not empty, and are of the vocabulary of `row`.
struct KeptLogits {
  KeptLogits(std::string_view bytes, const float* row);
  // Back to their places.
  void Scatter(float* row) const;

  std::vector<int32_t> ids;
  std::vector<float> values;
};

}  // namespace temper::engine
