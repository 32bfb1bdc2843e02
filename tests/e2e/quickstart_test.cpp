// What configs/quickstart.yaml promises, and its two controls. With TEMPER_KEEP_RUNS=FOLDER the files that `temper plot` reads stay there. Needs an otherwise idle two-core machine for the wall clock.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/job_process.h"

namespace temper::e2e {
namespace {

struct Finished {
  json::value summary;
  json::value first, last;  // lines of eval.jsonl
};

double Number(const json::value& object, const std::string& key) { return *JsonRef(object).DoubleOr(key, -1); }

// What `temper plot` draws, for docs/runs: the job's own folder goes with the test.
void Keep(const JobProcess& job, const std::string& folder) {
  std::filesystem::create_directories(folder);
  for (const char* file : {"metrics.jsonl", "eval.jsonl", "sft.jsonl", "summary.json"}) EXPECT_TRUE(WriteFile(folder + "/" + file, job.Read(file)).ok());
}

Finished Play(const std::string& config, int seed, const std::vector<std::string>& more = {}) {
  JobProcess job("quickstart");
  std::vector<std::string> arguments = {"--set", "seed=" + std::to_string(seed)};
  arguments.insert(arguments.end(), more.begin(), more.end());
  job.Start(arguments, {}, config);
  EXPECT_EQ(job.Wait(1700), 0) << job.Output();
  Finished out;
  out.summary = job.Summary();
  std::vector<std::string> lines = Split(std::string(Trim(job.Read("eval.jsonl"))), '\n');
  EXPECT_GE(lines.size(), 2u);
  out.first = *ParseJson(lines.front());
  out.last = *ParseJson(lines.back());
  std::string lowest;
  double low = 2;
  for (const auto& [family, score] : out.last.at("families").as_object()) {
    const double rate = score.at("pass_rate").to_number<double>();
    if (rate < low) lowest = family, low = rate;
  }
  // Recorded with the pass (tests/run.py).
  std::printf("measured: %s seed %d: %.3f -> %.3f, lowest family at the end %s %.2f, %.0f s\n  start %s\n  end   %s\n", config.c_str(), seed,
              Number(out.summary, "eval_start"), Number(out.summary, "eval_end"), lowest.c_str(), low, Number(out.summary, "wall_s"),
              PrintJson(out.first.at("families")).c_str(), PrintJson(out.last.at("families")).c_str());
  std::string output;
  EXPECT_EQ(JobProcess::Door({"pool", "verify", job.folder()}, &output), 0) << output;
  EXPECT_EQ(Number(out.summary, "importance_ratio_max_dev_on_policy"), 0);
  EXPECT_GE(out.summary.at("on_policy_versions").as_array().size(), 3u);
  EXPECT_EQ(Number(out.first, "tasks"), 256);
  EXPECT_EQ(Number(out.last, "tasks"), 256);
  for (const auto& [family, score] : out.first.at("families").as_object()) {
    EXPECT_EQ(score.at("tasks"), out.last.at("families").at(family).at("tasks")) << family << ": other tasks at the end";
  }
  EXPECT_EQ(job.Remains(), "");
  if (const char* keep = std::getenv("TEMPER_KEEP_RUNS")) Keep(job, keep + ("/" + config.substr(0, config.find('.')) + "-" + std::to_string(seed)));
  return out;
}

bool NeedsLooking(const std::string& family) { return family != "write" && family != "make" && family != "copy"; }

void ExpectPromise(int seed) {
  Finished run = Play("quickstart.yaml", seed);
  EXPECT_LE(Number(run.summary, "eval_start"), 0.5);
  EXPECT_GE(Number(run.summary, "eval_end"), 0.9);
  EXPECT_LE(Number(run.summary, "wall_s"), 600);
  double attempts = 0;
  for (const auto& [name, count] : run.summary.at("outcomes").as_object()) attempts += count.to_number<double>();
  EXPECT_LE(attempts, 8000);
  double looking = 0;
  for (const auto& [family, score] : run.first.at("families").as_object()) {
    if (!NeedsLooking(family)) continue;
    looking += score.at("tasks").to_number<double>();
    EXPECT_LE(score.at("pass_rate").to_number<double>(), 0.6) << family << " at the start";
  }
  EXPECT_GE(looking, 0.6 * 256);
  for (const auto& [family, score] : run.last.at("families").as_object()) {
    EXPECT_GE(score.at("pass_rate").to_number<double>(), 0.75) << family << " at the end";
  }
}

TEST(Quickstart, LearnsToLookSeed7) { ExpectPromise(7); }
TEST(Quickstart, LearnsToLookSeed1) { ExpectPromise(1); }
TEST(Quickstart, LearnsToLookSeed2) { ExpectPromise(2); }

// What could go wrong: a loss that computes the right numbers does not teach.
void ExpectLearns(const std::string& config, int seed) {
  const Finished run = Play(config, seed);
  EXPECT_LE(Number(run.summary, "eval_start"), 0.5);
  EXPECT_GE(Number(run.summary, "eval_end"), 0.9);
}
TEST(QuickstartLosses, GrpoSeed7) { ExpectLearns("quickstart-grpo.yaml", 7); }
TEST(QuickstartLosses, GrpoSeed1) { ExpectLearns("quickstart-grpo.yaml", 1); }
TEST(QuickstartLosses, GrpoSeed2) { ExpectLearns("quickstart-grpo.yaml", 2); }
TEST(QuickstartLosses, DrGrpoSeed7) { ExpectLearns("quickstart-dr_grpo.yaml", 7); }
TEST(QuickstartLosses, GspoSeed7) { ExpectLearns("quickstart-gspo.yaml", 7); }
TEST(QuickstartLosses, RlooSeed7) { ExpectLearns("quickstart-rloo.yaml", 7); }

// Seconds a step of the trainer's two passes, and of all that it does between a lease and the new weights. The first step warms up.
struct TrainerSeconds {
  double passes = 0, all = 0;
};
TrainerSeconds SecondsAStep(const std::string& metrics) {
  TrainerSeconds sum;
  const std::vector<std::string> lines = Split(std::string(Trim(metrics)), '\n');
  for (size_t i = 1; i < lines.size(); ++i) {
    const json::value value = *ParseJson(lines[i]);
    const double passes = Number(value, "forward_s") + Number(value, "backward_s");
    sum.passes += passes;
    sum.all += passes + Number(value, "batch_s") + Number(value, "optimizer_s");
  }
  const auto steps = static_cast<double>(lines.size() - 1);
  return {sum.passes / steps, sum.all / steps};
}

// What could go wrong: on separate rows the job learns something else, or the tree saves less (or more) than the bench says of the job's own
// rollouts. With a staleness of 0 nothing is drawn while the trainer computes: its seconds are its own, as the bench's are, and not those of
// whoever else had the cores.
void ExpectRowsDoTheSameSlower(int seed) {
  struct Side {
    double eval_end = 0;
    TrainerSeconds seconds;
  };
  Side sides[2];
  double promised = 0;
  for (const bool tree : {true, false}) {
    JobProcess job(tree ? "quickstart_tree" : "quickstart_rows");
    std::vector<std::string> arguments = {"--set", "seed=" + std::to_string(seed), "--set", "pool.staleness=0"};
    if (!tree) arguments.insert(arguments.end(), {"--set", "trainer.tree=off"});
    job.Start(arguments, {}, "quickstart.yaml");
    ASSERT_EQ(job.Wait(1700), 0) << job.Output();
    const json::value summary = job.Summary();
    EXPECT_EQ(Number(summary, "importance_ratio_max_dev_on_policy"), 0);
    const double logical = Number(summary, "logical_tokens"), laid = Number(summary, "tree_tokens");
    EXPECT_EQ(logical > laid, tree) << logical << " tokens as rows, " << laid << " computed";
    sides[tree ? 0 : 1] = {Number(summary, "eval_end"), SecondsAStep(job.Read("metrics.jsonl"))};
    if (!tree) continue;
    std::string rows, bench;
    ASSERT_EQ(JobProcess::Door({"pool", "export", job.folder()}, &rows), 0);
    const std::string file = job.folder() + "/rows.jsonl";
    ASSERT_TRUE(WriteFile(file, rows).ok());
    ASSERT_EQ(JobProcess::Door({"bench", "tree", job.folder(), "--rows", file, "--samples", "60", "--json"}, &bench), 0) << bench;
    double seconds[2] = {};  // of all steps, on trees and on rows
    for (const std::string& line : Split(std::string(Trim(bench)), '\n')) {
      const json::value row = *ParseJson(line);
      if (row.at("unit").as_string() != "s") continue;
      const bool rows_side = row.at("case").as_string().ends_with(", rows");
      ASSERT_EQ(row.at("samples").as_array().size(), 60u);
      for (const json::value& sample : row.at("samples").as_array()) seconds[rows_side] += sample.to_number<double>();
    }
    ASSERT_GT(seconds[0], 0);
    promised = seconds[1] / seconds[0];
  }
  const double ratio = sides[1].seconds.passes / sides[0].seconds.passes;
  std::printf("measured: seed %d: eval_end %.3f on trees, %.3f on rows; passes %.4f and %.4f s a step, %.2f times as long on rows, the bench %.2f; "
              "with batch and optimizer %.4f and %.4f, %.2f times\n",
              seed, sides[0].eval_end, sides[1].eval_end, sides[0].seconds.passes, sides[1].seconds.passes, ratio, promised, sides[0].seconds.all,
              sides[1].seconds.all, sides[1].seconds.all / sides[0].seconds.all);
  EXPECT_NEAR(sides[1].eval_end, sides[0].eval_end, 0.05);
  ASSERT_GT(promised, 1);
  EXPECT_NEAR(ratio / promised, 1, 0.15);
}
TEST(QuickstartTree, TreeOffSeed7) { ExpectRowsDoTheSameSlower(7); }
TEST(QuickstartTree, TreeOffSeed1) { ExpectRowsDoTheSameSlower(1); }
TEST(QuickstartTree, TreeOffSeed2) { ExpectRowsDoTheSameSlower(2); }

// What could go wrong: the student learns something else than what its teacher would say.
TEST(QuickstartDistillation, TheStudentReachesItsTeacher) {
  JobProcess teacher("quickstart_teacher");
  teacher.Start({}, {}, "quickstart.yaml");
  ASSERT_EQ(teacher.Wait(1700), 0) << teacher.Output();
  const Finished student = Play("quickstart-opd.yaml", 1, {"--set", "trainer.teacher=" + teacher.folder() + "/checkpoints/60"});
  EXPECT_LE(Number(student.summary, "eval_start"), 0.5);
  EXPECT_GE(Number(student.summary, "eval_end"), Number(teacher.Summary(), "eval_end") - 0.05);
}

// What could go wrong: the policy learns the habits of the tasks, and looking is for show.
TEST(QuickstartControl, BlindLearnsLittle) {
  Finished run = Play("quickstart-blind.yaml", 7);
  EXPECT_LE(Number(run.summary, "eval_end"), Number(run.summary, "eval_start") + 0.15);
}

// What could go wrong: something other than the reward makes the pass rate rise.
TEST(QuickstartControl, ShuffledLearnsNothing) {
  Finished run = Play("quickstart-shuffled.yaml", 7);
  EXPECT_LE(Number(run.summary, "eval_end"), Number(run.summary, "eval_start") + 0.1);
}

}  // namespace
}  // namespace temper::e2e
