#include "trainer/bench/tree_sets.h"

#include <algorithm>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "common/check.h"
#include "common/file.h"
#include "common/json.h"
#include "common/rng.h"
#include "common/strings.h"
#include "engine/kept_json.h"

namespace temper::trainer::bench {
namespace {

using Ids = std::vector<int32_t>;

Ids Join(std::initializer_list<Ids> parts) {
  Ids out;
  for (const Ids& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}

class Maker {
 public:
  Maker(const std::string& name, int vocab) : rng_(Rng(7).Fork(name)), vocab_(vocab) {}

  Ids Tokens(int n) {
    Ids ids;
    for (int i = 0; i < n; ++i) ids.push_back(static_cast<int32_t>(rng_.Below(static_cast<uint64_t>(vocab_))));
    return ids;
  }
  Rollout& Begin(Group& group) {
    Rollout& r = group.rollouts.emplace_back();
    r.rollout = static_cast<int32_t>(group.rollouts.size()) - 1;
    return r;
  }
  static int32_t Context(Rollout& r, int32_t parent, Ids ids, int call = 0) {
    TokenRun& run = r.runs.emplace_back();
    run.parent = parent;
    run.ids = std::move(ids);
    run.call = call;
    return static_cast<int32_t>(r.runs.size()) - 1;
  }
  static int32_t Sampled(Rollout& r, int32_t parent, Ids ids, int call = 0) {
    const int32_t index = Context(r, parent, std::move(ids), call);
    r.runs.back().sampled = true;
    r.runs.back().logprobs.assign(r.runs.back().ids.size(), -1.0f);
    return index;
  }

 private:
  Rng rng_;
  int vocab_;
};

// Answers to one prompt.
Group Answers(Maker& m, int prompt, int answer, int size) {
  Group group;
  const Ids start = m.Tokens(prompt);
  for (int i = 0; i < size; ++i) {
    Rollout& r = m.Begin(group);
    m.Sampled(r, m.Context(r, -1, start), m.Tokens(answer));
  }
  return group;
}

// Each turn thinks before it answers; the next prompt holds the answer alone.
Group ThinkDropped(Maker& m, int size, int turns) {
  Group group;
  const Ids start = m.Tokens(64);
  for (int i = 0; i < size; ++i) {
    Rollout& r = m.Begin(group);
    int32_t trunk = m.Context(r, -1, start);
    for (int t = 0; t < turns; ++t) {
      const Ids think = m.Tokens(48), answer = m.Tokens(16);
      m.Sampled(r, trunk, Join({think, answer}), t);
      if (t + 1 < turns) trunk = m.Context(r, trunk, Join({answer, m.Tokens(16)}), t + 1);
    }
  }
  return group;
}

// Each call brings its whole history as a prompt of its own.
Group RowPerCall(Maker& m, int size, int turns) {
  Group group;
  const Ids start = m.Tokens(64);
  for (int i = 0; i < size; ++i) {
    Rollout& r = m.Begin(group);
    Ids history = start;
    for (int t = 0; t < turns; ++t) {
      history = Join({history, m.Tokens(16)});
      const Ids answer = m.Tokens(16);
      m.Sampled(r, m.Context(r, -1, history, t), answer, t);
      history = Join({history, answer});
    }
  }
  return group;
}

// A history that grew too long goes on behind its system prompt, with a summary in its place.
Group Compaction(Maker& m, int size) {
  Group group;
  const Ids system = m.Tokens(96);
  for (int i = 0; i < size; ++i) {
    Rollout& r = m.Begin(group);
    const int32_t root = m.Context(r, -1, system);
    int call = 0;
    for (const int parts : {5, 4}) {
      int32_t at = m.Context(r, root, m.Tokens(parts == 4 ? 64 : 16), call);
      for (int k = 0; k < parts; ++k, ++call) at = m.Context(r, m.Sampled(r, at, m.Tokens(32), call), m.Tokens(16), call + 1);
      m.Sampled(r, at, m.Tokens(32), call++);
    }
  }
  return group;
}

// A main agent, and helpers that share a system prompt of their own.
Group SubAgents(Maker& m, int size, int helpers) {
  Group group;
  const Ids main = m.Tokens(128), helper = m.Tokens(128), task = m.Tokens(32);
  for (int i = 0; i < size; ++i) {
    Rollout& r = m.Begin(group);
    int32_t at = m.Context(r, -1, Join({main, task}));
    for (int k = 0; k < helpers; ++k) {
      at = m.Sampled(r, at, m.Tokens(24), k);
      m.Sampled(r, m.Context(r, -1, Join({helper, m.Tokens(16)}), helpers + k), m.Tokens(64), helpers + k);
      at = m.Context(r, at, m.Tokens(24), k + 1);
    }
    m.Sampled(r, at, m.Tokens(24), 2 * helpers);
  }
  return group;
}

// A token of a row of `pool export`.
struct RowToken {
  int32_t id = 0;
  bool sampled = false;
  bool drawn = false;  // sampled, and no row before holds it
  float inv_temperature = 1;
  std::string kept;
};

Result<std::vector<RowToken>> ReadRow(const JsonRef& ref, int vocab) {
  ASSIGN_OR_RETURN(const double inverse, ref.DoubleOr("inv_temperature", 1));
  ASSIGN_OR_RETURN(const JsonRef ids_field, ref.Field("ids"));
  ASSIGN_OR_RETURN(const std::vector<int64_t> ids, ids_field.Ints());
  ASSIGN_OR_RETURN(const JsonRef mask_field, ref.Field("mask"));
  ASSIGN_OR_RETURN(const std::vector<int64_t> mask, mask_field.Ints());
  ASSIGN_OR_RETURN(const JsonRef versions_field, ref.Field("versions"));
  ASSIGN_OR_RETURN(const auto versions, versions_field.Items());
  for (const auto& [field, size] : {std::pair(&mask_field, mask.size()), std::pair(&versions_field, versions.size())}) {
    if (size != ids.size()) return field->Error(fmt::format("{} values for {} ids", size, ids.size()));
  }
  Ids tokens;
  for (const int64_t id : ids) {
    if (id < 0 || id >= vocab) return ids_field.Error(fmt::format("{} is outside the vocabulary of {}", id, vocab));
    tokens.push_back(static_cast<int32_t>(id));
  }
  std::vector<std::string> kept;
  if (ref.Has("kept")) {
    ASSIGN_OR_RETURN(const JsonRef field, ref.Field("kept"));
    ASSIGN_OR_RETURN(kept, engine::ReadKept(field, tokens, vocab));
  }
  std::vector<RowToken> row;
  for (size_t i = 0; i < tokens.size(); ++i) {
    RowToken& token = row.emplace_back();
    token.id = tokens[i];
    token.sampled = !versions[i].value().is_null();
    token.drawn = token.sampled && mask[i] != 0;
    if (token.sampled) token.inv_temperature = static_cast<float>(inverse);
    if (token.sampled && !kept.empty()) token.kept = std::move(kept[i]);
    if (token.sampled && i == 0) return versions_field.Error("the first token is sampled and has no logprob");
  }
  return row;
}

// Rows of one rollout, put together to the tree they were read from.
class RolloutOfRows {
 public:
  void Add(const std::vector<RowToken>& row) {
    int32_t at = -1;
    for (const RowToken& token : row) {
      const std::vector<int32_t>& below = at < 0 ? roots_ : nodes_[at].children;
      const auto same = std::find_if(below.begin(), below.end(), [&](int32_t n) {
        const RowToken& other = nodes_[n].token;
        return !token.drawn && other.id == token.id && other.sampled == token.sampled && other.kept == token.kept;
      });
      at = same == below.end() ? Append(at, token) : *same;
    }
    ++rows_;
  }

  Rollout Runs() const {
    Rollout rollout;
    std::vector<int32_t> run_of;
    for (const Node& node : nodes_) {  // a parent before its children
      const bool continues = node.parent >= 0 && nodes_[node.parent].children.size() == 1 && nodes_[node.parent].token.sampled == node.token.sampled &&
                             nodes_[node.parent].token.inv_temperature == node.token.inv_temperature;
      if (!continues) {
        TokenRun& run = rollout.runs.emplace_back();
        run.parent = node.parent < 0 ? -1 : run_of[node.parent];
        run.sampled = node.token.sampled;
        run.inv_temperature = node.token.inv_temperature;
        run.call = node.row;
      }
      run_of.push_back(continues ? run_of[node.parent] : static_cast<int32_t>(rollout.runs.size()) - 1);
      TokenRun& run = rollout.runs[run_of.back()];
      run.ids.push_back(node.token.id);
      if (!run.sampled) continue;
      run.logprobs.push_back(-1.0f);
      run.kept.push_back(node.token.kept);
    }
    return rollout;
  }

 private:
  struct Node {
    RowToken token;
    int32_t parent = -1, row = 0;  // row: the first that holds it
    std::vector<int32_t> children;
  };
  int32_t Append(int32_t parent, const RowToken& token) {
    const auto index = static_cast<int32_t>(nodes_.size());
    nodes_.push_back({.token = token, .parent = parent, .row = rows_, .children = {}});
    (parent < 0 ? roots_ : nodes_[parent].children).push_back(index);
    return index;
  }
  std::vector<Node> nodes_;
  std::vector<int32_t> roots_;
  int32_t rows_ = 0;
};

struct GroupOfRows {
  bool silent = false;
  std::map<int64_t, RolloutOfRows> rollouts;
};

}  // namespace

const std::vector<std::string>& TreeSetNames() {
  static const std::vector<std::string> names = {"grpo_short", "grpo_long",  "think_dropped", "row_per_call",
                                                 "compaction", "sub_agents", "nothing"};
  return names;
}

TreeSet MakeTreeSet(const std::string& name, int vocab) {
  Maker m(name, vocab);
  TreeSet set{.name = name, .about = "", .groups = {}};
  if (name == "grpo_short") {
    set.about = "GRPO, 2 groups of 8, prompts of 64, answers of 64";
    for (int g = 0; g < 2; ++g) set.groups.push_back(Answers(m, 64, 64, 8));
  } else if (name == "grpo_long") {
    set.about = "GRPO, a group of 8, prompt of 256, answers of 32";
    set.groups = {Answers(m, 256, 32, 8)};
  } else if (name == "think_dropped") {
    set.about = "think-dropped multi-turn, a group of 2, 6 turns";
    set.groups = {ThinkDropped(m, 2, 6)};
  } else if (name == "row_per_call") {
    set.about = "one row per call, a group of 2, 6 turns";
    set.groups = {RowPerCall(m, 2, 6)};
  } else if (name == "compaction") {
    set.about = "compaction forks, a group of 3";
    set.groups = {Compaction(m, 3)};
  } else if (name == "sub_agents") {
    set.about = "sub-agents, a group of 2, 4 helpers";
    set.groups = {SubAgents(m, 2, 4)};
  } else {
    TEMPER_CHECK(name == "nothing") << name;
    set.about = "nothing to share, 8 rows of 160";
    set.shares = false;
    for (int g = 0; g < 8; ++g) set.groups.push_back(Answers(m, 96, 64, 1));
    // No first token twice.
    for (int g = 0; g < 8; ++g) set.groups[g].rollouts[0].runs[0].ids[0] = g;
  }
  for (size_t g = 0; g < set.groups.size(); ++g) set.groups[g].group = static_cast<int64_t>(g);
  return set;
}

Result<std::vector<TreeSet>> TreeSetsOfRows(const std::string& path, int vocab) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, int64_t{1} << 31));
  std::map<int64_t, std::map<int64_t, GroupOfRows>> steps;
  int64_t number = 0;
  for (const std::string& line : Split(text, '\n')) {
    ++number;
    if (Trim(line).empty()) continue;
    const auto parse = [&]() -> Status {
      ASSIGN_OR_RETURN(const json::value value, ParseJson(line));
      const JsonRef ref(value);
      ASSIGN_OR_RETURN(const int64_t step, ref.IntOr("step", 0));
      ASSIGN_OR_RETURN(const int64_t group, ref.IntOr("group", 0));
      ASSIGN_OR_RETURN(const int64_t rollout, ref.IntOr("rollout", 0));
      ASSIGN_OR_RETURN(const bool silent, ref.BoolOr("silent", false));
      ASSIGN_OR_RETURN(const std::vector<RowToken> row, ReadRow(ref, vocab));
      GroupOfRows& of = steps[step][group];
      of.silent = silent;
      of.rollouts[rollout].Add(row);
      return Status::Ok();
    };
    const Status status = parse();
    if (!status.ok()) return status.WithContext(fmt::format("{}: line {}", path, number));
  }
  std::vector<TreeSet> out;
  for (auto& [step, groups] : steps) {
    TreeSet& set = out.emplace_back();
    set.name = "rows";
    set.about = fmt::format("step {}", step);
    for (const auto& [id, of] : groups) {
      Group& group = set.groups.emplace_back();
      group.group = id;
      for (const auto& [index, rows] : of.rollouts) {
        group.rollouts.push_back(rows.Runs());
        group.rollouts.back().rollout = static_cast<int32_t>(index);
      }
      set.silent.push_back(of.silent);
    }
  }
  if (out.empty()) return InvalidArgument(path + ": no rows");
  return out;
}

}  // namespace temper::trainer::bench
