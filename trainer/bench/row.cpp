#include "trainer/bench/row.h"

#include <algorithm>

#include "common/check.h"

namespace temper::trainer::bench {

double Median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  const size_t n = x.size();
  return n == 0 ? 0 : n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

Row Beside(const std::string& work, const std::string& name, const std::string& unit, const std::string& reference,
           const std::vector<double>& ours, const std::vector<double>& theirs) {
  TEMPER_CHECK(ours.size() == theirs.size()) << name << ": " << ours.size() << " samples beside " << theirs.size();
  Row row{.work = work, .name = name, .unit = unit, .reference = reference, .samples = ours};
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / theirs[i]);
  row.ours = Median(ours);
  row.theirs = Median(theirs);
  row.ratio = Median(ratios);
  return row;
}

}  // namespace temper::trainer::bench
