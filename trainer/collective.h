// What the ranks of a trainer do together with whole arrays: the gradients of all come to rank 0, the weights of rank 0 go to all. The
// interface that a transport between devices implements too (NCCL: ncclReduce, ncclBroadcast); here a chain of stream sockets.
//
// Only rank 0 holds fp32 weights and moments, so that a sum is needed in one place alone, and what goes back is the compute form. Sums are
// in one order, whatever arrives first: from the last rank to rank 0, (((g[n-1] + g[n-2]) + …) + g[0]).
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "common/file.h"
#include "common/status.h"

namespace temper::trainer {

// A stream socket to another process. One sender and one receiver at a time.
class Link {
 public:
  Link() = default;
  // `peer`: how errors name the other end.
  Link(Fd socket, std::string peer);
  bool valid() const { return socket_.valid(); }
  // kUnavailable, naming the peer: it is gone, or it neither sends nor takes anything for kSilentS.
  Status Send(std::span<const std::byte> bytes);
  Status Receive(std::span<std::byte> bytes);
  // Until there is something to receive, for however long; kUnavailable when the peer is gone.
  Status Wait();
  // Ends whatever another thread waits for here.
  void Close();

  static constexpr int kSilentS = 60;

 private:
  Status Gone(const char* what, int error) const;
  Fd socket_;
  std::string peer_;
};

// All ranks call the same functions in the same order with arrays of one size. One thread at a time.
class Collective {
 public:
  virtual ~Collective() = default;
  // At rank 0 `values` become the sum over all ranks; what they are elsewhere is undefined.
  virtual Status Reduce(std::span<float> values) = 0;
  // `bytes` of rank 0 go to all.
  virtual Status Broadcast(std::span<std::byte> bytes) = 0;
};

// Rank r between r-1 (none at rank 0) and r+1 (none at the last), in blocks, so that all links are busy at once. Sockets of any stream
// kind: a pair within a machine, TCP between two.
std::unique_ptr<Collective> MakeChain(Link previous, Link next);

}  // namespace temper::trainer
