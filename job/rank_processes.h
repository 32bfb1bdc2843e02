// The ranks of a trainer above 0 as child processes of the trainer: started with it, ended with it, and told of when one dies alone.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "job/role_process.h"
#include "trainer/ranks.h"

namespace temper::job {

// How errors name the other end of a link.
std::string RankName(int rank);

class RankProcesses {
 public:
  // Starts ranks 1 … ranks-1 of the run, each `temper serve rank --index K` with its sockets inherited as "control", "previous" and, but for
  // the last, "next"; logs/rank-K.log. Main thread only: they die with the thread that starts them. `program`: "/proc/self/exe".
  Status Start(const std::string& run_dir, int ranks, const std::string& program = "/proc/self/exe");
  trainer::RankLinks* links() { return &links_; }

  // Words for ranks that ended though nobody ended them: "trainer rank 2 was killed by signal 9"; of several the one that a signal killed,
  // since others end of that. Nothing while all run. Thread-safe.
  struct Loss {
    std::string words;
    bool own_error = false;  // it said why and starting it anew would not help
  };
  std::optional<Loss> Lost();
  // The same, waiting so long for an end to be seen.
  std::optional<Loss> LostWithin(double seconds);

 private:
  struct Rank {
    int rank = 0;
    pid_t pid = -1;
    std::optional<RoleEnd> end;
  };
  std::string run_dir_;
  std::mutex mutex_;
  std::vector<Rank> ranks_;
  trainer::RankLinks links_;
};

}  // namespace temper::job
