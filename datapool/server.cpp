#include "datapool/server.h"

#include <grpcpp/impl/codegen/service_type.h>

#include "common/file.h"
#include "common/json.h"
#include "common/rpc.h"
#include "datapool/format.h"
#include "datapool/rpc_service.h"
#include "datapool/service.h"
#include "datapool/store.h"

namespace temper::datapool {

struct Server::Parts {
  Parts(ServerOptions o, Env e) : options(std::move(o)), env(e) {}

  ServerOptions options;
  Env env;
  temper::Metrics metrics;
  std::unique_ptr<LocalDataPool> pool;
  std::unique_ptr<grpc::Service> service;
  std::unique_ptr<RpcServer> rpc;

  // The configuration lies beside the store, for `pool verify`, and fixes what the store's numbers mean.
  Status KeepConfig() {
    const std::string path = options.run + kConfigFile;
    const std::string printed = PrintPoolConfig(options.config) + "\n";
    if (Exists(path)) {
      ASSIGN_OR_RETURN(const std::string former, ReadFile(path));
      if (former == printed) return Status::Ok();
      return FailedPrecondition(path + ": the run was started with other pool settings; they cannot change on resume");
    }
    RETURN_IF_ERROR(MakeDirs(DirName(path)));
    return WriteFileAtomic(path, printed);
  }

  Status Start() {
    RETURN_IF_ERROR(Validate(options.config));
    RETURN_IF_ERROR(KeepConfig());
    JsonWriter counts;
    counts.Ints(options.task_counts);
    RETURN_IF_ERROR(WriteFileAtomic(options.run + kTasksFile, counts.text() + "\n"));
    ASSIGN_OR_RETURN(std::unique_ptr<Store> store, OpenRocksStore(options.run + "/pool"));
    LocalPoolOptions local;
    local.config = options.config;
    local.task_counts = options.task_counts;
    local.job_incarnation = options.job_incarnation;
    local.ledger_path = options.run + kLedgerFile;
    local.alarms = options.alarms;
    local.retention = options.retention;
    local.archive_dir = options.run + kArchiveDir;
    local.on_damage = options.on_damage;
    ASSIGN_OR_RETURN(pool, LocalDataPool::Open(std::move(local), std::move(store), metrics, env));
    if (options.listen_fd < 0) return Status::Ok();
    service = MakePoolRpcService(*pool);
    rpc = std::make_unique<RpcServer>(Fd(options.listen_fd));
    rpc->Register(service.get());
    rpc->RegisterRole("pool", &metrics, [this](const std::string& reason) {
      if (options.on_stop) options.on_stop(reason);
    });
    return rpc->Start();
  }

  void Stop() {
    if (pool) pool->Stop();  // first, so that long polls end
    if (rpc) rpc->Stop();
    rpc.reset();
    service.reset();
    pool.reset();
  }
};

Server::Server(ServerOptions options, Env env) : parts_(std::make_unique<Parts>(std::move(options), env)) {}
Server::~Server() { Stop(); }
Status Server::Start() { return parts_->Start().WithContext("pool"); }
void Server::Stop() { parts_->Stop(); }
DataPool& Server::pool() { return *parts_->pool; }
Metrics& Server::metrics() { return parts_->metrics; }

}  // namespace temper::datapool
