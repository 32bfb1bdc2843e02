// A row of a bench: a figure of ours beside one of something else, sampled in turn.
#pragma once

#include <string>
#include <vector>

namespace temper::trainer::bench {

struct Row {
  std::string work;             // "gemm"
  std::string name;             // the case: "SmolLM2-135M gate and up, 64 x 3072 x 576"
  double ours = 0;              // the median
  std::string unit;             // "GFLOP/s", "tokens/s", …: more is better; "MiB", "s": less is
  std::string reference = {};   // what `theirs` is: "read bandwidth", "FMA peak", "torch float32", …
  double theirs = 0;            // the median
  double ratio = 0;             // the median of ours / theirs of the samples taken in turn
  std::vector<double> samples = {};  // ours
  std::string peer = {};        // of a peer: its version, instructions and threads
  std::string note = {};        // "weak: …": the row does not count; "not run: …": there is no figure
  // What the ratio is to be: at least, (MiB) at most, (s) no further than so many times apart; 0: nothing is asked for.
  double target = 0;
};

// Of an even count the mean of the middle two; 0 of none.
double Median(std::vector<double> x);

// Samples of ours and of the reference, taken in turn: as many of each.
Row Beside(const std::string& work, const std::string& name, const std::string& unit, const std::string& reference,
           const std::vector<double>& ours, const std::vector<double>& theirs);

}  // namespace temper::trainer::bench
