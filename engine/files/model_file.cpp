#include "engine/files/model_file.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "common/file.h"
#include "engine/files/gguf.h"
#include "engine/files/model_config_json.h"
#include "engine/layer.h"
#include "text/json.h"
#include "text/utf8.h"

namespace temper::engine {
namespace {

constexpr int64_t kMaxTokenizerFile = int64_t{256} << 20;
constexpr int64_t kMaxSmallFile = int64_t{16} << 20;

bool HasSuffix(const std::string& s, std::string_view suffix) { return s.size() >= suffix.size() && s.compare(s.size() - suffix.size(), suffix.size(), suffix) == 0; }

// The tensors of a model under Hugging Face's names, wherever they lie.
struct TensorSource {
  // nullptr when there is no such tensor.
  std::function<const FileTensor*(const std::string&)> find;
  std::vector<std::string> names;  // Hugging Face's, of all tensors in the files
  bool permuted = false;           // Q and K rows lie as llama.cpp wants them
  float gain_offset = 0;           // what the file's gains are more than Hugging Face's
};

struct OpenModel {
  TensorSource tensors;
  std::vector<std::unique_ptr<SafetensorsFile>> safetensors;
  std::unique_ptr<GgufFile> gguf;
};

// A shard's name must stay inside the folder.
Status CheckShardName(const std::string& name) {
  bool bad = name.empty() || name[0] == '/' || name.find('\\') != std::string::npos || name.find('\0') != std::string::npos;
  for (size_t at = 0; at <= name.size() && !bad;) {
    const size_t slash = std::min(name.find('/', at), name.size());
    bad = name.substr(at, slash - at) == "..";
    at = slash + 1;
  }
  if (!bad) return Status::Ok();
  return InvalidArgument("model.safetensors.index.json: the shard '" + text::Shown(name, 100) + "' lies outside the folder");
}

Result<std::unique_ptr<OpenModel>> OpenFolder(const std::string& dir, std::vector<ForeignTensor>* foreign) {
  auto out = std::make_unique<OpenModel>();
  std::map<std::string, const FileTensor*> by_name;
  auto add = [&](const std::string& file) -> Result<SafetensorsFile*> {
    ASSIGN_OR_RETURN(SafetensorsFile opened, SafetensorsFile::Open(dir + "/" + file, foreign));
    out->safetensors.push_back(std::make_unique<SafetensorsFile>(std::move(opened)));
    return out->safetensors.back().get();
  };
  if (Exists(dir + "/model.safetensors")) {
    ASSIGN_OR_RETURN(SafetensorsFile * file, add("model.safetensors"));
    for (const FileTensor& t : file->tensors()) by_name[t.name] = &t;
  } else if (Exists(dir + "/model.safetensors.index.json")) {
    ASSIGN_OR_RETURN(const std::string text, ReadFile(dir + "/model.safetensors.index.json", kMaxTokenizerFile));
    auto index = text::ParseJson(text);
    if (!index.ok()) return index.status().WithContext(dir + "/model.safetensors.index.json");
    const text::Value* map = index->Find("weight_map");
    if (!map || !map->is_dict()) return InvalidArgument(dir + "/model.safetensors.index.json: weight_map is missing");
    std::map<std::string, SafetensorsFile*> shards;
    for (const auto& [name, file] : map->as_dict().items()) {
      if (!file.is_string()) return InvalidArgument(dir + "/model.safetensors.index.json: weight_map holds what is no file name");
      SafetensorsFile*& shard = shards[file.as_string()];
      if (!shard) {
        RETURN_IF_ERROR(CheckShardName(file.as_string()).WithContext(dir));
        ASSIGN_OR_RETURN(shard, add(file.as_string()));
      }
      const std::string& tensor = name.as_string();
      const FileTensor* t = shard->Find(tensor);
      const auto is_it = [&tensor](const ForeignTensor& f) { return f.name == tensor; };
      if (!t && foreign && std::any_of(foreign->begin(), foreign->end(), is_it)) continue;
      if (!t) return InvalidArgument(dir + "/" + file.as_string() + ": tensor " + text::Shown(tensor, 100) + " is missing");
      by_name[tensor] = t;
    }
  } else {
    return InvalidArgument(dir + ": there is neither model.safetensors nor model.safetensors.index.json");
  }
  for (const auto& [name, t] : by_name) out->tensors.names.push_back(name);
  out->tensors.find = [by_name = std::move(by_name)](const std::string& name) -> const FileTensor* {
    auto it = by_name.find(name);
    return it == by_name.end() ? nullptr : it->second;
  };
  return out;
}

// GGUF's name -> Hugging Face's; empty for a name that is not of the family.
std::string HuggingFaceName(Family family, const std::string& gguf) {
  if (gguf == "token_embd.weight") return "model.embed_tokens.weight";
  if (gguf == "output_norm.weight") return "model.norm.weight";
  if (gguf == "output.weight") return "lm_head.weight";
  static constexpr std::pair<const char*, Role> kOfLayer[] = {
      {"attn_norm.weight", Role::kInputGain},   {"attn_q.weight", Role::kQ},          {"attn_k.weight", Role::kK},
      {"attn_v.weight", Role::kV},              {"attn_q.bias", Role::kQBias},        {"attn_k.bias", Role::kKBias},
      {"attn_v.bias", Role::kVBias},            {"attn_q_norm.weight", Role::kQGain}, {"attn_k_norm.weight", Role::kKGain},
      {"attn_output.weight", Role::kO},         {"ffn_norm.weight", Role::kMlpGain},  {"ffn_gate.weight", Role::kGate},
      {"ffn_up.weight", Role::kUp},             {"ffn_down.weight", Role::kDown},     {"post_ffw_norm.weight", Role::kOutGain},
      {"post_attention_norm.weight", Role::kAttentionGain}};
  if (gguf.rfind("blk.", 0) != 0) return "";
  const size_t dot = gguf.find('.', 4);
  if (dot == std::string::npos || dot == 4 || gguf.find_first_not_of("0123456789", 4) != dot) return "";
  ModelConfig config;
  config.family = family;
  for (const auto& [name, role] : kOfLayer) {
    if (gguf.substr(dot + 1) != name) continue;
    for (const LayerTensor& t : LayerTensors(config)) {
      if (t.role == role) return "model.layers." + gguf.substr(4, dot - 4) + "." + t.name;
    }
  }
  return "";
}

Result<std::unique_ptr<OpenModel>> OpenGguf(const std::string& path, std::vector<ForeignTensor>* foreign) {
  auto out = std::make_unique<OpenModel>();
  ASSIGN_OR_RETURN(GgufFile file, GgufFile::Open(path, foreign));
  out->gguf = std::make_unique<GgufFile>(std::move(file));
  std::map<std::string, const FileTensor*> by_name;
  const auto family = GgufFamily(*out->gguf);
  for (const FileTensor& t : out->gguf->tensors()) {
    if (t.name == "rope_freqs.weight") continue;  // part of the config
    std::string name = family.ok() ? HuggingFaceName(*family, t.name) : "";
    if (name.empty()) name = t.name;  // no part of the architecture: CheckTensors refuses it
    by_name[name] = &t;
    out->tensors.names.push_back(name);
  }
  if (family.ok()) {
    out->tensors.permuted = *family == Family::kLlama;
    ModelConfig config;
    config.family = *family;
    out->tensors.gain_offset = static_cast<float>(SpecOf(config).gain_offset);
  }
  out->tensors.find = [by_name = std::move(by_name)](const std::string& name) -> const FileTensor* {
    auto it = by_name.find(name);
    return it == by_name.end() ? nullptr : it->second;
  };
  return out;
}

// `foreign` as of GgufFile::Open.
Result<std::unique_ptr<OpenModel>> Open(const std::string& path, std::vector<ForeignTensor>* foreign = nullptr) {
  return IsDirectory(path) ? OpenFolder(path, foreign) : OpenGguf(path, foreign);
}

// The same numbers, of one shape.
bool SameNumbers(const FileTensor& a, const FileTensor& b) {
  if (a.shape != b.shape) return false;
  if (a.type == b.type && std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size()) == 0) return true;
  constexpr uint64_t kPiece = 1 << 14;  // elements
  std::vector<float> x(kPiece), y(kPiece);
  for (uint64_t at = 0; at < a.count; at += kPiece) {
    const uint64_t n = std::min(kPiece, a.count - at);
    const auto read = [&](const FileTensor& t, std::vector<float>* out) {
      ReadElements(t.type, t.bytes.subspan(FileTypeBytes(t.type, at), FileTypeBytes(t.type, n)), std::span(*out).first(n));
    };
    read(a, &x);
    read(b, &y);
    if (!std::equal(x.begin(), x.begin() + static_cast<long>(n), y.begin())) return false;
  }
  return true;
}

// A folder whose config says that the head is the embedding may store both, or the head alone. As transformers 5 has it: the one
// that is there stands for both, and two that differ are two.
void ResolveTiedHead(OpenModel* model, ModelConfig* c, std::vector<std::string>* notes) {
  static const std::string kHead = "lm_head.weight", kEmbedding = "model.embed_tokens.weight";
  TensorSource& source = model->tensors;
  const FileTensor *head = source.find(kHead), *embedding = source.find(kEmbedding);
  if (!c->tied || !head) return;
  if (embedding) {
    c->tied = SameNumbers(*head, *embedding);
    notes->push_back(c->tied ? kHead + " is stored too: it equals the embedding, and one copy is kept"
                             : "tie_word_embeddings is not heeded: " + kHead + " is stored too and differs from the embedding");
    return;
  }
  source.find = [find = std::move(source.find), head](const std::string& name) { return name == kEmbedding ? head : find(name); };
  source.names.push_back(kEmbedding);
  notes->push_back(kHead + " is the embedding: the file has no other");
}

// `notes`: what a reader of the config might not expect.
Result<ModelConfig> ConfigOf(OpenModel* model, const std::string& path, std::vector<std::string>* notes) {
  if (model->gguf) return ConfigFromGguf(*model->gguf);
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path + "/config.json", kMaxSmallFile));
  ASSIGN_OR_RETURN(ModelConfig config, ParseConfigJson(text));
  ResolveTiedHead(model, &config, notes);
  return config;
}

// Every tensor that the config asks for is there in its shape, and no other. Before anything is allocated.
Status CheckTensors(const OpenModel& model, const ModelConfig& c, const std::string& path) {
  // Cheap bound first, so that a config of a million layers costs nothing.
  if (static_cast<size_t>(c.layers) > model.tensors.names.size()) {
    return InvalidArgument(path + ": " + std::to_string(c.layers) + " layers, but only " + std::to_string(model.tensors.names.size()) + " tensors");
  }
  size_t found = 0;
  for (const TensorSpec& spec : TensorSpecs(c)) {
    const FileTensor* t = model.tensors.find(spec.name);
    if (!t) return InvalidArgument(path + ": tensor " + spec.name + " is missing");
    if (t->shape != spec.shape) {
      auto text = [](const std::vector<int64_t>& shape) {
        std::string out = "[";
        for (size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
        return out + "]";
      };
      return InvalidArgument(path + ": tensor " + spec.name + " has the shape " + text(t->shape) + ", the config asks for " + text(spec.shape));
    }
    ++found;
  }
  if (found == model.tensors.names.size()) return Status::Ok();
  const std::vector<TensorSpec> specs = TensorSpecs(c);
  for (const std::string& name : model.tensors.names) {
    const bool known = std::any_of(specs.begin(), specs.end(), [&](const TensorSpec& s) { return s.name == name; });
    // A tied head may be stored (ResolveTiedHead), and old files store the rotary frequencies; neither is a parameter of its own.
    const bool ignored = (c.tied && name == "lm_head.weight") || HasSuffix(name, "rotary_emb.inv_freq");
    if (!known && !ignored) return InvalidArgument(path + ": tensor " + text::Shown(name, 100) + " is not part of this model");
  }
  return Status::Ok();
}

// llama.cpp interleaves the two halves of each head's rows; this puts them back.
void UndoPermutation(std::span<float> tensor, int heads, int head_dim, int64_t width) {
  std::vector<float> head(static_cast<size_t>(head_dim * width));
  const int half = head_dim / 2;
  for (int h = 0; h < heads; ++h) {
    float* rows = tensor.data() + static_cast<int64_t>(h) * head_dim * width;
    for (int s = 0; s < 2; ++s) {
      for (int j = 0; j < half; ++j) std::memcpy(head.data() + (s * half + j) * width, rows + (2 * j + s) * width, static_cast<size_t>(width) * sizeof(float));
    }
    std::memcpy(rows, head.data(), head.size() * sizeof(float));
  }
}

Result<std::string> ReadOptional(const std::string& path, int64_t most) {
  if (!Exists(path)) return std::string();
  return ReadFile(path, most);
}

Result<text::TextFiles> TextFilesAt(const std::string& path, const GgufFile* gguf) {
  text::TextFiles out;
  if (!IsDirectory(path)) {
    ASSIGN_OR_RETURN(out.gguf, gguf->TokenizerMetadata());
    return out;
  }
  ASSIGN_OR_RETURN(out.tokenizer_json, ReadOptional(path + "/tokenizer.json", kMaxTokenizerFile));
  ASSIGN_OR_RETURN(out.tokenizer_config_json, ReadOptional(path + "/tokenizer_config.json", kMaxSmallFile));
  ASSIGN_OR_RETURN(out.special_tokens_map_json, ReadOptional(path + "/special_tokens_map.json", kMaxSmallFile));
  ASSIGN_OR_RETURN(out.chat_template_jinja, ReadOptional(path + "/chat_template.jinja", kMaxSmallFile));
  ASSIGN_OR_RETURN(out.generation_config_json, ReadOptional(path + "/generation_config.json", kMaxSmallFile));
  return out;
}

Result<ModelFile> Load(const std::string& model, bool with_params) {
  ModelFile out;
  ASSIGN_OR_RETURN(out.path, ResolveModel(model));
  ASSIGN_OR_RETURN(const std::unique_ptr<OpenModel> open, Open(out.path));
  std::vector<std::string> notes;
  auto config = ConfigOf(open.get(), out.path, &notes);
  if (!config.ok()) return config.status().WithContext(out.path);
  out.config = std::move(config).value();
  RETURN_IF_ERROR(CheckTensors(*open, out.config, out.path));
  out.format = open->gguf ? "gguf" : "safetensors";
  // A model without a readable tokenizer still scores ids.
  if (auto text = TextFilesAt(out.path, open->gguf.get()); text.ok()) {
    out.text = std::move(text).value();
  } else if (!open->gguf) {
    return text.status();
  }
  if (!with_params) return out;
  out.params = Parameters(out.config);
  for (size_t i = 0; i < out.params.tensors().size(); ++i) {
    const TensorSpec& spec = out.params.tensors()[i];
    const FileTensor* t = open->tensors.find(spec.name);
    ReadElements(t->type, t->bytes, out.params.tensor(i));
    if (const float offset = spec.gain ? open->tensors.gain_offset : 0; offset != 0) {
      for (float& x : out.params.tensor(i)) x -= offset;
    }
    if (!open->tensors.permuted) continue;
    if (HasSuffix(spec.name, "q_proj.weight")) UndoPermutation(out.params.tensor(i), out.config.heads, out.config.head_dim, out.config.width);
    if (HasSuffix(spec.name, "k_proj.weight")) UndoPermutation(out.params.tensor(i), out.config.kv_heads, out.config.head_dim, out.config.width);
  }
  return out;
}

// The folder of the newest checkpoint in RUN/checkpoints, or empty.
std::string NewestCheckpoint(const std::string& run) {
  std::string best;
  int64_t best_step = -1;
  auto names = ListDir(run + "/checkpoints");
  if (!names.ok()) return best;
  for (const std::string& name : *names) {
    if (name.empty() || name.size() > 18 || name.find_first_not_of("0123456789") != std::string::npos) continue;
    const int64_t step = std::stoll(name);
    const std::string dir = run + "/checkpoints/" + name;
    if (step > best_step && Exists(dir + "/config.json")) best_step = step, best = dir;
  }
  return best;
}

// What a path names: a folder with config.json, a run, a folder with one GGUF file, or a file; empty when nothing.
Result<std::string> ResolvePath(const std::string& path) {
  if (!IsDirectory(path)) return Exists(path) ? path : std::string();
  if (Exists(path + "/config.json")) return path;
  if (const std::string newest = NewestCheckpoint(path); !newest.empty()) return newest;
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDir(path));
  std::string gguf;
  for (const std::string& name : names) {
    if (!HasSuffix(name, ".gguf")) continue;
    if (!gguf.empty()) return InvalidArgument(path + ": there is more than one GGUF file; name one");
    gguf = path + "/" + name;
  }
  if (gguf.empty()) return InvalidArgument(path + ": there is neither config.json, nor a checkpoint, nor a GGUF file");
  return gguf;
}

}  // namespace

Result<std::string> ResolveModel(const std::string& model) {
  ASSIGN_OR_RETURN(std::string path, ResolvePath(model));
  if (path.empty() && model.find('/') == std::string::npos) {
    ASSIGN_OR_RETURN(path, ResolvePath("models/" + model));
  }
  if (path.empty()) {
    return NotFound("no model '" + model + "': neither a folder, nor a file" +
                    (model.find('/') == std::string::npos
                         ? ", nor models/" + model + " below " + AbsolutePath(".") + ", where `temper model fetch` called there puts it"
                         : std::string()));
  }
  return path;
}

Result<ModelFile> LoadModel(const std::string& model) { return Load(model, true); }
Result<ModelFile> LoadModelConfig(const std::string& model) { return Load(model, false); }

Result<text::TextFiles> LoadTextFiles(const std::string& model) {
  ASSIGN_OR_RETURN(const std::string path, ResolveModel(model));
  if (IsDirectory(path)) return TextFilesAt(path, nullptr);
  std::vector<ForeignTensor> foreign;  // no text is in tensors
  ASSIGN_OR_RETURN(const GgufFile gguf, GgufFile::Open(path, &foreign));
  return TextFilesAt(path, &gguf);
}

Result<TensorSummary> SummariseTensors(const std::string& path) {
  std::vector<ForeignTensor> foreign;
  ASSIGN_OR_RETURN(const std::unique_ptr<OpenModel> open, Open(path, &foreign));
  TensorSummary out;
  std::map<std::string, const ForeignTensor*> first;  // of each type
  for (const ForeignTensor& t : foreign) {
    TensorSummary::Type& type = out.types[t.type];
    ++type.tensors;
    type.elements += t.count;
    first.emplace(t.type, &t);
  }
  for (const auto& [type, t] : first) {
    const int64_t others = out.types[type].tensors - 1;
    const std::string more = others ? " and " + std::to_string(others) + " more" : "";
    out.unsupported.push_back("tensor type " + type + " (" + text::Shown(t->name, 100) + more + ")");
  }
  auto config_of = ConfigOf(open.get(), path, &out.notes);
  if (!config_of.ok()) {
    out.unsupported.push_back(config_of.status().message());
  } else {
    // With tensors left out others would be called missing.
    const Status tensors = foreign.empty() ? CheckTensors(*open, *config_of, path) : Status::Ok();
    if (!tensors.ok()) out.unsupported.push_back(tensors.message());
    else out.config = *config_of;
  }
  std::set<const FileTensor*> counted;
  for (const std::string& name : open->tensors.names) {
    const FileTensor* t = open->tensors.find(name);
    if (!counted.insert(t).second) continue;
    TensorSummary::Type& type = out.types[FileTypeName(t->type)];
    ++type.tensors;
    type.elements += static_cast<int64_t>(t->count);
    type.bytes += static_cast<int64_t>(t->bytes.size());
  }
  out.format = open->gguf ? "gguf" : "safetensors";
  if (open->gguf) {
    const text::Value* v = open->gguf->Meta("general.architecture");
    out.architecture = v && v->is_string() ? v->as_string() : "";
  } else {
    ASSIGN_OR_RETURN(const std::string text, ReadFile(path + "/config.json", kMaxSmallFile));
    auto config = text::ParseJson(text);
    if (config.ok()) out.architecture = config->StringOr("model_type", "");
  }
  return out;
}

Status SaveHuggingFace(const std::string& dir, const ModelConfig& config, const Parameters& params, const text::TextFiles& text, FileType type) {
  RETURN_IF_ERROR(MakeDirs(dir));
  std::vector<TensorToWrite> tensors;
  for (size_t i = 0; i < params.tensors().size(); ++i) {
    tensors.push_back({params.tensors()[i].name, params.tensors()[i].shape, params.tensor(i), {}});
  }
  text::TextFiles files = text;
  if (text.gguf) {
    ASSIGN_OR_RETURN(files, text::HuggingFaceFiles(*text.gguf));
  }
  const std::pair<const char*, const std::string*> kTexts[] = {{"tokenizer.json", &files.tokenizer_json},
                                                               {"tokenizer_config.json", &files.tokenizer_config_json},
                                                               {"special_tokens_map.json", &files.special_tokens_map_json},
                                                               {"chat_template.jinja", &files.chat_template_jinja},
                                                               {"generation_config.json", &files.generation_config_json}};
  for (const auto& [name, content] : kTexts) {
    if (!content->empty()) RETURN_IF_ERROR(WriteFileAtomic(dir + "/" + name, *content));
  }
  RETURN_IF_ERROR(WriteSafetensors(dir + "/model.safetensors", tensors, type));
  return WriteFileAtomic(dir + "/config.json", WriteConfigJson(config, type));  // last: a folder with it is whole
}

}  // namespace temper::engine
