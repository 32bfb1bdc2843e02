#include "engine/tree_batch.h"

#include <bit>

#include <fmt/format.h>

#include "common/check.h"

namespace temper::engine {

int32_t TreeBuilder::AddNode(int32_t parent, int32_t token, float inv_temperature, std::string_view kept) {
  TEMPER_CHECK(parent >= -1 && parent < static_cast<int32_t>(nodes_.size())) << "parent handle " << parent;
  const auto bits = std::bit_cast<uint32_t>(inv_temperature);
  int32_t set = -1;
  if (!kept.empty()) {
    const auto known = kept_.find(kept);
    set = known != kept_.end() ? known->second : kept_.emplace(kept, static_cast<int32_t>(kept_.size())).first->second;
  }
  if (merge_) {
    for (int32_t n = parent < 0 ? first_root_ : nodes_[parent].first_child; n >= 0; n = nodes_[n].next_sibling) {
      const Node& x = nodes_[n];
      if (x.token == token && std::bit_cast<uint32_t>(x.inv_temperature) == bits && x.kept == set) return n;
    }
  }
  const auto handle = static_cast<int32_t>(nodes_.size());
  nodes_.push_back({token, inv_temperature, set, parent});
  int32_t& first = parent < 0 ? first_root_ : nodes_[parent].first_child;
  int32_t& last = parent < 0 ? last_root_ : nodes_[parent].last_child;
  if (first < 0) {
    first = handle;
  } else {
    nodes_[last].next_sibling = handle;
  }
  last = handle;
  return handle;
}

std::vector<int32_t> TreeBuilder::AddRow(std::span<const int32_t> ids, std::span<const float> inv_temperature,
                                         std::span<const std::string> kept) {
  TEMPER_CHECK(inv_temperature.size() == 1 || inv_temperature.size() == ids.size());
  TEMPER_CHECK(kept.empty() || kept.size() == ids.size());
  std::vector<int32_t> handles;
  handles.reserve(ids.size());
  int32_t parent = -1;
  for (size_t i = 0; i < ids.size(); ++i) {
    parent = AddNode(parent, ids[i], inv_temperature[inv_temperature.size() == 1 ? 0 : i], kept.empty() ? std::string_view() : kept[i]);
    handles.push_back(parent);
  }
  logical_tokens_ += static_cast<int64_t>(ids.size());
  return handles;
}

TreeBatch TreeBuilder::Build(std::vector<int32_t>* index) const {
  const size_t n = nodes_.size();
  TreeBatch out;
  out.token.reserve(n);
  out.parent.reserve(n);
  out.pos.reserve(n);
  out.inv_temperature.reserve(n);
  out.tout.assign(n, 0);
  out.logical_tokens = logical_tokens_;
  if (!kept_.empty()) {
    out.kept.reserve(n);
    out.kept_sets.resize(kept_.size());
    for (const auto& [bytes, set] : kept_) out.kept_sets[set] = bytes;
  }
  std::vector<int32_t> at(n, -1);
  int32_t node = first_root_;
  while (node >= 0) {
    const Node& x = nodes_[node];
    at[node] = static_cast<int32_t>(out.token.size());
    out.token.push_back(x.token);
    out.parent.push_back(x.parent < 0 ? -1 : at[x.parent]);
    out.pos.push_back(x.parent < 0 ? 0 : out.pos[at[x.parent]] + 1);
    out.inv_temperature.push_back(x.inv_temperature);
    if (!kept_.empty()) out.kept.push_back(x.kept);
    if (x.first_child >= 0) {
      node = x.first_child;
      continue;
    }
    // Up to the nearest node with a next sibling, closing subtrees on the way.
    while (node >= 0) {
      out.tout[at[node]] = static_cast<int32_t>(out.token.size());
      if (nodes_[node].next_sibling >= 0) {
        node = nodes_[node].next_sibling;
        break;
      }
      node = nodes_[node].parent;
    }
  }
  if (index) *index = std::move(at);
  return out;
}

Result<std::vector<int32_t>> AddTree(TreeBuilder& builder, std::span<const int32_t> parent,
                                     std::span<const int32_t> token, std::span<const float> inv_temperature,
                                     std::span<const std::string> kept) {
  const auto n = static_cast<int32_t>(parent.size());
  TEMPER_CHECK(token.size() == parent.size() && (inv_temperature.size() == 1 || inv_temperature.size() == parent.size()));
  TEMPER_CHECK(kept.empty() || kept.size() == parent.size());
  // Children after parents, in the order given: repeatedly walk up from each node to the first placed ancestor.
  std::vector<int32_t> handle(n, -1), depth(n, 0), children(n, 0), path;
  std::vector<uint8_t> on_path(n, 0);
  for (int32_t i = 0; i < n; ++i) {
    path.clear();
    int32_t v = i;
    while (v >= 0 && handle[v] < 0) {
      if (on_path[v]) return InvalidArgument(fmt::format("parent[{}]: node {} is its own ancestor", v, v));
      on_path[v] = 1;
      path.push_back(v);
      if (parent[v] < -1 || parent[v] >= n) {
        return InvalidArgument(fmt::format("parent[{}] = {} is outside -1 … {}", v, parent[v], n - 1));
      }
      v = parent[v];
    }
    for (auto it = path.rbegin(); it != path.rend(); ++it) {
      const int32_t p = parent[*it];
      handle[*it] =
          builder.AddNode(p < 0 ? -1 : handle[p], token[*it], inv_temperature[inv_temperature.size() == 1 ? 0 : *it],
                          kept.empty() ? std::string_view() : kept[*it]);
      depth[*it] = p < 0 ? 1 : depth[p] + 1;
      on_path[*it] = 0;
    }
  }
  for (int32_t i = 0; i < n; ++i) {
    if (parent[i] >= 0) ++children[parent[i]];
  }
  int64_t logical = 0;
  for (int32_t i = 0; i < n; ++i) {
    if (!children[i]) logical += depth[i];
  }
  builder.AddLogicalTokens(logical);
  return handle;
}

}  // namespace temper::engine
