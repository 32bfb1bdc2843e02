// Plain structs of weight sync. Protocol and invariants: docs/weightsync.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/decode/types.h"
#include "engine/weights.h"

namespace temper::weightsync {

using engine::ToString;

using engine::Digest;  // 128 bits over the logical elements of a version

// What the bytes of a version mean. Equal manifests, or no exchange.
struct Manifest {
  std::string profile;      // "bf16" | "f32"
  std::string layout;       // the engine's layout id
  std::string config_json;  // model configuration, as the engine writes it
  uint64_t config_hash = 0;
  uint64_t bytes = 0;       // of one version
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

// A sealed version: where its bytes are and what they must be.
struct VersionRecord {
  Version version;
  Digest digest{};
  uint64_t bytes = 0;
  int32_t pid = 0;     // the arena is /proc/PID/fd/FD
  int32_t fd = -1;
  uint64_t arena = 0;  // inode of the memfd
  friend bool operator==(const VersionRecord&, const VersionRecord&) = default;
};

// Where a worker stands: everything the publisher needs to know, so that a message may be lost or repeated.
struct Report {
  std::string worker{};
  uint64_t incarnation = 0;  // rises at each start of the worker process
  uint64_t seq = 0;          // rises with each report; when one arrives, all earlier answers are settled: received or given up
  int32_t pid = 0;
  std::optional<Version> active{};  // served now
  std::optional<Version> staged{};  // verified, not yet served
  Digest staged_digest{};
  uint64_t staged_bytes = 0;
  std::optional<Version> refused{};  // could not be verified; told once
  std::string refused_reason{};
  std::vector<Version> held{};  // every version whose bytes are still mapped
};

// Where the worker should be.
struct Answer {
  uint64_t epoch = 0;
  std::optional<VersionRecord> offer{};  // stage this
  std::optional<Version> commit{};       // serve this (once it is staged), and nothing below it
  int64_t lease_ms = 0;
  std::string refuse{};  // not empty: cannot join, and why
};

}  // namespace temper::weightsync
