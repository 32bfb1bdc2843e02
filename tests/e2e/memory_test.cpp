// The memory of a whole job: weights lie once on the machine, whoever maps them, and no process takes more than its plan says.
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <set>
#include <sstream>

#include <fmt/format.h>

#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/job_process.h"

namespace temper::e2e {
namespace {

constexpr double kMiB = 1 << 20;

struct Mapping {
  std::string permissions;
  int64_t rss = 0, pss = 0, own = 0;  // own: private to the process, clean or dirty
};

// Mappings of the trainer's memory files in a process, by inode.
std::map<std::string, Mapping> WeightMappings(pid_t pid) {
  std::map<std::string, Mapping> out;
  auto text = ReadFile(fmt::format("/proc/{}/smaps", pid), 64 << 20);
  if (!text.ok()) return out;
  Mapping* here = nullptr;
  for (const std::string& line : Split(*text, '\n')) {
    std::istringstream words(line);
    std::string first, permissions, skip, inode;
    words >> first >> permissions;
    if (first.find('-') != std::string::npos && first.back() != ':') {
      words >> skip >> skip >> inode;
      here = line.find("memfd:temper-weights") == std::string::npos ? nullptr : &out[inode];
      if (here) here->permissions = permissions;
      continue;
    }
    if (!here) continue;
    const int64_t bytes = std::strtoll(permissions.c_str(), nullptr, 10) << 10;
    if (first == "Rss:") here->rss += bytes;
    if (first == "Pss:") here->pss += bytes;
    if (first == "Private_Clean:" || first == "Private_Dirty:") here->own += bytes;
  }
  return out;
}

int64_t PeakOf(pid_t pid) {
  auto text = ReadFile(fmt::format("/proc/{}/status", pid), 1 << 20);
  if (!text.ok()) return -1;
  const size_t at = text->find("VmHWM:");
  return at == std::string::npos ? -1 : std::strtoll(text->c_str() + at + 6, nullptr, 10) << 10;
}

// A worker could hold a copy of its own, or write to what others read; a plan could promise less than a process takes.
TEST(Memory, WeightsLieOnceAndNobodyTakesMoreThanPlanned) {
  JobProcess job("memory");
  job.Start({"--set", "rollout.workers=2", "--set", "trainer.steps=4", "--set", "model.create.width=256", "--set", "model.create.layers=4", "--set",
             "trainer.memory=64MiB", "--set", "rollout.kv_memory=48MiB", "--set", "trainer.sft.tokens=20000"});
  ASSERT_TRUE(job.WaitSteps(1, 200)) << job.Output();
  const json::value plan = *ParseJson(job.Read("plan.json"));
  const int64_t weights = plan.at("weightsync").at("bytes").as_int64();
  EXPECT_GT(weights, 2 << 20);
  const std::vector<pid_t> workers = job.RolePids("rollout");
  ASSERT_EQ(workers.size(), 2u);
  const pid_t trainer = job.RolePid("trainer");
  ASSERT_GT(trainer, 0);

  // Workers change to a new version one after the other: the look counts at which all three read the same one whole.
  bool together = false;
  for (int look = 0; look < 3000 && !together; ++look) {
    usleep(10000);
    const auto a = WeightMappings(workers[0]), b = WeightMappings(workers[1]), publisher = WeightMappings(trainer);
    for (const auto* maps : {&a, &b}) {
      for (const auto& [inode, m] : *maps) {
        ASSERT_EQ(m.permissions, "r--s") << "weights are shared and read-only";
        ASSERT_EQ(m.own, 0) << "bytes of weights that this worker alone holds";
      }
      ASSERT_LE(maps->size(), 2u) << "the served version and the next";
    }
    for (const auto& [inode, m] : a) {
      const auto other = b.find(inode), source = publisher.find(inode);
      if (other == b.end() || source == publisher.end()) continue;
      if (m.rss < weights || other->second.rss < weights || source->second.rss < weights) continue;
      // Three processes, one copy: each is charged a third.
      if (m.pss > m.rss / 3 + 65536 || other->second.pss > other->second.rss / 3 + 65536) continue;
      together = true;
    }
  }
  EXPECT_TRUE(together) << "two workers and the trainer never shared one copy of the weights";

  std::map<std::string, int64_t> peaks;
  for (const char* role : {"pool", "sandbox", "gateway", "trainer", "agents"}) peaks[role] = PeakOf(job.RolePid(role));
  peaks["rollout-0"] = PeakOf(workers[0]);
  peaks["rollout-1"] = PeakOf(workers[1]);
  for (const json::value& process : plan.at("processes").as_array()) {
    const std::string name(process.at("name").as_string());
    if (!peaks.count(name)) continue;
    const int64_t planned = process.at("bytes").as_int64() + process.at("mapped_bytes").as_int64();
    std::printf("measured: %s: planned at most %.0f MiB, peak %.0f MiB\n", name.c_str(), planned / kMiB, peaks[name] / kMiB);
    EXPECT_GT(peaks[name], 0) << name;
    EXPECT_LE(peaks[name], planned) << name;
  }
  EXPECT_EQ(job.Wait(200), 0) << job.Output();
}

}  // namespace
}  // namespace temper::e2e
