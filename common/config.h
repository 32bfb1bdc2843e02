// Strict YAML for job files: a tree in which every value knows its place and its source, and typed blocks that read it.
//
// Reading is the schema: a block that has been asked for all keys it knows is finished with Finish(), which reports every
// key nobody asked for, with the nearest one that was. What was read, defaults included, is kept in order and can be
// printed with its source, or as a YAML file that resolves to the same job.
//
//   ASSIGN_OR_RETURN(Config config, Config::Load("job.yaml"));
//   RETURN_IF_ERROR(config.Set("trainer.steps=3"));
//   ConfigBlock trainer = config.Root().Block("trainer");
//   job.steps = trainer.Int("steps", 60, {.min = 1});
//   trainer.Finish();
//   RETURN_IF_ERROR(config.Finish());
//
// Refused: unknown or duplicate keys, other types, values out of range, tabs, tags, several documents, more than 32
// aliases, more than 20,000 values after expansion, files above 1 MiB. `true` and `false` are the only booleans; a text
// that reads as a number, a boolean or null needs quotes where text is meant. Not thread-safe.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/status.h"

namespace temper {

enum class ConfigSource { kDefault, kRecipe, kFile, kSet };
// "default", "recipe", "file", "--set".
const char* ConfigSourceName(ConfigSource source);

struct ConfigPlace {
  std::string file;
  int line = 0;    // from 1; 0 = no place
  int column = 0;  // from 1
  std::string ToString() const;  // "job.yaml:12:3"
};

struct ConfigNode {
  enum class Kind { kNull, kScalar, kList, kMap };
  struct Member;

  Kind kind = Kind::kNull;
  std::string text;     // scalars, as written
  bool quoted = false;  // 'x', "x" or a block scalar: text whatever it looks like
  ConfigPlace place;
  ConfigSource source = ConfigSource::kFile;
  std::vector<ConfigNode> items;
  std::vector<Member> members;

  const ConfigNode* Find(const std::string& key) const;
  // "a number", "text", "a list", …
  std::string KindName() const;
  // Compact JSON: unquoted numbers, true, false and null become such, everything else text.
  std::string ToJson() const;
};

struct ConfigNode::Member {
  std::string key;
  ConfigPlace place;
  ConfigNode value;
};

// A value that was read, in the order of reading.
struct ConfigEntry {
  std::string path;  // "trainer.steps"; items of lists of blocks: "verifiers[0].name"
  std::string json;  // the value as JSON (which is YAML)
  ConfigSource source = ConfigSource::kDefault;
};

class ConfigBlock;

class Config {
 public:
  static Result<Config> Parse(const std::string& text, const std::string& file);
  static Result<Config> Load(const std::string& path);

  // "a.b=value", the value in YAML; makes blocks on the way. Fails when the path runs through a value or a list.
  Status Set(const std::string& assignment);

  ConfigBlock Root();
  const ConfigNode& root() const;
  // The place of a path, or of the nearest block above it that the user wrote.
  ConfigPlace PlaceOf(const std::string& path) const;

  // Adds an error at a path; unknown keys are reported before others, else the first one counts.
  void Fail(const std::string& path, const std::string& message);
  // The first error as kInvalidArgument("FILE:LINE:COLUMN: PATH: what"), or OK.
  Status Finish() const;

  // Everything read so far. Add records a value that somebody else read (the algorithm block).
  const std::vector<ConfigEntry>& entries() const;
  void Add(ConfigEntry entry);
  // The entries as a YAML file.
  std::string ResolvedYaml() const;

 private:
  friend class ConfigBlock;
  struct State;
  std::shared_ptr<State> state_;
};

// Bounds of a number, inclusive unless `above` says that min itself is too small.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above = false;
};

// One mapping of the tree. Copies refer to the same mapping. Getters return the default when the key is absent, and when it
// is wrong, after recording the error.
class ConfigBlock {
 public:
  const std::string& path() const { return path_; }
  bool present() const { return node_ != nullptr; }
  bool Has(const std::string& key) const;  // written by the user, null included; does not count as read

  ConfigBlock Block(const std::string& key);                   // absent: an empty one
  std::vector<ConfigBlock> BlockList(const std::string& key);  // a list of mappings; absent: empty

  std::string String(const std::string& key, const std::string& fallback);
  std::string Choice(const std::string& key, const std::string& fallback, const std::vector<std::string>& choices);
  int64_t Int(const std::string& key, int64_t fallback, Range range = {});
  double Double(const std::string& key, double fallback, Range range = {});
  bool Bool(const std::string& key, bool fallback);
  int64_t Size(const std::string& key, int64_t fallback, Range range = {});  // bytes; "64KiB", "1.5GiB", 4096
  // Absent or null = nothing.
  std::optional<std::string> OptionalString(const std::string& key);
  std::optional<int64_t> OptionalInt(const std::string& key, Range range = {});
  std::optional<double> OptionalDouble(const std::string& key, Range range = {});
  // Absent or `auto` = nothing.
  std::optional<int64_t> IntOrAuto(const std::string& key, Range range = {});
  std::optional<int64_t> SizeOrAuto(const std::string& key, Range range = {});
  std::vector<std::string> Strings(const std::string& key, const std::vector<std::string>& fallback = {});
  std::vector<double> Doubles(const std::string& key, const std::vector<double>& fallback, size_t count, Range range = {});
  std::map<std::string, std::string> StringMap(const std::string& key);
  // The raw value, marked as read; nullptr when absent.
  const ConfigNode* Raw(const std::string& key);

  // The user must write this key; an error otherwise.
  void Require(const std::string& key, const std::string& why);
  // An error when the user wrote this key: it would have no effect, or its part is not built.
  void Refuse(const std::string& key, const std::string& why);
  void Fail(const std::string& key, const std::string& message);
  // Reports keys that were not asked for.
  void Finish();

 private:
  friend class Config;
  ConfigBlock(std::shared_ptr<Config::State> state, const ConfigNode* node, std::string path);
  const ConfigNode* Get(const std::string& key);  // marks as known
  std::string Path(const std::string& key) const;
  void Record(const std::string& key, std::string json, const ConfigNode* node);
  void WrongType(const std::string& key, const ConfigNode& node, const std::string& expected);
  bool ScalarInt(const std::string& key, const ConfigNode& node, Range range, int64_t* out);
  bool ScalarDouble(const std::string& key, const ConfigNode& node, Range range, double* out);
  bool ScalarString(const std::string& key, const ConfigNode& node, std::string* out);
  bool ScalarSize(const std::string& key, const ConfigNode& node, Range range, int64_t* out);
  bool InRange(const std::string& key, double value, const std::string& shown, Range range, std::string (*print)(double) = nullptr);

  std::shared_ptr<Config::State> state_;
  const ConfigNode* node_;
  std::string path_;
  std::shared_ptr<std::vector<std::string>> known_;
};

}  // namespace temper
