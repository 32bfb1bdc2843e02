#include "gateway/http/server.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "common/check.h"
#include "gateway/http/asio.h"

namespace temper::gateway::http {
namespace net = boost::asio;
namespace beast = boost::beast;
using boost::system::error_code;
using Socket = beast::basic_stream<net::generic::stream_protocol>;

std::string_view Request::Header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return value;
  }
  return {};
}

namespace {

const char* Reason(int status) {
  switch (status) {
    case 100: return "Continue";
    case 200: return "OK";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 410: return "Gone";
    case 413: return "Payload Too Large";
    case 426: return "Upgrade Required";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 502: return "Bad Gateway";
    case 503: return "Service Unavailable";
    case 504: return "Gateway Timeout";
    default: return status < 500 ? "Error" : "Internal Server Error";
  }
}

std::string Head(int status, const Headers& headers) {
  std::string head = "HTTP/1.1 " + std::to_string(status) + " " + Reason(status) + "\r\n";
  for (const auto& [name, value] : headers) head += name + ": " + value + "\r\n";
  return head;
}

std::string Chunk(const std::string& bytes) {
  char size[24];
  std::snprintf(size, sizeof size, "%zx\r\n", bytes.size());
  return size + bytes + "\r\n";
}

class Connection;

}  // namespace

struct Server::State : std::enable_shared_from_this<Server::State> {
  State(ServerOptions o, Handler h) : options(std::move(o)), handler(std::move(h)) {
    if (!options.refuse) {
      options.refuse = [](int, const std::string&) { return std::string("{\"error\":{\"message\":\"refused\"}}"); };
    }
  }

  ServerOptions options;  // constant after construction
  const Handler handler;
  net::io_context io{1};

  // Touched on the I/O thread only (or before it starts and after it ended).
  struct Listener {
    explicit Listener(net::io_context& io) : fd(io), retry(io) {}
    net::posix::stream_descriptor fd;
    net::steady_timer retry;
  };
  std::set<std::shared_ptr<Listener>> listeners;
  std::set<std::shared_ptr<Connection>> open;

  std::atomic<int> connections{0};
  std::atomic<bool> stopping{false};

  struct Job {
    Request request;
    std::shared_ptr<Responder> responder;
  };
  std::mutex mutex;
  std::condition_variable ready;
  std::deque<Job> queue;  // guarded by mutex; at most options.queue_max
  bool closed = false;    // guarded by mutex

  std::thread io_thread;
  std::vector<std::thread> workers;
  std::optional<net::executor_work_guard<net::io_context::executor_type>> work;

  bool Enqueue(Job job) {
    {
      std::lock_guard lock(mutex);
      if (closed || static_cast<int>(queue.size()) >= options.queue_max) return false;
      queue.push_back(std::move(job));
    }
    ready.notify_one();
    return true;
  }

  void RunWorker() {
    for (;;) {
      Job job;
      {
        std::unique_lock lock(mutex);
        // A worker has nothing to do but wait; Stop wakes it.
        ready.wait(lock, [&] { return closed || !queue.empty(); });
        if (closed) return;
        job = std::move(queue.front());
        queue.pop_front();
      }
      handler(std::move(job.request), std::move(job.responder));
    }
  }

  void Accept(std::shared_ptr<Listener> listener);
};

namespace {

// One connection: reads a request, hands it to a worker, writes what the Responder says, reads the next. All of it on the I/O
// thread. `exchange_` numbers the requests, so that a late call of an old Responder touches nothing.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::shared_ptr<Server::State> server, Socket socket)
      : server_(std::move(server)), stream_(std::move(socket)) {
    // NOTES: growing the buffer read by read made large posts some ten times slower.
    buffer_.reserve(64 << 10);
  }

  void Read() {
    if (closed_) return;
    parser_.emplace();
    parser_->body_limit(server_->options.body_bytes_max);
    parser_->header_limit(server_->options.header_bytes_max);
    stream_.expires_after(std::chrono::seconds(exchange_ == 0 ? server_->options.header_s_max : server_->options.idle_s_max));
    beast::http::async_read_header(stream_, buffer_, *parser_,
                                   [self = shared_from_this()](error_code ec, size_t) { self->OnHeader(ec); });
  }

  void Close() {
    if (closed_) return;
    closed_ = true;
    error_code ignored;
    stream_.socket().shutdown(net::socket_base::shutdown_both, ignored);
    stream_.close();
    if (current_) Gone();
    server_->open.erase(shared_from_this());
    --server_->connections;
  }

  struct Events;
  class Answer;

 private:
  void OnHeader(error_code ec) {
    if (closed_) return;
    if (ec) return Refuse(ec);
    const auto length = parser_->content_length();
    if (length && *length > server_->options.body_bytes_max) return Refuse(beast::http::error::body_limit);
    stream_.expires_after(std::chrono::seconds(server_->options.body_s_max));
    if (beast::iequals(parser_->get()[beast::http::field::expect], "100-continue")) {
      auto text = std::make_shared<std::string>("HTTP/1.1 100 Continue\r\n\r\n");
      net::async_write(stream_, net::buffer(*text), [self = shared_from_this(), text](error_code e, size_t) {
        e ? self->Close() : self->ReadBody();
      });
      return;
    }
    ReadBody();
  }

  void ReadBody() {
    if (closed_) return;
    beast::http::async_read(stream_, buffer_, *parser_,
                            [self = shared_from_this()](error_code ec, size_t) { self->OnRequest(ec); });
  }

  void OnRequest(error_code ec);

  // The client sent what is no request: one answer, then close.
  void Refuse(error_code ec) {
    int status = 0;
    std::string message;
    if (ec == beast::http::error::body_limit) {
      status = 413;
      message = "the request body is larger than " + std::to_string(server_->options.body_bytes_max) + " bytes";
    } else if (ec == beast::http::error::header_limit || ec == beast::http::error::buffer_overflow) {
      status = 431;
      message = "the request head is larger than " + std::to_string(server_->options.header_bytes_max) + " bytes";
    } else if (ec.category() == beast::http::make_error_code(beast::http::error::bad_method).category() &&
               ec != beast::http::error::end_of_stream && ec != beast::http::error::partial_message) {
      status = 400;
      message = "not an HTTP/1.1 request: " + ec.message();
    }
    if (status == 0) return Close();
    std::string body = server_->options.refuse(status, message);
    finished_ = true;
    keep_alive_ = false;
    linger_ = true;  // the rest of a too large body is never handled
    Push(Head(status, {{"content-type", "application/json"},
                       {"content-length", std::to_string(body.size())},
                       {"connection", "close"}}) + "\r\n" + body);
  }

  // Notices a client that leaves while its request is worked on.
  void Watch() {
    stream_.socket().async_wait(net::socket_base::wait_read, [self = shared_from_this(), n = exchange_](error_code ec) {
      if (self->closed_ || self->exchange_ != n || !self->current_ || ec) return;
      error_code error;
      if (self->stream_.socket().available(error) == 0 || error) self->Close();  // end of file, not a pipelined request
    });
  }

  void Gone();

  void Flush() {
    if (closed_ || writing_ || out_.empty()) return;
    writing_ = true;
    stream_.expires_after(std::chrono::seconds(server_->options.stall_s_max));
    net::async_write(stream_, net::buffer(out_.front()), [self = shared_from_this()](error_code ec, size_t) {
      self->writing_ = false;
      if (self->closed_) return;
      if (ec) return self->Close();
      self->pending_bytes_ -= self->out_.front().size();
      self->out_.pop_front();
      if (!self->out_.empty()) return self->Flush();
      self->stream_.expires_never();
      if (self->finished_) self->OnFinished();
    });
  }

  void OnFinished();

  void Push(std::string bytes) {
    pending_bytes_ += bytes.size();
    if (pending_bytes_ > server_->options.pending_bytes_max && out_.size() > 1) return Close();
    out_.push_back(std::move(bytes));
    Flush();
  }

  // A short farewell read: closing with unread input would reset the connection and lose the answer.
  void Linger() {
    error_code ignored;
    stream_.socket().shutdown(net::socket_base::shutdown_send, ignored);
    stream_.expires_after(std::chrono::seconds(2));
    Drain();
  }
  void Drain() {
    stream_.async_read_some(net::buffer(drain_), [self = shared_from_this()](error_code ec, size_t n) {
      self->drained_ += n;
      if (self->closed_) return;
      if (ec || self->drained_ > (64u << 20)) return self->Close();
      self->Drain();
    });
  }

  const std::shared_ptr<Server::State> server_;
  Socket stream_;
  beast::flat_buffer buffer_;
  std::optional<beast::http::request_parser<beast::http::string_body>> parser_;
  std::shared_ptr<Events> current_;  // of the request being answered
  uint64_t exchange_ = 0;
  bool closed_ = false;
  bool keep_alive_ = true;
  bool chunked_ = true;   // of the current answer
  bool headless_ = false;  // HEAD: no body
  bool finished_ = false;  // the whole answer is in out_
  bool writing_ = false;
  bool linger_ = false;
  std::deque<std::string> out_;
  uint64_t pending_bytes_ = 0;
  char drain_[4096];
  uint64_t drained_ = 0;
};

// What the handler wants to hear of one request; shared by the connection and the Responder, so that it outlives either.
struct Connection::Events {
  std::mutex mutex;
  bool is_gone = false;             // guarded by mutex
  std::function<void()> gone;       // guarded by mutex
  std::function<void()> delivered;  // guarded by mutex

  void CallGone() {
    std::function<void()> call;
    {
      std::lock_guard lock(mutex);
      is_gone = true;
      call = std::exchange(gone, nullptr);
      delivered = nullptr;
    }
    if (call) call();
  }

  void CallDelivered() {
    std::function<void()> call;
    {
      std::lock_guard lock(mutex);
      call = std::exchange(delivered, nullptr);
      gone = nullptr;
    }
    if (call) call();
  }
};

// The Responder of one request. Its calls are posted to the I/O thread in order.
class Connection::Answer : public Responder {
 public:
  Answer(std::shared_ptr<Connection> connection, std::shared_ptr<Server::State> server, std::shared_ptr<Events> events,
         uint64_t exchange)
      : connection_(std::move(connection)), server_(std::move(server)), events_(std::move(events)), exchange_(exchange) {}

  ~Answer() override {
    if (answered_) return;
    // Nobody will answer any more.
    net::post(server_->io, [c = connection_, n = exchange_] {
      if (auto connection = c.lock(); connection && connection->exchange_ == n && !connection->finished_) connection->Close();
    });
  }

  void Send(int status, Headers headers, std::string body) override {
    answered_ = true;
    Post([status, headers = std::move(headers), body = std::move(body)](Connection& c) mutable {
      headers.emplace_back("content-length", std::to_string(body.size()));
      if (!c.keep_alive_) headers.emplace_back("connection", "close");
      std::string bytes = Head(status, headers) + "\r\n";
      if (!c.headless_) bytes += body;
      c.finished_ = true;
      c.Push(std::move(bytes));
    });
  }

  void Begin(int status, Headers headers) override {
    Post([status, headers = std::move(headers)](Connection& c) mutable {
      if (c.chunked_) headers.emplace_back("transfer-encoding", "chunked");
      if (!c.keep_alive_) headers.emplace_back("connection", "close");
      c.Push(Head(status, headers) + "\r\n");
    });
  }

  void Write(std::string bytes) override {
    if (bytes.empty()) return;  // An empty chunk would end the answer.
    Post([bytes = std::move(bytes)](Connection& c) mutable { c.Push(c.chunked_ ? Chunk(bytes) : std::move(bytes)); });
  }

  void End(bool clean) override {
    answered_ = true;
    Post([clean](Connection& c) {
      c.finished_ = true;
      if (!clean) c.keep_alive_ = false;
      if (clean && c.chunked_) return c.Push("0\r\n\r\n");
      if (c.out_.empty()) c.OnFinished();
    });
  }

  void OnGone(std::function<void()> gone) override {
    {
      std::lock_guard lock(events_->mutex);
      if (!events_->is_gone) {
        events_->gone = std::move(gone);
        return;
      }
    }
    gone();
  }

  void OnDelivered(std::function<void()> delivered) override {
    std::lock_guard lock(events_->mutex);
    events_->delivered = std::move(delivered);
  }

 private:
  template <typename F>
  void Post(F f) {
    net::post(server_->io, [c = connection_, n = exchange_, f = std::move(f)]() mutable {
      auto connection = c.lock();
      if (!connection || connection->closed_ || connection->exchange_ != n || connection->finished_) return;
      f(*connection);
    });
  }

  const std::weak_ptr<Connection> connection_;
  const std::shared_ptr<Server::State> server_;
  const std::shared_ptr<Events> events_;
  const uint64_t exchange_;
  std::atomic<bool> answered_{false};
};

void Connection::OnRequest(error_code ec) {
  if (closed_) return;
  if (ec) return Refuse(ec);
  stream_.expires_never();
  auto message = parser_->release();
  parser_.reset();
  ++exchange_;
  finished_ = false;
  keep_alive_ = message.keep_alive();
  chunked_ = message.version() >= 11;
  if (!chunked_) keep_alive_ = false;
  headless_ = message.method() == beast::http::verb::head;
  Request request;
  request.method = std::string(message.method_string());
  const std::string target(message.target());
  const size_t mark = target.find('?');
  request.path = target.substr(0, mark);
  if (mark != std::string::npos) request.query = target.substr(mark + 1);
  for (const auto& field : message) {
    std::string name(field.name_string());
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    request.headers.emplace_back(std::move(name), std::string(field.value()));
  }
  request.body = std::move(message.body());
  current_ = std::make_shared<Events>();
  auto answer = std::make_shared<Answer>(shared_from_this(), server_, current_, exchange_);
  Watch();
  if (!server_->Enqueue({std::move(request), answer})) {
    answer->Send(429, {{"content-type", "application/json"}, {"retry-after-ms", "500"}},
                 server_->options.refuse(429, "too many requests are waiting"));
  }
}

void Connection::Gone() {
  auto events = std::exchange(current_, nullptr);
  events->CallGone();
}

void Connection::OnFinished() {
  if (auto events = std::exchange(current_, nullptr)) events->CallDelivered();
  if (linger_) return Linger();
  if (!keep_alive_ || server_->stopping) return Close();
  Read();
}

}  // namespace

void Server::State::Accept(std::shared_ptr<Listener> listener) {
  listener->fd.async_wait(net::posix::stream_descriptor::wait_read, [self = shared_from_this(), listener](error_code ec) {
    if (ec || self->stopping || !listener->fd.is_open()) return;
    int error = 0;
    while (self->connections < self->options.connections_max) {
      sockaddr_storage address{};
      socklen_t length = sizeof address;
      int fd = ::accept4(listener->fd.native_handle(), reinterpret_cast<sockaddr*>(&address), &length,
                         SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0) {
        error = errno;
        if (error == EINTR || error == ECONNABORTED) continue;
        break;
      }
      const int family = address.ss_family;
      if (family == AF_INET || family == AF_INET6) {
        int one = 1;
        ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
      }
      net::generic::stream_protocol::socket socket(self->io);
      error_code assigned;
      socket.assign(net::generic::stream_protocol(family, 0), fd, assigned);
      if (assigned) {
        ::close(fd);
        continue;
      }
      auto connection = std::make_shared<Connection>(self, Socket(std::move(socket)));
      self->open.insert(connection);
      ++self->connections;
      connection->Read();
    }
    if (error == 0 || error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
      // Too many connections or descriptors: the others wait in the listening queue.
      listener->retry.expires_after(std::chrono::milliseconds(50));
      listener->retry.async_wait([self, listener](error_code e) {
        if (!e) self->Accept(listener);
      });
      return;
    }
    if (error == EAGAIN || error == EWOULDBLOCK) return self->Accept(listener);
    listener->fd.close();  // The other side of a handed-out socket is gone.
    self->listeners.erase(listener);
  });
}

Server::Server(ServerOptions options, Handler handler)
    : state_(std::make_shared<State>(std::move(options), std::move(handler))) {}

Server::~Server() { Stop(); }

void Server::Start() {
  TEMPER_CHECK(!state_->io_thread.joinable()) << "started twice";
  state_->work.emplace(state_->io.get_executor());
  state_->io_thread = std::thread([s = state_] { s->io.run(); });
  for (int i = 0; i < state_->options.worker_threads; ++i) {
    state_->workers.emplace_back([s = state_.get()] { s->RunWorker(); });
  }
}

void Server::Stop() {
  if (!state_->io_thread.joinable()) return;
  state_->stopping = true;
  {
    std::lock_guard lock(state_->mutex);
    state_->closed = true;
  }
  state_->ready.notify_all();
  for (auto& worker : state_->workers) worker.join();
  state_->workers.clear();
  {
    std::lock_guard lock(state_->mutex);
    state_->queue.clear();
  }
  net::post(state_->io, [s = state_.get()] {
    for (const auto& listener : s->listeners) {
      listener->fd.close();
      listener->retry.cancel();
    }
    s->listeners.clear();
    const auto open = s->open;
    for (const auto& connection : open) connection->Close();
  });
  state_->work.reset();
  state_->io_thread.join();
}

Status Server::AddListener(int fd) {
  int listening = 0;
  socklen_t length = sizeof listening;
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) != 0 || !listening) {
    if (fd >= 0) ::close(fd);
    return InvalidArgument("descriptor " + std::to_string(fd) + " is not a listening socket");
  }
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  net::post(state_->io, [s = state_, fd] {
    auto listener = std::make_shared<State::Listener>(s->io);
    listener->fd.assign(fd);
    if (s->stopping) return;
    s->listeners.insert(listener);
    s->Accept(listener);
  });
  return Status::Ok();
}

int Server::connections() const { return state_->connections; }

}  // namespace temper::gateway::http
