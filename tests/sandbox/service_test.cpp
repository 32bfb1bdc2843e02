#include <gtest/gtest.h>

#include "sandbox/janitor.h"
#include "sandbox/service.h"

namespace temper::sandbox {
namespace {

JanitorOptions InitHere() {
  JanitorOptions o;
  o.init_path = TEMPER_BUILD_DIR "/temper-sandbox-init";
  return o;
}

TEST(First, Smoke) {
  auto j = ForkJanitor(InitHere());
  ASSERT_TRUE(j.ok()) << j.status().ToString();
  ServiceOptions so;
  so.janitor_fd = j->service_fd();
  auto s = LocalSandboxService::Start(so);
  ASSERT_TRUE(s.ok()) << s.status().ToString();
  CreateRequest c;
  c.id = "a";
  c.files.push_back({"d/x.txt", "hello\n", 0644, File::Kind::kRegular});
  auto info = (*s)->Create(c);
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  ExecRequest e;
  e.id = "a";
  e.argv = {"sh", "-c", "id; ls -la / /work /dev /proc; cat d/x.txt; echo hi >&2; $TEMPER_TOOL_EXEC sh -c 'id; touch y; ls -la; ps ax'; ls -l; cat /proc/self/cgroup; mount"};
  auto r = (*s)->Exec(e);
  ASSERT_TRUE(r.ok()) << r.status().ToString();
  printf("%s %d %s\n%s\n%s\n%g %g %ld\n", Name(r->outcome), r->exit_code, r->message.c_str(), r->out.bytes.c_str(), r->err.bytes.c_str(), r->usage.wall_s, r->usage.cpu_s, r->usage.peak_bytes);
  EXPECT_TRUE((*s)->Destroy("a").ok());
}

}  // namespace
}  // namespace temper::sandbox
