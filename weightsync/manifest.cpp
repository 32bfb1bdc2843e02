#include "weightsync/manifest.h"

#include "common/json.h"
#include "common/rng.h"
#include "engine/weights.h"

namespace temper::weightsync {
namespace {

std::string PrintConfig(const engine::ModelConfig& c) {
  const engine::RopeScaling& r = c.rope_scaling;
  JsonWriter w;
  w.BeginObject().Key("family").String(engine::FamilyName(c.family));
  w.Key("vocab").Int(c.vocab).Key("layers").Int(c.layers).Key("width").Int(c.width).Key("heads").Int(c.heads);
  w.Key("kv_heads").Int(c.kv_heads).Key("head_dim").Int(c.head_dim).Key("ffn").Int(c.ffn);
  w.Key("max_positions").Int(c.max_positions).Key("rope_theta").Double(c.rope_theta);
  w.Key("rope_scaling").BeginObject().Key("kind").String(engine::RopeScalingName(r.kind)).Key("factor").Double(r.factor);
  w.Key("low_freq_factor").Double(r.low_freq_factor).Key("high_freq_factor").Double(r.high_freq_factor);
  w.Key("original_max_positions").Int(r.original_max_positions);
  w.Key("beta_fast").Double(r.beta_fast).Key("beta_slow").Double(r.beta_slow);
  w.Key("attention_factor").Double(r.attention_factor).Key("truncate").Bool(r.truncate).EndObject();
  w.Key("rms_eps").Double(c.rms_eps).Key("tied").Bool(c.tied);
  w.Key("window").Int(c.window).Key("windowed").Ints(std::vector<int>(c.windowed.begin(), c.windowed.end()));
  w.Key("local_rope_theta").Double(c.local_rope_theta).Key("query_scalar").Double(c.query_scalar);
  w.Key("score_cap").Double(c.score_cap).Key("logit_cap").Double(c.logit_cap);
  w.Key("bos_id").Int(c.bos_id).Key("pad_id").Int(c.pad_id).Key("eos_ids").Ints(c.eos_ids).EndObject();
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

Status ReadBool(const JsonRef& object, const char* key, bool* out) {
  ASSIGN_OR_RETURN(JsonRef field, object.Field(key));
  ASSIGN_OR_RETURN(*out, field.Bool());
  return Status::Ok();
}

}  // namespace

Result<engine::ModelConfig> ReadConfig(const std::string& text) {
  ASSIGN_OR_RETURN(json::value value, ParseJson(text));
  JsonRef root(value, "config");
  engine::ModelConfig c;
  for (auto [key, out] : {std::pair{"vocab", &c.vocab}, {"layers", &c.layers}, {"width", &c.width}, {"heads", &c.heads},
                          {"kv_heads", &c.kv_heads}, {"head_dim", &c.head_dim}, {"ffn", &c.ffn},
                          {"max_positions", &c.max_positions}, {"bos_id", &c.bos_id}, {"pad_id", &c.pad_id}}) {
    RETURN_IF_ERROR(ReadInt(root, key, out));
  }
  RETURN_IF_ERROR(ReadInt(root, "window", &c.window));
  for (auto [key, out] : {std::pair{"rope_theta", &c.rope_theta},
                          {"rms_eps", &c.rms_eps},
                          {"local_rope_theta", &c.local_rope_theta},
                          {"query_scalar", &c.query_scalar},
                          {"score_cap", &c.score_cap},
                          {"logit_cap", &c.logit_cap}}) {
    RETURN_IF_ERROR(ReadDouble(root, key, out));
  }
  ASSIGN_OR_RETURN(JsonRef family, root.Field("family"));
  ASSIGN_OR_RETURN(std::string name, family.String());
  ASSIGN_OR_RETURN(c.family, engine::ParseFamily(name));
  RETURN_IF_ERROR(ReadBool(root, "tied", &c.tied));
  ASSIGN_OR_RETURN(JsonRef windowed, root.Field("windowed"));
  ASSIGN_OR_RETURN(std::vector<int64_t> flags, windowed.Ints());
  for (int64_t flag : flags) c.windowed.push_back(flag != 0);
  ASSIGN_OR_RETURN(JsonRef eos, root.Field("eos_ids"));
  ASSIGN_OR_RETURN(std::vector<int64_t> ids, eos.Ints());
  for (int64_t id : ids) c.eos_ids.push_back(static_cast<int>(id));
  ASSIGN_OR_RETURN(JsonRef scaling, root.Field("rope_scaling"));
  ASSIGN_OR_RETURN(JsonRef kind, scaling.Field("kind"));
  ASSIGN_OR_RETURN(name, kind.String());
  engine::RopeScaling& r = c.rope_scaling;
  ASSIGN_OR_RETURN(r.kind, engine::ParseRopeScaling(name));
  for (auto [key, out] : {std::pair{"factor", &r.factor}, {"low_freq_factor", &r.low_freq_factor},
                          {"high_freq_factor", &r.high_freq_factor}, {"beta_fast", &r.beta_fast}, {"beta_slow", &r.beta_slow},
                          {"attention_factor", &r.attention_factor}}) {
    RETURN_IF_ERROR(ReadDouble(scaling, key, out));
  }
  RETURN_IF_ERROR(ReadInt(scaling, "original_max_positions", &r.original_max_positions));
  RETURN_IF_ERROR(ReadBool(scaling, "truncate", &r.truncate));
  RETURN_IF_ERROR(c.Validate());
  return c;
}

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
  ASSIGN_OR_RETURN(model.config, ReadConfig(manifest.config_json));
  const Manifest own = MakeManifest(model.config, model.profile);
  if (manifest.layout != own.layout) return InvalidArgument("layout '" + manifest.layout + "', this build reads '" + own.layout + "'");
  if (manifest.config_hash != own.config_hash) return InvalidArgument("the configuration does not have its stated hash");
  if (manifest.bytes != own.bytes) {
    return InvalidArgument("a version of " + std::to_string(manifest.bytes) + " bytes, this configuration has " + std::to_string(own.bytes));
  }
  return model;
}

}  // namespace temper::weightsync
