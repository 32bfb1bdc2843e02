// The trainer's end of weight sync: hands each new version to every rollout worker, whole, verified, bounded in time.
//
// Use: fill Begin()'s bytes with the compute form, then Publish(version, digest): it seals the bytes and returns when every live joined
// worker serves them (COMMITTED). A worker that joins later gets the newest version. Bytes of a sealed version are never written
// while a worker may read them: the pages are write-protected in this process, and an arena is reused only when no worker maps it.
// A worker that dies is dropped at once (its pidfd), one that hangs after lease_ms; neither blocks Publish longer.
// Threads: Begin and Publish from one thread (the trainer's); the service and a small timer thread run beside it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"
#include "weightsync/types.h"

namespace grpc {
class Service;
}

namespace temper::weightsync {

struct PublisherOptions {
  Manifest manifest;
  uint64_t epoch = 1;            // above every earlier trainer start (the incarnation of the trainer role)
  int expected_workers = 1;      // the first Publish waits for so many to join, at most join_ms
  int64_t join_ms = 60000;
  int64_t lease_ms = 10000;      // a worker silent for so long is fenced
};

// How a Publish went.
struct PublishReport {
  Version version;
  int workers = 0;               // that serve it
  int lost = 0;                  // workers dropped while it was distributed
  int refused = 0;               // records that a worker could not verify and asked for again
  double wall_ms = 0;
};

class Publisher {
 public:
  static Result<std::unique_ptr<Publisher>> Create(const PublisherOptions& options);
  ~Publisher();

  // The gRPC service to register on the trainer's server before it starts. Owned by the publisher, which must outlive the server.
  grpc::Service* service();

  // Writable zeroed or stale memory of manifest.bytes for the next version; the caller writes all of it. kResourceExhausted: no memory.
  Result<std::span<std::byte>> Begin();

  // Seals the bytes of the last Begin() as {epoch, step} with `digest` and blocks until COMMITTED or deadline_ms is over. kDeadlineExceeded: distribution goes on, the
  // next Publish supersedes it. kInvalidArgument: step not above the last one. kDataLoss: a worker refused the bytes twice
  // (what they hold does not match `digest`).
  Result<PublishReport> Publish(int64_t step, const Digest& digest, int64_t deadline_ms);

  // The newest COMMITTED version; false when there is none.
  bool Committed(Version* version) const;

  // workers, fenced, version_epoch, version_step, publishes, publish_ms_last, refused, arenas.
  std::map<std::string, double> Metrics() const;

  // One line a worker, for the live view.
  std::vector<std::string> Describe() const;

  // Answers every waiting worker and refuses new Syncs with kUnavailable. Call before the server is shut down. Idempotent.
  void Stop();

 private:
  struct State;
  explicit Publisher(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace temper::weightsync
