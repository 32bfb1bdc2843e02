#include "gateway/commands.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "common/check.h"
#include "common/clock.h"
#include "common/json.h"
#include "common/rpc.h"
#include "common/strings.h"
#include "datapool/store_reader.h"
#include "engine/files/model_file.h"
#include "gateway/gateway.h"
#include "gateway/http/server.h"
#include "gateway/trajectory_view.h"
#include "rollout/worker.h"
#include "text/text_model.h"

namespace temper::gateway {
namespace {

constexpr char kTryUsage[] =
    "usage: temper gateway try MODEL [--port N] [--numerics bf16|f32] [--cpu auto|avx2|avx512|amx] [--threads N]\n"
    "Serves MODEL over the OpenAI Chat API until Ctrl-C, through the gateway and one rollout worker, to test an agent before a\n"
    "job. Prints {\"base_url\":…,\"api_key\":…}. Any key works and is a session of its own; the client chooses sampling.\n"
    "  --port N   of 127.0.0.1; 0 or absent: any free one\n";

constexpr char kShowUsage[] =
    "usage: temper trajectory show RUN ID [--json] [--tokens]\n"
    "The token tree of an attempt: ID is GROUP.ROLLOUT[.ATTEMPT], without ATTEMPT the last. Context is plain, what the policy\n"
    "drew is green, each run with version, temperature and its logprob, whole and a token; last the verdict's evidence. Text\n"
    "stands four columns in, so that all of it can be pasted between fences of Markdown.\n"
    "  --json     one JSON object (docs/doors.md)\n"
    "  --tokens   each drawn token with its logprob\n";

int Bad(const char* program, const std::string& message) {
  std::fprintf(stderr, "%s: %s\n", program, message.c_str());
  return 2;
}
int Failed(const char* program, const Status& status) {
  std::fprintf(stderr, "%s: %s\n", program, status.message().c_str());
  return status.code() == StatusCode::kInvalidArgument || status.code() == StatusCode::kNotFound ? 2 : 1;
}

// Positional arguments and `--name value` options of a door.
struct Arguments {
  std::vector<std::string> words;
  std::map<std::string, std::string> options;
  std::string error;
};
Arguments ParseArguments(int argc, char** argv, const std::vector<std::string>& valued, const std::vector<std::string>& bare) {
  Arguments out;
  auto has = [](const std::vector<std::string>& list, const std::string& name) {
    return std::find(list.begin(), list.end(), name) != list.end();
  };
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (!word.starts_with("--")) {
      out.words.push_back(std::move(word));
      continue;
    }
    std::string value;
    const size_t equals = word.find('=');
    if (equals != std::string::npos) {
      value = word.substr(equals + 1);
      word.resize(equals);
    }
    if (has(bare, word) && equals == std::string::npos) {
      out.options[word] = "";
    } else if (!has(valued, word)) {
      out.error = "unknown option " + word;
    } else if (equals == std::string::npos && ++i >= argc) {
      out.error = word + " needs a value";
    } else {
      out.options[word] = equals == std::string::npos ? argv[i] : value;
    }
    if (!out.error.empty()) break;
  }
  return out;
}

// The weights of a model file, which never change.
class FixedWeights : public rollout::WeightSource {
 public:
  explicit FixedWeights(engine::ComputeWeights weights) : weights_(Weights{std::move(weights), {0, 0}}) {}
  std::optional<Weights> TakeSwap() override { return std::exchange(weights_, std::nullopt); }
  void Swapped(const engine::Version&) override {}
  bool MayServe() override { return true; }
  void SetWake(std::function<void()>) override {}

 private:
  std::optional<Weights> weights_;
};

int Try(int argc, char** argv) {
  const char* program = argv[0];
  if (argc > 1 && !std::strcmp(argv[1], "--help")) return std::fputs(kTryUsage, stdout), 0;
  const Arguments a = ParseArguments(argc, argv, {"--port", "--numerics", "--cpu", "--threads"}, {});
  if (!a.error.empty()) return Bad(program, a.error);
  if (a.words.size() != 1) return std::fputs(kTryUsage, stderr), 2;
  int64_t port = 0, threads = 0;
  auto option = [&](const char* name, const char* fallback) {
    auto it = a.options.find(name);
    return it == a.options.end() ? std::string(fallback) : it->second;
  };
  if (!ParseInt(option("--port", "0"), &port) || port < 0 || port > 65535) return Bad(program, "--port must be from 0 to 65535");
  if (!ParseInt(option("--threads", "0"), &threads) || threads < 0 || threads > 1024) return Bad(program, "--threads must be from 0 to 1024");
  auto profile = engine::ParseProfile(option("--numerics", "bf16"));
  if (!profile.ok()) return Bad(program, "--numerics: " + profile.status().message());

  // Before any thread: the signals that end the server are waited for, not handled.
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGINT);
  sigaddset(&ends, SIGTERM);
  sigprocmask(SIG_BLOCK, &ends, nullptr);
  signal(SIGPIPE, SIG_IGN);

  auto listening = ListenTcp("127.0.0.1", static_cast<int>(port));
  if (!listening.ok()) return std::fprintf(stderr, "%s: %s\n", program, listening.status().message().c_str()), 1;
  auto model = engine::LoadModel(a.words[0]);
  if (!model.ok()) return Failed(program, model.status());
  auto text = text::LoadTextModel(model->text);
  if (!text.ok()) return Failed(program, text.status());
  if (!text->chat_template) return Bad(program, a.words[0] + " has no chat template");
  const int context = model->config.max_positions;
  const auto policy = NewPolicyText(std::move(*text));
  FixedWeights source(engine::ComputeWeights::FromParameters(model->params, *profile));
  model->params = {};
  rollout::WorkerOptions worker_options;
  worker_options.cpu = option("--cpu", "auto");
  worker_options.threads = static_cast<int>(threads);
  auto worker = rollout::Worker::Start(worker_options, &source);
  if (!worker.ok()) return Failed(program, worker.status());

  Metrics metrics;
  Gateway gateway({.model_name = a.words[0], .context_tokens = context, .open_on_use = true}, *policy, **worker,
                  SystemClock::Get(), metrics);
  if (Status status = gateway.Start(); !status.ok()) return Failed(program, status);
  const std::string base_url = "http://127.0.0.1:" + std::to_string(*BoundPort(listening->get())) + "/v1";
  gateway.SetBaseUrl(base_url);
  http::Server server({.refuse = &Gateway::RefusalBody},
                      [&](http::Request r, std::shared_ptr<http::Responder> out) { gateway.Handle(std::move(r), std::move(out)); });
  if (Status status = server.AddListener(listening->Release()); !status.ok()) return Failed(program, status);
  server.Start();
  JsonWriter line;
  line.BeginObject().Key("base_url").String(base_url).Key("api_key").String("sk-temper-try").EndObject();
  std::printf("%s\n", line.text().c_str());
  std::fflush(stdout);
  int signal_number = 0;
  sigwait(&ends, &signal_number);
  server.Stop();
  gateway.Stop();
  (*worker)->Stop();
  return 0;
}

int Show(int argc, char** argv) {
  const char* program = argv[0];
  if (argc > 1 && !std::strcmp(argv[1], "--help")) return std::fputs(kShowUsage, stdout), 0;
  const Arguments a = ParseArguments(argc, argv, {}, {"--json", "--tokens"});
  if (!a.error.empty()) return Bad(program, a.error);
  if (a.words.size() != 2) return std::fputs(kShowUsage, stderr), 2;
  auto id = datapool::ParseAttemptId(a.words[1]);
  if (!id.ok()) return Bad(program, id.status().message());
  auto reader = datapool::StoreReader::Open(a.words[0]);
  if (!reader.ok()) return Failed(program, reader.status());
  auto bytes = (*reader)->Read(id->group, id->rollout, id->attempt > 0 ? std::optional<int32_t>(id->attempt) : std::nullopt);
  if (!bytes.ok()) return std::fprintf(stderr, "%s: %s\n", program, bytes.status().message().c_str()), 1;
  if (a.options.count("--json")) {
    auto json = TrajectoryJson(*bytes);
    if (!json.ok()) return std::fprintf(stderr, "%s: %s\n", program, json.status().message().c_str()), 1;
    std::printf("%s\n", json->c_str());
    return 0;
  }
  TrajectoryViewOptions options{.colour = ::isatty(STDOUT_FILENO) == 1, .tokens = a.options.count("--tokens") > 0, .decode = nullptr};
  // The run's own checkpoint has the tokenizer; without one the ids are still worth seeing.
  std::optional<text::TextModel> text;
  if (auto files = engine::LoadTextFiles(a.words[0]); files.ok()) {
    if (auto loaded = text::LoadTextModel(*files); loaded.ok()) text.emplace(std::move(*loaded));
  }
  if (text) options.decode = [&](const std::vector<int32_t>& ids) { return text->tokenizer.Decode(ids); };
  auto shown = TrajectoryText(*bytes, options);
  if (!shown.ok()) return std::fprintf(stderr, "%s: %s\n", program, shown.status().message().c_str()), 1;
  std::fputs(shown->c_str(), stdout);
  return 0;
}

}  // namespace

const std::vector<Command>& Commands() {
  static const std::vector<Command> kCommands = {
      {"gateway", "try", "serve a model over the OpenAI API, to test an agent", &Try},
      {"trajectory", "show", "the token tree of an attempt", &Show},
  };
  return kCommands;
}

}  // namespace temper::gateway
