// A batch of token trees in pre-order: position = depth, and one `tout` per node (the end of its subtree) is the whole
// attention mask: key j is visible to query i iff j <= i < tout[j]. A flat row is a tree without forks.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace temper::engine {

struct TreeBatch {
  // Per node, in pre-order.
  std::vector<int32_t> token;
  std::vector<int32_t> parent;  // pre-order index, -1 at a root
  std::vector<int32_t> tout;    // exclusive end of the subtree
  std::vector<int32_t> pos;     // depth, 0 at a root
  // fp32 1/T under which the node's token was drawn: its logprob is read from its parent's logits times this.
  std::vector<float> inv_temperature;
  // Which tokens its draw was from, as an index into `kept_sets` (engine/kept_set.h); -1: all. Empty: -1 everywhere.
  std::vector<int32_t> kept;
  std::vector<std::string> kept_sets;
  // Further tokens whose log-probability is asked for where that of `node` is: from the same logits, at the same 1/T, among the same
  // kept tokens. Each counts as a leaf beside `node` that is not computed itself. By their index behind the nodes: logprobs and
  // coefficients of a batch have items() entries.
  struct Target {
    int32_t node;  // no root
    int32_t token;
  };
  std::vector<Target> targets;
  int64_t logical_tokens = 0;  // what the same data counts as separate rows: sum of the lengths of what was added

  int size() const { return static_cast<int>(token.size()); }
  int items() const { return size() + static_cast<int>(targets.size()); }
  // The node whose draw an item belongs to, and its token.
  int32_t node_of(int item) const { return item < size() ? item : targets[item - size()].node; }
  int32_t token_of(int item) const { return item < size() ? token[item] : targets[item - size()].token; }
  int32_t kept_index(int node) const { return kept.empty() ? -1 : kept[node]; }
  // The bytes of an index that kept_index gave; none for -1.
  std::string_view kept_set(int32_t index) const { return index < 0 ? std::string_view() : kept_sets[index]; }
};

// Collects rows and trees, merges equal prefixes, and lays the forest out in pre-order; children keep the order in which they
// were first added. Two nodes are one when parent, token and the transform of the draw (inv_temperature, kept set) are equal.
class TreeBuilder {
 public:
  // merge = false: every row and tree stays on its own (the same numbers, slower).
  explicit TreeBuilder(bool merge = true) : merge_(merge) {}

  // A row: ids and 1/T per token (one value, or one per token), and the kept set per token (none, or one per token). Returns the node
  // handle of every token.
  std::vector<int32_t> AddRow(std::span<const int32_t> ids, std::span<const float> inv_temperature, std::span<const std::string> kept = {});
  // One node below `parent` (a handle, or -1 for a root). Returns its handle: that of an equal sibling when merging.
  // The caller of AddNode adds to logical tokens itself. `kept`: bytes of engine/kept_set.h, which the forward pass checks.
  int32_t AddNode(int32_t parent, int32_t token, float inv_temperature, std::string_view kept = {});
  void AddLogicalTokens(int64_t n) { logical_tokens_ += n; }

  // Lays out everything added. index[handle] = position in the batch.
  TreeBatch Build(std::vector<int32_t>* index) const;

 private:
  struct Node {
    int32_t token;
    float inv_temperature;
    int32_t kept;  // index, -1 = none
    int32_t parent;
    int32_t first_child = -1, last_child = -1, next_sibling = -1;
  };
  bool merge_;
  int64_t logical_tokens_ = 0;
  std::vector<Node> nodes_;
  std::map<std::string, int32_t, std::less<>> kept_;  // sets to their indices
  int32_t first_root_ = -1, last_root_ = -1;
};

// A tree given as parents in any order in which cycles are absent (-1: root). Returns handles of `builder` per given node.
// InvalidArgument names the first node whose parent is out of range or on a cycle. Adds to logical tokens the sum of
// root-to-leaf path lengths.
Result<std::vector<int32_t>> AddTree(TreeBuilder& builder, std::span<const int32_t> parent,
                                     std::span<const int32_t> token, std::span<const float> inv_temperature,
                                     std::span<const std::string> kept = {});

}  // namespace temper::engine
