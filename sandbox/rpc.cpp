// The sandbox service over gRPC, both sides. Translates, decides nothing.
#include "common/rpc.h"

#include "common/rpc_call.h"
#include "sandbox/server.h"
#include "temper/v1/sandbox.grpc.pb.h"

namespace temper::sandbox {
namespace {

constexpr double kConnectS = 10;
constexpr double kCallS = 60;
constexpr double kExecMaxS = 86400;  // when the sandbox's own limit is unknown here

void ToProto(const File& f, v1::SandboxFile* p) {
  p->set_path(f.path);
  p->set_bytes(f.bytes);
  p->set_mode(f.mode);
  p->set_kind(static_cast<v1::SandboxFile::Kind>(f.kind));
}

File FromProto(const v1::SandboxFile& p) {
  return File{p.path(), p.bytes(), p.mode(), static_cast<File::Kind>(p.kind())};
}

void ToProto(const CreateRequest& q, v1::CreateSandboxRequest* p) {
  p->set_id(q.id);
  v1::SandboxLimits* l = p->mutable_limits();
  l->set_memory_bytes(q.limits.memory_bytes);
  l->set_processes(q.limits.processes);
  l->set_disk_bytes(q.limits.disk_bytes);
  l->set_files(q.limits.files);
  l->set_cpu_s(q.limits.cpu_s);
  l->set_wall_s(q.limits.wall_s);
  l->set_output_bytes(q.limits.output_bytes);
  p->set_rootfs(q.rootfs);
  for (const Mount& m : q.mounts) {
    v1::SandboxMount* to = p->add_mounts();
    to->set_source(m.source);
    to->set_target(m.target);
  }
  for (const File& f : q.files) ToProto(f, p->add_files());
  p->set_relay(q.relay);
  p->set_ttl_s(q.ttl_s);
}

CreateRequest FromProto(const v1::CreateSandboxRequest& p) {
  CreateRequest q;
  q.id = p.id();
  const v1::SandboxLimits& l = p.limits();
  q.limits = Limits{l.memory_bytes(), l.processes(), l.disk_bytes(), l.files(), l.cpu_s(), l.wall_s(), l.output_bytes()};
  q.rootfs = p.rootfs();
  for (const v1::SandboxMount& m : p.mounts()) q.mounts.push_back(Mount{m.source(), m.target()});
  for (const v1::SandboxFile& f : p.files()) q.files.push_back(FromProto(f));
  q.relay = p.relay();
  q.ttl_s = p.ttl_s();
  return q;
}

void ToProto(const SandboxInfo& i, v1::SandboxInfo* p) {
  p->set_id(i.id);
  v1::SandboxEnforced* e = p->mutable_enforced();
  e->set_memory(i.enforced.memory);
  e->set_processes(i.enforced.processes);
  e->set_disk(i.enforced.disk);
  e->set_files(i.enforced.files);
  e->set_cpu_s(i.enforced.cpu_s);
  e->set_wall_s(i.enforced.wall_s);
  e->set_output(i.enforced.output);
  p->set_ttl_left_s(i.ttl_left_s);
  p->set_commands_running(i.commands_running);
}

SandboxInfo FromProto(const v1::SandboxInfo& p) {
  const v1::SandboxEnforced& e = p.enforced();
  return SandboxInfo{p.id(), Enforced{e.memory(), e.processes(), e.disk(), e.files(), e.cpu_s(), e.wall_s(), e.output()},
                     p.ttl_left_s(), p.commands_running()};
}

void ToProto(const ExecRequest& q, v1::ExecSandboxRequest* p) {
  p->set_id(q.id);
  for (const std::string& a : q.argv) p->add_argv(a);
  for (const auto& [name, value] : q.env) {
    auto* v = p->add_env();
    v->set_name(name);
    v->set_value(value);
  }
  p->set_cwd(q.cwd);
  p->set_stdin(q.stdin_bytes);
  p->set_capture_fd3(q.capture_fd3);
  p->set_timeout_s(q.timeout_s);
  p->set_role(q.role == Role::kTool ? v1::ExecSandboxRequest::TOOL : v1::ExecSandboxRequest::AGENT);
}

ExecRequest FromProto(const v1::ExecSandboxRequest& p) {
  ExecRequest q;
  q.id = p.id();
  q.argv.assign(p.argv().begin(), p.argv().end());
  for (const auto& v : p.env()) q.env.emplace_back(v.name(), v.value());
  q.cwd = p.cwd();
  q.stdin_bytes = p.stdin();
  q.capture_fd3 = p.capture_fd3();
  q.timeout_s = p.timeout_s();
  q.role = p.role() == v1::ExecSandboxRequest::TOOL ? Role::kTool : Role::kAgent;
  return q;
}

void ToProto(const ExecResult& r, v1::ExecSandboxResponse* p) {
  p->set_outcome(static_cast<v1::ExecSandboxResponse::Outcome>(r.outcome));
  p->set_exit_code(r.exit_code);
  p->set_signal(r.signal);
  p->set_limit(r.limit);
  p->set_out(r.out.bytes);
  p->set_out_dropped(r.out.dropped);
  p->set_err(r.err.bytes);
  p->set_err_dropped(r.err.dropped);
  p->set_fd3(r.fd3);
  p->set_fd3_dropped(r.fd3_dropped);
  p->set_wall_s(r.usage.wall_s);
  p->set_cpu_s(r.usage.cpu_s);
  p->set_peak_bytes(r.usage.peak_bytes);
  p->set_message(r.message);
}

ExecResult FromProto(const v1::ExecSandboxResponse& p) {
  ExecResult r;
  r.outcome = static_cast<ExecOutcome>(p.outcome());
  r.exit_code = p.exit_code();
  r.signal = p.signal();
  r.limit = p.limit();
  r.out = Captured{p.out(), p.out_dropped()};
  r.err = Captured{p.err(), p.err_dropped()};
  r.fd3 = p.fd3();
  r.fd3_dropped = p.fd3_dropped();
  r.usage = Usage{p.wall_s(), p.cpu_s(), p.peak_bytes()};
  r.message = p.message();
  return r;
}

class RpcService final : public v1::Sandbox::CallbackService {
 public:
  explicit RpcService(LocalSandboxService* service) : service_(service) {}

  grpc::ServerUnaryReactor* Create(grpc::CallbackServerContext* context, const v1::CreateSandboxRequest* request,
                                   v1::SandboxInfo* response) override {
    auto info = service_->Create(FromProto(*request));
    if (info.ok()) ToProto(*info, response);
    return Finish(context, info.status());
  }

  // The one call that lasts: its reactor waits, no thread does.
  grpc::ServerUnaryReactor* Exec(grpc::CallbackServerContext* context, const v1::ExecSandboxRequest* request,
                                 v1::ExecSandboxResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    service_->ExecAsync(FromProto(*request), [reactor, response](Result<ExecResult> result) {
      if (result.ok()) ToProto(*result, response);
      reactor->Finish(ToGrpc(result.status()));
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* Export(grpc::CallbackServerContext* context, const v1::ExportSandboxRequest* request,
                                   v1::ExportSandboxResponse* response) override {
    auto files = service_->Export(request->id(), ExportOptions{request->path(), request->bytes_max(), request->files_max()});
    if (files.ok()) {
      for (const File& f : *files) ToProto(f, response->add_files());
    }
    return Finish(context, files.status());
  }

  grpc::ServerUnaryReactor* Renew(grpc::CallbackServerContext* context, const v1::RenewSandboxRequest* request,
                                  v1::RenewSandboxResponse*) override {
    return Finish(context, service_->Renew(request->id(), request->ttl_s()));
  }

  grpc::ServerUnaryReactor* Destroy(grpc::CallbackServerContext* context, const v1::DestroySandboxRequest* request,
                                    v1::DestroySandboxResponse*) override {
    return Finish(context, service_->Destroy(request->id()));
  }

  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context, const v1::ListSandboxesRequest*,
                                 v1::ListSandboxesResponse* response) override {
    auto all = service_->List();
    if (all.ok()) {
      for (const SandboxInfo& i : *all) ToProto(i, response->add_sandboxes());
    }
    return Finish(context, all.status());
  }

 private:
  static grpc::ServerUnaryReactor* Finish(grpc::CallbackServerContext* context, const Status& status) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpc(status));
    return reactor;
  }

  LocalSandboxService* service_;
};

class RemoteSandboxService final : public SandboxService {
 public:
  explicit RemoteSandboxService(const std::string& address)
      : channel_(RpcChannel(address)), stub_(v1::Sandbox::NewStub(channel_)) {}

  Result<SandboxInfo> Create(const CreateRequest& request) override {
    v1::CreateSandboxRequest q;
    ToProto(request, &q);
    v1::SandboxInfo p;
    RETURN_IF_ERROR(Once(&v1::Sandbox::Stub::Create, q, &p, kCallS));
    return FromProto(p);
  }

  Result<ExecResult> Exec(const ExecRequest& request) override {
    v1::ExecSandboxRequest q;
    ToProto(request, &q);
    v1::ExecSandboxResponse p;
    RETURN_IF_ERROR(Once(&v1::Sandbox::Stub::Exec, q, &p, request.timeout_s > 0 ? request.timeout_s + kCallS : kExecMaxS));
    return FromProto(p);
  }

  Result<std::vector<File>> Export(const std::string& id, const ExportOptions& options) override {
    v1::ExportSandboxRequest q;
    q.set_id(id);
    q.set_path(options.path);
    q.set_bytes_max(options.bytes_max);
    q.set_files_max(options.files_max);
    v1::ExportSandboxResponse p;
    RETURN_IF_ERROR(Once(&v1::Sandbox::Stub::Export, q, &p, kCallS));
    std::vector<File> files;
    for (const v1::SandboxFile& f : p.files()) files.push_back(FromProto(f));
    return files;
  }

  Status Renew(const std::string& id, double ttl_s) override {
    v1::RenewSandboxRequest q;
    q.set_id(id);
    q.set_ttl_s(ttl_s);
    v1::RenewSandboxResponse p;
    return Once(&v1::Sandbox::Stub::Renew, q, &p, kCallS);
  }

  Status Destroy(const std::string& id) override {
    v1::DestroySandboxRequest q;
    q.set_id(id);
    v1::DestroySandboxResponse p;
    return Once(&v1::Sandbox::Stub::Destroy, q, &p, kCallS);
  }

  Result<std::vector<SandboxInfo>> List() override {
    v1::ListSandboxesResponse p;
    RETURN_IF_ERROR(Once(&v1::Sandbox::Stub::List, v1::ListSandboxesRequest(), &p, kCallS));
    std::vector<SandboxInfo> all;
    for (const v1::SandboxInfo& i : p.sandboxes()) all.push_back(FromProto(i));
    return all;
  }

 private:
  // Waits for the service, then calls once: when the connection breaks in the middle the sandbox is gone with its service,
  // and a second try could only meet a stranger's state.
  template <typename Request, typename Reply>
  Status Once(grpc::Status (v1::Sandbox::Stub::*method)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
              Reply* reply, double deadline_s) {
    RETURN_IF_ERROR(WaitConnected(*channel_, kConnectS, nullptr).WithContext("sandbox service"));
    return RpcCall(*channel_, *stub_, method, request, reply, {deadline_s, 0});
  }

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Sandbox::Stub> stub_;
};

}  // namespace

std::unique_ptr<SandboxService> ConnectSandboxService(const std::string& address) {
  return std::make_unique<RemoteSandboxService>(address);
}

struct Server::Impl {
  ServerOptions options;
  Metrics metrics;
  std::unique_ptr<LocalSandboxService> service;
  std::unique_ptr<RpcService> rpc;
  std::unique_ptr<RpcServer> server;
};

Server::Server(const ServerOptions& options) : impl_(std::make_unique<Impl>()) { impl_->options = options; }
Server::~Server() { Stop(); }

Status Server::Start() {
  ServiceOptions service = impl_->options.service;
  service.metrics = &impl_->metrics;
  ASSIGN_OR_RETURN(impl_->service, LocalSandboxService::Start(service));
  impl_->rpc = std::make_unique<RpcService>(impl_->service.get());
  impl_->server = std::make_unique<RpcServer>(Fd(impl_->options.listen_fd));
  impl_->server->Register(impl_->rpc.get());
  auto on_stop = impl_->options.on_stop;
  impl_->server->RegisterRole("sandbox", &impl_->metrics, [on_stop](const std::string& reason) {
    if (on_stop) on_stop(reason);
  });
  return impl_->server->Start();
}

void Server::Stop() {
  // The commands first: a call that runs can only end with its command.
  if (impl_->service) impl_->service->Close();
  impl_->server.reset();
  impl_->rpc.reset();
  impl_->service.reset();
}

Metrics& Server::metrics() { return impl_->metrics; }

}  // namespace temper::sandbox
