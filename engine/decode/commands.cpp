#include "engine/decode/commands.h"

#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstring>
#include <string>

#include "common/file.h"
#include "engine/decode/generate.h"
#include "engine/files/model_file.h"
#include "text/utf8.h"

namespace temper::engine {
namespace {

constexpr char kUsage[] =
    "usage: temper engine generate MODEL --in FILE [--numerics bf16|f32] [--cpu auto|avx2|avx512|amx] [--threads N] [--seed N]\n";

int BadUsage(const std::string& what) {
  std::fprintf(stderr, "temper engine generate: %s\n%s", what.c_str(), kUsage);
  return 2;
}

bool ParseCount(const char* text, uint64_t* out) {
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, *out);
  return error == std::errc() && stop == end;
}

int RunGenerate(int argc, char** argv) {
  std::string model_name, in;
  Profile profile = Profile::kBf16;
  EngineOptions options;
  uint64_t seed = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--help" || arg == "-h") {
      std::printf("%sDraws tokens for each line {\"ids\":[...],\"max_tokens\":N,...} of FILE ('-' is standard input); docs/doors.md.\n", kUsage);
      return 0;
    }
    if (arg.rfind("--", 0) != 0) {
      if (!model_name.empty()) return BadUsage("unexpected argument '" + arg + "'");
      model_name = arg;
      continue;
    }
    if (i + 1 == argc) return BadUsage("'" + arg + "' needs a value");
    const char* value = argv[++i];
    if (arg == "--in") {
      in = value;
    } else if (arg == "--numerics") {
      Result<Profile> parsed = ParseProfile(value);
      if (!parsed.ok()) return BadUsage("--numerics: " + parsed.status().message());
      profile = *parsed;
    } else if (arg == "--cpu") {
      Result<CpuPath> parsed = ParseCpuPath(value);
      if (!parsed.ok()) return BadUsage("--cpu: " + parsed.status().message());
      options.cpu = *parsed;
    } else if (arg == "--threads") {
      uint64_t threads = 0;
      if (!ParseCount(value, &threads) || threads < 1 || threads > 1024) return BadUsage("--threads: '" + std::string(value) + "' is no count of threads (1 to 1024)");
      options.threads = static_cast<int>(threads);
    } else if (arg == "--seed") {
      if (!ParseCount(value, &seed)) {
        return BadUsage("--seed: '" + std::string(value) + "' is no whole number from 0 to 18446744073709551615");
      }
    } else {
      return BadUsage("unknown option '" + arg + "'");
    }
  }
  if (model_name.empty()) return BadUsage("MODEL is missing");
  if (in.empty()) return BadUsage("--in FILE is missing ('-' is standard input)");

  auto fail = [](const Status& status, int code) {
    std::fprintf(stderr, "temper engine generate: %s\n", text::Shown(status.message()).c_str());
    return code;
  };
  const Result<std::string> input = in == "-" ? ReadAll(STDIN_FILENO) : ReadFile(in);
  if (!input.ok()) return fail(input.status(), 2);
  Result<ModelFile> model = LoadModel(model_name);
  if (!model.ok()) return fail(model.status(), 2);
  Result<std::unique_ptr<Engine>> engine = Engine::Create(options);
  if (!engine.ok()) return fail(engine.status(), 2);
  const ComputeWeights weights = ComputeWeights::FromParameters(model->params, profile);
  model->params = Parameters();
  const GenerateOutput output = GenerateLines(**engine, weights, *input, seed);
  std::fwrite(output.text.data(), 1, output.text.size(), stdout);
  if (std::fflush(stdout) != 0) return fail(Internal("standard output cannot be written"), 1);
  return output.bad_lines ? 1 : 0;
}

}  // namespace

const std::vector<Command>& DecodeCommands() {
  static const std::vector<Command> commands = {
      {"engine", "generate", "draw tokens after prompts of ids, all lines as one batch", RunGenerate},
  };
  return commands;
}

}  // namespace temper::engine
