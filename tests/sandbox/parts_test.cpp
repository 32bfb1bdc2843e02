// The parts of the sandbox that need no sandbox: wire forms, captured output, cgroup files, files of a folder.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "common/file.h"
#include "common/rng.h"
#include "sandbox/capture.h"
#include "sandbox/cgroup.h"
#include "sandbox/door.h"
#include "sandbox/files.h"
#include "sandbox/init/protocol.h"
#include "sandbox/janitor_protocol.h"
#include "sandbox/poller.h"
#include "sandbox/relay.h"
#include "sandbox/seccomp.h"
#include "sandbox/wire.h"

namespace temper::sandbox {
namespace {

using ::testing::HasSubstr;

std::string Mutate(std::string s, Rng& rng) {
  for (uint64_t k = rng.Between(1, 6); k > 0 && !s.empty(); --k) {
    size_t at = rng.Below(s.size());
    switch (rng.Below(5)) {
      case 0:
        s[at] = static_cast<char>(rng.Below(256));
        break;
      case 1:
        s.erase(at, rng.Below(8));
        break;
      case 2:
        s.insert(at, std::string(rng.Below(8), static_cast<char>(rng.Below(256))));
        break;
      case 3:
        s.resize(at);
        break;
      case 4: {  // a length that points far away
        uint32_t v = static_cast<uint32_t>(rng.Next() >> rng.Below(40));
        if (at + 4 <= s.size()) s.replace(at, 4, reinterpret_cast<char*>(&v), 4);
        break;
      }
    }
  }
  return s;
}

std::string ExecPayload() {
  WireWriter w;
  w.U32(protocol::kExecMagic).U32(1).U64(1).U64(2).U64(3).U64(4).Str("/work").U32(3).Str("sh").Str("").Str("x y");
  w.U32(2).Str("A=b").Str("C=");
  return w.bytes();
}

// What could go wrong: what the service writes is not what the init reads.
TEST(Protocol, CommandRoundTrip) {
  std::string bytes = ExecPayload();
  const char* slots[2 * protocol::kArgumentsMax + 2];
  protocol::Command c;
  ASSERT_TRUE(protocol::ParseCommand(bytes.data(), bytes.size(), false, slots, &c));
  EXPECT_EQ(c.role, 1u);
  EXPECT_EQ(c.address_space, 1u);
  EXPECT_EQ(c.cpu_s, 4u);
  EXPECT_STREQ(c.cwd, "/work");
  EXPECT_STREQ(c.argv[2], "x y");
  EXPECT_EQ(c.argv[3], nullptr);
  EXPECT_STREQ(c.env[1], "C=");
  EXPECT_EQ(c.env[2], nullptr);
  EXPECT_FALSE(protocol::ParseCommand(bytes.data(), bytes.size(), true, slots, &c));
  EXPECT_FALSE(protocol::ParseCommand(bytes.data(), bytes.size() - 1, false, slots, &c));
  bytes += 'x';
  EXPECT_FALSE(protocol::ParseCommand(bytes.data(), bytes.size(), false, slots, &c));
}

// What could go wrong: bytes of an agent lead PID 1 out of its buffer. Every pointer must lie inside and end in a NUL there.
TEST(Protocol, CommandFuzz) {
  Rng rng(11);
  WireWriter tool;
  tool.U32(protocol::kToolMagic).U32(2).Str("sh").Str("-c").U32(1).Str("A=b");
  static const char* slots[2 * protocol::kArgumentsMax + 2];
  int accepted = 0;
  for (int i = 0; i < 60000; ++i) {
    bool is_tool = i & 1;
    std::string bytes = i < 2 ? (is_tool ? tool.bytes() : ExecPayload()) : Mutate(is_tool ? tool.bytes() : ExecPayload(), rng);
    // Exactly sized, so that a sanitizer sees a read past the end.
    std::vector<char> exact(bytes.begin(), bytes.end());
    protocol::Command c;
    if (!protocol::ParseCommand(exact.data(), exact.size(), is_tool, slots, &c)) continue;
    ++accepted;
    auto inside = [&](const char* p) { return p >= exact.data() && p < exact.data() + exact.size(); };
    ASSERT_NE(c.argv[0], nullptr);
    for (const char** list : {c.argv, c.env}) {
      for (; *list; ++list) {
        ASSERT_TRUE(inside(*list));
        ASSERT_TRUE(inside(*list + std::strlen(*list)));
      }
    }
    ASSERT_LE(c.role, 1u);
  }
  EXPECT_GT(accepted, 100);
}

JanitorRequest SomeRequest() {
  JanitorRequest q;
  q.type = JanitorRequest::Type::kCreate;
  q.seq = 7;
  q.memory_bytes = 1 << 20;
  q.processes = 5;
  q.disk_bytes = 4096;
  q.files = 10;
  q.relay = true;
  q.rootfs = "/root folder";
  q.mounts = {{"/a", "/b"}, {"/c", "/d"}};
  return q;
}

// What could go wrong: a field is lost; or a compromised service feeds the janitor, which is root, what no service writes.
TEST(Protocol, JanitorRoundTripAndFuzz) {
  JanitorRequest q = SomeRequest();
  auto back = DecodeJanitorRequest(Encode(q));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(*back, q);
  JanitorReply p{.seq = 1, .handle = 2, .fds = 3, .host_uid = 4, .memory = "cgroup", .processes = "no", .cpu = "x",
                 .code = StatusCode::kNotFound, .message = "m"};
  auto reply = DecodeJanitorReply(Encode(p));
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(*reply, p);

  q.processes = 0;
  EXPECT_FALSE(DecodeJanitorRequest(Encode(q)).ok());
  q = SomeRequest();
  q.disk_bytes = -1;
  EXPECT_FALSE(DecodeJanitorRequest(Encode(q)).ok());
  q = SomeRequest();
  q.rootfs = "relative";
  EXPECT_FALSE(DecodeJanitorRequest(Encode(q)).ok());
  q = SomeRequest();
  q.mounts[0].target = std::string("/x\0/y", 5);
  EXPECT_FALSE(DecodeJanitorRequest(Encode(q)).ok());

  Rng rng(12);
  int accepted = 0;
  for (int i = 0; i < 40000; ++i) {
    auto r = DecodeJanitorRequest(Mutate(Encode(SomeRequest()), rng));
    if (r.ok()) {
      ++accepted;
      EXPECT_EQ(*DecodeJanitorRequest(Encode(*r)), *r);
    }
    auto a = DecodeJanitorReply(Mutate(Encode(p), rng));
    if (a.ok()) {
      EXPECT_EQ(*DecodeJanitorReply(Encode(*a)), *a);
    }
  }
  EXPECT_GT(accepted, 10);
}

// What could go wrong: a byte at the border of head and tail is lost or doubled, for some way of cutting the stream.
TEST(Capture, KeepsHeadAndTail) {
  Rng rng(3);
  for (int round = 0; round < 300; ++round) {
    int64_t max = rng.Between(1, 40);
    std::string all;
    Capture capture(max);
    while (all.size() < rng.Below(200)) {
      std::string piece(rng.Below(30), 'x');
      for (char& c : piece) c = static_cast<char>('a' + rng.Below(26));
      all += piece;
      capture.Add(piece);
    }
    uint64_t dropped = all.size() > static_cast<size_t>(max) ? all.size() - static_cast<size_t>(max) : 0;
    EXPECT_EQ(capture.dropped(), dropped);
    Captured c = capture.Take();
    EXPECT_EQ(c.dropped, dropped);
    size_t head = static_cast<size_t>(max - max / 2), tail = static_cast<size_t>(max / 2);
    std::string expected = dropped ? all.substr(0, head) + "\n[" + std::to_string(dropped) + " bytes left out]\n" + all.substr(all.size() - tail) : all;
    EXPECT_EQ(c.bytes, expected);
  }
}

// What could go wrong: our own place in the hierarchies is misread and groups are made beside it, or at the machine's root.
TEST(Cgroup, OwnPlaceIsFound) {
  const std::string hybrid =
      "31 30 0:27 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
      "32 30 0:28 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids\n"
      "33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
      "34 30 0:30 / /sys/fs/cgroup/cpu,cpuacct rw shared:1 - cgroup cgroup rw,cpu,cpuacct\n";
  CgroupBases b = ParseCgroupBases(hybrid, "8:pids:/\n4:memory:/api/x\n0::/scope\n");
  EXPECT_EQ(b.v1_memory, "/sys/fs/cgroup/memory/api/x");
  EXPECT_EQ(b.v1_pids, "/sys/fs/cgroup/pids");
  EXPECT_EQ(b.v2, "/sys/fs/cgroup/unified/scope");
  // A container that sees only its part of the hierarchy, without a cgroup namespace.
  b = ParseCgroupBases("40 30 0:27 /docker/abc /sys/fs/cgroup rw shared:4 master:2 - cgroup2 cgroup rw,nsdelegate\n", "0::/docker/abc/sub\n");
  EXPECT_EQ(b.v2, "/sys/fs/cgroup/sub");
  EXPECT_EQ(b.v1_memory, "");
  b = ParseCgroupBases("40 30 0:27 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n", "0::/elsewhere\n");
  EXPECT_EQ(b.v2, "");
  Rng rng(4);
  for (int i = 0; i < 3000; ++i) ParseCgroupBases(Mutate(hybrid, rng), Mutate("8:pids:/\n4:memory:/api/x\n0::/scope\n", rng));
}

std::string Folder(const char* name);

// What could go wrong: groups of jobs that died with their janitor pile up; or those of a living job are taken away.
TEST(Cgroup, EmptyGroupsOfDeadJobsAreRemoved) {
  std::string base = Folder("dead");
  pid_t dead = fork();
  if (dead == 0) _exit(0);
  waitpid(dead, nullptr, 0);
  const std::string gone = base + "/temper-" + std::to_string(dead) + "." + PidNamespaceTag() + "-0a1b2c3d";
  const std::string alive = base + "/temper-" + std::to_string(getpid()) + "." + PidNamespaceTag() + "-0a1b2c3d";
  // Of a container that shares the hierarchy: alive, but its number is nobody's here.
  const std::string foreign = base + "/temper-" + std::to_string(dead) + ".0badc0de-0a1b2c3d";
  for (const std::string& dir : {gone + "/s0", alive + "/s0", foreign + "/s0", base + "/temper-x-y", base + "/other-1-2"}) {
    ASSERT_TRUE(MakeDirs(dir).ok());
  }
  CgroupBases bases;
  bases.v1_memory = bases.v1_pids = base;
  ASSERT_TRUE(CgroupTree::OpenAt(CgroupMode::kHybrid, "job", bases).ok());
  EXPECT_FALSE(Exists(gone));
  EXPECT_TRUE(Exists(alive + "/s0"));
  EXPECT_TRUE(Exists(foreign + "/s0"));
  EXPECT_TRUE(Exists(base + "/temper-x-y"));
  EXPECT_TRUE(Exists(base + "/other-1-2"));
  ASSERT_TRUE(RemoveAll(base).ok());
}

std::string Folder(const char* name) {
  std::string path = ::testing::TempDir() + "temper-parts-" + std::to_string(getpid()) + "-" + name;
  EXPECT_TRUE(RemoveAll(path).ok());
  EXPECT_TRUE(MakeDirs(path).ok());
  return path;
}

// What could go wrong: version 2 gets the values of version 1, or a mode is claimed that does not hold. The hierarchy is an
// ordinary folder here: it shows what is written where.
TEST(Cgroup, VersionTwoWrites) {
  std::string base = Folder("v2");
  CgroupBases bases;
  bases.v2 = base;
  bases.v2_limits = true;
  // The kernel makes these files; here they are laid before.
  for (const char* dir : {"/job", "/job/s0"}) {
    ASSERT_TRUE(MakeDirs(base + dir).ok());
    for (const char* file : {"cgroup.subtree_control", "cgroup.procs", "memory.max", "memory.swap.max", "pids.max", "cpu.stat", "memory.events",
                             "memory.peak", "pids.events", "cgroup.kill"}) {
      ASSERT_TRUE(WriteFile(base + dir + "/" + file, "").ok());
    }
  }
  auto tree = CgroupTree::OpenAt(CgroupMode::kAuto, "job", bases);
  ASSERT_TRUE(tree.ok());
  EXPECT_EQ(tree->mode(), CgroupMode::kV2);
  EXPECT_FALSE(tree->reusable());
  EXPECT_EQ(*ReadFile(base + "/job/cgroup.subtree_control"), "+memory +pids");
  auto group = tree->Make("s0");
  ASSERT_TRUE(group.ok());
  EXPECT_EQ(group->enter.size(), 1u);
  ASSERT_TRUE(tree->SetLimits(*group, 1000, 7).ok());
  EXPECT_EQ(*ReadFile(base + "/job/s0/memory.max"), "1000");
  EXPECT_EQ(*ReadFile(base + "/job/s0/memory.swap.max"), "0");
  EXPECT_EQ(*ReadFile(base + "/job/s0/pids.max"), "7");
  ASSERT_TRUE(WriteFile(base + "/job/s0/cpu.stat", "usage_usec 55\nuser_usec 5\n").ok());
  ASSERT_TRUE(WriteFile(base + "/job/s0/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n").ok());
  ASSERT_TRUE(WriteFile(base + "/job/s0/memory.peak", "4096\n").ok());
  ASSERT_TRUE(WriteFile(base + "/job/s0/pids.events", "max 9\n").ok());
  Counters c = ReadCounters(group->counters.cpu.get(), group->counters.oom.get(), group->counters.peak.get(), group->counters.refused.get());
  EXPECT_EQ(c.cpu_us, 55);
  EXPECT_EQ(c.oom_kills, 2);
  EXPECT_EQ(c.peak_bytes, 4096);
  EXPECT_EQ(c.refused_forks, 9);
  c = ReadCounters(-1, -1, -1, -1);
  EXPECT_EQ(c.cpu_us, -1);
  ASSERT_TRUE(RemoveAll(base).ok());
}

// What could go wrong: a mode that cannot work is silently replaced by no limits at all.
TEST(Cgroup, AMissingHierarchyIsSaid) {
  CgroupBases none;
  EXPECT_EQ(CgroupTree::OpenAt(CgroupMode::kV2, "job", none).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(CgroupTree::OpenAt(CgroupMode::kHybrid, "job", none).status().code(), StatusCode::kFailedPrecondition);
  auto tree = CgroupTree::OpenAt(CgroupMode::kAuto, "job", none);
  ASSERT_TRUE(tree.ok());
  EXPECT_EQ(tree->mode(), CgroupMode::kNone);
  EXPECT_THAT(tree->why(), HasSubstr("no cgroup hierarchy"));
}

// What could go wrong: what goes into a folder does not come out the same; or something else lies around it.
TEST(Files, RoundTrip) {
  std::string path = Folder("files");
  Fd folder(open(path.c_str(), O_RDONLY | O_DIRECTORY));
  Rng rng(8);
  std::vector<File> files = {{"a", "x", 0600, File::Kind::kRegular},
                             {"d", "", 0750, File::Kind::kFolder},
                             {"d/e", "", 0700, File::Kind::kFolder},
                             {"d/e/-rf", std::string("\0\n", 2), 0755, File::Kind::kRegular},
                             {"l", "../../etc/passwd", 0777, File::Kind::kLink}};
  ASSERT_TRUE(PutFiles(folder.get(), files, getuid(), getgid()).ok());
  auto back = TakeFiles(folder.get(), {});
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(*back, files);
  EXPECT_EQ(*ReadFolder(path), files);
  // Nothing may be written through a link or over something else.
  for (const File& bad : std::vector<File>{{"l/x", "y"}, {"l", "y"}, {"a/b", "y"}, {"a", "y"}, {"d", "y"}, {"/abs", "y"}, {"../up", "y"},
                                           {std::string("n\0l", 3), "y"}, {std::string(300, 'n'), "y"}, {"x", "", 0777, File::Kind::kLink}}) {
    EXPECT_FALSE(PutFiles(folder.get(), {bad}, getuid(), getgid()).ok()) << bad.path;
  }
  EXPECT_EQ(*TakeFiles(folder.get(), {}), files);
  ASSERT_TRUE(RemoveAll(path).ok());
}

// What could go wrong: a tree as deep as a malicious program can make it exhausts our stack or our descriptors.
TEST(Files, DeepTreesEnd) {
  std::string path = Folder("deep");
  Fd at(open(path.c_str(), O_RDONLY | O_DIRECTORY));
  Fd top(dup(at.get()));
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(mkdirat(at.get(), "d", 0755), 0);
    at = Fd(openat(at.get(), "d", O_RDONLY | O_DIRECTORY));
  }
  EXPECT_EQ(TakeFiles(top.get(), {}).status().code(), StatusCode::kResourceExhausted);
  ASSERT_EQ(system(("rm -rf " + path).c_str()), 0);
}

// What could go wrong: the filter is empty or does not begin with the check of the architecture.
TEST(Seccomp, FilterBeginsWithTheArchitecture) {
  auto filter = CompileSeccompFilter();
  ASSERT_TRUE(filter.ok()) << filter.status().ToString();
  ASSERT_EQ(filter->size() % sizeof(sock_filter), 0u);
  EXPECT_GT(filter->size() / sizeof(sock_filter), 80u);
  EXPECT_LT(filter->size() / sizeof(sock_filter), 4096u);
  const auto* code = reinterpret_cast<const sock_filter*>(filter->data());
  EXPECT_EQ(code[0].code, BPF_LD | BPF_W | BPF_ABS);
  EXPECT_EQ(code[0].k, 4u);  // offsetof(seccomp_data, arch)
}

// What could go wrong: a sandbox that goes while more connections wait than its relay takes brings the service down, and with it
// every other sandbox.
TEST(Relay, EndsWhileConnectionsWait) {
  auto poller = Poller::Make().value();
  Fd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in address = ParseAddress("127.0.0.1:1").value();  // nobody listens there: connections wait for their gateway
  const sockaddr_in gateway = address;
  address.sin_port = 0;
  socklen_t length = sizeof address;
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(listener.get(), 8), 0);
  ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  std::vector<Fd> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(clients.back().get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  RelayStats stats;
  auto relay = std::make_unique<Relay>(poller.get(), std::move(listener), gateway, 2, &stats);
  for (int i = 0; i < 10; ++i) poller->Wait(0.01);
  EXPECT_EQ(stats.accepted, 2);
  relay.reset();
  EXPECT_EQ(stats.connections, 0);
}

// What could go wrong: a typing error in a limit is taken for another, or for none.
TEST(Door, Limits) {
  Limits l;
  ASSERT_TRUE(ParseLimits("memory=64MiB,processes=3,disk=1GiB,files=9,cpu_s=1.5,wall_s=2,output=10", &l).ok());
  EXPECT_EQ(l.memory_bytes, 64 << 20);
  EXPECT_EQ(l.processes, 3);
  EXPECT_EQ(l.disk_bytes, 1 << 30);
  EXPECT_EQ(l.files, 9);
  EXPECT_EQ(l.cpu_s, 1.5);
  EXPECT_EQ(l.wall_s, 2);
  EXPECT_EQ(l.output_bytes, 10);
  EXPECT_THAT(ParseLimits("proceses=3", &l).message(), HasSubstr("did you mean 'processes'"));
  for (const char* bad : {"memory", "memory=", "memory=-1", "memory=1X", "processes=1.5", "wall_s=0", "wall_s=nan", "cpu_s=inf", "", "memory=1MiB,,files=2"}) {
    EXPECT_EQ(ParseLimits(bad, &l).code(), StatusCode::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace temper::sandbox
