#include "job/live_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "datapool/types.h"

namespace temper::job {
namespace {

std::string Duration(double seconds) {
  const int64_t s = static_cast<int64_t>(seconds);
  return s >= 3600 ? fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60) : fmt::format("{}:{:02}", s / 60, s % 60);
}

double Value(const std::map<std::string, double>& metrics, const std::string& name) {
  auto it = metrics.find(name);
  return it == metrics.end() ? 0 : it->second;
}

// Cuts after `width` columns; every code point we print is one column wide.
std::string Cut(const std::string& text, size_t width) {
  size_t columns = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xc0) == 0x80) continue;
    if (columns++ == width) return text.substr(0, i);
  }
  return text;
}

std::string Failures(const ViewState& view) {
  std::string text;
  for (const char* outcome : {"policy_failure", "truncated", "infra_failure", "aborted"}) {
    const double count = Value(view.outcomes, outcome);
    if (count > 0) text += fmt::format("{}{} {:.0f}", text.empty() ? "" : ", ", outcome, count);
  }
  if (view.buried > 0) text += fmt::format("{}{:.0f} groups buried", text.empty() ? "" : ", ", view.buried);
  if (view.restarts > 0) text += fmt::format("{}{} restarted", text.empty() ? "" : ", ", view.restarts);
  return text.empty() ? "none" : text;
}

double Value(const ViewState& view, const SourceView& source, const std::string& name) {
  return Value(view.pool, datapool::WindowMetric(source.name, name));
}

// The groups from the head on, `|` where the window ends: o running, ! late, # ready, . taken or dead.
std::string Positions(const ViewState& view, const SourceView& source) {
  const auto count = static_cast<int64_t>(Value(view, source, "positions"));
  const auto size = static_cast<int64_t>(Value(view, source, "size"));
  if (count == 0) return "";
  std::string text = fmt::format("  head {:.0f} ", Value(view, source, "head"));
  for (int64_t i = 0; i < count; ++i) {
    if (i == size) text += "|";
    text += static_cast<char>(Value(view, source, fmt::format("{:02}", i)));
  }
  return text + (count <= size ? "|" : "");
}

// One line a source; what the characters mean stands behind the last.
std::vector<std::string> Windows(const ViewState& view) {
  std::vector<std::string> lines;
  size_t longest = 0;
  bool any = false;
  for (const SourceView& source : view.sources) longest = std::max(longest, source.name.size());
  for (const SourceView& source : view.sources) {
    const std::string positions = Positions(view, source);
    any |= !positions.empty();
    std::string text;
    if (view.sources.size() > 1) text = fmt::format("{:<{}}  ", source.name, longest);
    text += fmt::format("W = {}{}", source.window ? std::to_string(*source.window) : "none", positions);
    if (view.sources.size() > 1) {
      text += fmt::format("  {:.0f} of {:.0f} taken, {:.0f} ready, {:.0f} rollouts running", Value(view, source, "batch_have"),
                          Value(view, source, "batch_need"), Value(view, source, "ready_inside") + Value(view, source, "ready_outside"),
                          Value(view, source, "running"));
    }
    lines.push_back(std::move(text));
  }
  if (any) lines.back() += "  # ready  o running  ! late  . gone";
  return lines;
}

// Names of the alarms that are raised: "infra_share, head_wait.code".
std::string Alarms(const ViewState& view) {
  constexpr std::string_view kAlarm = "alarm.";
  std::string names;
  for (const auto& [name, value] : view.pool) {
    if (value != 0 && name.rfind(kAlarm, 0) == 0) names += (names.empty() ? "" : ", ") + name.substr(kAlarm.size());
  }
  return names;
}

// Empty while the trainer has what it wants.
std::string WhyItWaits(const ViewState& view) {
  if (Value(view.pool, "asking") == 0) return "";
  double have = 0, need = 0;
  std::string why;
  for (const SourceView& source : view.sources) {
    auto value = [&](const char* name) { return Value(view, source, name); };
    have += value("batch_have");
    need += value("batch_need");
    if (value("batch_have") >= value("batch_need")) continue;
    if (view.sources.size() > 1) why += fmt::format("; {} lacks {:.0f}", source.name, value("batch_need") - value("batch_have"));
    if (value("head") >= 0 && value("head_running") > 0) {
      why += fmt::format("; head {:.0f} has {:.0f} rollouts running for {:.0f} s", value("head"), value("head_running"), value("head_wait_s"));
    }
    if (value("ready_outside") > 0) why += fmt::format("; {:.0f} ready behind the window", value("ready_outside"));
  }
  return fmt::format("the trainer waits: {:.0f} of {:.0f} groups of its batch", have, need) + why;
}

std::string Rate(std::optional<double> tokens_per_s) { return tokens_per_s ? fmt::format("{:.0f}", *tokens_per_s) : "-"; }

std::string WarmUp(const ViewState& view) {
  return fmt::format("{:.0f} of {:.0f} tokens, loss {:.3f}", view.warm_up_tokens, view.warm_up_tokens_all, view.warm_up_loss);
}

std::string KindOf(const std::string& line) {
  constexpr size_t kCompared = 48;
  std::string kind;
  for (const char c : line) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit) kind += c;
    else if (kind.empty() || kind.back() != '#') kind += '#';
    if (kind.size() == kCompared) break;
  }
  return kind;
}

std::string Bound(const ViewState& view) {
  return view.staleness_bound ? fmt::format("/{}", *view.staleness_bound) : "";
}

}  // namespace

std::string Sparkline(const std::vector<double>& values, size_t width) {
  static constexpr const char* kBars[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  if (values.empty() || width == 0) return "";
  const size_t first = values.size() > width ? values.size() - width : 0;
  const auto [low, high] = std::minmax_element(values.begin() + static_cast<ptrdiff_t>(first), values.end());
  std::string line;
  for (size_t i = first; i < values.size(); ++i) {
    const double height = *high > *low ? (values[i] - *low) / (*high - *low) : 0;
    line += kBars[std::clamp(static_cast<int>(height * 8), 0, 7)];
  }
  return line;
}

std::vector<std::string> RenderPanel(const ViewState& view, size_t width) {
  std::vector<std::string> lines;
  auto add = [&](const std::string& text) { lines.push_back(Cut(text, width)); };
  add(fmt::format("{}  {}  {}", view.name, view.phase, Duration(view.elapsed_s)));
  if (view.history.empty()) {
    if (view.warm_up_tokens_all > 0) {
      add("warm-up   " + WarmUp(view));
    }
  } else {
    std::vector<double> rewards;
    for (const StepView& step : view.history) rewards.push_back(step.reward);
    const StepView& last = view.history.back();
    add(fmt::format("step      {} of {}", last.step, view.steps));
    add(fmt::format("reward    {:.3f}  {}", last.reward, Sparkline(rewards, width > 40 ? width - 30 : 10)));
    add(fmt::format("speed     sampling {} tokens/s{}, training {:.0f} tokens/s, trainer waited {:.1f} s",
                    Rate(view.sample_tokens_per_s), view.sample_is_mean ? " (mean since the first token)" : "", last.train_tokens_per_s,
                    last.wait_s));
    add(fmt::format("staleness {}{} updates", last.staleness, Bound(view)));
  }
  if (!view.ended) {
    add(fmt::format("slots     {:.0f} of {} in flight, {:.0f} rollouts running", Value(view.pool, "in_flight"), view.slots,
                    Value(view.pool, "running")));
    const std::vector<std::string> windows = Windows(view);
    for (size_t i = 0; i < windows.size(); ++i) add((i == 0 ? "window    " : "          ") + windows[i]);
    if (const std::string why = WhyItWaits(view); !why.empty()) add("          " + why);
    if (const double held = Value(view.pool, "held"); held != 0) {
      add(held == 1 ? fmt::format("          held: the store is at its bound ({:.0f} MB); no new rollouts until groups are trained and committed", Value(view.pool, "store_bytes") / 1e6)
                    : fmt::format("          held: only {:.0f} MB are free on the disk; no new rollouts until there is space", Value(view.pool, "disk_free_bytes") / 1e6));
    }
  }
  if (const std::string alarms = Alarms(view); !alarms.empty() && !view.ended) {
    const bool pauses = Value(view.pool, "alarm_pauses") != 0;
    add("alarm     " + alarms + (pauses ? ": paused, no new rollouts until it is cured (Ctrl-C, then run --resume)" : ""));
  }
  add("failures  " + Failures(view));
  const bool judging = !view.ended && view.eval_tasks > view.eval_done;
  if (!view.evaluations.empty() || judging) {
    std::string text;
    for (const auto& [version, rate] : view.evaluations) text += fmt::format("{}v{} {:.3f}", text.empty() ? "" : "  ", version, rate);
    if (judging) text += fmt::format("{}{:.0f} of {:.0f} judged", text.empty() ? "" : "  ", view.eval_done, view.eval_tasks);
    add("held out  " + text);
  }
  for (size_t i = view.notes.size() > 4 ? view.notes.size() - 4 : 0; i < view.notes.size(); ++i) add("  " + view.notes[i]);
  return lines;
}

std::string RenderProgress(const ViewState& view) {
  const int64_t next = (view.history.empty() ? 0 : view.history.back().step) + 1;
  std::string text = view.phase;
  if (view.phase == "warm-up") text += fmt::format(": step {:.0f}, {}", view.warm_up_steps, WarmUp(view));
  if (view.phase == "evaluating" && view.eval_tasks > view.eval_done) {
    text += fmt::format(": {:.0f} of {:.0f} tasks judged", view.eval_done, view.eval_tasks);
  }
  if (view.phase == "collecting") {
    text += fmt::format(": {:.0f} rollouts ended {} (a step takes {}), {:.0f} running", view.rollouts_since_step,
                        next == 1 ? "so far" : fmt::format("since step {}", next - 1), view.rollouts_per_step,
                        Value(view.pool, "running"));
  }
  if (view.phase == "proving") text += fmt::format(": tree = rows on the batch of step {}", next);
  if (view.phase == "training") text += fmt::format(": step {} of {}", next, view.steps);
  if (const std::string alarms = Alarms(view); !alarms.empty()) {
    text += fmt::format("; alarm {}{}", alarms, Value(view.pool, "alarm_pauses") == 0 ? "" : ", paused");
  }
  return fmt::format("{} ({})", text, Duration(view.elapsed_s));
}

bool Progress::Due(const ViewState& view, double now_s) {
  // Each step has its own line: what it is made of changes too often to be said.
  const bool stepping = view.phase == "collecting" || view.phase == "training";
  const std::string phase = stepping && !view.history.empty() ? "steps" : view.phase;
  const bool changed = phase != phase_ && phase != "steps" && !view.phase.empty();
  phase_ = phase;
  if (!changed && now_s - said_s_ < kSilenceS) return false;
  said_s_ = now_s;
  return true;
}

std::vector<std::string> Chatter::Take(const std::vector<std::string>& lines, double now_s) {
  std::vector<std::string> told;
  for (const std::string& line : lines) {
    auto [it, fresh] = kinds_.try_emplace(KindOf(line), Kind{now_s, 0, ""});
    if (fresh) {
      told.push_back(line);
    } else {
      ++it->second.more;
      it->second.last = line;
    }
  }
  for (auto it = kinds_.begin(); it != kinds_.end();) {
    Kind& kind = it->second;
    if (now_s - kind.told_s < kTogetherS) {
      ++it;
      continue;
    }
    if (kind.more == 0) {
      it = kinds_.erase(it);
      continue;
    }
    told.push_back(kind.last + (kind.more > 1 ? fmt::format(" (and {} more like it)", kind.more - 1) : ""));
    kind = {now_s, 0, ""};
    ++it;
  }
  return told;
}

std::string RenderStep(const ViewState& view, const StepView& step) {
  return fmt::format("step {}/{} reward {:.3f} staleness {}{} sampling {} tok/s training {:.0f} tok/s waited {:.1f} s failures {} ({})",
                     step.step, view.steps, step.reward, step.staleness, Bound(view), Rate(step.sample_tokens_per_s),
                     step.train_tokens_per_s, step.wait_s, Failures(view), Duration(view.elapsed_s));
}

}  // namespace temper::job
