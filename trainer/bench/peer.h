// A peer: a program that measures on request, one line of JSON in, one out. It stays alive between requests, so that its samples
// and ours are taken in turn.
#pragma once

#include <memory>
#include <string>

#include "common/status.h"

namespace temper::trainer::bench {

class Peer {
 public:
  // Starts `program script name threads path clock`. FailedPrecondition when it does not come up.
  static Result<std::unique_ptr<Peer>> Start(const std::string& program, const std::string& script, const std::string& name,
                                             int threads, const std::string& path, const std::string& clock);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  // Sends a line, reads the answer's `seconds`. FailedPrecondition says what the peer said.
  Result<double> Measure(const std::string& request);
  const std::string& name() const { return name_; }

 private:
  Peer(int pid, int in, int out, std::string name) : pid_(pid), in_(in), out_(out), name_(std::move(name)) {}
  Result<std::string> ReadLine();
  int pid_, in_, out_;
  std::string name_, pending_;
};

}  // namespace temper::trainer::bench
