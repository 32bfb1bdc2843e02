#include "job/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "common/strings.h"

namespace temper::job {
namespace {

constexpr double kWidth = 900, kLeft = 62, kRight = 24;
// Okabe and Ito's colours, apart from each other for every kind of colour vision; the darker ones first.
constexpr std::array<const char*, 7> kColours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"};
constexpr std::array<const char*, 3> kDashes = {"", " stroke-dasharray=\"7 3\"", " stroke-dasharray=\"2 3\""};
constexpr double kLetter = 6.6;  // a letter's width at 12 pixels, on the large side

std::string Escape(const std::string& text) {
  const bool utf8 = IsUtf8(text);
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '&') out += "&amp;";
    else if (c == '<') out += "&lt;";
    else if (c == '>') out += "&gt;";
    else if (c == '"') out += "&quot;";
    else if (byte < 0x20 || byte == 0x7f || (!utf8 && byte >= 0x80)) out += '?';
    else out += c;
  }
  return out;
}

// U+FFFE and U+FFFF are UTF-8 and still no XML.
std::string Name(const std::string& text) {
  std::string name = text;
  for (const char* bad : {"\xef\xbf\xbe", "\xef\xbf\xbf"}) {
    for (size_t at; (at = name.find(bad)) != std::string::npos;) name[at] = name[at + 1] = name[at + 2] = '?';
  }
  if (name.size() > 90) {
    size_t end = 88;
    while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xc0) == 0x80) --end;
    name.resize(end);
    name += "…";
  }
  return Escape(name);
}

double TickStep(double range, int target) {
  const double raw = range / target, power = std::pow(10, std::floor(std::log10(raw)));
  const double share = raw / power;
  return power * (share < 1.5 ? 1 : share < 3.5 ? 2 : share < 7.5 ? 5 : 10);
}

struct Tick {
  double at;
  std::string label;
};

struct Axis {
  double low = 0, high = 1;
  bool log = false;
  std::string title;
  std::vector<Tick> ticks;
  double Share(double value) const {
    if (log) return std::log(value / low) / std::log(high / low);
    return (value - low) / (high - low);
  }
};

Axis LinearAxis(const std::string& title, double low, double high, int target) {
  Axis axis{low, high, false, title, {}};
  const std::vector<double> ticks = RoundTicks(low, high, target);
  const double step = ticks.size() > 1 ? ticks[1] - ticks[0] : 1;
  const int decimals = std::max(0, static_cast<int>(-std::floor(std::log10(step) + 1e-9)));
  for (const double tick : ticks) axis.ticks.push_back({tick, fmt::format("{:.{}f}", tick == 0 ? 0.0 : tick, decimals)});
  return axis;
}

// Of counted things: no ticks between them.
Axis CountAxis(const std::string& title, double high, int target) {
  Axis axis = LinearAxis(title, 0, std::max(high, 1.0), target);
  if (high < target) {
    axis.ticks.clear();
    for (int tick = 0; tick <= axis.high; ++tick) axis.ticks.push_back({static_cast<double>(tick), std::to_string(tick)});
  }
  return axis;
}

// From a tick to a tick, so that both ends are labelled.
Axis ValueAxis(const std::string& title, double low, double high, int target) {
  if (high <= low) high = low + 1;
  const double step = TickStep(high - low, target);
  return LinearAxis(title, std::floor(low / step + 1e-9) * step, std::ceil(high / step - 1e-9) * step, target);
}

Axis LogAxis(const std::string& title, double low, double high) {
  Axis axis{std::pow(10, std::floor(std::log10(low))), std::pow(10, std::ceil(std::log10(high) + 1e-9)), true, title, {}};
  const double decades = std::log10(axis.high / axis.low);
  for (double power = axis.low; power <= axis.high * 1.001; power *= 10) {
    for (const int times : {1, 2, 5}) {
      if (power * times > axis.high * 1.001 || (times > 1 && decades > 2.5)) continue;
      const double value = power * times;
      axis.ticks.push_back({value, value >= 1e6   ? fmt::format("{:g}M", value / 1e6)
                                   : value >= 1e3 ? fmt::format("{:g}k", value / 1e3)
                                                  : fmt::format("{:g}", value)});
    }
  }
  return axis;
}

struct Box {
  double x, y, w, h;
  bool Meets(const Box& other) const {
    return x < other.x + other.w && other.x < x + w && y < other.y + other.h && other.y < y + h;
  }
};

// One plane with its two axes, and what is drawn in it.
class Panel {
 public:
  Panel(std::string* out, const char* id, const std::string& title, Box frame, Axis x, Axis y)
      : out_(*out), frame_(frame), x_(std::move(x)), y_(std::move(y)) {
    out_ += fmt::format("<g class=\"panel\" id=\"{}\">\n<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"title\">{}</text>\n",
                        id, frame.x, frame.y - 9, title);
    for (const Tick& tick : x_.ticks) {
      out_ += fmt::format("<line class=\"grid\" x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{0:.1f}\" y2=\"{2:.1f}\"/>",
                          X(tick.at), frame.y, frame.y + frame.h);
      out_ += fmt::format("<text class=\"tick\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
                          X(tick.at), frame.y + frame.h + 15, tick.label);
    }
    for (const Tick& tick : y_.ticks) {
      out_ += fmt::format("<line class=\"grid\" x1=\"{1:.1f}\" y1=\"{0:.1f}\" x2=\"{2:.1f}\" y2=\"{0:.1f}\"/>",
                          Y(tick.at), frame.x, frame.x + frame.w);
      out_ += fmt::format("<text class=\"tick\" text-anchor=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
                          frame.x - 6, Y(tick.at) + 4, tick.label);
    }
    out_ += fmt::format("<rect class=\"frame\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>\n",
                        frame.x, frame.y, frame.w, frame.h);
    out_ += fmt::format("<text class=\"axis\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
                        frame.x + frame.w / 2,
                        frame.y + frame.h + 32, x_.title);
    out_ +=
        fmt::format("<text class=\"axis\" text-anchor=\"middle\" transform=\"translate({:.1f} {:.1f}) rotate(-90)\">{}</text>\n",
                    frame.x - 44, frame.y + frame.h / 2, y_.title);
  }
  ~Panel() { out_ += "</g>\n"; }
  Panel(const Panel&) = delete;
  Panel& operator=(const Panel&) = delete;

  double X(double value) const { return frame_.x + frame_.w * x_.Share(value); }
  double Y(double value) const { return frame_.y + frame_.h * (1 - y_.Share(value)); }

  void Dot(double x, double y, const char* colour) {
    out_ += fmt::format("<circle class=\"step\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.4\" fill=\"{}\" fill-opacity=\"0.35\"/>\n",
                        X(x), Y(y), colour);
  }
  // Through the points; a single one is a dot.
  void Line(const char* kind, const std::vector<std::pair<double, double>>& points, const char* colour, const char* dashes,
            double width) {
    if (points.empty()) return;
    out_ += fmt::format("<polyline class=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" stroke-linejoin=\"round\" "
                        "stroke-linecap=\"round\"{} points=\"", kind, colour,
                        width, dashes);
    if (points.size() == 1) out_ += fmt::format("{:.1f},{:.1f} ",
                                                X(points[0].first), Y(points[0].second));  // to nowhere: a round dot
    for (size_t i = 0; i < points.size(); ++i) out_ += fmt::format("{}{:.1f},{:.1f}", i ? " " : "",
                                                                   X(points[i].first), Y(points[i].second));
    out_ += "\"/>\n";
  }
  void Diamond(double x, double y, const char* colour) {
    out_ += fmt::format(
        "<path class=\"evaluation\" d=\"M{:.1f} {:.1f} l5.5 5.5 l-5.5 5.5 l-5.5 -5.5 z\" fill=\"{}\" stroke=\"#ffffff\" "
        "stroke-width=\"1.2\"/>\n",
        X(x), Y(y) - 5.5, colour);
    taken_.push_back({X(x) - 5, Y(y) - 5, 10, 10});
  }
  // Beside (x, y), where it covers no diamond and no other label as long as there is such a place.
  void Label(double x, double y, const std::string& text, const char* colour) {
    const double w = 6.5 * static_cast<double>(text.size()) + 3, h = 13;
    Box best{};
    bool found = false;
    for (int ring = 0; ring < 6 && !found; ++ring) {
      const double away = 8 + 14 * ring;
      for (const auto& [dx, dy] : {std::pair{-w / 2, -away - h}, {-w / 2, away}, {away, -h / 2}, {-away - w, -h / 2}}) {
        Box box{std::clamp(X(x) + dx, frame_.x + 1, frame_.x + frame_.w - w - 1), Y(y) + dy, w, h};
        if (box.y < frame_.y + 1 || box.y + h > frame_.y + frame_.h - 1) continue;
        if (!found) best = box;
        found = std::none_of(taken_.begin(), taken_.end(), [&](const Box& other) { return box.Meets(other); });
        if (found) {
          best = box;
          break;
        }
      }
    }
    if (best.w == 0) best = {X(x) - w / 2, Y(y) - 8 - h, w, h};
    taken_.push_back(best);
    out_ += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"#ffffff\" "
                        "fill-opacity=\"0.85\"/>", best.x, best.y, best.w, best.h);
    out_ += fmt::format("<text class=\"value\" text-anchor=\"middle\" style=\"fill:{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
                        colour, best.x + best.w / 2,
                        best.y + h - 3, text);
  }
  void Note(double x, double y, const std::string& text) {
    out_ += fmt::format("<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", X(x) + 6, Y(y) - 5, text);
  }
  void Empty(const std::string& text) {
    out_ += fmt::format("<text class=\"axis\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
                        frame_.x + frame_.w / 2,
                        frame_.y + frame_.h / 2, text);
  }

 private:
  std::string& out_;
  const Box frame_;
  const Axis x_, y_;
  std::vector<Box> taken_;
};

const char* Colour(size_t curve) { return kColours[curve % kColours.size()]; }
const char* Dashes(size_t curve) { return kDashes[curve / kColours.size() % kDashes.size()]; }

// The largest step and second of all curves, the range of all rewards.
struct Ranges {
  double step = 0, wall_s = 0, low = 0, high = 1;
  bool any = false;
  explicit Ranges(const std::vector<Curve>& curves) {
    for (const Curve& curve : curves) {
      for (const CurvePoint& p : curve.points) Take(p.step, p.wall_s, p.reward);
      for (const CurveEvaluation& e : curve.evaluations) Take(e.step, e.wall_s, e.value);
    }
  }
  void Take(int64_t at, double seconds, double value) {
    step = std::max(step, static_cast<double>(at));
    wall_s = std::max(wall_s, seconds);
    low = std::min(low, value);
    high = std::max(high, value);
    any = true;
  }
};

void DrawRewards(Panel& panel, const std::vector<Curve>& curves, const PlotOptions& options, bool any, bool by_step) {
  if (!any) panel.Empty("no step yet");
  for (size_t c = 0; c < curves.size(); ++c) {
    for (const CurvePoint& p : curves[c].points) panel.Dot(by_step ? static_cast<double>(p.step) : p.wall_s, p.reward, Colour(c));
  }
  for (size_t c = 0; c < curves.size(); ++c) {
    const std::vector<CurvePoint>& points = curves[c].points;
    const size_t window = static_cast<size_t>(options.window);
    std::vector<std::pair<double, double>> means;
    for (size_t i = window; i <= points.size(); ++i) {
      double sum = 0;
      for (size_t k = i - window; k < i; ++k) sum += points[k].reward;
      means.emplace_back(by_step ? static_cast<double>(points[i - 1].step) : points[i - 1].wall_s, sum / options.window);
    }
    panel.Line("mean", means, Colour(c), Dashes(c), 2.2);
  }
  for (size_t c = 0; c < curves.size(); ++c) {
    for (const CurveEvaluation& e : curves[c].evaluations)
      panel.Diamond(by_step ? static_cast<double>(e.step) : e.wall_s, e.value, Colour(c));
  }
  for (size_t c = 0; c < curves.size(); ++c) {
    for (const CurveEvaluation& e : curves[c].evaluations) {
      panel.Label(by_step ? static_cast<double>(e.step) : e.wall_s, e.value, fmt::format("{:.3f}", e.value), Colour(c));
    }
  }
}

void DrawStaleness(std::string* out, const Curve& run, const Ranges& ranges, Box frame) {
  double high = run.staleness_bound.value_or(0);
  std::vector<std::pair<double, double>> line;
  for (const CurvePoint& p : run.points) {
    if (!p.staleness) continue;
    high = std::max(high, *p.staleness);
    line.emplace_back(static_cast<double>(p.step), *p.staleness);
  }
  // Half an update of air, so that the bound is not the frame.
  Axis y = CountAxis("updates", high, 6);
  y.high = std::max(high, 1.0) + 0.5;
  Panel panel(out, "staleness", "Largest staleness of each step", frame, CountAxis("step", ranges.step, 6), std::move(y));
  for (const auto& [x, value] : line) panel.Dot(x, value, Colour(0));
  panel.Line("staleness", line, Colour(0), "", 1.5);
  if (run.staleness_bound) {
    panel.Line("bound", {{0, *run.staleness_bound}, {std::max(ranges.step, 1.0), *run.staleness_bound}}, Colour(1),
               " stroke-dasharray=\"6 4\"", 1.5);
    panel.Note(0, *run.staleness_bound, fmt::format("bound {:g}", *run.staleness_bound));
  }
}

void DrawSpeed(std::string* out, const Curve& run, const Ranges& ranges, Box frame) {
  std::vector<std::pair<double, double>> sample, train;
  double low = 1e300, high = 0;
  auto take = [&](std::vector<std::pair<double, double>>& line, int64_t step, std::optional<double> value) {
    if (!value || *value <= 0) return;
    line.emplace_back(static_cast<double>(step), *value);
    low = std::min(low, *value);
    high = std::max(high, *value);
  };
  for (const CurvePoint& p : run.points) {
    take(sample, p.step, p.sample_tokens_per_s);
    take(train, p.step, p.train_tokens_per_s);
  }
  Panel panel(out, "speed", "Tokens per second", frame, CountAxis("step", ranges.step, 6),
              high > 0 ? LogAxis("tokens/s, logarithmic", low, high) : LogAxis("tokens/s, logarithmic", 1, 10));
  panel.Line("train", train, Colour(1), "", 1.5);
  panel.Line("sample", sample, Colour(0), "", 1.5);
  for (const auto& [line, text, colour] :
       {std::tuple{&train, "training", Colour(1)}, {&sample, "sampled, whole step", Colour(0)}}) {
    if (!line->empty()) panel.Label(line->back().first, line->back().second, text, colour);
  }
}

// Names from left to right, in as many rows as they need; then what the marks mean. Returns where it ends.
double DrawLegend(std::string* out, const std::vector<Curve>& curves, const PlotOptions& options, double y) {
  double x = kLeft;
  for (size_t c = 0; c < curves.size(); ++c) {
    const std::string name = Name(curves[c].name);
    const double width = 34 + kLetter * static_cast<double>(std::min<size_t>(curves[c].name.size(), 90)) + 22;
    if (x > kLeft && x + width > kWidth - kRight) {
      x = kLeft;
      y += 20;
    }
    *out += fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"2.6\"{}/>",
                        x, y - 4, x + 26, y - 4, Colour(c), Dashes(c));
    *out += fmt::format("<text class=\"name\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", x + 33, y, name);
    x += width;
  }
  y += 20;
  const bool evaluated = std::any_of(curves.begin(), curves.end(), [](const Curve& c) { return !c.evaluations.empty(); });
  *out += fmt::format("<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\">dots: one step · line: mean of {} steps{}</text>\n",
                      kLeft, y, options.window,
                      evaluated ? " · diamonds: evaluations on held-out tasks" : "");
  return y;
}

}  // namespace

std::vector<double> RoundTicks(double low, double high, int target) {
  const double step = TickStep(high - low, target);
  std::vector<double> ticks;
  for (double k = std::ceil(low / step - 1e-9); k * step <= high + step * 1e-9; ++k) ticks.push_back(k * step);
  return ticks;
}

std::string PlotSvg(const std::vector<Curve>& curves, const PlotOptions& options) {
  const Ranges ranges(curves);
  const bool single = curves.size() == 1 && curves[0].run;
  std::string body;
  double y = DrawLegend(&body, curves, options, 26) + 40;
  const double width = kWidth - kLeft - kRight, height = 270, below = 74;
  for (const bool by_step : {true, false}) {
    Panel panel(&body, by_step ? "reward-step" : "reward-seconds", by_step ? "Mean reward by step" : "Mean reward by time",
                {kLeft, y, width, height},
                by_step ? CountAxis("step", ranges.step, 12)
                        : LinearAxis("wall-clock seconds", 0, ranges.wall_s > 0 ? ranges.wall_s : 1, 12),
                ValueAxis("mean reward", ranges.low, ranges.high, 5));
    DrawRewards(panel, curves, options, ranges.any, by_step);
    y += height + below;
  }
  if (single) {
    const double half = (width - 78) / 2;
    DrawStaleness(&body, curves[0], ranges, {kLeft, y, half, 160});
    DrawSpeed(&body, curves[0], ranges, {kLeft + half + 78, y, half, 160});
    y += 160 + below;
  }
  const double all = y - 26;
  return fmt::format(
             "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\">\n"
             "<style>text{{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif;font-size:12px;fill:#333333}} "
             ".title{{font-size:14px;font-weight:bold;"
             "fill:#111111}} .name{{font-size:13px;fill:#111111}} .tick{{font-size:11px;fill:#555555}} .axis{{fill:#555555}} "
             ".grid{{stroke:#e6e6e6;stroke-width:1}} .frame{{fill:none;stroke:#888888;stroke-width:1}} "
             ".value{{font-size:11px;font-weight:bold}}</style>\n"
             "<rect width=\"{0:.0f}\" height=\"{1:.0f}\" fill=\"#ffffff\"/>\n",
             kWidth, all) +
         body + "</svg>\n";
}

}  // namespace temper::job
