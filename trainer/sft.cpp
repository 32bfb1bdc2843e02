#include "trainer/sft.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

#include "common/clock.h"
#include "common/file.h"
#include "common/json.h"
#include "engine/tree_batch.h"
#include "engine/weights.h"

namespace temper::trainer {
namespace {

// The learning rate after `done` of `options.tokens` tokens, for a batch of `batch` tokens.
double SftRate(const SftOptions& options, int64_t done, int64_t batch) {
  const double lr = options.optimizer.lr;
  const double total = static_cast<double>(options.tokens);
  const double progress = static_cast<double>(done) / total;
  const double end = static_cast<double>(done + batch) / total;
  if (end < options.warmup_fraction) return lr * end / options.warmup_fraction;
  const double left = std::clamp((1 - progress) / (1 - options.warmup_fraction), 0.0, 1.0);
  switch (options.optimizer.schedule) {
    case Schedule::kConstant:
    case Schedule::kWsd: return lr;
    case Schedule::kLinear: return lr * left;
    case Schedule::kCosine: return lr * 0.5 * (1 - std::cos(std::numbers::pi * left));
  }
  return lr;
}

struct SftBatch {
  engine::TreeBatch tree;
  std::vector<int32_t> nodes;   // of the trained tokens of all rows, in order
  std::vector<uint8_t> wanted;  // per node
  int64_t rows = 0, tokens = 0;
};

// Takes rows from the source, from `row` on, until the batch has its tokens.
Result<SftBatch> TakeBatch(const SftSource& source, int64_t row, int64_t batch_tokens) {
  SftBatch batch;
  engine::TreeBuilder builder;
  while (batch.tokens < batch_tokens) {
    ASSIGN_OR_RETURN(const SftRow r, source(row + batch.rows));
    if (r.ids.empty() || r.mask.size() != r.ids.size()) {
      return InvalidArgument(fmt::format("SFT row {}: {} ids, {} mask entries", row + batch.rows, r.ids.size(), r.mask.size()));
    }
    const float one = 1;
    const std::vector<int32_t> handles = builder.AddRow(r.ids, {&one, 1});
    for (size_t t = 1; t < r.ids.size(); ++t) {
      if (r.mask[t]) batch.nodes.push_back(handles[t]);
    }
    batch.tokens += static_cast<int64_t>(r.ids.size());
    ++batch.rows;
  }
  std::vector<int32_t> index;
  batch.tree = builder.Build(&index);
  batch.wanted.assign(static_cast<size_t>(batch.tree.size()), 0);
  for (int32_t& node : batch.nodes) {
    node = index[node];
    batch.wanted[node] = 1;
  }
  return batch;
}

}  // namespace

Result<SftReport> RunSft(engine::Engine& engine, engine::Profile profile, const SftOptions& options, const SftSource& source,
                         engine::Parameters& params, const std::string& log_path, const std::function<bool()>& stopped,
                         const std::function<void(const SftReport&)>& progress) {
  const Clock& clock = SystemClock::Get();
  const double start_s = clock.NowS();
  SftReport report;
  AdamW optimizer(params.config());
  engine::Gradients grads(params.config());
  engine::TrainPass pass(engine);
  RETURN_IF_ERROR(WriteFile(log_path, ""));
  engine::ComputeWeights weights;
  engine::Buffer packed;
  while (report.tokens < options.tokens) {
    if (stopped()) return Cancelled("stopped during SFT");
    ASSIGN_OR_RETURN(const SftBatch batch, TakeBatch(source, report.rows, options.batch_tokens));
    const int64_t trained = static_cast<int64_t>(batch.nodes.size());
    double loss = 0;
    AdamW::Report step;
    if (trained > 0) {
      weights = engine::Repack(params, profile, engine.threads(), packed);
      engine::ForwardOptions forward;
      forward.wanted = batch.wanted;
      const engine::PassChoice choice =
          engine::ChoosePass(params.config(), profile, batch.tree, batch.wanted, static_cast<size_t>(options.memory_bytes));
      forward.chunk_nodes = choice.chunk_nodes;
      forward.recompute = choice.recompute;
      ASSIGN_OR_RETURN(const std::span<const float> logprobs, pass.Forward(weights, batch.tree, forward));
      std::vector<double> sums(batch.wanted.size(), 0);
      for (int32_t node : batch.nodes) {
        loss -= static_cast<double>(logprobs[node]) / static_cast<double>(trained);
        sums[node] -= 1 / static_cast<double>(trained);
      }
      const std::vector<float> coef(sums.begin(), sums.end());
      grads.SetZero();
      pass.Backward(coef, grads);
      AdamWOptions rate = options.optimizer;
      rate.lr = SftRate(options, report.tokens, batch.tokens);
      rate.warmup_steps = 0;
      rate.schedule = Schedule::kConstant;
      ASSIGN_OR_RETURN(step, optimizer.Step(engine, rate, grads, params));
    }
    report.rows += batch.rows;
    report.tokens += batch.tokens;
    report.trained_tokens += trained;
    if (report.steps++ == 0) report.first_loss = loss;
    report.last_loss = loss;
    report.wall_s = clock.NowS() - start_s;
    JsonWriter line;
    line.BeginObject().Key("step").Int(report.steps).Key("loss").Double(loss).Key("rows").Int(report.rows);
    line.Key("tokens").Int(report.tokens).Key("trained_tokens").Int(report.trained_tokens);
    line.Key("tree_tokens").Int(batch.tree.size()).Key("grad_norm").Double(step.grad_norm).Key("lr").Double(step.lr);
    line.Key("wall_s").Double(report.wall_s).EndObject();
    RETURN_IF_ERROR(AppendFile(log_path, line.Take() + "\n"));
    progress(report);
  }
  return report;
}

}  // namespace temper::trainer
