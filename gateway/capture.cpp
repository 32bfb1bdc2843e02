#include "gateway/capture.h"

#include <xxhash.h>

#include <algorithm>

#include "common/check.h"
#include "common/strings.h"
#include "text/json.h"

namespace temper::gateway {

std::string CanonicalJson(const std::string& text) {
  auto value = text::ParseJson(text);
  if (!value.ok()) return text;
  auto canonical = text::DumpJson(*value, {.item_separator = ",", .key_separator = ":", .sort_keys = true});
  return canonical.ok() ? *canonical : text;
}

uint64_t MessageHash(const Message& message, bool loose) {
  std::string bytes(1, static_cast<char>('0' + static_cast<int>(message.role)));
  bytes += loose ? Trim(message.content) : std::string_view(message.content);
  for (const ToolCall& call : message.tool_calls) {
    bytes += '\0';
    bytes += call.name;
    bytes += '\0';
    bytes += CanonicalJson(call.arguments);
  }
  return XXH3_64bits(bytes.data(), bytes.size());
}

uint64_t RootHash(const ChatRequest& request) {
  std::string bytes;
  for (const text::Value* value : {&request.tools, &request.variables}) {
    if (!value->is_undefined()) {
      auto json = text::DumpJson(*value);  // in the order of the keys: the template prints them in this order
      if (json.ok()) bytes += *json;
    }
    bytes += '\0';
  }
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::vector<int32_t> Capture::Path(int run) const {
  std::vector<int32_t> ids(PathLength(run));
  size_t end = ids.size();
  for (; run >= 0; run = runs_[run].parent) {
    const auto& own = runs_[run].ids;
    std::copy(own.begin(), own.end(), ids.begin() + static_cast<ptrdiff_t>(end - own.size()));
    end -= own.size();
  }
  TEMPER_CHECK(end == 0) << "path length " << end;
  return ids;
}

int Capture::Attach(const std::vector<int32_t>& ids, int from) const {
  // Depth first; of equally deep runs the newest wins. A session has few branches at one place.
  int best = from;
  std::vector<int> todo = {from};
  while (!todo.empty()) {
    const int at = todo.back();
    todo.pop_back();
    const size_t length = PathLength(at);
    if (static_cast<int>(length) > PathLength(best)) best = at;
    const auto children = run_children_.find(at);
    if (children == run_children_.end()) continue;
    for (int child : children->second) {
      const auto& own = runs_[child].ids;
      if (own.size() <= ids.size() - length && std::equal(own.begin(), own.end(), ids.begin() + static_cast<ptrdiff_t>(length))) {
        todo.push_back(child);
      }
    }
  }
  return best;
}

int Capture::Match(uint64_t root, int parent, const Message& message) const {
  const auto children = turn_children_.find({root, parent});
  if (children == turn_children_.end()) return -1;
  const uint64_t hash = MessageHash(message, false), loose = MessageHash(message, true);
  int best = -1, best_rank = 0;
  for (int id : children->second) {  // oldest first: among equals the newest wins
    const Turn& turn = turns_[id];
    if (turn.loose != loose) continue;
    int rank = turn.hash == hash ? 2 : 1;
    if (turn.run >= 0) {
      rank += 2;  // what the policy said itself, rather than an earlier fabrication of the same words
      const auto& said = turn.message.tool_calls;
      const bool same_ids = !said.empty() && said.size() == message.tool_calls.size() &&
                            std::equal(said.begin(), said.end(), message.tool_calls.begin(),
                                       [](const ToolCall& a, const ToolCall& b) { return a.id == b.id; });
      if (same_ids) rank += 4;
    }
    if (rank >= best_rank) {
      best = id;
      best_rank = rank;
    }
  }
  return best;
}

int Capture::AddRun(Run run) {
  run.id = static_cast<int>(runs_.size());
  TEMPER_CHECK(!run.ids.empty());
  TEMPER_CHECK(run.parent >= -1 && run.parent < run.id) << "run " << run.id << " under " << run.parent;
  TEMPER_CHECK(run.logprobs.size() == (run.sampled ? run.ids.size() : 0)) << "run " << run.id;
  TEMPER_CHECK(run.kept.empty() || (run.sampled && run.kept.size() == run.ids.size())) << "run " << run.id;
  path_length_.push_back(PathLength(run.parent) + static_cast<int>(run.ids.size()));
  run_children_[run.parent].push_back(run.id);
  runs_.push_back(std::move(run));
  return runs_.back().id;
}

int Capture::AddTurn(Turn turn) {
  turn.id = static_cast<int>(turns_.size());
  TEMPER_CHECK(turn.parent >= -1 && turn.parent < turn.id) << "turn " << turn.id << " under " << turn.parent;
  TEMPER_CHECK(turn.run >= -1 && turn.run < static_cast<int>(runs_.size()));
  turn_children_[{turn.root, turn.parent}].push_back(turn.id);
  turns_.push_back(std::move(turn));
  return turns_.back().id;
}

bool Capture::Restore(Run run) {
  if (run.id != static_cast<int>(runs_.size()) || run.ids.empty() || run.parent < -1 || run.parent >= run.id ||
      run.logprobs.size() != (run.sampled ? run.ids.size() : 0) ||
      (!run.kept.empty() && (!run.sampled || run.kept.size() != run.ids.size()))) {
    return false;
  }
  AddRun(std::move(run));
  return true;
}

bool Capture::Restore(Turn turn) {
  if (turn.id != static_cast<int>(turns_.size()) || turn.parent < -1 || turn.parent >= turn.id || turn.run < -1 ||
      turn.run >= static_cast<int>(runs_.size())) {
    return false;
  }
  AddTurn(std::move(turn));
  return true;
}

}  // namespace temper::gateway
