#include "common/rpc.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <grpcpp/server_posix.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "common/log.h"
#include "common/rpc_call.h"
#include "temper/v1/role.grpc.pb.h"

namespace temper {
namespace {

constexpr int kMaxMessageBytes = 256 << 20;
constexpr int kBacklog = 128;

std::chrono::system_clock::time_point DeadlineIn(double seconds) {
  return std::chrono::system_clock::now() + std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
}

}  // namespace

Result<Fd> ListenAbstract(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() > sizeof address.sun_path - 1) {
    return InvalidArgument("socket name '" + name + "': 1 to " + std::to_string(sizeof address.sun_path - 1) + " bytes");
  }
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const socklen_t length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus("socket", errno);
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) return ErrnoStatus("unix-abstract:" + name, errno);
  if (listen(fd.get(), kBacklog) != 0) return ErrnoStatus("listen", errno);
  return fd;
}

Result<Fd> ListenTcp(const std::string& host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  if (inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) return InvalidArgument("'" + host + "' is not an IPv4 address");
  if (port < 0 || port > 65535) return InvalidArgument("port " + std::to_string(port) + " is not within 0..65535");
  address.sin_port = htons(static_cast<uint16_t>(port));
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus("socket", errno);
  // A port whose former owner has gone may still have connections in TIME_WAIT; another listener is still refused.
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || listen(fd.get(), 1024) != 0) {
    return ErrnoStatus("port " + host + ":" + std::to_string(port), errno);
  }
  return fd;
}

Result<int> BoundPort(int listening_fd) {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  if (getsockname(listening_fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return ErrnoStatus("getsockname", errno);
  if (address.sin_family != AF_INET) return InvalidArgument("not an IPv4 socket");
  return static_cast<int>(ntohs(address.sin_port));
}

grpc::Status ToGrpc(const Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()), status.message()};
}

Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return Status::Ok();
  return {static_cast<StatusCode>(status.error_code()), status.error_message()};
}

Status WaitConnected(grpc::Channel& channel, double retry_s, const std::atomic<bool>* cancelled) {
  SystemClock& clock = SystemClock::Get();
  const double give_up_s = clock.NowS() + std::max(retry_s, 0.0);
  for (;;) {
    if (cancelled && cancelled->load()) return Cancelled("call cancelled");
    if (channel.GetState(true) == GRPC_CHANNEL_READY) return Status::Ok();
    const double left_s = give_up_s - clock.NowS();
    // Even without a retry budget a first connection may take a moment.
    if (channel.WaitForConnected(DeadlineIn(std::clamp(left_s, 0.05, 0.2)))) return Status::Ok();
    if (left_s <= 0) return Unavailable("the peer does not answer");
  }
}

namespace {

class RoleService final : public v1::Role::Service {
 public:
  RoleService(std::string role, const Metrics* metrics, std::function<void(const std::string&)> on_stop)
      : role_(std::move(role)), metrics_(metrics), on_stop_(std::move(on_stop)) {}

  grpc::Status Snapshot(grpc::ServerContext*, const v1::SnapshotRequest*, v1::SnapshotReply* reply) override {
    reply->set_role(role_);
    reply->set_pid(static_cast<uint64_t>(getpid()));
    for (const auto& [name, value] : metrics_->Snapshot()) (*reply->mutable_metrics())[name] = value;
    for (std::string& line : metrics_->Lines()) reply->add_lines(std::move(line));
    return grpc::Status::OK;
  }

  grpc::Status Stop(grpc::ServerContext*, const v1::StopRequest* request, v1::StopReply*) override {
    on_stop_(request->reason());
    return grpc::Status::OK;
  }

 private:
  const std::string role_;
  const Metrics* const metrics_;
  const std::function<void(const std::string&)> on_stop_;
};

}  // namespace

struct RpcServer::Impl {
  Fd listening;
  RpcServerOptions options;
  std::vector<grpc::Service*> services;
  std::vector<std::unique_ptr<RoleService>> roles;
  std::unique_ptr<grpc::Server> server;
  Fd wake;
  std::thread accepting;

  void Accept() {
    for (;;) {
      pollfd polled[2] = {{listening.get(), POLLIN, 0}, {wake.get(), POLLIN, 0}};
      if (poll(polled, 2, -1) < 0 && errno != EINTR) return;
      if (polled[1].revents) return;
      if (!polled[0].revents) continue;
      Fd connection(accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!connection.valid()) {
        // Out of descriptors: the connection stays readable, so without a pause this would spin.
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) SystemClock::Get().SleepS(0.05);
        continue;
      }
      ucred peer{};
      socklen_t length = sizeof peer;
      if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != geteuid()) {
        log::Warn("connection of another user refused", {{"uid", peer.uid}, {"pid", peer.pid}});
        continue;
      }
      grpc::AddInsecureChannelFromFd(server.get(), connection.Release());
    }
  }
};

RpcServer::RpcServer(Fd listening, RpcServerOptions options) : impl_(std::make_unique<Impl>()) {
  impl_->listening = std::move(listening);
  impl_->options = options;
}

RpcServer::~RpcServer() { Stop(0); }

void RpcServer::Register(grpc::Service* service) {
  TEMPER_CHECK(!impl_->server) << "Register before Start";
  impl_->services.push_back(service);
}

void RpcServer::RegisterRole(const std::string& role, const Metrics* metrics,
                             std::function<void(const std::string&)> on_stop) {
  impl_->roles.push_back(std::make_unique<RoleService>(role, metrics, std::move(on_stop)));
  Register(impl_->roles.back().get());
}

Status RpcServer::Start() {
  TEMPER_CHECK(!impl_->server) << "started twice";
  if (!impl_->listening.valid()) return InvalidArgument("no listening socket");
  const int flags = fcntl(impl_->listening.get(), F_GETFL);
  if (flags < 0 || fcntl(impl_->listening.get(), F_SETFL, flags | O_NONBLOCK) != 0) return ErrnoStatus("listening socket", errno);
  grpc::ServerBuilder builder;
  grpc::ResourceQuota quota("rpc");
  quota.SetMaxThreads(impl_->options.max_threads);
  builder.SetResourceQuota(quota);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
  for (grpc::Service* service : impl_->services) builder.RegisterService(service);
  impl_->server = builder.BuildAndStart();
  if (!impl_->server) return Internal("gRPC did not start");
  impl_->wake = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!impl_->wake.valid()) return ErrnoStatus("eventfd", errno);
  impl_->accepting = std::thread([impl = impl_.get()] { impl->Accept(); });
  return Status::Ok();
}

void RpcServer::Stop(double drain_s) {
  if (!impl_->server) return;
  if (impl_->accepting.joinable()) {
    const uint64_t one = 1;
    TEMPER_CHECK(write(impl_->wake.get(), &one, sizeof one) == sizeof one);
    impl_->accepting.join();
  }
  impl_->server->Shutdown(DeadlineIn(drain_s));
  impl_->server.reset();
}

std::shared_ptr<grpc::Channel> RpcChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  // Also the time a connection may sit in a backlog before it is tried anew.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

Result<RoleSnapshot> FetchSnapshot(grpc::Channel& channel, double deadline_s) {
  // A stub wants shared ownership; the caller's reference outlives the call.
  std::shared_ptr<grpc::Channel> unowned(&channel, [](grpc::Channel*) {});
  auto stub = v1::Role::NewStub(unowned);
  v1::SnapshotReply reply;
  RETURN_IF_ERROR(RpcCall(channel, *stub, &v1::Role::Stub::Snapshot, v1::SnapshotRequest(), &reply, {deadline_s, deadline_s}));
  RoleSnapshot snapshot;
  snapshot.role = reply.role();
  snapshot.pid = static_cast<int64_t>(reply.pid());
  snapshot.metrics.insert(reply.metrics().begin(), reply.metrics().end());
  snapshot.lines.assign(reply.lines().begin(), reply.lines().end());
  return snapshot;
}

Status RequestStop(grpc::Channel& channel, const std::string& reason, double deadline_s) {
  std::shared_ptr<grpc::Channel> unowned(&channel, [](grpc::Channel*) {});
  auto stub = v1::Role::NewStub(unowned);
  v1::StopRequest request;
  request.set_reason(reason);
  v1::StopReply reply;
  return RpcCall(channel, *stub, &v1::Role::Stub::Stop, request, &reply, {deadline_s, deadline_s});
}

}  // namespace temper
