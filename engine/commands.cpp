#include "engine/commands.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "common/clock.h"
#include "common/file.h"
#include "common/json.h"
#include "common/process.h"
#include "common/strings.h"
#include "engine/files/model_file.h"
#include "engine/files/safetensors.h"
#include "engine/kept_json.h"
#include "engine/reference.h"
#include "engine/score.h"
#include "engine/train_pass.h"
#include "text/utf8.h"

namespace temper::engine {
namespace {

constexpr int64_t kMaxInputBytes = int64_t{1} << 31;
constexpr double kCoefMax = 1e30;  // a coefficient is a float, and so is its product with a gradient of the model

// What both doors take.
struct Options {
  std::string model, in, out;
  std::string numerics = "bf16";
  EngineOptions engine;
  ScoreOptions score;
  int chunk = 0;
  bool merge = true;
  bool f64() const { return numerics == "f64"; }
};

int Fail(const char* program, const Status& status, int code) {
  std::fprintf(stderr, "%s: %s\n", program, text::Shown(status.message()).c_str());
  return code;
}

Status ParseMode(const std::string& text, ScoreOptions& score) {
  using Mode = ScoreOptions::Mode;
  if (text == "flat") {
    score.mode = Mode::kFlat;
  } else if (text == "tree") {
    score.mode = Mode::kTree;
  } else if (text == "decode") {
    score.mode = Mode::kDecode;
  } else if (text.starts_with("prefill:")) {
    int64_t n;
    if (!ParseInt(text.substr(8), &n) || n < 1 || n > 1 << 20) {
      return InvalidArgument(fmt::format("--mode {}: prefill:N needs N from 1 to {}", text, 1 << 20));
    }
    score.mode = Mode::kPrefill;
    score.chunk = static_cast<int>(n);
  } else {
    return InvalidArgument(fmt::format("--mode {}: expected flat, decode, prefill:N or tree", text));
  }
  return Status::Ok();
}

// Options of `names` only; `--name value` and `--name=value`.
Result<Options> ParseOptions(int argc, char** argv, const std::set<std::string>& names) {
  Options o;
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    const size_t equals = word.find('=');
    if (word.starts_with("--") && equals != std::string::npos) {
      words.push_back(word.substr(0, equals));
      words.push_back(word.substr(equals + 1));
    } else {
      words.push_back(word);
    }
  }
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (!word.starts_with("--")) {
      if (!o.model.empty()) return InvalidArgument(fmt::format("unexpected argument '{}'", word));
      o.model = word;
      continue;
    }
    if (!names.count(word)) {
      const std::string hint = Nearest(word, {names.begin(), names.end()});
      return InvalidArgument(fmt::format("unknown option '{}'{}", word, hint.empty() ? "" : "; did you mean " + hint + "?"));
    }
    if (i + 1 == words.size()) return InvalidArgument(fmt::format("{} needs a value", word));
    const std::string& value = words[++i];
    int64_t n = 0;
    const auto number = [&](int64_t low, int64_t high) -> Status {
      if (ParseInt(value, &n) && n >= low && n <= high) return Status::Ok();
      return InvalidArgument(fmt::format("{} {}: expected a whole number from {} to {}", word, value, low, high));
    };
    if (word == "--in") o.in = value;
    if (word == "--out") o.out = value;
    if (word == "--numerics") {
      if (value != "f64") {
        auto profile = ParseProfile(value);
        if (!profile.ok()) return InvalidArgument(fmt::format("--numerics {}: expected bf16, f32 or f64", value));
      }
      o.numerics = value;
    }
    if (word == "--cpu") {
      auto cpu = ParseCpuPath(value);
      if (!cpu.ok()) return cpu.status().WithContext(word);
      o.engine.cpu = *cpu;
    }
    if (word == "--threads") {
      RETURN_IF_ERROR(number(1, 1024));
      o.engine.threads = static_cast<int>(n);
    }
    if (word == "--mode") RETURN_IF_ERROR(ParseMode(value, o.score));
    if (word == "--top") {
      RETURN_IF_ERROR(number(1, 1 << 20));
      o.score.top = static_cast<int>(n);
    }
    if (word == "--chunk") {
      RETURN_IF_ERROR(number(1, int64_t{1} << 30));
      o.chunk = static_cast<int>(n);
    }
    if (word == "--tree") {
      if (value != "on" && value != "off") return InvalidArgument(fmt::format("--tree {}: expected on or off", value));
      o.merge = value == "on";
    }
  }
  if (o.model.empty()) return InvalidArgument("MODEL is missing");
  if (o.in.empty()) return InvalidArgument("--in FILE is missing");
  return o;
}

bool WantsHelp(int argc, char** argv, const char* text) {
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--help") || !std::strcmp(argv[i], "-h")) {
      std::fputs(text, stdout);
      return true;
    }
  }
  return false;
}

Result<std::string> ReadInput(const std::string& path) {
  return path == "-" ? ReadAll(STDIN_FILENO, kMaxInputBytes) : ReadFile(path, kMaxInputBytes);
}

Result<std::vector<int32_t>> ReadIds(const JsonRef& ref) {
  ASSIGN_OR_RETURN(auto values, ref.Ints());
  std::vector<int32_t> ids;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] < -1 || values[i] > INT32_MAX) return ref.Error(fmt::format("[{}] = {} is out of range", i, values[i]));
    ids.push_back(static_cast<int32_t>(values[i]));
  }
  return ids;
}

// ---- score ----------------------------------------------------------------------------------------------------------------

constexpr char kScoreHelp[] =
    "usage: temper engine score MODEL --in FILE [--mode flat|decode|prefill:N|tree] [--top K]\n"
    "                           [--numerics bf16|f32|f64] [--cpu auto|avx2|avx512|amx] [--threads N]\n"
    "Lines {\"ids\":[...],\"temperature\":1} give lines {\"logprobs\":[null,lp(ids[1]),...]}, with --top K also \"top\": the\n"
    "likeliest next tokens after each token. \"kept\":[null,[id,...],...] says for each id among which tokens it was drawn (null: all);\n"
    "its logprob is then among them. All modes give the same bits.\n";

Result<ScoreRow> ParseScoreLine(std::string_view line, const ModelConfig& config) {
  ASSIGN_OR_RETURN(const json::value value, ParseJson(line));
  const JsonRef ref(value);
  RETURN_IF_ERROR(ref.OnlyKeys({"ids", "temperature", "kept"}));
  ScoreRow row;
  ASSIGN_OR_RETURN(const JsonRef ids, ref.Field("ids"));
  ASSIGN_OR_RETURN(row.ids, ReadIds(ids));
  ASSIGN_OR_RETURN(row.temperature, ref.DoubleOr("temperature", 1));
  RETURN_IF_ERROR(CheckScoreRow(config, row));
  if (ref.Has("kept")) {
    ASSIGN_OR_RETURN(const JsonRef kept, ref.Field("kept"));
    ASSIGN_OR_RETURN(row.kept, ReadKept(kept, row.ids, config.vocab));
  }
  return row;
}

void WriteNumber(JsonWriter& w, double value, bool f64) {
  if (f64) {
    w.Double(value);
  } else {
    w.Float(static_cast<float>(value));
  }
}

void PrintLine(std::string text) {
  text += '\n';
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void PrintError(const Status& status) {
  std::string kind = Status(status.code(), "").ToString();
  kind.resize(kind.find(':'));
  std::transform(kind.begin(), kind.end(), kind.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  JsonWriter w;
  w.BeginObject().Key("error").BeginObject().Key("kind").String(kind).Key("message").String(status.message());
  w.EndObject().EndObject();
  PrintLine(w.Take());
}

// JSON has no word for what is no number, and `null` is what the first token has.
Status CheckFinite(const RowScores& scores) {
  for (size_t i = 1; i < scores.logprobs.size(); ++i) {
    if (std::isfinite(scores.logprobs[i])) continue;
    return FailedPrecondition(
        fmt::format("the log-probability of ids[{}] is {}: weights of the model are no numbers, or overflow", i, scores.logprobs[i]));
  }
  return Status::Ok();
}

void PrintScores(const RowScores& scores, bool f64) {
  JsonWriter w;
  w.BeginObject().Key("logprobs").BeginArray();
  for (double x : scores.logprobs) WriteNumber(w, x, f64);
  w.EndArray();
  if (!scores.top.empty()) {
    w.Key("top").BeginArray();
    for (const auto& position : scores.top) {
      w.BeginArray();
      for (const auto& [id, logprob] : position) {
        w.BeginArray().Int(id);
        WriteNumber(w, logprob, f64);
        w.EndArray();
      }
      w.EndArray();
    }
    w.EndArray();
  }
  w.EndObject();
  PrintLine(w.Take());
}

int RunScore(int argc, char** argv) {
  if (WantsHelp(argc, argv, kScoreHelp)) return 0;
  auto options = ParseOptions(argc, argv, {"--in", "--mode", "--top", "--numerics", "--cpu", "--threads"});
  if (!options.ok()) return Fail(argv[0], options.status(), 2);
  const Options& o = *options;
  auto input = ReadInput(o.in);
  if (!input.ok()) return Fail(argv[0], input.status(), 2);
  auto engine = Engine::Create(o.engine);
  if (!engine.ok()) return Fail(argv[0], engine.status(), 2);
  auto model = LoadModel(o.model);
  if (!model.ok()) return Fail(argv[0], model.status(), 2);

  std::vector<std::string> lines = Split(*input, '\n');
  if (!lines.empty() && Trim(lines.back()).empty()) lines.pop_back();
  std::vector<ScoreRow> rows;
  std::vector<Status> status;
  for (size_t i = 0; i < lines.size(); ++i) {
    auto row = ParseScoreLine(lines[i], model->config);
    status.push_back(row.ok() ? Status::Ok() : row.status().WithContext(fmt::format("line {}", i + 1)));
    if (row.ok()) rows.push_back(*std::move(row));
  }
  std::optional<ComputeWeights> weights;
  if (!o.f64()) {
    weights = ComputeWeights::FromParameters(model->params, *ParseProfile(o.numerics));
    model->params = Parameters();
  }
  const auto score = [&](const std::vector<ScoreRow>& some) {
    return o.f64() ? ScoreReference(model->params, some, o.score) : Score(**engine, *weights, some, o.score);
  };
  // Modes that take rows one by one answer as they go; the others need all rows first.
  const bool together = o.score.mode == ScoreOptions::Mode::kTree || o.score.mode == ScoreOptions::Mode::kDecode;
  std::vector<RowScores> all;
  if (together) all = score(rows);
  size_t next = 0;
  bool bad = false;
  for (size_t i = 0; i < status.size(); ++i) {
    Status s = status[i];
    if (s.ok()) {
      const RowScores scores = together ? all[next] : score({rows[next]})[0];
      ++next;
      s = CheckFinite(scores).WithContext(fmt::format("line {}", i + 1));
      if (s.ok()) PrintScores(scores, o.f64());
    }
    if (!s.ok()) PrintError(s);
    bad = bad || !s.ok();
  }
  return bad ? 1 : 0;
}

// ---- grad -----------------------------------------------------------------------------------------------------------------

constexpr char kGradHelp[] =
    "usage: temper engine grad MODEL --in FILE --out G.safetensors [--chunk N] [--tree on|off]\n"
    "                          [--numerics bf16|f32|f64] [--cpu auto|avx2|avx512|amx] [--threads N]\n"
    "{\"rows\":[{\"ids\":[...],\"coef\":[...],\"temperature\":1}]} or\n"
    "{\"trees\":[{\"parent\":[-1,0,1,1],\"token\":[...],\"coef\":[...],\"temperature\":1}]} gives the gradient of\n"
    "J = sum of coef * logprob of every parameter. \"kept\":[null,[id,...],...] says for each token among which others it was drawn\n"
    "(null: all). --tree off keeps rows apart; --chunk N takes whole trees until N tokens.\n";

// A row or a tree of the input.
struct Item {
  std::vector<int32_t> parent, token;  // a row is a tree whose parents are -1, 0, 1, …
  std::vector<double> coef;
  std::vector<double> temperature;  // one, or one per node
  std::vector<std::string> kept;    // none, or one per node
  double temperature_of(size_t node) const { return temperature[temperature.size() == 1 ? 0 : node]; }
  std::string_view kept_of(size_t node) const { return kept.empty() ? std::string_view() : kept[node]; }
};

Result<Item> ParseItem(const JsonRef& ref, bool row, const ModelConfig& config) {
  Item item;
  if (row) {
    RETURN_IF_ERROR(ref.OnlyKeys({"ids", "coef", "temperature", "kept"}));
  } else {
    RETURN_IF_ERROR(ref.OnlyKeys({"parent", "token", "coef", "temperature", "kept"}));
  }
  ASSIGN_OR_RETURN(const JsonRef tokens, ref.Field(row ? "ids" : "token"));
  ASSIGN_OR_RETURN(item.token, ReadIds(tokens));
  const size_t n = item.token.size();
  if (!n) return tokens.Error("an empty list");
  for (size_t i = 0; i < n; ++i) {
    if (item.token[i] < 0 || item.token[i] >= config.vocab) {
      return tokens.Error(fmt::format("[{}] = {} is outside the vocabulary of {}", i, item.token[i], config.vocab));
    }
  }
  if (row) {
    for (size_t i = 0; i < n; ++i) item.parent.push_back(static_cast<int32_t>(i) - 1);
  } else {
    ASSIGN_OR_RETURN(const JsonRef parents, ref.Field("parent"));
    ASSIGN_OR_RETURN(item.parent, ReadIds(parents));
    if (item.parent.size() != n) return parents.Error(fmt::format("{} values for {} tokens", item.parent.size(), n));
  }
  ASSIGN_OR_RETURN(const JsonRef coef, ref.Field("coef"));
  ASSIGN_OR_RETURN(item.coef, coef.Doubles());
  if (item.coef.size() != n) return coef.Error(fmt::format("{} values for {} tokens", item.coef.size(), n));
  for (size_t i = 0; i < n; ++i) {
    if (!(std::abs(item.coef[i]) <= kCoefMax)) {
      return coef.Error(fmt::format("[{}] = {}: expected a number from -{} to {}", i, item.coef[i], kCoefMax, kCoefMax));
    }
  }
  if (ref.Has("kept")) {
    ASSIGN_OR_RETURN(const JsonRef kept, ref.Field("kept"));
    ASSIGN_OR_RETURN(item.kept, ReadKept(kept, item.token, config.vocab));
  }
  item.temperature = {1};
  if (ref.Has("temperature")) {
    ASSIGN_OR_RETURN(const JsonRef temperature, ref.Field("temperature"));
    if (temperature.value().is_array()) {
      ASSIGN_OR_RETURN(item.temperature, temperature.Doubles());
      if (item.temperature.size() != n) {
        return temperature.Error(fmt::format("{} values for {} tokens", item.temperature.size(), n));
      }
    } else {
      ASSIGN_OR_RETURN(const double t, temperature.Double());
      item.temperature = {t};
    }
    for (double t : item.temperature) {
      if (const Status s = CheckTemperature(t); !s.ok()) return temperature.Error(s.message());
    }
  }
  return item;
}

// The items as batches of whole trees, and where each node of each item went.
struct Batches {
  struct Place {
    int batch = -1;
    int32_t node = -1;
  };
  std::vector<TreeBatch> trees;
  std::vector<std::vector<double>> coef, inverse;  // per batch and node
  std::vector<std::vector<Place>> places;          // per item and node
  int64_t logical_tokens = 0, tree_tokens = 0;
};

// Root-to-leaf rows of an item; a shared node's coefficient goes with the first row that has it.
struct Path {
  std::vector<int32_t> nodes;
  std::vector<uint8_t> first;  // this row carries the node's coefficient
};
std::vector<Path> PathsOf(const Item& item) {
  const size_t n = item.token.size();
  std::vector<uint8_t> has_child(n, 0), seen(n, 0);
  for (int32_t p : item.parent) {
    if (p >= 0) has_child[p] = 1;
  }
  std::vector<Path> out;
  for (size_t leaf = 0; leaf < n; ++leaf) {
    if (has_child[leaf]) continue;
    Path path;
    for (auto v = static_cast<int32_t>(leaf); v >= 0; v = item.parent[v]) path.nodes.push_back(v);
    std::reverse(path.nodes.begin(), path.nodes.end());
    for (int32_t v : path.nodes) {
      path.first.push_back(!seen[v]);
      seen[v] = 1;
    }
    out.push_back(std::move(path));
  }
  return out;
}

Result<Batches> MakeBatches(const std::vector<Item>& items, const Options& o, const ModelConfig& config) {
  Batches out;
  out.places.resize(items.size());
  for (size_t i = 0; i < items.size(); ++i) out.places[i].resize(items[i].token.size());
  // Everything that goes into one batch, then the next: only whole trees, so a batch may exceed the chunk by one tree.
  struct Added {
    size_t item;
    int32_t node, handle;
    bool carries;
  };
  std::optional<TreeBuilder> builder;
  std::vector<Added> added;
  int64_t tokens = 0;
  const auto flush = [&] {
    if (!builder) return;
    std::vector<int32_t> index;
    TreeBatch tree = builder->Build(&index);
    std::vector<double> coef(tree.size(), 0), inverse(tree.size(), 1);
    for (const Added& a : added) {
      const int32_t node = index[a.handle];
      if (a.carries) coef[node] += items[a.item].coef[a.node];
      inverse[node] = 1 / items[a.item].temperature_of(a.node);
      Batches::Place& place = out.places[a.item][a.node];
      if (place.batch < 0) place = {static_cast<int>(out.trees.size()), node};
    }
    out.logical_tokens += tree.logical_tokens;
    out.tree_tokens += tree.size();
    out.trees.push_back(std::move(tree));
    out.coef.push_back(std::move(coef));
    out.inverse.push_back(std::move(inverse));
    builder.reset();
    added.clear();
    tokens = 0;
  };
  for (size_t i = 0; i < items.size(); ++i) {
    const Item& item = items[i];
    if (o.chunk && builder && tokens + static_cast<int64_t>(item.token.size()) > o.chunk) flush();
    if (!builder) builder.emplace(o.merge);
    std::vector<float> inverse(item.token.size());
    for (size_t v = 0; v < inverse.size(); ++v) inverse[v] = 1.0f / static_cast<float>(item.temperature_of(v));
    {  // also checks the shape of the tree
      TreeBuilder check(false);
      ASSIGN_OR_RETURN(const auto handles, AddTree(o.merge ? *builder : check, item.parent, item.token, inverse, item.kept));
      if (o.merge) {
        for (size_t v = 0; v < handles.size(); ++v) added.push_back({i, static_cast<int32_t>(v), handles[v], true});
      }
    }
    if (!o.merge) {
      for (const Path& path : PathsOf(item)) {
        int32_t parent = -1;
        for (size_t j = 0; j < path.nodes.size(); ++j) {
          const int32_t v = path.nodes[j];
          parent = builder->AddNode(parent, item.token[v], inverse[v], item.kept_of(v));
          added.push_back({i, v, parent, path.first[j] != 0});
        }
        builder->AddLogicalTokens(static_cast<int64_t>(path.nodes.size()));
      }
    }
    tokens += static_cast<int64_t>(item.token.size());
  }
  flush();
  for (const TreeBatch& tree : out.trees) {
    for (int pos : tree.pos) {
      if (pos >= config.max_positions) {
        return InvalidArgument(fmt::format("a path of more than {} tokens, the positions of the model", config.max_positions));
      }
    }
  }
  return out;
}

Result<std::vector<Item>> ParseGradInput(std::string_view text, const ModelConfig& config) {
  ASSIGN_OR_RETURN(const json::value value, ParseJson(text));
  const JsonRef ref(value);
  RETURN_IF_ERROR(ref.OnlyKeys({"rows", "trees"}));
  if (ref.Has("rows") == ref.Has("trees")) return ref.Error("expected exactly one of `rows` and `trees`");
  const bool rows = ref.Has("rows");
  ASSIGN_OR_RETURN(const JsonRef list, ref.Field(rows ? "rows" : "trees"));
  ASSIGN_OR_RETURN(const auto refs, list.Items());
  if (refs.empty()) return list.Error("an empty list");
  std::vector<Item> items;
  for (const JsonRef& item : refs) {
    ASSIGN_OR_RETURN(Item parsed, ParseItem(item, rows, config));
    items.push_back(std::move(parsed));
  }
  return items;
}

int RunGrad(int argc, char** argv) {
  if (WantsHelp(argc, argv, kGradHelp)) return 0;
  auto options = ParseOptions(argc, argv, {"--in", "--out", "--chunk", "--tree", "--numerics", "--cpu", "--threads"});
  if (!options.ok()) return Fail(argv[0], options.status(), 2);
  const Options& o = *options;
  if (o.out.empty()) return Fail(argv[0], InvalidArgument("--out FILE is missing"), 2);
  auto input = ReadInput(o.in);
  if (!input.ok()) return Fail(argv[0], input.status(), 2);
  auto engine = Engine::Create(o.engine);
  if (!engine.ok()) return Fail(argv[0], engine.status(), 2);
  auto model = LoadModel(o.model);
  if (!model.ok()) return Fail(argv[0], model.status(), 2);
  auto items = ParseGradInput(*input, model->config);
  if (!items.ok()) return Fail(argv[0], items.status().WithContext(o.in), 2);
  auto batches = MakeBatches(*items, o, model->config);
  if (!batches.ok()) return Fail(argv[0], batches.status().WithContext(o.in), 2);

  const double begin_s = SystemClock::Get().NowS();
  std::vector<std::vector<double>> logprobs;  // per batch and node
  Gradients grads;
  std::vector<double> grads64;
  size_t bytes = 0;
  if (o.f64()) {
    grads64.assign(model->params.flat().size(), 0);
    for (size_t b = 0; b < batches->trees.size(); ++b) {
      ReferenceOptions reference;
      reference.coef = batches->coef[b];
      reference.inv_temperature = batches->inverse[b];
      reference.gradient = true;
      ReferenceResult result = RunReference(model->params, batches->trees[b], reference);
      for (size_t i = 0; i < grads64.size(); ++i) grads64[i] += result.gradient[i];
      logprobs.push_back(std::move(result.logprobs));
    }
    bytes = static_cast<size_t>(PeakRssBytes());
  } else {
    const auto weights = ComputeWeights::FromParameters(model->params, *ParseProfile(o.numerics));
    grads = std::move(model->params);
    grads.SetZero();
    TrainPass pass(**engine);
    for (size_t b = 0; b < batches->trees.size(); ++b) {
      const auto got = pass.Forward(weights, batches->trees[b]);
      if (!got.ok()) return Fail(argv[0], got.status().WithContext(o.in), 2);
      logprobs.emplace_back(got->begin(), got->end());
      const std::vector<float> coef(batches->coef[b].begin(), batches->coef[b].end());
      pass.Backward(coef, grads);
      bytes = std::max(bytes, pass.bytes());
    }
  }
  const double seconds = SystemClock::Get().NowS() - begin_s;

  double objective = 0;
  for (size_t b = 0; b < logprobs.size(); ++b) {
    for (size_t v = 0; v < logprobs[b].size(); ++v) {
      if (batches->trees[b].parent[v] >= 0) objective += batches->coef[b][v] * logprobs[b][v];
    }
  }
  const auto finite = [](const auto& all) {
    return std::all_of(all.begin(), all.end(), [](auto x) { return std::isfinite(x); });
  };
  const bool good = o.f64() ? finite(grads64) : finite(grads.flat());
  if (!good || !std::isfinite(objective)) {
    const Status overflow = FailedPrecondition(fmt::format(
        "the {} is not finite, and {} was not written: coefficients are too large, temperatures too small, or weights of the model "
        "no numbers",
        good ? "objective" : "gradient", o.out));
    return Fail(argv[0], overflow.WithContext(o.in), 1);
  }

  std::vector<TensorToWrite> tensors;
  for (const TensorSpec& spec : TensorSpecs(model->config)) {
    TensorToWrite t;
    t.name = spec.name;
    t.shape = spec.shape;
    if (o.f64()) {
      t.f64 = std::span<const double>(grads64).subspan(spec.offset, spec.size);
    } else {
      t.f32 = std::span<const float>(grads.flat()).subspan(spec.offset, spec.size);
    }
    tensors.push_back(std::move(t));
  }
  const Status written = WriteSafetensors(o.out, tensors, o.f64() ? FileType::kF64 : FileType::kF32);
  if (!written.ok()) return Fail(argv[0], written, 1);

  JsonWriter w;
  w.BeginObject().Key("objective").Double(objective).Key("logprobs").BeginArray();
  for (size_t i = 0; i < items->size(); ++i) {
    w.BeginArray();
    for (const Batches::Place& place : batches->places[i]) WriteNumber(w, logprobs[place.batch][place.node], o.f64());
    w.EndArray();
  }
  w.EndArray().Key("logical_tokens").Int(batches->logical_tokens).Key("tree_tokens").Int(batches->tree_tokens);
  w.Key("peak_bytes").Int(static_cast<int64_t>(bytes)).Key("seconds").Double(seconds).EndObject();
  PrintLine(w.Take());
  return 0;
}

}  // namespace

const std::vector<Command>& Commands() {
  static const std::vector<Command> commands = {
      {"engine", "score", "log-probabilities of rows of ids, by any path of the engine", RunScore},
      {"engine", "grad", "gradient of a weighted sum of log-probabilities over rows or trees", RunGrad},
  };
  return commands;
}

}  // namespace temper::engine
