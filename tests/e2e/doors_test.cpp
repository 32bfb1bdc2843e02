// The doors of docs/doors.md as a user types them: the binary, files in, lines out. What they compute is tested beside the parts;
// here it is that each is there, reads its options and answers in its documented form.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <set>

#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/job_process.h"
#include "tests/gateway/http_client.h"

namespace temper::e2e {
namespace {

const std::string kModel = std::string(TEMPER_SOURCE_DIR) + "/tests/golden/engine_files/tiny.gguf";

class Doors : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "temper_doors_XXXXXX";
    ASSERT_TRUE(mkdtemp(folder_.data()));
  }
  void TearDown() override { EXPECT_TRUE(RemoveAll(folder_).ok()); }
  std::string In(const std::string& text) {
    const std::string path = folder_ + "/in" + std::to_string(++files_);
    EXPECT_TRUE(WriteFile(path, text).ok());
    return path;
  }
  // The last line of what a good call prints.
  json::value Ask(const std::vector<std::string>& arguments) {
    std::string output;
    EXPECT_EQ(JobProcess::Door(arguments, &output), 0) << arguments[0] << " " << arguments[1] << ": " << output;
    auto value = ParseJson(Split(std::string(Trim(output)), '\n').back());
    EXPECT_TRUE(value.ok()) << output;
    return value.ok() ? *value : json::value(json::object());
  }
  std::string folder_;
  int files_ = 0;
};

// The README could name a command that is not there: `run` and `test` are the launcher's, the others the binary's.
TEST_F(Doors, ReadmeCommandsExist) {
  const std::string readme = *ReadFile(TEMPER_SOURCE_DIR "/README.md");
  std::set<std::string> named;
  for (size_t at = 0; (at = readme.find("./temper ", at)) != std::string::npos;) {
    at += 9;
    named.insert(readme.substr(at, readme.find_first_of("`\n", at) - at));
  }
  int seen = 0;
  for (const std::string& line : named) {
    const std::vector<std::string> words = Split(line, ' ');
    if (words[0] == "test") continue;
    std::string output;
    std::vector<std::string> call = {words[0]};
    const std::set<std::string> single = {"run", "top", "plot", "doctor"};
    if (!single.count(words[0])) call.push_back(words.at(1));
    call.push_back("--help");
    EXPECT_EQ(JobProcess::Door(call, &output), 0) << line << ": " << output;
    EXPECT_NE(output.find("usage: temper " + words[0]), std::string::npos) << line << ": " << output;
    ++seen;
  }
  EXPECT_GE(seen, 7);
}

// Help could start the work it is asked about, or be an error; a slip could build for minutes before it is named.
TEST_F(Doors, HelpWhereverItIsAskedFor) {
  std::string output;
  EXPECT_EQ(JobProcess::Door({"pool", "--help"}, &output), 0);
  EXPECT_NE(output.find("pool verify"), std::string::npos) << output;
  EXPECT_EQ(output.find("trajectory show"), std::string::npos) << output;
  EXPECT_EQ(JobProcess::Door({"pool"}, &output), 2);
  EXPECT_EQ(JobProcess::Door({"gateway", "try", kModel, "--help"}, &output), 0);
  EXPECT_EQ(output.rfind("usage: temper gateway try", 0), 0u) << output;
  EXPECT_EQ(JobProcess::Door({"pool", "nothing", "--help"}, &output), 2);
  // What follows `--` is another program's.
  EXPECT_EQ(JobProcess::Door({"sandbox", "run", "--", "ls", "--help"}, &output), 0) << output;
  EXPECT_NE(output.find("\"outcome\""), std::string::npos) << output;
  const std::string launcher = TEMPER_SOURCE_DIR "/temper";
  const auto launch = [&](const std::string& words) { return WEXITSTATUS(std::system(("timeout 20 " + launcher + " " + words + " > " + folder_ + "/said 2>&1").c_str())); };
  EXPECT_EQ(launch("test nonsense"), 2);
  EXPECT_NE(ReadFile(folder_ + "/said")->find("test: 'nonsense' is not understood"), std::string::npos);
  EXPECT_EQ(launch("test --help"), 0);
  EXPECT_EQ(ReadFile(folder_ + "/said")->rfind("usage: temper test", 0), 0u);
}

// What is no run says so, and a picture that could not be opened by its name is not drawn.
TEST_F(Doors, NoRunIsNamed) {
  std::string output;
  EXPECT_EQ(JobProcess::Door({"top", folder_}, &output), 2);
  EXPECT_NE(output.find(folder_ + ": no run"), std::string::npos) << output;
  for (const std::vector<std::string>& words : {std::vector<std::string>{"pool", "verify", folder_}, {"pool", "tasks", folder_},
                                                {"pool", "sim", "--ledger", folder_}}) {
    EXPECT_EQ(JobProcess::Door(words, &output), 2);
    EXPECT_NE(output.find(folder_ + ": no run"), std::string::npos) << output;
  }
  EXPECT_EQ(JobProcess::Door({"plot", folder_, "--out", folder_ + "/curve.png"}, &output), 2);
  EXPECT_NE(output.find("the picture is SVG"), std::string::npos) << output;
  EXPECT_EQ(JobProcess::Door({"engine", "score", "no-such-model", "--in", In("{\"ids\":[1,2]}\n")}, &output), 2);
  EXPECT_NE(output.find("nor models/no-such-model below /"), std::string::npos) << output;
}

// The picture could be missing, not be the one on standard output, or bad input be drawn as if it were nothing.
TEST_F(Doors, PlotDrawsFilesAndRefusesBadOnes) {
  const std::string lines = In(R"({"step":1,"reward_mean":0.25,"wall_s":10})" "\n" R"({"step":2,"reward_mean":0.5,"wall_s":20})" "\n");
  const std::string out = folder_ + "/curve.svg";
  std::string printed, output;
  EXPECT_EQ(JobProcess::Door({"plot", "theirs=" + lines, "--window", "2", "--out", out}, &output), 0) << output;
  EXPECT_EQ(output, "");
  EXPECT_EQ(JobProcess::Door({"plot", "theirs=" + lines, "--window=2"}, &printed), 0) << printed;
  EXPECT_EQ(ReadFile(out).value(), printed);
  EXPECT_NE(printed.find("theirs"), std::string::npos);
  EXPECT_NE(printed.find("class=\"mean\""), std::string::npos);
  const std::string bad = In(R"({"step":1,"reward":0.25,"s":10})" "\n");
  for (const auto& [arguments, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"plot", "theirs=" + bad}, bad + " line 1: no number \"reward_mean\""},
           {{"plot", folder_ + "/none"}, "no such run or file"},
           {{"plot", folder_}, "no run here"},
           {{"plot", "=" + lines}, "no name"},
           {{"plot", lines, "--window", "0"}, "from 1"},
           {{"plot", lines, "--wide"}, "unknown option --wide"},
           {{"plot"}, "usage: temper plot"}}) {
    EXPECT_EQ(JobProcess::Door(arguments, &output), 2) << message;
    EXPECT_NE(output.find(message), std::string::npos) << output;
  }
  EXPECT_EQ(JobProcess::Door({"plot", lines, "--out", folder_ + "/no/such/folder.svg"}, &output), 1) << output;
}

// A text could not come back from its ids, or a rendered prompt be encoded in another way than its tokens say.
TEST_F(Doors, TextGoesToIdsAndBack) {
  const std::string text = "hi ab 12\n";
  const json::value ids = Ask({"text", "encode", kModel, "--in", In(PrintJson(json::value(text)) + "\n")});
  EXPECT_EQ(Ask({"text", "decode", kModel, "--in", In(PrintJson(ids) + "\n")}).at("text").as_string(), text);
  const json::value rendered = Ask({"text", "render", kModel, "--tokens", "--in", In(R"({"messages":[{"role":"user","content":"hi"}]})")});
  EXPECT_EQ(Ask({"text", "encode", kModel, "--parse-special", "--in", In(PrintJson(rendered.at("text")) + "\n")}).at("ids"), rendered.at("ids"));
}

// An exported model could be another one, and what is drawn greedily be scored otherwise.
TEST_F(Doors, ModelsAreInspectedExportedScoredAndDrawnFrom) {
  EXPECT_EQ(Ask({"model", "inspect", kModel}).at("parameters").as_int64(), 78464);
  Ask({"model", "export", kModel, folder_ + "/exported"});
  const json::value drawn =
      Ask({"engine", "generate", kModel, "--in", In(R"({"ids":[3,4,5],"max_tokens":4,"temperature":0})")});
  ASSERT_EQ(drawn.at("ids").as_array().size(), 4u);
  json::array row = {3, 4, 5};
  for (const json::value& id : drawn.at("ids").as_array()) row.push_back(id);
  const std::string in = In(PrintJson(json::object{{"ids", row}}) + "\n");
  const json::value scored = Ask({"engine", "score", kModel, "--in", in});
  EXPECT_EQ(Ask({"engine", "score", folder_ + "/exported", "--in", in}), scored);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(scored.at("logprobs").at(3 + i), drawn.at("logprobs").at(i)) << i;
  // Drawn among few: what one door says was kept, the other scores to the same digits.
  const json::value few = Ask({"engine", "generate", kModel, "--in",
                               In(R"({"ids":[3,4,5],"max_tokens":30,"temperature":1,"top_k":40,"top_p":0.8,"min_p":0.01,"kept":true})")});
  json::array ids = {3, 4, 5}, kept = {nullptr, nullptr, nullptr};
  for (const json::value& id : few.at("ids").as_array()) ids.push_back(id);
  for (const json::value& set : few.at("kept").as_array()) kept.push_back(set);
  ASSERT_EQ(ids.size(), 33u);
  ASSERT_EQ(kept.size(), 33u);
  EXPECT_LE(kept[3].as_array().size(), 40u);
  const json::value again = Ask({"engine", "score", kModel, "--in", In(PrintJson(json::object{{"ids", ids}, {"kept", kept}}) + "\n")});
  for (size_t i = 0; i < 30; ++i) EXPECT_EQ(again.at("logprobs").at(3 + i), few.at("logprobs").at(i)) << i;
}

// A model could be called something it is not, its memory be another than what is allocated, or a part that is not supported go unnamed.
TEST_F(Doors, InspectSaysWhatAModelIsAndWhatIsNotSupported) {
  Ask({"model", "export", kModel, folder_ + "/exported"});
  for (const auto& [path, format] : {std::pair(kModel, "gguf"), {folder_ + "/exported", "safetensors"}}) {
    const json::value said = Ask({"model", "inspect", path});
    EXPECT_EQ(said.at("format"), format);
    EXPECT_EQ(said.at("architecture"), "llama");
    EXPECT_EQ(said.at("unsupported").as_array().size(), 0u);
    EXPECT_EQ(said.at("tensors").as_int64(), 20);
    int64_t elements = 0;
    for (const auto& type : said.at("types").as_object()) elements += type.value().at("elements").as_int64();
    EXPECT_EQ(elements, said.at("parameters").as_int64());
    EXPECT_EQ(said.at("tokenizer").at("kind"), "byte-level BPE");
    EXPECT_TRUE(said.at("chat_template").at("tool_format").is_string());
    const json::value& memory = said.at("memory");
    EXPECT_EQ(memory.at("master_weights_bytes").as_int64(), 4 * 78464);
    EXPECT_EQ(memory.at("optimizer_bytes").as_int64(), 8 * 78464);
    for (const char* profile : {"bf16", "f32"}) {
      const auto of = [&](const std::string& use) { return memory.at(use + "_" + profile).as_int64(); };
      // Two layers of two heads of 16 (keys padded to 32).
      EXPECT_EQ(of("kv_bytes_per_token"), 2 * 2 * (32 + 16) * (profile[0] == 'b' ? 2 : 4));
      EXPECT_LT(of("training_layers_again_bytes_per_token"), of("training_bytes_per_token"));
    }
  }
  const auto inspect = [&](const std::string& path, int code) {
    std::string output;
    EXPECT_EQ(JobProcess::Door({"model", "inspect", path}, &output), code) << output;
    auto value = ParseJson(Split(std::string(Trim(output)), '\n').back());
    return value.ok() ? *value : json::value(json::object{{"unsupported", json::array{output}}});
  };
  // A type of tensors that is not implemented, an architecture that is not, and a broken file.
  std::string bytes = *ReadFile(kModel);
  const size_t norm = bytes.find("blk.1.attn_q.weight");
  ASSERT_NE(norm, std::string::npos);
  bytes[norm + 19 + 4 + 2 * 8] = 10;  // after the name: two dimensions, then the type
  ASSERT_TRUE(WriteFile(folder_ + "/q2.gguf", bytes).ok());
  const json::value foreign = inspect(folder_ + "/q2.gguf", 1);
  ASSERT_EQ(foreign.at("unsupported").as_array().size(), 1u) << PrintJson(foreign);
  EXPECT_EQ(foreign.at("unsupported").at(0), "tensor type Q2_K (blk.1.attn_q.weight)");
  EXPECT_EQ(foreign.at("types").at("Q2_K").at("tensors").as_int64(), 1);
  EXPECT_TRUE(foreign.as_object().contains("tokenizer")) << "the rest is told";
  std::string config = *ReadFile(folder_ + "/exported/config.json");
  config.replace(config.find("\"llama\""), 7, "\"phi3\"");
  ASSERT_TRUE(WriteFile(folder_ + "/exported/config.json", config).ok());
  const json::value other = inspect(folder_ + "/exported", 1);
  EXPECT_EQ(other.at("architecture"), "phi3");
  ASSERT_EQ(other.at("unsupported").as_array().size(), 1u) << PrintJson(other);
  EXPECT_NE(std::string(other.at("unsupported").at(0).as_string()).find("phi3"), std::string::npos) << PrintJson(other);
  ASSERT_TRUE(WriteFile(folder_ + "/cut.gguf", bytes.substr(0, 600)).ok());
  const json::value broken = inspect(folder_ + "/cut.gguf", 2);
  EXPECT_NE(std::string(broken.at("unsupported").at(0).as_string()).find("cut.gguf"), std::string::npos) << PrintJson(broken);
}

// Doors of one family could call the same fault by other names, forget to say in which line it was, leave out good lines after a bad one,
// or end with another code: what docs/doors.md says of all of them, for each.
TEST_F(Doors, LinesExitCodesAndUsageAreTheSameEverywhere) {
  struct Door {
    std::vector<std::string> words;
    std::string good, bad;  // lines
    const char* field;      // of a good answer
  };
  const std::vector<Door> doors = {
      {{"text", "encode"}, "\"hi\"", "5", "ids"},
      {{"text", "decode"}, R"({"ids":[1,2]})", R"({"ids":[261]})", "text"},
      {{"text", "render"}, R"({"messages":[{"role":"user","content":"hi"}]})", R"({"messages":[],"mesages":[]})", "text"},
      {{"engine", "score"}, R"({"ids":[3,4]})", R"({"ids":[]})", "logprobs"},
      {{"engine", "generate"}, R"({"ids":[3,4],"max_tokens":2})", R"({"ids":[3,261]})", "finish"},
  };
  const auto call = [&](std::vector<std::string> words, const std::vector<std::string>& more, int code) {
    words.insert(words.end(), more.begin(), more.end());
    std::string output;
    EXPECT_EQ(JobProcess::Door(words, &output), code) << words[1] << ": " << output;
    return output;
  };
  for (const Door& door : doors) {
    SCOPED_TRACE(door.words[1]);
    const std::string in = In(door.good + "\n" + door.bad + "\nno json\n" + door.good + "\n");
    const std::vector<std::string> lines = Split(std::string(Trim(call(door.words, {kModel, "--in", in}, 1))), '\n');
    ASSERT_EQ(lines.size(), 4u) << Join(lines, "\n");
    for (size_t i = 0; i < 4; ++i) {
      const auto value = ParseJson(lines[i]);
      ASSERT_TRUE(value.ok()) << lines[i];
      const bool bad = i == 1 || i == 2;
      EXPECT_EQ(value->as_object().contains(door.field), !bad) << lines[i];
      if (!bad) continue;
      EXPECT_EQ(value->at("error").at("kind"), "invalid_argument") << lines[i];
      EXPECT_EQ(std::string(value->at("error").at("message").as_string()).rfind("line " + std::to_string(i + 1) + ": ", 0), 0u) << lines[i];
    }
    EXPECT_EQ(lines[0], lines[3]);
    call(door.words, {kModel, "--in", In(door.good + "\n")}, 0);
    const std::string none = folder_ + "/none";
    EXPECT_NE(call(door.words, {kModel, "--in", none}, 2).find(none), std::string::npos) << "the file is named";
    EXPECT_NE(call(door.words, {none, "--in", in}, 2).find(none), std::string::npos) << "the model is named";
    EXPECT_NE(call(door.words, {kModel}, 2).find("--in"), std::string::npos);
    EXPECT_NE(call(door.words, {kModel, "--in", in, "--wrong"}, 2).find("--wrong"), std::string::npos);
    if (door.words[0] != "engine") continue;
    for (const std::vector<std::string>& wrong : {std::vector<std::string>{"--cpu", "mmx"}, {"--threads", "0"}, {"--numerics", "f16"}}) {
      EXPECT_NE(call(door.words, {kModel, "--in", in, wrong[0], wrong[1]}, 2).find(wrong[0]), std::string::npos);
    }
    // A cap that is no lower than what f32 has is no error where the machine has it; the same numbers on every path.
    EXPECT_EQ(call(door.words, {kModel, "--in", in, "--cpu", "avx2", "--threads", "1"}, 1), call(door.words, {kModel, "--in", in}, 1));
  }
  // One line for all rows, and bad input is bad usage.
  const std::string gradient = folder_ + "/g.safetensors";
  const json::value grad = Ask({"engine", "grad", kModel, "--out", gradient, "--in", In(R"({"rows":[{"ids":[3,4,5],"coef":[9,1,1]}]})")});
  for (const char* field : {"objective", "logprobs", "logical_tokens", "tree_tokens", "peak_bytes", "seconds"}) {
    EXPECT_TRUE(grad.as_object().contains(field)) << field;
  }
  EXPECT_TRUE(grad.at("logprobs").at(0).at(0).is_null()) << "the first token has no logprob";
  EXPECT_TRUE(Exists(gradient));
  const std::string wrong = In(R"({"rows":[{"ids":[3,4,5],"coef":[1]}]})");
  EXPECT_NE(call({"engine", "grad"}, {kModel, "--out", gradient, "--in", wrong}, 2).find(wrong), std::string::npos);
  call({"engine", "grad"}, {kModel, "--in", wrong}, 2);
  // A program inherits what the one that starts it had resident: that is none of its own peak.
  const std::vector<char> resident(size_t{512} << 20, 1);
  const std::string row = In(R"({"rows":[{"ids":[3,4,5],"coef":[9,1,1]}]})");
  const json::value exact = Ask({"engine", "grad", kModel, "--numerics", "f64", "--out", gradient, "--in", row});
  EXPECT_GT(exact.at("peak_bytes").as_int64(), 1 << 20);
  EXPECT_LT(exact.at("peak_bytes").as_int64(), static_cast<int64_t>(resident.size()) / (2 * resident.back()));
  const std::string drawn = In(R"({"ids":[3],"max_tokens":1,"temperature":1})");
  call({"engine", "generate"}, {kModel, "--in", drawn, "--seed", "18446744073709551615"}, 0);
  for (const char* seed : {"18446744073709551616", "-1", "7x", ""}) {
    EXPECT_NE(call({"engine", "generate"}, {kModel, "--in", drawn, "--seed", seed}, 2).find("--seed"), std::string::npos) << seed;
  }
  for (const char* temperature : {"1e300", "1e-320", "-1"}) {
    const std::string in = In(std::string(R"({"ids":[3],"max_tokens":1,"temperature":)") + temperature + "}");
    const std::string said = call({"engine", "generate"}, {kModel, "--in", in}, 1);
    EXPECT_NE(said.find("expected a number from 1e-30 to 1e30"), std::string::npos) << said;
  }
  // Nothing is written over.
  EXPECT_NE(call({"model", "export"}, {kModel, TEMPER_SOURCE_DIR}, 2).find("no empty folder"), std::string::npos);
  call({"model", "inspect"}, {folder_ + "/none"}, 2);
  call({"model", "inspect"}, {}, 2);
}

// A script that fetches whatever model it is given would fail on one that lies there, or pass over one that does not.
TEST_F(Doors, FetchLeavesAPathAlone) {
  EXPECT_EQ(Ask({"model", "fetch", kModel}).at("path").as_string(), kModel);
  std::string output;
  EXPECT_EQ(JobProcess::Door({"model", "fetch", "no/such/model"}, &output), 2) << output;
  ASSERT_TRUE(WriteFile(folder_ + "/config.json", "{}").ok());
  EXPECT_EQ(JobProcess::Door({"model", "fetch", folder_}, &output), 2) << output;
}

// The examples that docs/algorithm_block.md gives could stay behind when the door changes.
TEST_F(Doors, TrainLossGivesTheDocumentedExample) {
  const std::string page = *ReadFile(TEMPER_SOURCE_DIR "/docs/algorithm_block.md");
  const size_t begin = page.find("{\"algorithm\"", page.find("Example 1 ("));
  ASSERT_NE(begin, std::string::npos);
  const json::value answer = Ask({"train", "loss", "--in", In(page.substr(begin, page.find('`', begin) - begin))});
  EXPECT_NEAR(answer.at("loss").to_number<double>(), 0.28, 1e-9);
  const std::vector<std::vector<double>> coef = {{-0.1, -0.22, -0.3}, {0, 0.14, 0.8}};
  for (size_t i = 0; i < 2; ++i) {
    for (size_t t = 0; t < 3; ++t) EXPECT_NEAR(answer.at("coef").at(0).at(i).at(t).to_number<double>(), coef[i][t], 1e-9);
  }
}

// The last line of the trace that docs/pool_sim.md writes out in full could differ from what the door prints.
TEST_F(Doors, PoolSimGivesTheDocumentedTrace) {
  const std::string page = *ReadFile(TEMPER_SOURCE_DIR "/docs/pool_sim.md");
  const size_t begin = page.find("{", page.find("**(c)"));
  const size_t last = page.find("\n{\"bound\"", begin);
  ASSERT_NE(last, std::string::npos);
  std::string script = page.substr(begin, page.find('\n', begin) - begin) + "\n{\"t\":1,\"event\":\"lease\"}\n";
  auto finish = [&](int t, int group, int rollout, int reward) {
    script += "{\"t\":" + std::to_string(t) + ",\"event\":\"finish\",\"group\":" + std::to_string(group) + ",\"rollout\":" +
              std::to_string(rollout) + ",\"outcome\":\"scored\",\"reward\":" + std::to_string(reward) + "}\n";
  };
  for (const auto& [t, group, first, second] : {std::array{2, 1, 1, 1}, {3, 2, 0, 1}, {4, 3, 1, 0}}) {
    finish(t, group, 0, first);
    finish(t, group, 1, second);
  }
  script += "{\"t\":11,\"event\":\"tick\"}\n{\"t\":12,\"event\":\"crash\",\"who\":\"trainer\"}\n";
  finish(12, 4, 0, 1);
  finish(12, 4, 1, 0);
  script += "{\"t\":13,\"event\":\"lease\"}\n{\"t\":14,\"event\":\"update\",\"batch\":0}\n{\"t\":14,\"event\":\"commit\",\"step\":1}\n";
  EXPECT_EQ(PrintJson(Ask({"pool", "sim", "--in", In(script)})), PrintJson(*ParseJson(page.substr(last + 1, page.find('\n', last + 1) - last - 1))));
}

// An agent that is tried by hand could find no server at the printed address, or Ctrl-C not end it.
TEST_F(Doors, GatewayTryServesUntilCtrlC) {
  int out[2];
  ASSERT_EQ(pipe(out), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a failed test leaves no server
    dup2(out[1], 1);
    close(out[0]);
    execl(TEMPER_BUILD_DIR "/temper", "temper", "gateway", "try", kModel.c_str(), "--threads", "1", nullptr);
    _exit(127);
  }
  close(out[1]);
  std::string line;
  for (char c; read(out[0], &c, 1) == 1 && c != '\n';) line += c;
  auto printed = ParseJson(line);
  ASSERT_TRUE(printed.ok()) << line;
  const std::string base(printed->at("base_url").as_string()), key(printed->at("api_key").as_string());
  int64_t port = 0;
  ASSERT_TRUE(base.ends_with("/v1") && ParseInt(base.substr(base.rfind(':') + 1, base.size() - 3 - base.rfind(':') - 1), &port)) << base;
  auto ask = [&](const std::string& method, const std::string& path, const std::string& body) {
    auto value = ParseJson(gateway::Exchange(static_cast<int>(port), method, "/v1" + path, key, body).body);
    EXPECT_TRUE(value.ok()) << path;
    return value.ok() ? *value : json::value(json::object());
  };
  EXPECT_EQ(ask("GET", "/models", "").at("data").at(0).at("object"), "model");
  const std::string body = R"({"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5})";
  const json::value answer = ask("POST", "/chat/completions", body);
  EXPECT_LE(answer.at("usage").at("completion_tokens").as_int64(), 5);
  EXPECT_EQ(answer.at("choices").at(0).at("message").at("role"), "assistant");
  kill(pid, SIGINT);
  int status = -1;
  for (int i = 0; i < 500 && waitpid(pid, &status, WNOHANG) == 0; ++i) usleep(20000);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  if (status == -1) kill(pid, SIGKILL);
  close(out[0]);
}

// The example agents run what a policy says: outside a sandbox they must refuse, before they ask anybody anything.
TEST_F(Doors, ExampleAgentsRefuseToRunOutsideASandbox) {
  const std::vector<std::string> commands = {std::string(TEMPER_BUILD_DIR) + "/terminal-agent",
                                             "python3 " + std::string(TEMPER_SOURCE_DIR) + "/examples/agents/terminal_agent.py"};
  for (const std::string& command : commands) {
    FILE* pipe = popen(("env -u TEMPER_TOOL_EXEC " + command + " 2>&1").c_str(), "r");
    ASSERT_TRUE(pipe);
    std::string said;
    for (int c; (c = fgetc(pipe)) != EOF;) said += static_cast<char>(c);
    const int status = pclose(pipe);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << command << ": " << status;
    EXPECT_NE(said.find("TEMPER_TOOL_EXEC is not set"), std::string::npos) << said;
  }
}

}  // namespace
}  // namespace temper::e2e
