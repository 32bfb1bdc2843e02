// Curves as one SVG picture, 900 pixels wide: mean reward by step and by seconds; of a single run also staleness and speed. Pure.
//
// Every panel is <g class="panel" id="reward-step|reward-seconds|staleness|speed"> with one <rect class="frame"> around its
// plane; in it <circle class="step"> a step, <polyline class="mean"> the moving mean, <path class="evaluation"> a diamond.
#pragma once

#include <string>
#include <vector>

#include "job/curves.h"

namespace temper::job {

struct PlotOptions {
  int window = 10;  // steps of the moving mean: drawn from the first step that has as many behind it
};

std::string PlotSvg(const std::vector<Curve>& curves, const PlotOptions& options);

// Multiples of 1, 2 or 5 times a power of ten, about `target` of them within [low, high].
std::vector<double> RoundTicks(double low, double high, int target);

}  // namespace temper::job
