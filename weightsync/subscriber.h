// The worker's end of weight sync: stages each offered version (maps it read-only, verifies its digest) beside the one that is
// served, and hands it to the engine between two steps.
//
// Fault points (common/faults.h): `weightsync.corrupt_staged=fail` flips a bit of a private copy of the offered bytes before they
// are verified (the version must be refused); `weightsync.flip_verified=fail` changes one bf16 weight after that (the worker serves
// wrong weights, which the trainer's ratio check must find).
//
// Threads: one of its own for the control calls and the verification; TakeSwap, Swapped, MayServe from the engine thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "common/status.h"
#include "engine/weights.h"
#include "weightsync/types.h"

namespace temper::weightsync {

struct SubscriberOptions {
  std::string publisher_address;  // gRPC address of the trainer
  std::string worker;             // name, the same after a restart
  uint64_t incarnation = 0;       // rises at each start of the worker; 0 = taken from the clock
  int64_t retry_ms = 100;         // between attempts while the publisher is away
};

// A verified version, ready to serve. `weights` holds the mapping; dropping the last copy unmaps it.
struct Staged {
  engine::ComputeWeights weights;
  Version version;
};

class Subscriber {
 public:
  // Starts the control thread. `wake` is called from it when TakeSwap or MayServe may answer otherwise than before.
  Subscriber(const SubscriberOptions& options, std::function<void()> wake);
  ~Subscriber();

  // The version to swap to now, once. After the swap the engine calls Swapped.
  std::optional<Staged> TakeSwap();
  void Swapped(const Version& version);

  // False while the publisher has not been heard for lease_ms, though it is reachable: it may have gone on without this worker. A
  // publisher that is gone altogether cannot have, so the worker serves on until it is back.
  bool MayServe() const;

  // active_epoch, active_step, staged, refused, syncs.
  std::map<std::string, double> Metrics() const;

  void Stop();  // idempotent

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace temper::weightsync
