// The kernels of a path, each counting what it does: time, operations, bytes. A step run on them says where its time goes. One
// engine of them at a time.
#pragma once

#include <array>
#include <memory>

#include "engine/engine.h"

namespace temper::trainer::bench {

enum class Part {
  kForwardProducts,   // of a layer: [q;k;v], o, [gate;up], down
  kInputGradients,    // the same in the backward pass: dX
  kWeightGradients,   // dW
  kForwardAttention,
  kBackwardAttention,
  kHeadForward,       // logits and their log-sum-exp
  kHeadBackward,      // logits again where they were not kept, their gradient, its products
  kRows,              // norms, rotations, activations, rounding: what is done number by number
  kPacking,           // rows and matrices turned into panels for the backward pass
  kOptimizer,         // norm of the gradient, AdamW
};
inline constexpr int kParts = 10;
const char* PartName(Part part);

struct Count {
  double ticks = 0;       // of the processor's clock, all threads together
  double operations = 0;  // on fp32 numbers; a multiply-add is two
  double bytes = 0;       // of the arrays a call reads and writes, each once
};

class CountedKernels {
 public:
  // An engine of the same path and count of threads as `like`. `vocab` and `like` say which products are the head's.
  static std::unique_ptr<engine::Engine> MakeEngine(engine::Engine& like, int vocab);
  // What the calls that follow belong to. Between loops only.
  static void Enter(bool backward);
  // The counts since the last call, by Part. Between loops only.
  static std::array<Count, kParts> Take();
  static double Ticks();
};

}  // namespace temper::trainer::bench
