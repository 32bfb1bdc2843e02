#include "weightsync/manifest.h"

#include "common/json.h"
#include "common/rng.h"
#include "engine/weights.h"

namespace temper::weightsync {
namespace {

constexpr const char* kScalingNames[] = {"none", "linear", "llama3"};

std::string PrintConfig(const engine::ModelConfig& c) {
  JsonWriter w;
  w.BeginObject();
  w.Key("vocab").Int(c.vocab).Key("layers").Int(c.layers).Key("width").Int(c.width).Key("heads").Int(c.heads);
  w.Key("kv_heads").Int(c.kv_heads).Key("head_dim").Int(c.head_dim).Key("ffn").Int(c.ffn);
  w.Key("max_positions").Int(c.max_positions).Key("rope_theta").Double(c.rope_theta);
  w.Key("rope_scaling").BeginObject().Key("kind").String(kScalingNames[static_cast<int>(c.rope_scaling.kind)]);
  w.Key("factor").Double(c.rope_scaling.factor).Key("low_freq_factor").Double(c.rope_scaling.low_freq_factor);
  w.Key("high_freq_factor").Double(c.rope_scaling.high_freq_factor);
  w.Key("original_max_positions").Int(c.rope_scaling.original_max_positions).EndObject();
  w.Key("rms_eps").Double(c.rms_eps).Key("tied").Bool(c.tied).Key("bos_id").Int(c.bos_id).Key("pad_id").Int(c.pad_id);
  w.Key("eos_ids").Ints(c.eos_ids).EndObject();
  return w.Take();
}

Status ReadInt(const JsonRef& object, const char* key, int* out) {
  ASSIGN_OR_RETURN(JsonRef field, object.Field(key));
  ASSIGN_OR_RETURN(int64_t value, field.Int());
  if (value < INT32_MIN || value > INT32_MAX) return field.Error("out of range");
  *out = static_cast<int>(value);
  return Status::Ok();
}

Status ReadDouble(const JsonRef& object, const char* key, double* out) {
  ASSIGN_OR_RETURN(JsonRef field, object.Field(key));
  ASSIGN_OR_RETURN(*out, field.Double());
  return Status::Ok();
}

Result<engine::ModelConfig> ParseConfig(const std::string& text) {
  ASSIGN_OR_RETURN(json::value value, ParseJson(text));
  JsonRef root(value, "config");
  engine::ModelConfig c;
  for (auto [key, out] : {std::pair{"vocab", &c.vocab}, {"layers", &c.layers}, {"width", &c.width}, {"heads", &c.heads},
                          {"kv_heads", &c.kv_heads}, {"head_dim", &c.head_dim}, {"ffn", &c.ffn},
                          {"max_positions", &c.max_positions}, {"bos_id", &c.bos_id}, {"pad_id", &c.pad_id}}) {
    RETURN_IF_ERROR(ReadInt(root, key, out));
  }
  RETURN_IF_ERROR(ReadDouble(root, "rope_theta", &c.rope_theta));
  RETURN_IF_ERROR(ReadDouble(root, "rms_eps", &c.rms_eps));
  ASSIGN_OR_RETURN(JsonRef tied, root.Field("tied"));
  ASSIGN_OR_RETURN(c.tied, tied.Bool());
  ASSIGN_OR_RETURN(JsonRef eos, root.Field("eos_ids"));
  ASSIGN_OR_RETURN(std::vector<int64_t> ids, eos.Ints());
  for (int64_t id : ids) c.eos_ids.push_back(static_cast<int>(id));
  ASSIGN_OR_RETURN(JsonRef scaling, root.Field("rope_scaling"));
  ASSIGN_OR_RETURN(JsonRef kind, scaling.Field("kind"));
  ASSIGN_OR_RETURN(std::string name, kind.String());
  bool known = false;
  for (int i = 0; i < 3; ++i) {
    if (name != kScalingNames[i]) continue;
    c.rope_scaling.kind = static_cast<engine::RopeScaling::Kind>(i);
    known = true;
  }
  if (!known) return kind.Error("unknown kind '" + name + "'");
  RETURN_IF_ERROR(ReadDouble(scaling, "factor", &c.rope_scaling.factor));
  RETURN_IF_ERROR(ReadDouble(scaling, "low_freq_factor", &c.rope_scaling.low_freq_factor));
  RETURN_IF_ERROR(ReadDouble(scaling, "high_freq_factor", &c.rope_scaling.high_freq_factor));
  RETURN_IF_ERROR(ReadInt(scaling, "original_max_positions", &c.rope_scaling.original_max_positions));
  RETURN_IF_ERROR(c.Validate());
  return c;
}

}  // namespace

Manifest MakeManifest(const engine::ModelConfig& config, engine::Profile profile) {
  Manifest m;
  m.profile = engine::ProfileName(profile);
  m.layout = engine::ComputeLayoutId(profile);
  m.config_json = PrintConfig(config);
  m.config_hash = HashName(0, m.config_json);
  m.bytes = engine::ComputeBytes(config, profile);
  return m;
}

Result<ManifestModel> ReadManifest(const Manifest& manifest) {
  ManifestModel model;
  ASSIGN_OR_RETURN(model.profile, engine::ParseProfile(manifest.profile));
  ASSIGN_OR_RETURN(model.config, ParseConfig(manifest.config_json));
  const Manifest own = MakeManifest(model.config, model.profile);
  if (manifest.layout != own.layout) return InvalidArgument("layout '" + manifest.layout + "', this build reads '" + own.layout + "'");
  if (manifest.config_hash != own.config_hash) return InvalidArgument("the configuration does not have its stated hash");
  if (manifest.bytes != own.bytes) {
    return InvalidArgument("a version of " + std::to_string(manifest.bytes) + " bytes, this configuration has " + std::to_string(own.bytes));
  }
  return model;
}

}  // namespace temper::weightsync
