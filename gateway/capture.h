// The forest of token runs of one session, and the tree of messages by which a later request finds its place in it.
//
// Problem: a client sends its whole history as text again and again, slightly reshaped; the tokens the policy drew must stand
// unchanged in every later prompt, each once. Idea: two trees. *Runs* hold ids (context or sampled), append-only. *Turns*
// hold what a message was, canonically; a sampled turn knows the run it ends. A replayed message is matched against the children
// of the turn before it, by tool-call ids, canonical content, then content without outer white space.
//
// Pure and single-threaded; the session owns it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gateway/types.h"

namespace temper::gateway {

// A node of the forest: ids of one provenance and one version.
struct Run {
  int id = 0;
  int parent = -1;  // -1 = root
  bool sampled = false;
  std::vector<int32_t> ids;     // never empty
  std::vector<float> logprobs;  // sampled: one per id
  std::vector<std::string> kept;  // sampled: empty, or one per id, the tokens it was drawn from (engine/kept_set.h)
  engine::Version version;      // sampled
  bool mixed = false;
  float temperature = 1;
  float inv_temperature = 1;
  int call = 0;    // the call that added it
  int choice = 0;  // sampled
  double time_s = 0;
  bool trainable = false;
};

// A message somebody sent or the policy said, at its place in the conversation.
struct Turn {
  int id = 0;
  int parent = -1;     // -1 = first message under `root`
  uint64_t root = 0;   // hash of tools and template variables: another set of tools is another conversation
  uint64_t hash = 0;   // canonical content
  uint64_t loose = 0;  // the same without outer white space of the text
  int run = -1;        // sampled: its last run; -1 = context
  bool closed = false;  // sampled and ended by an end token: the next prompt may go on from its tokens
  int call = 0;
  int choice = 0;
  std::string finish;   // sampled: as in Choice
  Message message;      // sampled only: what the client was told (role assistant)
};

class Capture {
 public:
  const std::vector<Run>& runs() const { return runs_; }
  const std::vector<Turn>& turns() const { return turns_; }

  // The ids from the root to the end of `run`; empty for -1.
  std::vector<int32_t> Path(int run) const;
  int PathLength(int run) const { return run < 0 ? 0 : path_length_[run]; }

  // The turn under (root, parent) that `message` is a replay of, or -1.
  int Match(uint64_t root, int parent, const Message& message) const;

  // The deepest run at or below `from` (-1: any root) whose path is a prefix of `ids`, where Path(from) is one already.
  int Attach(const std::vector<int32_t>& ids, int from) const;

  // Append; ids are given here and never change.
  int AddRun(Run run);
  int AddTurn(Turn turn);
  // For recovery: the ids in the records must be the next ones.
  bool Restore(Run run);
  bool Restore(Turn turn);

 private:
  std::vector<Run> runs_;
  std::vector<int> path_length_;
  std::map<int, std::vector<int>> run_children_;  // by parent run
  std::vector<Turn> turns_;
  std::map<std::pair<uint64_t, int>, std::vector<int>> turn_children_;  // by (root, parent turn)
};

// Identity of a message: role, text, for an assistant the calls as (name, canonical arguments); not ids, not reasoning.
// `loose`: the text without outer white space.
uint64_t MessageHash(const Message& message, bool loose);
// Of tools and template variables.
uint64_t RootHash(const ChatRequest& request);
// The value of a JSON text in canonical form (sorted keys, no spaces); a text that is no JSON stays as it is.
std::string CanonicalJson(const std::string& text);

}  // namespace temper::gateway
