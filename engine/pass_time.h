// How long a pass over a tree takes on this machine, said before it runs: its work (PassWork) times rates measured on flat rows.
// Pure.
#pragma once

#include <span>

#include "engine/train_pass.h"

namespace temper::engine {

// Seconds each.
struct PassRates {
  double row = 0, pair = 0, head_row = 0;                             // forward: a node, a query and key, a row of the head
  double backward_row = 0, backward_pair = 0, backward_head_row = 0;  // the same of the backward pass
  double chunk = 0;                                                   // of the backward pass: what does not depend on its rows
};

struct PassTime {
  PassWork work;
  double forward_s = 0, backward_s = 0;  // backward_s: 0 where there was none
};

// The rates that explain the measured times best: none negative, least sum of squared relative errors. Needs passes that differ in rows,
// pairs and head rows; what none of them has gets the rate 0.
PassRates FitRates(std::span<const PassTime> measured);

double ForwardSeconds(const PassWork& work, const PassRates& rates);
double BackwardSeconds(const PassWork& work, const PassRates& rates);  // with what is computed again in it

}  // namespace temper::engine
