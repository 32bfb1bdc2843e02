// The sandbox service with real sandboxes. The contract tests run on the local object and over gRPC; the others on the local.
// Attempts to break out are in attempts_test.cpp.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <thread>

#include "common/clock.h"
#include "common/rpc.h"
#include "sandbox/janitor.h"
#include "sandbox/server.h"
#include "sandbox/service.h"
#include "tests/sandbox/live_sandbox.h"

namespace temper::sandbox {
namespace {

using ::testing::HasSubstr;

// One janitor for the binary, forked before gRPC has any thread.
class JanitorEnvironment : public ::testing::Environment {
 public:
  void SetUp() override {
    JanitorOptions options;
    options.init_path = TEMPER_BUILD_DIR "/temper-sandbox-init";
    auto janitor = ForkJanitor(options);
    ASSERT_TRUE(janitor.ok()) << janitor.status().ToString();
    janitor_ = std::make_unique<Janitor>(std::move(*janitor));
  }
  void TearDown() override { janitor_.reset(); }
  static Janitor& Get() { return *janitor_; }

 private:
  static std::unique_ptr<Janitor> janitor_;
};
std::unique_ptr<Janitor> JanitorEnvironment::janitor_;
const auto* const kEnvironment = ::testing::AddGlobalTestEnvironment(new JanitorEnvironment);

ServiceOptions OptionsHere() {
  ServiceOptions o;
  o.janitor_fd = JanitorEnvironment::Get().service_fd();
  return o;
}

// --- contract: both forms of the interface ---

struct LocalForm {
  LocalForm() {
    auto started = LocalSandboxService::Start(OptionsHere());
    EXPECT_TRUE(started.ok()) << started.status().ToString();
    service = std::move(*started);
  }
  SandboxService& get() { return *service; }
  std::unique_ptr<LocalSandboxService> service;
};

struct RemoteForm {
  RemoteForm() {
    static std::atomic<int> number{0};
    std::string name = "temper-sandbox-test-" + std::to_string(getpid()) + "-" + std::to_string(number++);
    auto fd = ListenAbstract(name);
    EXPECT_TRUE(fd.ok()) << fd.status().ToString();
    ServerOptions o;
    o.listen_fd = fd->Release();
    o.service = OptionsHere();
    server = std::make_unique<Server>(o);
    Status started = server->Start();
    EXPECT_TRUE(started.ok()) << started.ToString();
    client = ConnectSandboxService("unix-abstract:" + name);
  }
  ~RemoteForm() { server->Stop(); }
  SandboxService& get() { return *client; }
  std::unique_ptr<Server> server;
  std::unique_ptr<SandboxService> client;
};

template <typename Form>
class Contract : public ::testing::Test {
 protected:
  Form form_;
  SandboxService& s() { return form_.get(); }
};
using Forms = ::testing::Types<LocalForm, RemoteForm>;
TYPED_TEST_SUITE(Contract, Forms);

// What could go wrong: a field is lost on the way in or out.
TYPED_TEST(Contract, FilesInCommandFilesOut) {
  CreateRequest q = Request();
  q.files = {{"d/in.txt", "hello", 0640, File::Kind::kRegular},
             {"link", "d/in.txt", 0777, File::Kind::kLink},
             {"empty", "", 0750, File::Kind::kFolder},
             {"odd \n\xff", std::string("\0\1", 2), 0600, File::Kind::kRegular}};
  auto info = this->s().Create(q);
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(info->id, "a");
  EXPECT_THAT(info->enforced.memory, ::testing::AnyOf("cgroup", "rlimit"));
  EXPECT_EQ(info->enforced.disk, "tmpfs");

  ExecRequest e = Sh("cat link - > out; pwd; echo \"$X\" >&2; printf verdict >&3; exit 7");
  e.stdin_bytes = " world";
  e.env = {{"X", "y z"}};
  e.capture_fd3 = true;
  e.cwd = "/work/d/..";
  auto r = this->s().Exec(e);
  ASSERT_TRUE(r.ok()) << r.status().ToString();
  EXPECT_EQ(r->outcome, ExecOutcome::kExited) << r->message;
  EXPECT_EQ(r->exit_code, 7);
  EXPECT_EQ(r->out.bytes, "/work\n");
  EXPECT_EQ(r->err.bytes, "y z\n");
  EXPECT_EQ(r->fd3, "verdict");
  EXPECT_EQ(r->limit, "");
  EXPECT_GT(r->usage.wall_s, 0);
  EXPECT_GT(r->usage.cpu_s, 0);
  EXPECT_GT(r->usage.peak_bytes, 0);

  auto files = this->s().Export("a", {});
  ASSERT_TRUE(files.ok()) << files.status().ToString();
  std::vector<std::string> paths;
  for (const File& f : *files) paths.push_back(f.path);
  EXPECT_EQ(paths, (std::vector<std::string>{"d", "d/in.txt", "empty", "link", "odd \n\xff", "out"}));
  for (const File& f : *files) {
    if (f.path == "out") {
      EXPECT_EQ(f.bytes, "hello world");
    }
    if (f.path == "link") {
      EXPECT_EQ(f.bytes, "d/in.txt");
    }
    if (f.path == "d/in.txt") {
      EXPECT_EQ(f.mode, 0640u);
    }
    if (f.path == "empty") {
      EXPECT_EQ(f.mode, 0750u);
    }
  }
  auto one = this->s().Export("a", {"d/in.txt"});
  ASSERT_TRUE(one.ok());
  ASSERT_EQ(one->size(), 1u);
  EXPECT_EQ((*one)[0].bytes, "hello");
  EXPECT_EQ(this->s().Export("a", {"nothing"}).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(this->s().Export("a", {"", 3, 100}).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(this->s().Export("a", {"", 1000, 3}).status().code(), StatusCode::kResourceExhausted);
}

// What could go wrong: an id is lost, doubled, or destroyed twice with an error.
TYPED_TEST(Contract, Lifecycle) {
  ASSERT_TRUE(this->s().Create(Request("x")).ok());
  EXPECT_EQ(this->s().Create(Request("x")).status().code(), StatusCode::kAlreadyExists);
  ASSERT_TRUE(this->s().Create(Request("y")).ok());
  auto all = this->s().List();
  ASSERT_TRUE(all.ok());
  ASSERT_EQ(all->size(), 2u);
  EXPECT_EQ((*all)[0].id, "x");
  EXPECT_GT((*all)[0].ttl_left_s, 500);
  EXPECT_TRUE(this->s().Renew("x", 5).ok());
  EXPECT_LT(this->s().List()->at(0).ttl_left_s, 5.1);
  EXPECT_EQ(this->s().Renew("z", 5).code(), StatusCode::kNotFound);
  EXPECT_TRUE(this->s().Destroy("x").ok());
  EXPECT_TRUE(this->s().Destroy("x").ok());
  EXPECT_EQ(this->s().Exec(Sh("true", Role::kAgent, "x")).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(this->s().Export("x", {}).status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(this->s().Create(Request("x")).ok());  // the id is free again
}

// What could go wrong: a request that can never work is tried, or leaves a half-made sandbox.
TYPED_TEST(Contract, ImpossibleRequestsAreNamed) {
  auto refused = [&](CreateRequest q, const std::string& named) {
    auto r = this->s().Create(q);
    EXPECT_EQ(r.status().code(), StatusCode::kInvalidArgument) << r.status().ToString();
    EXPECT_THAT(r.status().message(), HasSubstr(named));
  };
  CreateRequest q = Request();
  q.id = "a/b";
  refused(q, "id");
  q = Request();
  q.limits.processes = 0;
  refused(q, "processes");
  q = Request();
  q.ttl_s = -1;
  refused(q, "ttl_s");
  q = Request();
  q.rootfs = "/nowhere";
  refused(q, "/nowhere");
  q = Request();
  q.mounts = {{"/nowhere", "/opt/x"}};
  refused(q, "/nowhere");
  for (const char* target : {"/work/x", "/proc", "/opt/../etc", "relative", "/dev/null", "/"}) {
    q = Request();
    q.mounts = {{"/usr", target}};
    refused(q, "target");
  }
  for (const char* path : {"../x", "/etc/x", "a/./b", "", "a//b"}) {
    q = Request();
    q.files = {{path, "x"}};
    refused(q, "path");
  }
  q = Request();
  q.files = {{"out", "/etc", 0777, File::Kind::kLink}, {"out/passwd", "x"}};
  refused(q, "link");
  q = Request();
  q.relay = true;  // this service was given no gateway
  refused(q, "gateway");
  EXPECT_TRUE(this->s().List()->empty());

  ASSERT_TRUE(this->s().Create(Request()).ok());
  ExecRequest e = Sh("true");
  e.argv.clear();
  EXPECT_EQ(this->s().Exec(e).status().code(), StatusCode::kInvalidArgument);
  e = Sh("true");
  e.env = {{"A=B", "x"}};
  EXPECT_EQ(this->s().Exec(e).status().code(), StatusCode::kInvalidArgument);
}

// What could go wrong: a call over the wire holds a thread, and the second waits for the first.
TYPED_TEST(Contract, ManyCommandsAtOnce) {
  ASSERT_TRUE(this->s().Create(Request()).ok());
  double start = SystemClock::Get().NowS();
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int i = 0; i < 24; ++i) {
    threads.emplace_back([&] {
      auto r = this->s().Exec(Sh("sleep 0.5"));
      good += r.ok() && r->outcome == ExecOutcome::kExited && r->exit_code == 0;
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(good, 24);
  EXPECT_LT(SystemClock::Get().NowS() - start, 6);  // one after another: 12 s
}

// --- the rest on the local object ---

class Sandbox : public SandboxTest {
 protected:
  void Start(const CreateRequest& q, const ServiceOptions& o = OptionsHere()) { StartService(q, o); }
};

// What could go wrong: a timeout kills the shell and leaves its daemons.
TEST_F(Sandbox, TimeoutKillsDaemonsToo) {
  Start(Request());
  ExecRequest e = Sh("setsid sh -c 'while :; do date +%s%N >> tick; sleep 0.02; done' & sleep 60", Role::kTool);
  e.timeout_s = 0.4;
  ExecResult r = Run(e);
  EXPECT_EQ(r.outcome, ExecOutcome::kTimeout);
  EXPECT_EQ(r.limit, "wall_s");
  EXPECT_LT(r.usage.wall_s, 2);
  std::string a = Run("cat tick").out.bytes, b = Run("sleep 0.2; cat tick").out.bytes;
  EXPECT_FALSE(a.empty());
  EXPECT_EQ(a, b);
}

// What could go wrong: memory over the limit harms the host, or looks like a crash of the command.
TEST_F(Sandbox, MemoryBomb) {
  CreateRequest q = Request();
  q.limits.memory_bytes = 48 << 20;
  Start(q);
  ExecResult r = Python("x = bytearray(300 << 20)");
  EXPECT_EQ(r.outcome, ExecOutcome::kLimit);
  EXPECT_EQ(r.limit, "memory");
  EXPECT_LE(r.usage.peak_bytes, 48 << 20);
  r = Run("python3 -c 'x = bytearray(300 << 20)'; echo lived");
  EXPECT_EQ(r.outcome, ExecOutcome::kExited);  // hit, not ended by
  EXPECT_EQ(r.limit, "memory");
  EXPECT_EQ(r.out.bytes, "lived\n");
  r = Run("true");
  EXPECT_EQ(r.limit, "");  // it belongs to the command that met it
}

// What could go wrong: the tool's memory bomb takes the agent with it.
TEST_F(Sandbox, ToolIsTakenBeforeTheAgent) {
  CreateRequest q = Request();
  q.limits.memory_bytes = 64 << 20;
  Start(q);
  ExecResult r = Python(
      "import os, subprocess\n"
      "x = bytearray(30 << 20)\n"  // larger than what the tool gets to
      "p = subprocess.run([os.environ['TEMPER_TOOL_EXEC'], 'python3', '-c', 'import time\\nl=[]\\nfor i in range(200): l.append(bytearray(1<<20))'])\n"
      "print('agent lives', p.returncode)");
  EXPECT_EQ(r.outcome, ExecOutcome::kExited) << r.err.bytes;
  EXPECT_EQ(r.out.bytes, "agent lives 137\n");
}

// What could go wrong: a background writer keeps a finished command's streams open and the call never returns.
TEST_F(Sandbox, DaemonDoesNotHoldTheCall) {
  Start(Request());
  double start = SystemClock::Get().NowS();
  ExecResult r = Run("sleep 30 & echo done");
  EXPECT_EQ(r.outcome, ExecOutcome::kExited);
  EXPECT_EQ(r.out.bytes, "done\n");
  EXPECT_LT(SystemClock::Get().NowS() - start, 5);
  EXPECT_THAT(Run("ps ax").out.bytes, HasSubstr("sleep 30"));  // it lives on until the sandbox goes
}

// What could go wrong: a tool command kills the agent that runs it, or the sandbox's init.
TEST_F(Sandbox, ToolCannotKillTheAgent) {
  Start(Request());
  std::promise<Result<ExecResult>> agent;
  ExecRequest e = Sh("echo $$ > pid; sleep 0.7; echo survived");
  e.env = {{"AGENT_KEY", "sesame"}};
  service_->ExecAsync(e, [&](Result<ExecResult> r) { agent.set_value(std::move(r)); });
  ExecResult tool = Run(
      "while ! [ -s pid ]; do sleep 0.01; done; kill -9 $(cat pid); kill -9 1; kill -STOP 1; cat /proc/*/environ | tr '\\0' '\\n';"
      "ls -d /proc/$(cat pid) /proc/1 && echo SEEN; $TEMPER_TOOL_EXEC true; [ $? = 125 ] || echo TAKEN; for p in 2 3 4 5 6 7 8 9 10 11 12; do [ $p = $$ ] || kill -9 $p; done 2>/dev/null; kill -9 -1; echo tool lives",
      Role::kTool);
  EXPECT_EQ(tool.outcome, ExecOutcome::kExited);
  EXPECT_THAT(tool.out.bytes, HasSubstr("tool lives"));
  EXPECT_THAT(tool.out.bytes, ::testing::Not(::testing::AnyOf(HasSubstr("sesame"), HasSubstr("SEEN"), HasSubstr("TAKEN"))));
  auto r = agent.get_future().get();
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->outcome, ExecOutcome::kExited);
  EXPECT_EQ(r->out.bytes, "survived\n");
}

// What could go wrong: the way by which an agent runs a tool loses streams, codes, users, or the agent's key.
TEST_F(Sandbox, AgentRunsToolCommands) {
  Start(Request());
  ExecRequest e = Sh(
      "T=$TEMPER_TOOL_EXEC\n"
      "echo in | $T sh -c 'cat; id -un; pwd; echo err >&2; exit 5'; echo code $?\n"
      "$T sh -c 'kill -9 $$'; echo code $?\n"
      "$T --timeout 0.3 sleep 9; echo code $?\n"
      "$T nosuchcommand; echo code $?\n"
      "$T --env A=b env | grep -E '^(A|KEY)='; echo code $?\n"
      "$T sh -c 'echo tool > made'; echo agent >> made && $T cat made; $T sh -c 'rm made' && ls\n"
      "$T --bad; echo code $?");
  e.env = {{"KEY", "secret"}};
  ExecResult r = Run(e);
  EXPECT_EQ(r.out.bytes,
            "in\ntool\n/work\ncode 5\ncode 137\ncode 124\ncode 127\nA=b\ncode 0\ntool\nagent\ncode 125\n");
  EXPECT_THAT(r.err.bytes, HasSubstr("err\n"));
}

// What could go wrong: a tool that its agent gave up on runs on.
TEST_F(Sandbox, ToolDiesWithItsClient) {
  Start(Request());
  ExecResult r = Run(
      "$TEMPER_TOOL_EXEC --timeout 0.2 sh -c 'while :; do date +%N >> tick; sleep 0.02; done'\n"
      "$TEMPER_TOOL_EXEC sh -c 'while :; do date +%N >> tock; sleep 0.02; done' & sleep 0.2; kill -9 $!\n"
      "sleep 0.1; cp tick tick1; cp tock tock1; sleep 0.2; cmp tick tick1 && cmp tock tock1 && [ -s tick ] && [ -s tock ] && echo still");
  EXPECT_EQ(r.out.bytes, "still\n") << r.err.bytes;
}

// What could go wrong: bytes on the tool channel crash the sandbox's init.
TEST_F(Sandbox, ToolChannelTakesNoRubbish) {
  Start(Request());
  ExecResult r = Python(
      "import socket, os, random, array, struct\n"
      "random.seed(5)\n"
      "def send(payload, msg, fds=4, size=None):\n"
      "  s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
      "  s.connect('\\0temper-tool')\n"
      "  m = os.memfd_create('x'); os.write(m, payload)\n"
      "  if size is not None: os.ftruncate(m, size)\n"
      "  try: s.sendmsg([msg], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [m, 1, 1, 2, 1, 1, 1][:fds]))] if fds else [])\n"
      "  except BrokenPipeError: pass\n"
      "  s.settimeout(5)\n"
      "  try: s.recv(100)\n"
      "  except ConnectionError: pass\n"
      "  os.close(m); s.close()\n"
      "good = struct.pack('<IIiIQ', 4, 0, 0, 0, 0)\n"
      "body = struct.pack('<II', 0x31545354, 1) + struct.pack('<I', 4) + b'true\\0' + struct.pack('<I', 0)\n"
      "for i in range(150):\n"
      "  b = bytearray(body)\n"
      "  for _ in range(random.randrange(1, 4)): b[random.randrange(len(b))] = random.randrange(256)\n"
      "  send(bytes(b[:random.randrange(1, len(b) + 1)]), good)\n"
      "send(body, good[:7]); send(body, b''.join([good] * 50)); send(body, good, 0); send(body, good, 7); send(body, good, size=8 << 20)\n"
      "send(body, struct.pack('<IIiIQ', 1, 0, 0, 1, 0)); send(body, struct.pack('<IIiIQ', 3, 1, 0, 0, 0)); send(b'', good)\n"
      "print('sent')");
  EXPECT_EQ(r.out.bytes, "sent\n") << r.err.bytes;
  EXPECT_EQ(Run("$TEMPER_TOOL_EXEC echo alive").out.bytes, "alive\n");
}

// What could go wrong: what one sandbox left in the reused parts (network, cgroup, ids) shows in the next.
TEST_F(Sandbox, NextSandboxIsClean) {
  CreateRequest q = Request("a");
  Start(q);
  Python(
      "import os, socket, time\n"
      "s = socket.socket(); s.bind(('127.0.0.1', 8080)); s.listen()\n"
      "u = socket.socket(socket.AF_UNIX); u.bind('\\0left'); u.listen()\n"
      "x = bytearray(60 << 20); open('/tmp/left','w').write('x'); open('/dev/shm/left','w').write('x')\n"
      "if os.fork() == 0: time.sleep(100)");
  ASSERT_TRUE(service_->Destroy("a").ok());
  ASSERT_TRUE(service_->Create(q).ok());
  ExecResult r = Run("ls -A /work /tmp /dev/shm; ps ax | grep -c '[p]ython3'; cat /proc/net/unix | grep -c left; cat /proc/net/tcp | wc -l");
  EXPECT_EQ(r.out.bytes, "/dev/shm:\n\n/tmp:\n\n/work:\n0\n0\n1\n") << r.out.bytes;
  EXPECT_LT(r.usage.peak_bytes, 20 << 20);
}

// What could go wrong: a mount is writable, or shows more than it should.
TEST_F(Sandbox, MountsAreReadOnly) {
  std::string folder = ::testing::TempDir() + "temper-mount-" + std::to_string(getpid());
  ASSERT_TRUE(MakeDirs(folder + "/sub").ok());
  ASSERT_TRUE(WriteFile(folder + "/sub/tool", "#!/bin/sh\necho tool runs\n").ok());
  ASSERT_EQ(chmod((folder + "/sub/tool").c_str(), 0777), 0);
  ASSERT_TRUE(WriteFile(folder + "/one", "task one").ok());
  ASSERT_TRUE(WriteFile(folder + "/two", "task two").ok());
  CreateRequest q = Request("a");
  q.mounts = {{folder + "/sub", "/opt/agent"}, {folder + "/one", "/task/file.json"}};
  Start(q);
  ExecResult r = Run("/opt/agent/tool; cat /task/file.json; echo x > /opt/agent/tool; echo y > /task/file.json; touch /opt/agent/z /task/z; ls /task /opt");
  EXPECT_EQ(r.out.bytes, "tool runs\ntask one/opt:\nagent\n\n/task:\nfile.json\n");
  // Another file at the same place is another sandbox's business only.
  q.id = "b";
  q.mounts[1].source = folder + "/two";
  ASSERT_TRUE(service_->Create(q).ok());
  EXPECT_EQ(Run(Sh("cat /task/file.json", Role::kAgent, "b")).out.bytes, "task two");
  EXPECT_EQ(Run("cat /task/file.json").out.bytes, "task one");
  ASSERT_TRUE(RemoveAll(folder).ok());
}

// What could go wrong: a root folder of one's own is not used, or its links lead the builder out of it.
TEST_F(Sandbox, OwnRootFolder) {
  std::string root = ::testing::TempDir() + "temper-root-" + std::to_string(getpid());
  ASSERT_TRUE(MakeDirs(root + "/etc").ok());
  ASSERT_TRUE(WriteFile(root + "/etc/marker", "own root").ok());
  for (const char* name : {"usr", "bin", "lib", "lib64"}) ASSERT_EQ(symlink((std::string("/") + name).c_str(), (root + "/" + name).c_str()), 0);
  CreateRequest q = Request("a");
  q.rootfs = root;
  q.mounts = {{"/usr", "/usr/inside"}};
  auto service = LocalSandboxService::Start(OptionsHere());
  ASSERT_TRUE(service.ok());
  EXPECT_EQ((*service)->Create(q).status().code(), StatusCode::kInvalidArgument);  // through the link /usr
  service->reset();
  for (const char* name : {"usr", "bin", "lib", "lib64"}) ASSERT_EQ(unlink((root + "/" + name).c_str()), 0);
  for (const char* name : {"bin", "lib", "lib64"}) ASSERT_EQ(symlink((std::string("usr/") + name).c_str(), (root + "/" + name).c_str()), 0);
  q.mounts = {{"/usr", "/usr"}};
  Start(q);
  EXPECT_EQ(Run("cat /etc/marker; ls /etc").out.bytes, "own rootmarker\n");
  ASSERT_TRUE(RemoveAll(root).ok());
}

// What could go wrong: large input is cut, blocks everything, kills the service, or can be read twice.
TEST_F(Sandbox, StandardInput) {
  Start(Request());
  ExecRequest e = Sh("ln -s /proc/self/fd/0 again; wc -c; wc -c < again");
  e.stdin_bytes = std::string(3000000, 'x');
  EXPECT_EQ(Run(e).out.bytes, "3000000\n0\n");
  e = Sh("exec <&-; sleep 0.1; echo closed");
  e.stdin_bytes = std::string(3000000, 'x');
  EXPECT_EQ(Run(e).out.bytes, "closed\n");
  e = Sh("sleep 9");
  e.stdin_bytes = std::string(3000000, 'x');
  e.timeout_s = 0.1;
  EXPECT_EQ(Run(e).outcome, ExecOutcome::kTimeout);
  EXPECT_EQ(Run("wc -c").out.bytes, "0\n");
  for (Role role : {Role::kAgent, Role::kTool}) {
    e = Sh("cat /dev/stdin; echo err > /dev/stderr; echo out > /dev/stdout; echo three > /dev/fd/3; [ $(id -un) = tool ] || $TEMPER_TOOL_EXEC sh -c 'echo tool > /dev/stderr'", role);
    e.stdin_bytes = "in ";
    e.capture_fd3 = true;
    ExecResult r = Run(e);
    EXPECT_EQ(r.out.bytes + r.err.bytes + r.fd3, role == Role::kTool ? "in out\nerr\nthree\n" : "in out\nerr\ntool\nthree\n");
  }
}

// What could go wrong: a lease that nobody renews keeps its sandbox.
TEST_F(Sandbox, LeaseExpires) {
  CreateRequest q = Request();
  q.ttl_s = 0.3;
  Start(q);
  ExecResult r = Run("sleep 5");
  EXPECT_EQ(r.outcome, ExecOutcome::kInfra);
  EXPECT_EQ(r.message, "destroyed");
  for (int i = 0; i < 100 && !service_->List()->empty(); ++i) SystemClock::Get().SleepS(0.02);
  EXPECT_TRUE(service_->List()->empty());
}

// What could go wrong: a call hangs for ever when its sandbox is taken away, or when the service starts anew.
TEST_F(Sandbox, DestroyAndRestartEndCommands) {
  Start(Request());
  std::promise<Result<ExecResult>> done;
  service_->ExecAsync(Sh("sleep 30"), [&](Result<ExecResult> r) { done.set_value(std::move(r)); });
  SystemClock::Get().SleepS(0.05);
  ASSERT_TRUE(service_->Destroy("a").ok());
  auto r = done.get_future().get();
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->outcome, ExecOutcome::kInfra);

  ASSERT_TRUE(service_->Create(Request()).ok());
  std::promise<Result<ExecResult>> second;
  service_->ExecAsync(Sh("sleep 30"), [&](Result<ExecResult> x) { second.set_value(std::move(x)); });
  service_.reset();
  EXPECT_EQ(second.get_future().get()->outcome, ExecOutcome::kInfra);
  Start(Request());  // the same id on the same channel
  EXPECT_EQ(Run("echo anew").out.bytes, "anew\n");
}

// What could go wrong: parallel makers meet each other, or something stays behind.
TEST_F(Sandbox, ManyAtOnceLeaveNothing) {
  Start(Request());
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 8; ++i) {
        CreateRequest q = Request("p" + std::to_string(t) + "." + std::to_string(i));
        q.files = {{"who", q.id}};
        if (!service_->Create(q).ok()) continue;
        auto r = service_->Exec(Sh("cat who; ls | wc -l", Role::kTool, q.id));
        good += r.ok() && r->out.bytes == q.id + "1\n";
        (void)service_->Destroy(q.id);
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(good, 48);
  EXPECT_EQ(service_->List()->size(), 1u);
}

// --- relay ---

// A gateway that answers every connection with what it got, in capitals, at the end of the request.
class EchoServer {
 public:
  explicit EchoServer(int port) {
    auto fd = ListenTcp("127.0.0.1", port);
    EXPECT_TRUE(fd.ok()) << fd.status().ToString();
    fd_ = std::move(*fd);
    thread_ = std::thread([this] {
      for (;;) {
        pollfd p = {fd_.get(), POLLIN, 0};
        if (stop_) return;
        if (poll(&p, 1, 20) <= 0) continue;
        Fd c(accept(fd_.get(), nullptr, nullptr));
        if (!c.valid()) continue;
        std::string all;
        char bytes[65536];
        for (ssize_t n; (n = read(c.get(), bytes, sizeof bytes)) > 0;) all.append(bytes, static_cast<size_t>(n));
        for (char& ch : all) ch = static_cast<char>(toupper(ch));
        EXPECT_TRUE(WriteAll(c.get(), all).ok());
      }
    });
  }
  ~EchoServer() {
    stop_ = true;
    thread_.join();
  }

 private:
  Fd fd_;
  std::thread thread_;
  std::atomic<bool> stop_{false};
};

// What could go wrong: bytes are lost or mixed, half-closed connections break, or a gateway that restarts is seen inside.
TEST_F(Sandbox, RelayReachesTheGatewayAndOnlyIt) {
  auto probe = ListenTcp("127.0.0.1", 0);
  ASSERT_TRUE(probe.ok());
  int port = *BoundPort(probe->get());
  probe->Reset();
  ServiceOptions o = OptionsHere();
  o.gateway_address = "127.0.0.1:" + std::to_string(port);
  CreateRequest q = Request();
  q.relay = true;
  Start(q, o);
  const std::string program =
      "import socket, sys, threading\n"
      "def ask(text):\n"
      "  s = socket.create_connection(('127.0.0.1', 8080)); s.sendall(text); s.shutdown(1)\n"
      "  out = b''\n"
      "  while True:\n"
      "    b = s.recv(65536)\n"
      "    if not b: return out\n"
      "    out += b\n"
      "big = bytes(97 + i % 26 for i in range(1000000))\n"
      "print(ask(b'hello'), ask(big) == big.upper())";
  std::promise<Result<ExecResult>> early;
  ExecRequest e = Sh("");
  e.argv = {"python3", "-c", program};
  service_->ExecAsync(e, [&](Result<ExecResult> r) { early.set_value(std::move(r)); });
  SystemClock::Get().SleepS(0.4);  // the gateway is not there yet: the connection waits
  {
    EchoServer gateway(port);
    auto r = early.get_future().get();
    ASSERT_TRUE(r.ok());
    EXPECT_EQ(r->out.bytes, "b'HELLO' True\n") << r->err.bytes;
  }
  EchoServer again(port);  // restarted
  EXPECT_EQ(Run(e).out.bytes, "b'HELLO' True\n");
  // A second sandbox has the same address for itself; one without relay has nothing there.
  q.id = "b";
  ASSERT_TRUE(service_->Create(q).ok());
  q.id = "c";
  q.relay = false;
  ASSERT_TRUE(service_->Create(q).ok());
  e.id = "b";
  EXPECT_EQ(Run(e).out.bytes, "b'HELLO' True\n");
  e.id = "c";
  EXPECT_THAT(Run(e).err.bytes, HasSubstr("ConnectionRefused"));
}

}  // namespace
}  // namespace temper::sandbox
