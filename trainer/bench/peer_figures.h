// What peers are known to reach on another machine, and what this one should let them reach: a peer far below is set up badly, and
// being faster than it says nothing.
#pragma once

#include <string>

namespace temper::trainer::bench {

// What a machine does at most, all threads together.
struct MachineRates {
  double read_bytes_s = 0;
  double fma_flops_s = 0;  // fp32 multiply-adds, two FLOP each
  bool tiles = false;      // it has a tile unit (AMX), and the run uses it
};

// Tokens/s of SmolLM2-135M that `peer` should reach on a machine of such rates: its figure on the machine it was measured on (two cores
// of a CPU with AMX) times what the roofline of both says, the later of reading weights and pages and of the arithmetic. work: "decode"
// (batch sequences), "prefill", "step". 0: no figure is known.
double ExpectedTokensPerSecond(const std::string& peer, const std::string& work, int batch, const MachineRates& here);

// A peer whose best mode reaches less than so much of that is weak: its rows do not count.
constexpr double kWeakBelow = 0.8;

}  // namespace temper::trainer::bench
