#include "engine/decode/generate.h"

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/json.h"
#include "engine/decode/decoder.h"
#include "engine/decode/paged_model.h"
#include "engine/kept_json.h"
#include "engine/score.h"

namespace temper::engine {
namespace {

constexpr int kMaxBatch = 128;
constexpr uint64_t kKvBytesMax = uint64_t{2} << 30;

Result<std::vector<int32_t>> ReadIds(const JsonRef& field) {
  ASSIGN_OR_RETURN(std::vector<int64_t> values, field.Ints());
  std::vector<int32_t> ids;
  ids.reserve(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    // Ids outside the vocabulary are the decoder's to refuse; here they must only fit.
    if (values[i] < INT32_MIN || values[i] > INT32_MAX) return field.Error("[" + std::to_string(i) + "] is no token id");
    ids.push_back(static_cast<int32_t>(values[i]));
  }
  return ids;
}

Result<float> FloatOr(const JsonRef& line, const char* key, float fallback) {
  ASSIGN_OR_RETURN(double value, line.DoubleOr(key, static_cast<double>(fallback)));
  return static_cast<float>(value);
}

Result<uint32_t> CountOr(const JsonRef& line, const char* key, uint32_t fallback) {
  ASSIGN_OR_RETURN(int64_t value, line.IntOr(key, fallback));
  if (value < 0 || value > UINT32_MAX) return InvalidArgument(std::string(key) + ": " + std::to_string(value) + " is out of range");
  return static_cast<uint32_t>(value);
}

Result<DecodeRequest> ParseLine(std::string_view text, uint64_t seed, bool* wants_kept) {
  ASSIGN_OR_RETURN(json::value value, ParseJson(text));
  JsonRef line(value);
  if (!value.is_object()) return InvalidArgument("expected an object");
  RETURN_IF_ERROR(line.OnlyKeys(
      {"ids", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop_ids", "seed", "repetition_stop", "kept"}));
  DecodeRequest r;
  ASSIGN_OR_RETURN(JsonRef ids, line.Field("ids"));
  ASSIGN_OR_RETURN(r.ids, ReadIds(ids));
  if (line.Has("stop_ids")) {
    ASSIGN_OR_RETURN(JsonRef stop, line.Field("stop_ids"));
    ASSIGN_OR_RETURN(r.stop_ids, ReadIds(stop));
  }
  ASSIGN_OR_RETURN(const double temperature, line.DoubleOr("temperature", 0));
  if (temperature != 0) RETURN_IF_ERROR(CheckTemperature(temperature));  // one too small for a float would be 0, which is greedy
  r.sampling.temperature = static_cast<float>(temperature);
  ASSIGN_OR_RETURN(r.sampling.top_p, FloatOr(line, "top_p", 1.0f));
  ASSIGN_OR_RETURN(r.sampling.top_k, CountOr(line, "top_k", 0));
  ASSIGN_OR_RETURN(r.sampling.min_p, FloatOr(line, "min_p", 0.0f));
  ASSIGN_OR_RETURN(r.sampling.max_tokens, CountOr(line, "max_tokens", 16));
  ASSIGN_OR_RETURN(r.sampling.repetition_stop, CountOr(line, "repetition_stop", 0));
  ASSIGN_OR_RETURN(*wants_kept, line.BoolOr("kept", false));
  ASSIGN_OR_RETURN(int64_t own_seed, line.IntOr("seed", static_cast<int64_t>(seed)));
  r.key.seed = static_cast<uint64_t>(own_seed);
  return r;
}

std::string ErrorLine(const Status& status) {
  std::string kind = Status(status.code(), "").ToString();
  kind.resize(kind.find(':'));
  std::transform(kind.begin(), kind.end(), kind.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  JsonWriter w;
  w.BeginObject().Key("error").BeginObject().Key("kind").String(kind).Key("message").String(status.message()).EndObject().EndObject();
  return w.Take();
}

struct Line {
  int64_t number = 0;  // in the input
  Result<DecodeRequest> request = DecodeRequest{};
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  bool wants_kept = false;
  std::vector<std::string> kept;  // one per id
  Finish finish = Finish::kNone;
  Status status{};
};

}  // namespace

GenerateOutput GenerateLines(Engine& engine, const ComputeWeights& weights, std::string_view input, uint64_t seed) {
  std::vector<Line> lines;
  const ModelConfig& config = weights.config();
  uint64_t pages = 2;
  int64_t number = 0;
  while (!input.empty()) {
    const size_t end = std::min(input.find('\n'), input.size());
    std::string_view text = input.substr(0, end);
    input.remove_prefix(std::min(end + 1, input.size()));
    ++number;
    if (text.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    Line line;
    line.number = number;
    line.request = ParseLine(text, seed, &line.wants_kept);
    if (line.request.ok()) {
      const uint64_t most = std::min<uint64_t>(line.request->ids.size() + line.request->sampling.max_tokens, static_cast<uint64_t>(config.max_positions));
      pages += most / kPagePositions + 1;
    }
    lines.push_back(std::move(line));
  }
  // Enough for every line at once, within a bound; but always for one sequence of full length.
  const uint64_t full = static_cast<uint64_t>(config.max_positions) / kPagePositions + 2;
  const uint64_t bound = kKvBytesMax / KvPool::PageBytes(config, weights.profile());
  pages = std::max(std::min(pages, bound), std::min(pages, full));
  Decoder decoder(std::make_unique<PagedModel>(engine, config, weights.profile(), static_cast<int>(pages)),
                  {.max_batch = kMaxBatch, .waiting_max = static_cast<int>(lines.size()) + 1});
  const Status swapped = decoder.SwapWeights(weights, {1, 0});
  TEMPER_CHECK(swapped.ok()) << swapped.ToString();

  std::unordered_map<uint64_t, Line*> by_id;
  for (Line& line : lines) {
    line.status = line.request.status();
    if (!line.status.ok()) continue;
    Result<uint64_t> id = decoder.Add(std::move(*line.request));
    line.status = id.status();
    if (id.ok()) by_id[*id] = &line;
  }
  std::vector<DecodeEvent> events;
  while (decoder.Step(&events)) {
    for (DecodeEvent& e : events) {
      Line& line = *by_id[e.id];
      if (e.token >= 0) {
        line.ids.push_back(e.token);
        line.logprobs.push_back(e.logprob);
        line.kept.push_back(std::move(e.kept));
      }
      line.finish = e.finish;
    }
    events.clear();
  }

  GenerateOutput output;
  for (const Line& line : lines) {
    if (!line.status.ok()) {
      ++output.bad_lines;
      output.text += ErrorLine(line.status.WithContext("line " + std::to_string(line.number))) + "\n";
      continue;
    }
    JsonWriter w;
    w.BeginObject().Key("ids").Ints(line.ids).Key("logprobs").Floats(line.logprobs).Key("finish").String(FinishName(line.finish));
    if (line.wants_kept) {
      w.Key("kept");
      WriteKept(w, line.kept);
    }
    w.EndObject();
    output.text += w.text() + "\n";
  }
  return output;
}

}  // namespace temper::engine
