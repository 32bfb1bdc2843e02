#include "text/text_model.h"

#include <algorithm>
#include <set>

#include "text/json.h"

namespace temper::text {
namespace {

// "<s>", or {"content": "<s>", …}; empty when neither.
std::string TokenContent(const Value& v) { return v.is_string() ? v.as_string() : v.StringOr("content", ""); }

// bos_token, eos_token, … of a dict into `out`, as Hugging Face gives them to the template.
void AddSpecialTokens(const Value& from, Dict* out) {
  for (const char* key : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    const Value* v = from.Find(key);
    const std::string content = v ? TokenContent(*v) : "";
    if (!content.empty()) out->Set(key, content);
  }
}

struct Templates {
  std::string plain, with_tools;
};

// The template in tokenizer_config.json: a string, or a list of {name, template}.
Templates TemplatesIn(const Value& config) {
  Templates out;
  const Value* node = config.Find("chat_template");
  if (!node) return out;
  if (node->is_string()) out.plain = node->as_string();
  if (!node->is_list()) return out;
  for (const Value& entry : node->as_list()) {
    if (entry.StringOr("name", "") == "default") out.plain = entry.StringOr("template", "");
    if (entry.StringOr("name", "") == "tool_use") out.with_tools = entry.StringOr("template", "");
  }
  return out;
}

Status AddTemplates(const Templates& templates, const Dict& tokens, TextModel* model) {
  auto parse = [&](const std::string& source, std::optional<ChatTemplate>* out) -> Status {
    if (source.empty()) return Status::Ok();
    ASSIGN_OR_RETURN(ChatTemplate parsed, ChatTemplate::Parse(source));
    parsed.SetDefaults(tokens);
    *out = std::move(parsed);
    return Status::Ok();
  };
  RETURN_IF_ERROR(parse(templates.plain, &model->chat_template));
  RETURN_IF_ERROR(parse(templates.with_tools, &model->tool_template));
  const std::string& source = templates.with_tools.empty() ? templates.plain : templates.with_tools;
  model->tool_format = source.empty() ? ToolFormat::kNone : ToolFormatOf(source);
  model->template_shows_calls = model->tool_format == ToolFormat::kTask || source.find("tool_calls") != std::string::npos;
  return Status::Ok();
}

Result<TextModel> FromGguf(const GgufTokenizer& gguf) {
  ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::FromGguf(gguf));
  TextModel out{std::move(tokenizer), {}, {}, {}, ToolFormat::kNone};
  Dict tokens;
  auto add = [&](const char* key, const std::optional<int32_t>& id) {
    if (id && out.tokenizer.HasToken(*id)) tokens.Set(key, gguf.tokens[static_cast<size_t>(*id)]);
  };
  add("bos_token", gguf.bos);
  add("eos_token", gguf.eos);
  add("unk_token", gguf.unk);
  add("pad_token", gguf.pad);
  std::set<int32_t> ends;
  for (const auto& id : {gguf.eos, gguf.eot}) {
    if (id && out.tokenizer.HasToken(*id)) ends.insert(*id);
  }
  out.end_ids.assign(ends.begin(), ends.end());
  RETURN_IF_ERROR(AddTemplates({gguf.chat_template, ""}, tokens, &out));
  return out;
}

}  // namespace

Value TextModel::ShowCalls(const Value& messages) const {
  if (template_shows_calls || !messages.is_list()) return messages;
  List shown;
  for (const Value& message : messages.as_list()) {
    const Value* calls = message.Find("tool_calls");
    if (!calls || !calls->is_list()) {
      shown.push_back(message);
      continue;
    }
    const Value* content = message.Find("content");
    std::string text = content && content->is_string() ? content->as_string() : "";
    for (const Value& call : calls->as_list()) {
      const Value* function = call.Find("function");
      if (!function) continue;
      if (!text.empty()) text += "\n";
      text += HermesCall(*function);
    }
    Dict out;
    for (const auto& [key, value] : message.as_dict().items()) {
      if (key.as_string() != "tool_calls" && key.as_string() != "content") out.Set(key, value);
    }
    out.Set("content", std::move(text));
    shown.push_back(std::move(out));
  }
  return shown;
}

Result<std::string> TextModel::Render(const RenderInput& input) const {
  if (!input.tools.is_none() && tool_template) return tool_template->Render(input);
  if (!chat_template) return FailedPrecondition("the model has no chat template");
  return chat_template->Render(input);
}

Result<TextModel> LoadTextModel(const TextFiles& files) {
  if (files.gguf) return FromGguf(*files.gguf);
  if (files.tokenizer_json.empty()) return FailedPrecondition("the model has no tokenizer.json");
  ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::FromJson(files.tokenizer_json));
  TextModel out{std::move(tokenizer), {}, {}, {}, ToolFormat::kNone};
  auto parse = [](const std::string& json, const char* name) -> Result<Value> {
    if (json.empty()) return Value(Dict());
    auto parsed = ParseJson(json);
    if (!parsed.ok()) return parsed.status().WithContext(name);
    return parsed;
  };
  ASSIGN_OR_RETURN(const Value config, parse(files.tokenizer_config_json, "tokenizer_config.json"));
  ASSIGN_OR_RETURN(const Value map, parse(files.special_tokens_map_json, "special_tokens_map.json"));
  ASSIGN_OR_RETURN(const Value generation, parse(files.generation_config_json, "generation_config.json"));
  Dict tokens;
  AddSpecialTokens(map, &tokens);
  AddSpecialTokens(config, &tokens);
  std::set<int32_t> ends;
  if (const Value* eos = tokens.Find("eos_token")) {
    if (const auto id = out.tokenizer.TokenId(eos->as_string())) ends.insert(*id);
  }
  if (const Value* eos = generation.Find("eos_token_id"); eos && !eos->is_none()) {
    for (const Value& id : eos->is_list() ? eos->as_list() : List{*eos}) {
      if (id.is_int() && id.as_int() >= 0 && id.as_int() < out.tokenizer.size()) ends.insert(static_cast<int32_t>(id.as_int()));
    }
  }
  out.end_ids.assign(ends.begin(), ends.end());
  Templates templates = TemplatesIn(config);
  if (!files.chat_template_jinja.empty()) templates = {files.chat_template_jinja, ""};
  RETURN_IF_ERROR(AddTemplates(templates, tokens, &out));
  return out;
}

Result<TextFiles> HuggingFaceFiles(const GgufTokenizer& gguf) {
  ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::FromGguf(gguf));
  TextFiles out;
  out.tokenizer_json = tokenizer.json();
  Dict config = MakeDict({{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}});
  auto add = [&](const char* key, const std::optional<int32_t>& id) {
    if (id && tokenizer.HasToken(*id)) config.Set(key, gguf.tokens[static_cast<size_t>(*id)]);
  };
  add("bos_token", gguf.bos);
  add("eos_token", gguf.eos);
  add("unk_token", gguf.unk);
  add("pad_token", gguf.pad);
  if (!gguf.chat_template.empty()) config.Set("chat_template", gguf.chat_template);
  JsonStyle style;
  style.indent = 2;
  out.tokenizer_config_json = DumpJson(Value(std::move(config)), style).value() + "\n";
  return out;
}

}  // namespace temper::text
