#include "common/config.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace temper {
namespace {

constexpr int64_t kMaxBytes = 1 << 20;
constexpr int kMaxNodes = 20000;
constexpr int kMaxAliases = 32;
constexpr size_t kMaxDepth = 32;

bool IsNullText(const std::string& text) { return text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL"; }

bool LooksLikeText(const ConfigNode& node) {
  double number;
  return node.quoted || !(ParseDouble(node.text, &number) || node.text == "true" || node.text == "false");
}

struct Refusal {
  std::string message;
};

// Builds the tree from yaml-cpp's events. Throws Refusal for what is YAML but not for us.
class TreeBuilder final : public YAML::EventHandler {
 public:
  TreeBuilder(std::string file, ConfigSource source) : file_(std::move(file)), source_(source) {}

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { Leaf(Make(mark, ConfigNode::Kind::kNull), anchor); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    if (++aliases_ > kMaxAliases) Refuse(mark, "more than " + std::to_string(kMaxAliases) + " aliases");
    auto it = anchors_.find(anchor);
    if (it == anchors_.end()) Refuse(mark, "an alias to something that contains it");
    Count(mark, it->second);
    Leaf(it->second, 0, &mark);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, const std::string& value) override {
    if (tag != "?" && tag != "!" && !tag.empty()) Refuse(mark, "tags (" + tag + ") are not used here");
    ConfigNode node = Make(mark, ConfigNode::Kind::kScalar);
    node.text = value;
    node.quoted = tag == "!";
    if (!node.quoted && IsNullText(value) && !ExpectsKey()) node.kind = ConfigNode::Kind::kNull;
    Leaf(std::move(node), anchor);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, YAML::EmitterStyle::value) override {
    Open(mark, tag, anchor, ConfigNode::Kind::kList);
  }
  void OnSequenceEnd() override { Close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, YAML::EmitterStyle::value) override {
    Open(mark, tag, anchor, ConfigNode::Kind::kMap);
  }
  void OnMapEnd() override { Close(); }

  ConfigNode Take() { return std::move(root_); }

 private:
  struct Level {
    ConfigNode node;
    YAML::anchor_t anchor;
    bool has_key = false;
    std::string key;
    ConfigPlace key_place;
  };

  ConfigPlace Place(const YAML::Mark& mark) const { return {file_, mark.line + 1, mark.column + 1}; }
  [[noreturn]] void Refuse(const YAML::Mark& mark, const std::string& message) const {
    throw Refusal{Place(mark).ToString() + ": " + message};
  }
  ConfigNode Make(const YAML::Mark& mark, ConfigNode::Kind kind) {
    ConfigNode node;
    node.kind = kind;
    node.place = Place(mark);
    node.source = source_;
    if (++nodes_ > kMaxNodes) Refuse(mark, "more than " + std::to_string(kMaxNodes) + " values");
    return node;
  }
  void Count(const YAML::Mark& mark, const ConfigNode& node) {
    if (++nodes_ > kMaxNodes) Refuse(mark, "more than " + std::to_string(kMaxNodes) + " values after expanding aliases");
    for (const ConfigNode& item : node.items) Count(mark, item);
    for (const ConfigNode::Member& member : node.members) Count(mark, member.value);
  }
  bool ExpectsKey() const { return !open_.empty() && open_.back().node.kind == ConfigNode::Kind::kMap && !open_.back().has_key; }

  void Open(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, ConfigNode::Kind kind) {
    if (tag != "?" && tag != "!" && !tag.empty()) Refuse(mark, "tags (" + tag + ") are not used here");
    if (ExpectsKey()) Refuse(mark, "a key must be a word (a value that begins with '{' needs quotes)");
    if (open_.size() >= kMaxDepth) Refuse(mark, "nested deeper than " + std::to_string(kMaxDepth));
    open_.push_back(Level{Make(mark, kind), anchor, false, {}, {}});
  }
  void Close() {
    Level level = std::move(open_.back());
    open_.pop_back();
    Leaf(std::move(level.node), level.anchor);
  }
  void Leaf(ConfigNode node, YAML::anchor_t anchor, const YAML::Mark* alias = nullptr) {
    if (anchor) anchors_[anchor] = node;
    if (open_.empty()) {
      root_ = std::move(node);
      return;
    }
    Level& level = open_.back();
    if (level.node.kind == ConfigNode::Kind::kList) {
      level.node.items.push_back(std::move(node));
    } else if (!level.has_key) {
      ConfigPlace place = alias ? Place(*alias) : node.place;
      if (node.kind != ConfigNode::Kind::kScalar) throw Refusal{place.ToString() + ": a key must be a word"};
      if (const ConfigNode* other = level.node.Find(node.text)) {
        throw Refusal{place.ToString() + ": key '" + node.text + "' twice in one block; the other one is at line " +
                      std::to_string(other->place.line)};
      }
      level.has_key = true;
      level.key = node.text;
      level.key_place = place;
    } else {
      level.node.members.push_back({std::move(level.key), level.key_place, std::move(node)});
      level.has_key = false;
    }
  }

  const std::string file_;
  const ConfigSource source_;
  std::vector<Level> open_;
  std::map<YAML::anchor_t, ConfigNode> anchors_;
  ConfigNode root_;
  int nodes_ = 0;
  int aliases_ = 0;
};

// What must not be in the bytes at all: yaml-cpp is lenient about these.
Status CheckBytes(const std::string& text, const std::string& file) {
  if (static_cast<int64_t>(text.size()) > kMaxBytes) return InvalidArgument(file + ": larger than " + FormatSize(kMaxBytes));
  int line = 1, column = 1;
  int open = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = text[i];
    const std::string place = file + ":" + std::to_string(line) + ":" + std::to_string(column) + ": ";
    if (c == '\t') return InvalidArgument(place + "a tab; use spaces (inside double quotes write \\t)");
    if ((c < ' ' && c != '\n' && c != '\r') || c == 127) return InvalidArgument(place + "a control character");
    // Flow collections nest by recursion in the parser; far beyond any job, well below the stack.
    open += c == '[' || c == '{' ? 1 : c == ']' || c == '}' ? -1 : 0;
    if (open > 200) return InvalidArgument(place + "brackets nested too deep");
    column = c == '\n' ? 1 : column + ((c & 0xc0) != 0x80);
    line += c == '\n';
  }
  if (!IsUtf8(text)) return InvalidArgument(file + ": not UTF-8");
  return Status::Ok();
}

Result<ConfigNode> ParseTree(const std::string& text, const std::string& file, ConfigSource source) {
  RETURN_IF_ERROR(CheckBytes(text, file));
  try {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    TreeBuilder builder(file, source);
    if (!parser.HandleNextDocument(builder)) return ConfigNode{};
    ConfigNode root = builder.Take();
    TreeBuilder second(file, source);
    if (parser.HandleNextDocument(second)) return InvalidArgument(file + ": more than one document ('---')");
    return root;
  } catch (const Refusal& refusal) {
    return InvalidArgument(refusal.message);
  } catch (const YAML::Exception& e) {
    const ConfigPlace place{file, e.mark.line + 1, e.mark.column + 1};
    return InvalidArgument(place.ToString() + ": " + e.msg);
  } catch (const std::exception& e) {
    return InvalidArgument(file + ": " + e.what());
  }
}

std::string JsonString(const std::string& text) {
  JsonWriter writer;
  writer.String(text);
  return writer.Take();
}

void MarkSource(ConfigNode* node, ConfigSource source) {
  node->source = source;
  for (ConfigNode& item : node->items) MarkSource(&item, source);
  for (ConfigNode::Member& member : node->members) MarkSource(&member.value, source);
}

void AppendJson(const ConfigNode& node, JsonWriter* out) {
  switch (node.kind) {
    case ConfigNode::Kind::kNull: out->Null(); return;
    case ConfigNode::Kind::kScalar: {
      int64_t integer;
      double number;
      if (LooksLikeText(node)) out->String(node.text);
      else if (node.text == "true" || node.text == "false") out->Bool(node.text == "true");
      else if (ParseInt(node.text, &integer)) out->Int(integer);
      else if (ParseDouble(node.text, &number)) out->Double(number);
      return;
    }
    case ConfigNode::Kind::kList:
      out->BeginArray();
      for (const ConfigNode& item : node.items) AppendJson(item, out);
      out->EndArray();
      return;
    case ConfigNode::Kind::kMap:
      out->BeginObject();
      for (const ConfigNode::Member& member : node.members) {
        out->Key(member.key);
        AppendJson(member.value, out);
      }
      out->EndObject();
  }
}

// "a.b[0].c" -> {"a", "b", "[0]", "c"}.
std::vector<std::string> PathParts(const std::string& path) {
  std::vector<std::string> parts;
  for (const std::string& word : Split(path, '.')) {
    size_t at = word.find('[');
    parts.push_back(word.substr(0, at));
    while (at != std::string::npos) {
      const size_t next = word.find('[', at + 1);
      parts.push_back(word.substr(at, next == std::string::npos ? next : next - at));
      at = next;
    }
  }
  return parts;
}

}  // namespace

const char* ConfigSourceName(ConfigSource source) {
  switch (source) {
    case ConfigSource::kDefault: return "default";
    case ConfigSource::kRecipe: return "recipe";
    case ConfigSource::kFile: return "file";
    case ConfigSource::kSet: return "--set";
  }
  return "?";
}

std::string ConfigPlace::ToString() const {
  if (line == 0) return file;
  return file + ":" + std::to_string(line) + ":" + std::to_string(column);
}

const ConfigNode* ConfigNode::Find(const std::string& key) const {
  for (const Member& member : members) {
    if (member.key == key) return &member.value;
  }
  return nullptr;
}

std::string ConfigNode::KindName() const {
  switch (kind) {
    case Kind::kNull: return "nothing";
    case Kind::kList: return "a list";
    case Kind::kMap: return "a block";
    case Kind::kScalar: break;
  }
  const std::string shown = "'" + (text.size() > 60 ? text.substr(0, 57) + "..." : text) + "'";
  if (LooksLikeText(*this)) return "the text " + shown;
  if (text == "true" || text == "false") return text;
  return "the number " + text;
}

std::string ConfigNode::ToJson() const {
  JsonWriter writer;
  AppendJson(*this, &writer);
  return writer.Take();
}

struct Config::State {
  std::string file;
  ConfigNode root;
  // Trees whose blocks were handed out stay where they are: Set is refused once reading began.
  bool reading = false;
  std::vector<ConfigEntry> entries;
  std::vector<std::string> unknown, errors;

  ConfigPlace PlaceOf(const std::string& path) const {
    const ConfigNode* node = &root;
    ConfigPlace place = root.place;
    if (place.line == 0) place.file = file;
    for (const std::string& part : PathParts(path)) {
      if (part.empty()) continue;
      if (part[0] == '[') {
        int64_t index = -1;
        ParseInt(part.substr(1, part.size() - 2), &index);
        if (index < 0 || index >= static_cast<int64_t>(node->items.size())) return place;
        node = &node->items[static_cast<size_t>(index)];
        place = node->place;
        continue;
      }
      const ConfigNode* next = nullptr;
      for (const ConfigNode::Member& member : node->members) {
        if (member.key == part) {
          next = &member.value;
          place = member.place;
        }
      }
      if (!next) return place;
      node = next;
    }
    return place;
  }
  std::string Message(const std::string& path, const std::string& message) const {
    return PlaceOf(path).ToString() + ": " + (path.empty() ? "" : path + ": ") + message;
  }
};

Result<Config> Config::Parse(const std::string& text, const std::string& file) {
  ASSIGN_OR_RETURN(ConfigNode root, ParseTree(text, file, ConfigSource::kFile));
  if (root.kind == ConfigNode::Kind::kNull) {
    root.kind = ConfigNode::Kind::kMap;
    root.place.file = file;
  }
  if (root.kind != ConfigNode::Kind::kMap) {
    return InvalidArgument(root.place.ToString() + ": expected a block of keys, got " + root.KindName());
  }
  Config config;
  config.state_ = std::make_shared<State>();
  config.state_->file = file;
  config.state_->root = std::move(root);
  return config;
}

Result<Config> Config::Load(const std::string& path) {
  ASSIGN_OR_RETURN(std::string text, ReadFile(path, kMaxBytes));
  return Parse(text, path);
}

Status Config::Set(const std::string& assignment) {
  TEMPER_CHECK(!state_->reading) << "Set after reading began";
  const std::string shown = "--set " + assignment;
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0) return InvalidArgument(shown + ": expected KEY.KEY=VALUE");
  auto parsed = ParseTree(assignment.substr(equals + 1), "--set " + assignment.substr(0, equals), ConfigSource::kSet);
  if (!parsed.ok()) return parsed.status();
  MarkSource(&*parsed, ConfigSource::kSet);
  parsed->place.file = shown;
  const std::vector<std::string> keys = Split(std::string_view(assignment).substr(0, equals), '.');
  ConfigNode* node = &state_->root;
  std::string path;
  for (size_t i = 0; i < keys.size(); ++i) {
    const std::string key(Trim(keys[i]));
    path += (i ? "." : "") + key;
    if (key.empty() || key.find('[') != std::string::npos) return InvalidArgument(shown + ": '" + key + "' is no key");
    ConfigNode::Member* member = nullptr;
    for (ConfigNode::Member& m : node->members) {
      if (m.key == key) member = &m;
    }
    if (!member) {
      node->members.push_back({key, {shown, 0, 0}, {}});
      member = &node->members.back();
      member->value.place.file = shown;
      member->value.source = ConfigSource::kSet;
    }
    if (i + 1 == keys.size()) {
      member->place = {shown, 0, 0};
      member->value = std::move(*parsed);
      member->value.place = {shown, 0, 0};
      return Status::Ok();
    }
    if (member->value.kind == ConfigNode::Kind::kNull) member->value.kind = ConfigNode::Kind::kMap;
    if (member->value.kind != ConfigNode::Kind::kMap) {
      return InvalidArgument(shown + ": " + path + " is " + member->value.KindName() + ", not a block");
    }
    node = &member->value;
  }
  return Status::Ok();
}

ConfigBlock Config::Root() {
  state_->reading = true;
  return ConfigBlock(state_, &state_->root, "");
}

const ConfigNode& Config::root() const { return state_->root; }
ConfigPlace Config::PlaceOf(const std::string& path) const { return state_->PlaceOf(path); }
void Config::Fail(const std::string& path, const std::string& message) { state_->errors.push_back(state_->Message(path, message)); }
const std::vector<ConfigEntry>& Config::entries() const { return state_->entries; }
void Config::Add(ConfigEntry entry) { state_->entries.push_back(std::move(entry)); }

Status Config::Finish() const {
  if (!state_->unknown.empty()) return InvalidArgument(state_->unknown.front());
  if (!state_->errors.empty()) return InvalidArgument(state_->errors.front());
  return Status::Ok();
}

std::string Config::ResolvedYaml() const {
  // Blocks in the order in which they were first read, whatever came between.
  struct Tree {
    std::string key, json;
    std::vector<Tree> members;
    Tree& At(const std::string& name) {
      for (Tree& member : members) {
        if (member.key == name) return member;
      }
      return members.emplace_back(Tree{name, "", {}});
    }
    void Print(int depth, std::string* out) const {
      for (const Tree& member : members) {
        const bool item = member.key[0] == '[';
        *out += std::string(static_cast<size_t>(2 * depth), ' ') + (item ? "-" : member.key + ":");
        if (member.members.empty()) {
          *out += " " + member.json + "\n";
        } else {
          *out += "\n";
          member.Print(depth + 1, out);
        }
      }
    }
  };
  Tree root;
  for (const ConfigEntry& entry : state_->entries) {
    Tree* at = &root;
    for (const std::string& part : PathParts(entry.path)) at = &at->At(part);
    at->json = entry.json;
  }
  std::string text;
  root.Print(0, &text);
  return text;
}

ConfigBlock::ConfigBlock(std::shared_ptr<Config::State> state, const ConfigNode* node, std::string path)
    : state_(std::move(state)), node_(node), path_(std::move(path)), known_(std::make_shared<std::vector<std::string>>()) {}

bool ConfigBlock::Has(const std::string& key) const { return node_ && node_->Find(key); }

std::string ConfigBlock::Path(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }

const ConfigNode* ConfigBlock::Get(const std::string& key) {
  if (std::find(known_->begin(), known_->end(), key) == known_->end()) known_->push_back(key);
  return node_ ? node_->Find(key) : nullptr;
}

void ConfigBlock::Record(const std::string& key, std::string json, const ConfigNode* node) {
  state_->entries.push_back({Path(key), std::move(json), node ? node->source : ConfigSource::kDefault});
}

void ConfigBlock::Fail(const std::string& key, const std::string& message) {
  state_->errors.push_back(state_->Message(Path(key), message));
}

void ConfigBlock::WrongType(const std::string& key, const ConfigNode& node, const std::string& expected) {
  Fail(key, "expected " + expected + ", got " + node.KindName());
}

void ConfigBlock::Finish() {
  if (!node_) return;
  for (const ConfigNode::Member& member : node_->members) {
    if (std::find(known_->begin(), known_->end(), member.key) != known_->end()) continue;
    const std::string near = Nearest(member.key, *known_);
    std::string message = "unknown key";
    if (!near.empty()) message += "; did you mean '" + near + "'?";
    else message += "; known here: " + Join(*known_, ", ");
    state_->unknown.push_back(state_->Message(Path(member.key), message));
  }
}

void ConfigBlock::Require(const std::string& key, const std::string& why) {
  Get(key);
  if (!Has(key)) Fail(key, "must be given: " + why);
}

void ConfigBlock::Refuse(const std::string& key, const std::string& why) {
  Get(key);
  if (Has(key)) Fail(key, why);
}

ConfigBlock ConfigBlock::Block(const std::string& key) {
  const ConfigNode* node = Get(key);
  if (node && node->kind == ConfigNode::Kind::kNull) node = nullptr;
  if (node && node->kind != ConfigNode::Kind::kMap) {
    WrongType(key, *node, "a block of keys");
    node = nullptr;
  }
  return ConfigBlock(state_, node, Path(key));
}

std::vector<ConfigBlock> ConfigBlock::BlockList(const std::string& key) {
  std::vector<ConfigBlock> blocks;
  const ConfigNode* node = Get(key);
  if (!node) return blocks;
  if (node->kind != ConfigNode::Kind::kList) {
    WrongType(key, *node, "a list of blocks");
    return blocks;
  }
  for (size_t i = 0; i < node->items.size(); ++i) {
    const std::string item = key + "[" + std::to_string(i) + "]";
    if (node->items[i].kind != ConfigNode::Kind::kMap) WrongType(item, node->items[i], "a block of keys");
    else blocks.push_back(ConfigBlock(state_, &node->items[i], Path(item)));
  }
  return blocks;
}

bool ConfigBlock::InRange(const std::string& key, double value, const std::string& shown, Range range, std::string (*print)(double)) {
  if (value <= range.max && (range.above ? value > range.min : value >= range.min)) return true;
  std::string bounds;
  if (std::isfinite(range.min)) bounds += (range.above ? "above " : "at least ") + (print ? print(range.min) : FormatDouble(range.min));
  if (std::isfinite(range.max)) bounds += (bounds.empty() ? "at most " : " and at most ") + (print ? print(range.max) : FormatDouble(range.max));
  Fail(key, shown + " is out of range: must be " + bounds);
  return false;
}

bool ConfigBlock::ScalarInt(const std::string& key, const ConfigNode& node, Range range, int64_t* out) {
  int64_t value = 0;
  if (node.kind != ConfigNode::Kind::kScalar || node.quoted || !ParseInt(node.text, &value)) {
    WrongType(key, node, "a whole number");
    return false;
  }
  if (!InRange(key, static_cast<double>(value), node.text, range)) return false;
  *out = value;
  return true;
}

bool ConfigBlock::ScalarDouble(const std::string& key, const ConfigNode& node, Range range, double* out) {
  double value = 0;
  if (node.kind != ConfigNode::Kind::kScalar || node.quoted || !ParseDouble(node.text, &value)) {
    WrongType(key, node, "a number");
    return false;
  }
  if (!InRange(key, value, node.text, range)) return false;
  *out = value;
  return true;
}

bool ConfigBlock::ScalarString(const std::string& key, const ConfigNode& node, std::string* out) {
  if (node.kind != ConfigNode::Kind::kScalar || !LooksLikeText(node)) {
    WrongType(key, node, node.kind == ConfigNode::Kind::kScalar ? "text (quote it)" : "text");
    return false;
  }
  *out = node.text;
  return true;
}

namespace {

// The largest unit that divides the size.
std::string SizeText(int64_t bytes) {
  if (bytes != 0) {
    for (auto [suffix, shift] : {std::pair("GiB", 30), std::pair("MiB", 20), std::pair("KiB", 10)}) {
      if ((bytes & ((int64_t{1} << shift) - 1)) == 0) return std::to_string(bytes >> shift) + suffix;
    }
  }
  return std::to_string(bytes);
}

}  // namespace

bool ConfigBlock::ScalarSize(const std::string& key, const ConfigNode& node, Range range, int64_t* out) {
  int64_t value = 0;
  if (node.kind != ConfigNode::Kind::kScalar || node.quoted || !ParseSize(node.text, &value)) {
    WrongType(key, node, "a size such as 4096, 64KiB, 256MiB or 1.5GiB");
    return false;
  }
  const auto print = [](double bytes) { return SizeText(static_cast<int64_t>(bytes)); };
  if (!InRange(key, static_cast<double>(value), node.text, range, print)) return false;
  *out = value;
  return true;
}

std::string ConfigBlock::String(const std::string& key, const std::string& fallback) {
  const ConfigNode* node = Get(key);
  std::string value = fallback;
  if (node) ScalarString(key, *node, &value);
  Record(key, JsonString(value), node);
  return value;
}

std::string ConfigBlock::Choice(const std::string& key, const std::string& fallback, const std::vector<std::string>& choices) {
  const ConfigNode* node = Get(key);
  std::string value = fallback;
  if (node && node->kind != ConfigNode::Kind::kScalar) {
    WrongType(key, *node, "one of " + Join(choices, ", "));
  } else if (node) {
    if (std::find(choices.begin(), choices.end(), node->text) == choices.end()) {
      const std::string near = Nearest(node->text, choices);
      Fail(key, "'" + node->text + "' is not one of " + Join(choices, ", ") + (near.empty() ? "" : "; did you mean '" + near + "'?"));
    } else {
      value = node->text;
    }
  }
  // Written plain: `off` and `on` are words here.
  Record(key, value, node);
  return value;
}

int64_t ConfigBlock::Int(const std::string& key, int64_t fallback, Range range) {
  const ConfigNode* node = Get(key);
  int64_t value = fallback;
  if (node) ScalarInt(key, *node, range, &value);
  Record(key, std::to_string(value), node);
  return value;
}

double ConfigBlock::Double(const std::string& key, double fallback, Range range) {
  const ConfigNode* node = Get(key);
  double value = fallback;
  if (node) ScalarDouble(key, *node, range, &value);
  Record(key, FormatDouble(value), node);
  return value;
}

bool ConfigBlock::Bool(const std::string& key, bool fallback) {
  const ConfigNode* node = Get(key);
  bool value = fallback;
  if (node) {
    if (node->kind != ConfigNode::Kind::kScalar || node->quoted || (node->text != "true" && node->text != "false")) {
      WrongType(key, *node, "true or false");
    } else {
      value = node->text == "true";
    }
  }
  Record(key, value ? "true" : "false", node);
  return value;
}

int64_t ConfigBlock::Size(const std::string& key, int64_t fallback, Range range) {
  const ConfigNode* node = Get(key);
  int64_t value = fallback;
  if (node) ScalarSize(key, *node, range, &value);
  Record(key, SizeText(value), node);
  return value;
}

std::optional<std::string> ConfigBlock::OptionalString(const std::string& key) {
  const ConfigNode* node = Get(key);
  std::optional<std::string> value;
  std::string text;
  if (node && node->kind != ConfigNode::Kind::kNull && ScalarString(key, *node, &text)) value = text;
  Record(key, value ? JsonString(*value) : "null", node);
  return value;
}

std::optional<int64_t> ConfigBlock::OptionalInt(const std::string& key, Range range) {
  const ConfigNode* node = Get(key);
  std::optional<int64_t> value;
  int64_t number = 0;
  if (node && node->kind != ConfigNode::Kind::kNull && ScalarInt(key, *node, range, &number)) value = number;
  Record(key, value ? std::to_string(*value) : "null", node);
  return value;
}

std::optional<double> ConfigBlock::OptionalDouble(const std::string& key, Range range) {
  const ConfigNode* node = Get(key);
  std::optional<double> value;
  double number = 0;
  if (node && node->kind != ConfigNode::Kind::kNull && ScalarDouble(key, *node, range, &number)) value = number;
  Record(key, value ? FormatDouble(*value) : "null", node);
  return value;
}

std::optional<int64_t> ConfigBlock::IntOrAuto(const std::string& key, Range range) {
  const ConfigNode* node = Get(key);
  std::optional<int64_t> value;
  int64_t number = 0;
  const bool automatic = !node || (node->kind == ConfigNode::Kind::kScalar && node->text == "auto");
  if (!automatic && ScalarInt(key, *node, range, &number)) value = number;
  Record(key, value ? std::to_string(*value) : "auto", node);
  return value;
}

std::optional<int64_t> ConfigBlock::SizeOrAuto(const std::string& key, Range range) {
  const ConfigNode* node = Get(key);
  std::optional<int64_t> value;
  int64_t number = 0;
  const bool automatic = !node || (node->kind == ConfigNode::Kind::kScalar && node->text == "auto");
  if (!automatic && ScalarSize(key, *node, range, &number)) value = number;
  Record(key, value ? SizeText(*value) : "auto", node);
  return value;
}

std::vector<std::string> ConfigBlock::Strings(const std::string& key, const std::vector<std::string>& fallback) {
  const ConfigNode* node = Get(key);
  std::vector<std::string> values = fallback;
  if (node) {
    if (node->kind != ConfigNode::Kind::kList) {
      WrongType(key, *node, "a list of texts");
    } else {
      values.clear();
      for (size_t i = 0; i < node->items.size(); ++i) {
        std::string text;
        if (ScalarString(key + "[" + std::to_string(i) + "]", node->items[i], &text)) values.push_back(text);
      }
    }
  }
  JsonWriter json;
  json.BeginArray();
  for (const std::string& value : values) json.String(value);
  json.EndArray();
  Record(key, json.Take(), node);
  return values;
}

std::vector<double> ConfigBlock::Doubles(const std::string& key, const std::vector<double>& fallback, size_t count, Range range) {
  const ConfigNode* node = Get(key);
  std::vector<double> values = fallback;
  if (node) {
    if (node->kind != ConfigNode::Kind::kList || (count && node->items.size() != count)) {
      WrongType(key, *node, "a list of " + (count ? std::to_string(count) + " " : "") + "numbers");
    } else {
      std::vector<double> read;
      for (size_t i = 0; i < node->items.size(); ++i) {
        double number = 0;
        if (ScalarDouble(key + "[" + std::to_string(i) + "]", node->items[i], range, &number)) read.push_back(number);
      }
      if (read.size() == node->items.size()) values = read;
    }
  }
  JsonWriter json;
  json.Doubles(values);
  Record(key, json.Take(), node);
  return values;
}

std::map<std::string, std::string> ConfigBlock::StringMap(const std::string& key) {
  const ConfigNode* node = Get(key);
  std::map<std::string, std::string> values;
  if (node && node->kind != ConfigNode::Kind::kMap) {
    WrongType(key, *node, "a block of texts");
  } else if (node) {
    for (const ConfigNode::Member& member : node->members) {
      std::string text;
      if (ScalarString(key + "." + member.key, member.value, &text)) values[member.key] = text;
    }
  }
  JsonWriter json;
  json.BeginObject();
  for (const auto& [name, value] : values) json.Key(name).String(value);
  json.EndObject();
  Record(key, json.Take(), node);
  return values;
}

const ConfigNode* ConfigBlock::Raw(const std::string& key) { return Get(key); }

}  // namespace temper
