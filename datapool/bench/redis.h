// A pool made of a Redis Stream, as the peer of `temper bench pool`: records are added with XADD and leased with XREADGROUP, through
// hiredis, pipelined, over a unix socket. The server is a process of its own with an append-only file that is written before the answer
// and not waited for (appendfsync no): what is answered survives kill -9, as in our pool.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"

namespace temper::datapool::bench {

class RedisPool {
 public:
  // Starts `server` in `dir` and connects. kUnimplemented: built without hiredis; kFailedPrecondition: the server does not come up. Both
  // say what to install.
  static Result<std::unique_ptr<RedisPool>> Start(const std::string& server, const std::string& dir);
  virtual ~RedisPool() = default;  // kills the server
  virtual std::string version() const = 0;  // of server and client
  // Adds records to a new stream, so many commands and bytes on their way at once. Returns when all are answered.
  virtual Status Add(const std::vector<const std::string*>& records) = 0;
  // Reads the stream's records as a new consumer would, in one answer; their bytes in all.
  virtual Result<int64_t> Lease(int64_t count) = 0;
  // Forgets the stream.
  virtual Status Forget() = 0;
};

}  // namespace temper::datapool::bench
