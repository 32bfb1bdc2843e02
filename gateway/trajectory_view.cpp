#include "gateway/trajectory_view.h"

#include <algorithm>
#include <limits>
#include <map>

#include <fmt/format.h>

#include "common/json.h"
#include "common/strings.h"
#include "engine/kept_json.h"
#include "engine/kept_set.h"
#include "temper/v1/types.pb.h"

namespace temper::gateway {
namespace {

constexpr const char* kDim = "\x1b[2m";
constexpr const char* kGreen = "\x1b[32m";
constexpr const char* kYellow = "\x1b[33m";
constexpr const char* kBold = "\x1b[1m";
constexpr const char* kOff = "\x1b[0m";

Result<v1::Trajectory> Parse(const std::string& serialised) {
  v1::Trajectory t;
  if (!t.ParseFromString(serialised)) return DataLoss("not a stored trajectory");
  for (int i = 0; i < t.runs_size(); ++i) {
    const auto& run = t.runs(i);
    if (run.id() != i || run.parent() >= i || run.parent() < -1) {
      return DataLoss(fmt::format("run {} of {} has id {} and parent {}", i, t.session(), run.id(), run.parent()));
    }
    if (run.logprobs_size() != (run.provenance() == v1::SAMPLED ? run.ids_size() : 0)) {
      return DataLoss(fmt::format("run {} of {} has {} logprobs for {} tokens", i, t.session(), run.logprobs_size(), run.ids_size()));
    }
    bool kept = run.kept_size() == 0 || run.kept_size() == run.logprobs_size();
    for (int k = 0; kept && k < run.kept_size(); ++k) {
      kept = engine::CheckKept(run.kept(k), std::numeric_limits<int32_t>::max(), static_cast<int32_t>(run.ids(k))).ok();
    }
    if (!kept) return DataLoss(fmt::format("run {} of {} has kept sets that are none of its tokens", i, t.session()));
  }
  return t;
}

class TreePrinter {
 public:
  TreePrinter(const v1::Trajectory& t, const TrajectoryViewOptions& options) : t_(t), options_(options) {
    for (const auto& run : t.runs()) children_[run.parent()].push_back(run.id());
  }

  std::string Print() {
    int sampled = 0, context = 0;
    for (const auto& run : t_.runs()) (run.provenance() == v1::SAMPLED ? sampled : context) += run.ids_size();
    out_ += Paint(kBold, t_.session());
    out_ += fmt::format("  {}", t_.outcome().empty() ? "open" : t_.outcome());
    if (!t_.reason().empty()) out_ += "(" + t_.reason() + ")";
    out_ += fmt::format("  reward {:.9g}", t_.reward());
    for (const auto& [name, value] : std::map<std::string, double>(t_.components().begin(), t_.components().end())) {
      out_ += fmt::format("  {}={:.9g}", name, value);
    }
    for (int turn = 0; turn < t_.turn_rewards_size(); ++turn) out_ += fmt::format("{}{:.9g}", turn == 0 ? "  turns " : " ", t_.turn_rewards(turn));
    out_ += fmt::format("\ntask {}{}  {} calls  {} tokens sampled  {} context  {:.2f} s\n", t_.task_id(),
                        t_.family().empty() ? "" : " [" + t_.family() + "]", t_.calls_size(), sampled, context, t_.wall_s());
    for (const auto& flag : t_.flags()) out_ += Paint(kYellow, "  " + flag) + "\n";
    for (int root : children_[-1]) Walk(root, "");
    out_ += fmt::format("ended {}", t_.outcome().empty() ? "open" : t_.outcome());
    if (!t_.reason().empty()) out_ += "(" + t_.reason() + ")";
    if (t_.outcome() == "scored" || t_.reward() != 0) out_ += fmt::format("  reward {:.9g}", t_.reward());
    if (!t_.evidence().empty() && t_.evidence() != "{}") out_ += "  evidence " + Shown(t_.evidence());
    out_ += "\n";
    return std::move(out_);
  }

 private:
  std::string Paint(const char* colour, const std::string& text) const { return options_.colour ? colour + text + kOff : text; }

  // A chain stays at one indentation; only branches move to the right.
  void Walk(int id, std::string indent) {
    for (;;) {
      One(t_.runs(id), indent);
      const auto& next = children_[id];
      if (next.empty()) return;
      if (next.size() > 1) break;
      id = next[0];
    }
    for (int child : children_[id]) Walk(child, indent + "    ");
  }

  // Who speaks. What stands behind the policy's own words was said by tools, or by whoever asked again.
  const char* Speaker(const v1::TokenRun& run) const {
    if (run.provenance() == v1::SAMPLED) return "sampled: the policy";
    for (int id = run.parent(); id >= 0; id = t_.runs(id).parent()) {
      if (t_.runs(id).provenance() == v1::SAMPLED) return "context: tool output or next message";
    }
    return "context: prompt";
  }

  // How the call of a sampled run ended; empty where the run is not its last.
  std::string Finish(const v1::TokenRun& run) const {
    for (int child : children_.count(run.id()) ? children_.at(run.id()) : std::vector<int>()) {
      const auto& next = t_.runs(child);
      if (next.provenance() == v1::SAMPLED && next.call() == run.call() && next.choice() == run.choice()) return "";
    }
    for (const auto& call : t_.calls()) {
      if (call.call() == run.call()) return call.finish();
    }
    return "";
  }

  void One(const v1::TokenRun& run, const std::string& indent) {
    const bool sampled = run.provenance() == v1::SAMPLED;
    std::string facts = fmt::format("#{} {}  call {}  {} tokens", run.id(), Speaker(run), run.call(), run.ids_size());
    if (sampled) {
      double sum = 0;
      for (float lp : run.logprobs()) sum += lp;
      facts += fmt::format("  choice {}  version {}  T {}  logprob {:.4f}, {:.4f} a token", run.choice(), run.version().step(),
                           FormatFloat(run.temperature()), sum, run.ids_size() ? sum / run.ids_size() : 0);
      if (const std::string finish = Finish(run); !finish.empty()) facts += "  finish " + finish;
      if (run.mixed()) facts += "  mixed";
      if (!run.trainable()) facts += "  not trained";
    }
    out_ += indent + Paint(kDim, facts) + "\n";
    const char* colour = sampled ? kGreen : "";
    const std::vector<int32_t> ids(run.ids().begin(), run.ids().end());
    if (sampled && options_.tokens) {
      for (size_t i = 0; i < ids.size(); ++i) {
        out_ += indent + fmt::format("    {:9.4f}  ", run.logprobs(static_cast<int>(i))) + Paint(colour, Text({ids[i]})) + "\n";
      }
      return;
    }
    // Four columns in, where no fence of Markdown can be closed by what somebody said.
    std::string text = Text(ids);
    size_t at = 0;
    while (at < text.size()) {
      const size_t end = std::min(text.find('\n', at), text.size());
      const std::string line = text.substr(at, end - at);
      if (!line.empty()) out_ += indent + "    " + (*colour ? Paint(colour, line) : line);
      out_ += "\n";
      at = end + 1;
    }
  }

  std::string Text(const std::vector<int32_t>& ids) const {
    if (!options_.decode) return fmt::format("{}", fmt::join(ids, " "));
    return Shown(options_.decode(ids), ids.size() > 1);
  }

  // Control characters other than line ends are shown, so that tool output cannot drive the terminal.
  static std::string Shown(const std::string& raw, bool keep_line_ends = false) {
    std::string text;
    for (unsigned char c : raw) {
      if (c == '\n' && keep_line_ends) {
        text += '\n';
      } else if (c < 0x20 || c == 0x7f) {
        text += fmt::format("\\x{:02x}", c);
      } else {
        text += static_cast<char>(c);
      }
    }
    return text;
  }

  const v1::Trajectory& t_;
  const TrajectoryViewOptions& options_;
  std::map<int, std::vector<int>> children_;
  std::string out_;
};

}  // namespace

Result<std::string> TrajectoryJson(const std::string& serialised) {
  ASSIGN_OR_RETURN(const v1::Trajectory t, Parse(serialised));
  JsonWriter w;
  w.BeginObject().Key("session").String(t.session()).Key("task").String(t.task_id()).Key("outcome").String(t.outcome());
  w.Key("reason").String(t.reason()).Key("reward").Double(t.reward()).Key("components").BeginObject();
  for (const auto& [name, value] : std::map<std::string, double>(t.components().begin(), t.components().end())) {
    w.Key(name).Double(value);
  }
  w.EndObject();
  if (t.turn_rewards_size() > 0) {
    w.Key("turn_rewards").BeginArray();
    for (const double reward : t.turn_rewards()) w.Double(reward);
    w.EndArray();
  }
  w.Key("evidence");
  const auto evidence = ParseJson(t.evidence());
  evidence.ok() ? w.Value(*evidence) : w.Null();
  w.Key("flags").BeginArray();
  for (const auto& flag : t.flags()) w.String(flag);
  w.EndArray().Key("nodes").BeginArray();
  for (const auto& run : t.runs()) {
    const bool sampled = run.provenance() == v1::SAMPLED;
    w.BeginObject().Key("id").Int(run.id()).Key("parent").Int(run.parent());
    w.Key("provenance").String(sampled ? "sampled" : "context").Key("ids").Ints(run.ids()).Key("logprobs").Floats(run.logprobs());
    if (run.kept_size() > 0) {
      w.Key("kept");
      engine::WriteKept(w, std::vector<std::string>(run.kept().begin(), run.kept().end()));
    }
    w.Key("version");
    sampled ? w.Int(run.version().step()) : w.Null();
    w.Key("mixed").Bool(run.mixed()).Key("temperature");
    sampled ? w.Float(run.temperature()) : w.Null();
    w.Key("call").Int(run.call()).Key("choice").Int(run.choice()).Key("trainable").Bool(run.trainable()).EndObject();
  }
  w.EndArray().EndObject();
  return w.Take();
}

Result<std::string> TrajectoryText(const std::string& serialised, const TrajectoryViewOptions& options) {
  ASSIGN_OR_RETURN(const v1::Trajectory t, Parse(serialised));
  return TreePrinter(t, options).Print();
}

}  // namespace temper::gateway
