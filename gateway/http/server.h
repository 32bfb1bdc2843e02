// HTTP/1.1 server: keep-alive, limits, chunked streaming, disconnect detection. Knows no dialect and no session.
//
// One I/O thread owns every connection; a small pool of workers runs the handler, so that rendering and parsing never stall
// the I/O. A handler may answer later and from any thread through its Responder.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/status.h"

namespace temper::gateway::http {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct Request {
  std::string method;  // "GET"
  std::string path;    // target without query, as sent
  std::string query;   // without '?'
  Headers headers;     // names in lower case, in order
  std::string body;

  // The first header of this (lower case) name, or "".
  std::string_view Header(std::string_view name) const;
};

// Answers one request. Thread-safe. Either Send once, or Begin, any Write, End. Dropping the last reference unanswered closes
// the connection. After the client has gone every call is a no-op.
class Responder {
 public:
  virtual ~Responder() = default;
  // A whole answer; content-length is added.
  virtual void Send(int status, Headers headers, std::string body) = 0;
  // The head of a streamed answer (chunked; for HTTP/1.0 until close).
  virtual void Begin(int status, Headers headers) = 0;
  virtual void Write(std::string bytes) = 0;
  // `clean` false: closes without the last chunk, so that the client sees a cut stream.
  virtual void End(bool clean) = 0;
  // Called at most once, on the I/O thread, when the client left (or stalled) before it had the whole answer; at once (on the
  // caller's thread) when that already happened. Must not block.
  virtual void OnGone(std::function<void()> gone) = 0;
  // Called at most once, on the I/O thread, when the socket took the last byte of the answer. Must not block.
  virtual void OnDelivered(std::function<void()> delivered) = 0;
};

using Handler = std::function<void(Request, std::shared_ptr<Responder>)>;

struct ServerOptions {
  int worker_threads = 2;
  int queue_max = 1024;          // requests waiting for a worker; beyond it they are answered by `refuse(429, …)`
  int connections_max = 4096;    // beyond it new connections wait in the listening queue
  uint64_t body_bytes_max = 64ull << 20;
  uint32_t header_bytes_max = 64 << 10;
  int header_s_max = 30;         // from the first byte's wait on a new connection to the end of the head
  int idle_s_max = 600;          // between two requests of one connection
  int body_s_max = 120;
  int stall_s_max = 60;          // a client that takes nothing for this long is gone
  uint64_t pending_bytes_max = 8ull << 20;  // unsent bytes of a streamed answer; beyond it the client counts as stalled
  // The body of the server's own refusals (400, 413, 429, 431), as JSON.
  std::function<std::string(int status, const std::string& message)> refuse;
};

class Server {
 public:
  Server(ServerOptions options, Handler handler);
  ~Server();  // stops
  void Start();
  // Closes listeners and connections (their OnGone runs), waits for running handlers. Idempotent.
  void Stop();
  // Accepts on a listening stream socket (TCP or unix, of any network namespace). Takes ownership, also on failure.
  // Thread-safe; may be called before Start.
  Status AddListener(int fd);
  int connections() const;

  struct State;  // of server.cpp

 private:
  std::shared_ptr<State> state_;
};

}  // namespace temper::gateway::http
