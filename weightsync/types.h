// Plain structs of weight sync. Protocol and invariants: docs/weightsync.md.
#pragma once

#include <cstdint>
#include <string>

#include "engine/decode/types.h"
#include "engine/weights.h"

namespace temper::weightsync {

using engine::Version;

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

}  // namespace temper::weightsync
