#include "job/rank_processes.h"

#include <errno.h>
#include <sys/socket.h>

#include <chrono>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "common/clock.h"
#include "common/file.h"
#include "common/strings.h"

namespace temper::job {
namespace {

Status Pair(Fd* a, Fd* b) {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) return ErrnoStatus("socketpair", errno);
  *a = Fd(fds[0]);
  *b = Fd(fds[1]);
  return Status::Ok();
}

}  // namespace

std::string RankName(int rank) { return fmt::format("trainer rank {}", rank); }

Status RankProcesses::Start(const std::string& run_dir, int ranks, const std::string& program) {
  run_dir_ = run_dir;
  trainer::Link next_of_0;
  Fd previous, next;  // of the rank that is started, and of the one behind it
  for (int rank = 1; rank < ranks; ++rank) {
    Fd control, to_rank_0;
    RETURN_IF_ERROR(Pair(&control, &to_rank_0));
    if (rank == 1) {
      Fd own;
      RETURN_IF_ERROR(Pair(&own, &previous));
      next_of_0 = trainer::Link(std::move(own), RankName(1));
    }
    Fd previous_of_next;
    if (rank + 1 < ranks) RETURN_IF_ERROR(Pair(&next, &previous_of_next));
    RoleCommand command;
    command.name = fmt::format("rank-{}", rank);
    command.program = program;
    command.argv = {"temper", "serve", "rank", "--run", run_dir, "--index", std::to_string(rank)};
    std::string table = fmt::format("control={},previous={}", to_rank_0.get(), previous.get());
    command.fds = {to_rank_0.get(), previous.get()};
    if (next.valid()) {
      table += fmt::format(",next={}", next.get());
      command.fds.push_back(next.get());
    }
    command.env = {{"TEMPER_SERVE_FDS", table}};
    command.log_path = run_dir + "/logs/" + command.name + ".log";
    RETURN_IF_ERROR(RemoveAll(run_dir + "/logs/" + command.name + ".error"));
    ASSIGN_OR_RETURN(const pid_t pid, StartRole(command));
    ranks_.push_back({rank, pid, std::nullopt});
    links_.control.emplace_back(std::move(control), RankName(rank));
    previous = std::move(previous_of_next);
    next.Reset();
  }
  links_.collective = trainer::MakeChain(trainer::Link(), std::move(next_of_0));
  return Status::Ok();
}

std::optional<RankProcesses::Loss> RankProcesses::Lost() {
  const std::lock_guard lock(mutex_);
  std::optional<Loss> loss;
  bool killed = false;
  for (Rank& rank : ranks_) {
    RoleEnd end;
    if (!rank.end && Reap(rank.pid, &end)) rank.end = end;
    if (!rank.end || killed || (loss && !rank.end->signaled)) continue;
    killed = rank.end->signaled;
    if (killed) {
      loss = {fmt::format("{} was killed by signal {}", RankName(rank.rank), rank.end->code), false};
      continue;
    }
    auto why = ReadFile(fmt::format("{}/logs/rank-{}.error", run_dir_, rank.rank), 1 << 16);
    loss = {fmt::format("{}: {}", RankName(rank.rank), why.ok() ? std::string(Trim(*why)) : rank.end->ToString()), why.ok()};
  }
  return loss;
}

std::optional<RankProcesses::Loss> RankProcesses::LostWithin(double seconds) {
  const double until_s = SystemClock::Get().NowS() + seconds;
  while (true) {
    std::optional<Loss> loss = Lost();
    if (loss || SystemClock::Get().NowS() > until_s) return loss;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace temper::job
