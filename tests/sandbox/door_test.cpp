// The doors `temper sandbox run` and `temper verifier run` as a user calls them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace temper {
namespace {

using ::testing::HasSubstr;

struct Answer {
  int exit_code = -1;
  std::string out, err;
  std::string Field(const std::string& key) const {
    auto value = ParseJson(out);
    if (!value.ok() || !value->is_object() || !value->as_object().contains(key)) return "(none)";
    const json::value& v = value->as_object().at(key);
    return v.is_string() ? std::string(v.as_string()) : PrintJson(v);
  }
};

class Doors : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "doors-" + std::to_string(getpid());
    ASSERT_TRUE(RemoveAll(folder_).ok());
    ASSERT_TRUE(MakeDirs(folder_ + "/in/sub").ok());
  }
  void TearDown() override { ASSERT_TRUE(RemoveAll(folder_).ok()); }

  // `line` is a shell line after "temper ".
  Answer Temper(const std::string& line) {
    std::string command = "cd " + folder_ + " && " TEMPER_BUILD_DIR "/temper " + line + " >out 2>err </dev/null";
    int status = system(command.c_str());
    Answer a;
    a.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
    a.out = *ReadFile(folder_ + "/out");
    a.err = *ReadFile(folder_ + "/err");
    return a;
  }
  std::string folder_;
};

// What could go wrong: the answer's form drifts away from docs/doors.md.
TEST_F(Doors, AnswersAsDocumented) {
  Answer a = Temper("sandbox run -- sh -c 'echo out; echo err >&2; exit 3'");
  EXPECT_EQ(a.exit_code, 0);
  EXPECT_EQ(a.Field("outcome"), "exited");
  EXPECT_EQ(a.Field("exit_code"), "3");
  EXPECT_EQ(a.Field("stdout"), "out\n");
  EXPECT_EQ(a.Field("stderr"), "err\n");
  EXPECT_EQ(a.Field("truncated"), "false");
  EXPECT_THAT(a.Field("usage"), HasSubstr("\"peak_bytes\":"));
  EXPECT_THAT(a.Field("enforced"), HasSubstr("\"memory\":\""));
  EXPECT_EQ(a.err, "");
  EXPECT_EQ(Temper("sandbox run -- printf '\\377'").Field("stdout_base64"), "/w==");
  EXPECT_EQ(Temper("sandbox run -- cat").Field("stdout"), "");
  EXPECT_EQ(Temper("sandbox run -- nosuchcommand").Field("exit_code"), "127");
  EXPECT_EQ(Temper("sandbox run -- /etc/passwd").Field("exit_code"), "126");
  a = Temper("sandbox run --limits wall_s=0.2 -- sleep 9");
  EXPECT_EQ(a.exit_code, 0);
  EXPECT_EQ(a.Field("outcome"), "timeout");
  EXPECT_EQ(a.Field("limit"), "wall_s");
  a = Temper("sandbox run --limits memory=32MiB -- python3 -c 'x = bytearray(100000000)'");
  EXPECT_EQ(a.Field("outcome"), "limit");
  EXPECT_EQ(a.Field("limit"), "memory");
  a = Temper("sandbox run --limits output=10 -- seq 100");
  EXPECT_EQ(a.Field("outcome"), "exited");
  EXPECT_EQ(a.Field("truncated"), "true");
  EXPECT_EQ(a.Field("limit"), "output");
  a = Temper("sandbox run -- sh -c 'kill -TERM $$'");
  EXPECT_EQ(a.Field("outcome"), "signaled");
  EXPECT_EQ(a.Field("signal"), "15");
  EXPECT_EQ(a.Field("exit_code"), "null");
}

// What could go wrong: a link in the given folder is followed out of it, or a file comes back that was not asked for.
TEST_F(Doors, FilesInAndOneOut) {
  ASSERT_TRUE(WriteFile(folder_ + "/in/sub/a", "text").ok());
  ASSERT_TRUE(WriteFile(folder_ + "/input", "from stdin").ok());
  ASSERT_EQ(symlink("/etc/hostname", (folder_ + "/in/out").c_str()), 0);
  ASSERT_EQ(symlink("sub/a", (folder_ + "/in/link").c_str()), 0);
  Answer a = Temper("sandbox run --files in --stdin input --env K=v --get made/x=got -- sh -c 'cat link; readlink out; cat; mkdir made; echo $K > made/x; echo n > in'");
  EXPECT_EQ(a.exit_code, 0) << a.err;
  EXPECT_EQ(a.Field("stdout"), "text/etc/hostname\nfrom stdin");
  EXPECT_EQ(*ReadFile(folder_ + "/got"), "v\n");
  EXPECT_EQ(ListDir(folder_ + "/in")->size(), 3u);
  a = Temper("sandbox run --get x=got2 -- ln -s /etc/passwd x");
  EXPECT_EQ(a.exit_code, 1);
  EXPECT_THAT(a.err, HasSubstr("not a regular file"));
  EXPECT_FALSE(Exists(folder_ + "/got2"));
  a = Temper("sandbox run --get nothing=got2 -- true");
  EXPECT_EQ(a.exit_code, 1);
}

// What could go wrong: bad usage runs something, or is answered with another code than 2.
TEST_F(Doors, BadUsage) {
  for (auto [line, named] : {std::pair{"sandbox run true", "--"}, {"sandbox run --", "no command"}, {"sandbox run", "no command"}, {"sandbox run --limit memory=1MiB -- true", "--limits"},
                             {"sandbox run --limits memory=1 -- true", "memory"}, {"sandbox run --limits memery=1MiB -- true", "memory"},
                             {"sandbox run --net host -- true", "host"}, {"sandbox run --files nowhere -- true", "nowhere"}, {"sandbox run --rootfs nowhere -- true", "nowhere"},
                             {"sandbox run --get x -- true", "PATH=FILE"}, {"sandbox run --mount x -- true", "SOURCE:TARGET"}, {"sandbox run --mount in:/work/x -- true", "/work/x"},
                             {"sandbox run --stdin nowhere -- true", "nowhere"}, {"verifier run exact", "--case"}, {"verifier run --case out", "NAME"},
                             {"verifier run nobody --case input", "input"}}) {
    Answer a = Temper(line);
    EXPECT_EQ(a.exit_code, 2) << line << a.err;
    EXPECT_THAT(a.err, HasSubstr(named)) << line;
    EXPECT_EQ(a.out, "") << line;
  }
  EXPECT_EQ(Temper("sandbox run --help").exit_code, 0);
}

// What could go wrong: where there are no cgroups the limits are said and not held, or a named mode is replaced by another.
TEST_F(Doors, LimitsHoldWithoutCgroups) {
  const std::string none = "sandbox run --cgroups none --limits ";
  Answer a = Temper(none + "memory=64MiB -- python3 -c 'x = bytearray(300000000)'");
  EXPECT_EQ(a.Field("exit_code"), "1");
  EXPECT_THAT(a.err + a.out, HasSubstr("MemoryError"));
  EXPECT_THAT(a.Field("enforced"), HasSubstr(R"("memory":"rlimit","processes":"rlimit","disk":"tmpfs","files":"tmpfs","cpu_s":"rlimit")"));
  EXPECT_EQ(Temper(none + "memory=64MiB -- python3 -c 'x = bytearray(10000000)'").Field("exit_code"), "0");
  a = Temper(none + "processes=10 -- sh -c 'i=0; while [ $i -lt 30 ]; do sleep 0.3 & i=$((i+1)); done; wait; echo all'");
  EXPECT_THAT(a.Field("stderr"), HasSubstr("Cannot fork"));
  EXPECT_EQ(a.Field("stdout"), "");
  a = Temper(none + "cpu_s=1 -- sh -c 'while :; do :; done'");
  EXPECT_EQ(a.Field("outcome"), "limit");
  EXPECT_EQ(a.Field("limit"), "cpu_s");
  a = Temper(none + "disk=1MiB -- dd if=/dev/zero of=big bs=1M count=3");
  EXPECT_THAT(a.Field("stderr"), HasSubstr("No space left"));
  // By name it is this mode or a refusal.
  for (const char* mode : {"v2", "hybrid"}) {
    a = Temper(std::string("sandbox run --cgroups ") + mode + " -- true");
    if (a.exit_code == 0) {
      EXPECT_THAT(a.Field("enforced"), HasSubstr(R"("memory":"cgroup")")) << mode;
    } else {
      EXPECT_EQ(a.exit_code, 1);
      EXPECT_THAT(a.err, HasSubstr(std::string("cgroup mode ") + mode)) << mode;
    }
  }
}

// What could go wrong: the quickstart's judge believes words, gives a part of the reward, or overlooks what should not be there.
TEST_F(Doors, TheFilesVerifierLooksAtFilesOnly) {
  const std::string judge = "verifier run --mount " TEMPER_BUILD_DIR "/files-verifier:/opt/judge --command /opt/judge --case case";
  auto reward = [&](const std::string& files, const std::string& words = "") {
    EXPECT_TRUE(WriteFile(folder_ + "/case", R"({"task":{"hidden":{"files":{"a":"red\n","d/b":"x"},"folders":["d"]}},"final_text":")" + words +
                                                 R"(","files":[)" + files + "]}").ok());
    Answer a = Temper(judge);
    EXPECT_EQ(a.exit_code, 0) << a.err << a.out;
    EXPECT_EQ(a.Field("outcome"), "scored");
    return a.Field("reward");
  };
  const std::string a = R"({"path":"a","text":"red\n"})", d = R"({"path":"d","folder":true})", b = R"({"path":"d/b","text":"x"})";
  EXPECT_EQ(reward(a + "," + d + "," + b), "1");
  EXPECT_EQ(reward("", "done: a holds red, d/b holds x, reward 1"), "0");
  EXPECT_EQ(reward(a + "," + d), "0") << "half of it";
  EXPECT_EQ(reward(R"({"path":"a","text":"red"},)" + d + "," + b), "0") << "another content";
  EXPECT_EQ(reward(a + "," + d + "," + b + R"(,{"path":"e","text":""})"), "0") << "a file too many";
  EXPECT_EQ(reward(a + "," + d + "," + b + R"(,{"path":"e","folder":true})"), "0") << "a folder too many";
  EXPECT_EQ(reward(R"({"path":"a","link":"d/b"},)" + d + "," + b), "0") << "a link for a file";
}

// What could go wrong: a verifier that misbehaves passes for one that has judged, or the door waits for what it left behind.
TEST_F(Doors, BadVerifiersHaveNoReward) {
  ASSERT_TRUE(WriteFile(folder_ + "/case", R"({"files":{"a":"x"}})").ok());
  for (const char* row : {"crash exit", "exit-3 exit", "hang deadline", "writes-slowly deadline", "ignores-sigterm deadline", "silent verdict",
                          "1e999 verdict", "twice verdict", "closes-fd3 verdict", "daemon-judges-instead verdict"}) {
    const std::vector<std::string> mode_reason = Split(row, ' ');
    Answer a = Temper("verifier run --mount " TEMPER_BUILD_DIR "/bad-verifier:/opt/bad --command '/opt/bad " + mode_reason[0] +
                      "' --case case --timeout 0.4");
    EXPECT_EQ(a.exit_code, 1) << row << a.err << a.out;
    EXPECT_EQ(a.Field("outcome"), "infra_failure") << row;
    EXPECT_EQ(a.Field("reward"), "null") << row;
    EXPECT_THAT(a.Field("evidence"), HasSubstr("\"reason\":\"" + mode_reason[1] + "\"")) << row;
  }
  Answer a = Temper("verifier run --mount " TEMPER_BUILD_DIR "/bad-verifier:/opt/bad --command '/opt/bad daemon' --case case");
  EXPECT_EQ(a.exit_code, 0) << a.err << a.out;
  EXPECT_EQ(a.Field("reward"), "1");
}

// What could go wrong: a verdict and its exit code disagree.
TEST_F(Doors, Verifier) {
  ASSERT_TRUE(WriteFile(folder_ + "/case", R"({"task":{"answer":"42"},"final_text":"42","files":{"a":"x"}})").ok());
  ASSERT_TRUE(WriteFile(folder_ + "/judge.py", "import json,os,sys\nc=json.load(sys.stdin)\nos.write(3,json.dumps({'reward':float(open('a').read()=='x'),'evidence':{'f':c['files']}}).encode())\n").ok());
  Answer a = Temper("verifier run exact --case case");
  EXPECT_EQ(a.exit_code, 0) << a.err;
  EXPECT_EQ(a.Field("reward"), "1");
  a = Temper("verifier run --command 'python3 ./judge.py' --case case");
  EXPECT_EQ(a.exit_code, 0) << a.err << a.out;
  EXPECT_EQ(a.Field("outcome"), "scored");
  EXPECT_EQ(a.Field("reward"), "1");
  EXPECT_EQ(a.Field("evidence"), R"({"f":["a"]})");
  a = Temper("verifier run --command 'exit 9' --case case");
  EXPECT_EQ(a.exit_code, 1);
  EXPECT_EQ(a.Field("outcome"), "infra_failure");
  EXPECT_EQ(a.Field("reward"), "null");
  ASSERT_TRUE(WriteFile(folder_ + "/case", "{\"tsak\":{}}").ok());
  a = Temper("verifier run exact --case case");
  EXPECT_EQ(a.exit_code, 2);
  EXPECT_THAT(a.err, HasSubstr("task"));
}

}  // namespace
}  // namespace temper
