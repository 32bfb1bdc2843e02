// The verdict channel and the case: text from and for programs outside. Pure.
#include <cmath>

#include "common/base64.h"
#include "common/json.h"
#include "common/strings.h"
#include "verifiers/verifier.h"

namespace temper::verifiers {
namespace {

using sandbox::File;

// A JSON object as text, or {} when it is none: the fields of a Case are objects by contract.
json::value ObjectOf(const std::string& text) {
  auto value = ParseJson(text);
  TEMPER_CHECK(value.ok() && value->is_object()) << "not a JSON object: " << text.substr(0, 200);
  return *value;
}

Result<File> FileFromJson(const JsonRef& ref) {
  RETURN_IF_ERROR(ref.OnlyKeys({"path", "text", "base64", "link", "folder", "mode"}));
  File file;
  ASSIGN_OR_RETURN(JsonRef path, ref.Field("path"));
  ASSIGN_OR_RETURN(file.path, path.String());
  int forms = ref.Has("text") + ref.Has("base64") + ref.Has("link") + ref.Has("folder");
  if (forms != 1) return ref.Error("has one of text, base64, link, folder");
  if (ref.Has("text")) {
    ASSIGN_OR_RETURN(file.bytes, ref.StringOr("text", ""));
  } else if (ref.Has("base64")) {
    ASSIGN_OR_RETURN(std::string text, ref.StringOr("base64", ""));
    if (!Base64Decode(text, &file.bytes)) return ref.Error("base64 is not base64");
  } else if (ref.Has("link")) {
    file.kind = File::Kind::kLink;
    ASSIGN_OR_RETURN(file.bytes, ref.StringOr("link", ""));
  } else {
    file.kind = File::Kind::kFolder;
  }
  ASSIGN_OR_RETURN(int64_t mode, ref.IntOr("mode", file.kind == File::Kind::kFolder ? 0755 : 0644));
  if (mode < 0 || mode > 0777) return ref.Error("mode is not 0..511");
  file.mode = static_cast<uint32_t>(mode);
  return file;
}

}  // namespace

const char* Name(VerdictOutcome outcome) {
  return outcome == VerdictOutcome::kScored ? "scored" : "infra_failure";
}

std::string CaseToJson(const Case& c, bool include_contents) {
  JsonWriter w;
  w.BeginObject().Key("task").Value(ObjectOf(c.task_json)).Key("outcome").String(c.outcome);
  w.Key("final_text").String(c.final_text).Key("turns").Int(c.turns).Key("metadata").Value(ObjectOf(c.metadata_json));
  w.Key("files").BeginArray();
  for (const File& f : c.files) {
    if (!include_contents) {
      if (f.kind == File::Kind::kRegular) w.String(f.path);
      continue;
    }
    w.BeginObject().Key("path").String(f.path);
    if (f.kind == File::Kind::kFolder) {
      w.Key("folder").Bool(true);
    } else if (f.kind == File::Kind::kLink) {
      w.Key("link").String(f.bytes);
    } else if (IsUtf8(f.bytes)) {
      w.Key("text").String(f.bytes);
    } else {
      w.Key("base64").String(Base64Encode(f.bytes));
    }
    if (f.kind != File::Kind::kLink) w.Key("mode").Int(f.mode);
    w.EndObject();
  }
  return w.EndArray().EndObject().Take();
}

Result<Case> CaseFromJson(const std::string& text) {
  ASSIGN_OR_RETURN(json::value value, ParseJson(text));
  JsonRef ref(value);
  if (!value.is_object()) return InvalidArgument("a case is a JSON object");
  RETURN_IF_ERROR(ref.OnlyKeys({"task", "outcome", "final_text", "turns", "metadata", "files"}));
  Case c;
  for (auto [key, out] : {std::pair{"task", &c.task_json}, {"metadata", &c.metadata_json}}) {
    if (!ref.Has(key)) continue;
    ASSIGN_OR_RETURN(JsonRef field, ref.Field(key));
    if (!field.value().is_object()) return field.Error("is not an object");
    *out = PrintJson(field.value());
  }
  ASSIGN_OR_RETURN(c.outcome, ref.StringOr("outcome", c.outcome));
  ASSIGN_OR_RETURN(c.final_text, ref.StringOr("final_text", ""));
  ASSIGN_OR_RETURN(c.turns, ref.IntOr("turns", 0));
  if (ref.Has("files")) {
    ASSIGN_OR_RETURN(JsonRef files, ref.Field("files"));
    if (files.value().is_object()) {
      // {"a.txt": "text"}: enough for most cases written by hand.
      for (const auto& entry : files.value().as_object()) {
        if (!entry.value().is_string()) return files.Error("'" + std::string(entry.key()) + "' is not a string");
        c.files.push_back(File{std::string(entry.key()), std::string(entry.value().as_string()), 0644, File::Kind::kRegular});
      }
    } else {
      ASSIGN_OR_RETURN(std::vector<JsonRef> items, files.Items());
      for (const JsonRef& item : items) {
        ASSIGN_OR_RETURN(File file, FileFromJson(item));
        c.files.push_back(std::move(file));
      }
    }
  }
  return c;
}

Result<Verdict> ParseVerdict(const std::string& bytes) {
  if (Trim(bytes).empty()) return InvalidArgument("nothing was written to file descriptor 3");
  auto value = ParseJson(bytes);
  if (!value.ok()) return InvalidArgument("file descriptor 3 does not hold exactly one JSON object: " + value.status().message());
  if (!value->is_object()) return InvalidArgument("file descriptor 3 holds JSON that is not an object");
  JsonRef ref(*value);
  Verdict v;
  auto outcome = ref.StringOr("outcome", "scored");
  if (!outcome.ok()) return outcome.status();
  if (ref.Has("evidence") && !ref.is_null()) {
    const json::value& evidence = value->as_object().at("evidence");
    if (!evidence.is_object()) return InvalidArgument("evidence is not an object");
    v.evidence_json = PrintJson(evidence);
  }
  if (*outcome == "infra_failure") return v;
  if (*outcome != "scored") return InvalidArgument("outcome '" + *outcome + "' is neither scored nor infra_failure");
  if (!ref.Has("reward")) return InvalidArgument("the verdict has no reward");
  auto reward = ref.Field("reward")->Double();
  if (!reward.ok()) return reward.status();
  if (!std::isfinite(*reward)) return InvalidArgument("reward is not finite");
  if (ref.Has("components")) {
    const json::value& components = value->as_object().at("components");
    if (!components.is_object()) return InvalidArgument("components is not an object");
    for (const auto& entry : components.as_object()) {
      auto number = JsonRef(entry.value(), "components." + std::string(entry.key())).Double();
      if (!number.ok()) return number.status();
      if (!std::isfinite(*number)) return InvalidArgument("components." + std::string(entry.key()) + " is not finite");
      v.components[std::string(entry.key())] = *number;
    }
  }
  if (ref.Has("turn_rewards")) {
    const json::value& rewards = value->as_object().at("turn_rewards");
    if (!rewards.is_array()) return InvalidArgument("turn_rewards is not a list");
    for (const json::value& entry : rewards.as_array()) {
      const std::string path = "turn_rewards[" + std::to_string(v.turn_rewards.size()) + "]";
      auto number = JsonRef(entry, path).Double();
      if (!number.ok()) return number.status();
      if (!std::isfinite(*number)) return InvalidArgument(path + " is not finite");
      v.turn_rewards.push_back(*number);
    }
  }
  v.outcome = VerdictOutcome::kScored;
  v.reward = *reward;
  return v;
}

Verdict HeldToTurns(Verdict verdict, int64_t turns) {
  const auto given = static_cast<int64_t>(verdict.turn_rewards.size());
  if (verdict.outcome != VerdictOutcome::kScored || given == 0 || given == turns) return verdict;
  Verdict failure;
  failure.evidence_json = PrintJson(json::object{
      {"reason", "verdict"},
      {"message", "turn_rewards has " + std::to_string(given) + " numbers; the rollout has " + std::to_string(turns) + " turns (`turns` of the case)"}});
  return failure;
}

std::string VerdictToJson(const Verdict& v) {
  JsonWriter w;
  w.BeginObject().Key("outcome").String(Name(v.outcome)).Key("reward");
  if (v.outcome == VerdictOutcome::kScored) {
    w.Double(v.reward);
  } else {
    w.Null();
  }
  w.Key("components").BeginObject();
  for (const auto& [name, value] : v.components) w.Key(name).Double(value);
  w.EndObject();
  if (!v.turn_rewards.empty()) {
    w.Key("turn_rewards").BeginArray();
    for (const double reward : v.turn_rewards) w.Double(reward);
    w.EndArray();
  }
  w.Key("evidence").Value(ObjectOf(v.evidence_json)).EndObject();
  return w.Take();
}

}  // namespace temper::verifiers
