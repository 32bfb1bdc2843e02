#include "datapool/bench/redis.h"

#if defined(TEMPER_HIREDIS)
#include <hiredis/hiredis.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/file.h"
#include "fmt/format.h"
#endif

namespace temper::datapool::bench {
namespace {

constexpr char kInstall[] = "; tests/setup_redis.sh installs what it takes";

#if defined(TEMPER_HIREDIS)
constexpr size_t kCommandsOut = 64, kBytesOut = size_t{8} << 20;  // on their way at once
constexpr double kStartS = 10;

using Reply = std::unique_ptr<redisReply, void (*)(void*)>;

class Streams final : public RedisPool {
 public:
  explicit Streams(pid_t pid) : pid_(pid) {}
  ~Streams() override {
    if (context_ != nullptr) redisFree(context_);
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  Status Connect(const std::string& socket) {
    SystemClock& clock = SystemClock::Get();
    for (const double until = clock.NowS() + kStartS;;) {
      context_ = redisConnectUnix(socket.c_str());
      if (context_ != nullptr && context_->err == 0) break;
      if (context_ != nullptr) redisFree(context_);
      context_ = nullptr;
      if (clock.NowS() > until || waitpid(pid_, nullptr, WNOHANG) == pid_) {
        return FailedPrecondition(std::string("redis-server does not come up") + kInstall);
      }
      clock.SleepS(0.02);
    }
    ASSIGN_OR_RETURN(const Reply info, Ask({"INFO", "server"}));
    const std::string text = info->str;
    const size_t at = text.find("redis_version:");
    if (at == std::string::npos) return FailedPrecondition("redis-server gives no version");
    version_ = fmt::format("Redis {} Streams, hiredis {}.{}.{}", text.substr(at + 14, text.find('\r', at) - at - 14), HIREDIS_MAJOR, HIREDIS_MINOR, HIREDIS_PATCH);
    return Status::Ok();
  }

  std::string version() const override { return version_; }

  Status Add(const std::vector<const std::string*>& records) override {
    size_t asked = 0, answered = 0, bytes_out = 0;
    while (answered < records.size()) {
      while (asked < records.size() && asked - answered < kCommandsOut && bytes_out < kBytesOut) {
        const std::string& record = *records[asked++];
        const char* words[] = {"XADD", "pool", "*", "record", record.data()};
        const size_t sizes[] = {4, 4, 1, 6, record.size()};
        if (redisAppendCommandArgv(context_, 5, words, sizes) != REDIS_OK) return Broken();
        bytes_out += record.size();
      }
      ASSIGN_OR_RETURN(const Reply reply, Next());
      bytes_out -= records[answered++]->size();
    }
    return Status::Ok();
  }

  Result<int64_t> Lease(int64_t count) override {
    const std::string group = fmt::format("trainer-{}", ++groups_);
    RETURN_IF_ERROR(Ask({"XGROUP", "CREATE", "pool", group, "0"}).status());
    ASSIGN_OR_RETURN(const Reply reply, Ask({"XREADGROUP", "GROUP", group, "t", "COUNT", std::to_string(count), "STREAMS", "pool", ">"}));
    if (reply->type != REDIS_REPLY_ARRAY || reply->elements != 1) return Internal("Redis: no such stream");
    const redisReply* entries = reply->element[0]->element[1];
    if (static_cast<int64_t>(entries->elements) != count) return Internal("Redis: not all records");
    int64_t bytes = 0;
    for (size_t i = 0; i < entries->elements; ++i) bytes += static_cast<int64_t>(entries->element[i]->element[1]->element[1]->len);
    return bytes;
  }

  Status Forget() override { return Ask({"DEL", "pool"}).status(); }

 private:
  Status Broken() const { return Unavailable(std::string("Redis: ") + context_->errstr); }
  Result<Reply> Next() {
    void* raw = nullptr;
    if (redisGetReply(context_, &raw) != REDIS_OK) return Broken();
    Reply reply(static_cast<redisReply*>(raw), &freeReplyObject);
    if (reply->type == REDIS_REPLY_ERROR) return Internal(std::string("Redis: ") + reply->str);
    return reply;
  }
  Result<Reply> Ask(const std::vector<std::string>& words) {
    std::vector<const char*> text;
    std::vector<size_t> sizes;
    for (const std::string& word : words) {
      text.push_back(word.data());
      sizes.push_back(word.size());
    }
    if (redisAppendCommandArgv(context_, static_cast<int>(words.size()), text.data(), sizes.data()) != REDIS_OK) return Broken();
    return Next();
  }

  const pid_t pid_;
  redisContext* context_ = nullptr;
  std::string version_;
  int groups_ = 0;
};
#endif

}  // namespace

#if defined(TEMPER_HIREDIS)
Result<std::unique_ptr<RedisPool>> RedisPool::Start(const std::string& server, const std::string& dir) {
  RETURN_IF_ERROR(MakeDirs(dir));
  const std::string socket = dir + "/socket";
  const std::vector<std::string> words = {server, "--port", "0", "--unixsocket", socket, "--dir", dir, "--save", "", "--appendonly", "yes",
                                          "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0", "--daemonize", "no", "--logfile", "log"};
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = fork();
  if (pid < 0) return ErrnoStatus("fork", errno);
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  auto pool = std::make_unique<Streams>(pid);
  RETURN_IF_ERROR(pool->Connect(socket));
  return std::unique_ptr<RedisPool>(std::move(pool));
}
#else
Result<std::unique_ptr<RedisPool>> RedisPool::Start(const std::string&, const std::string&) {
  return Unimplemented(std::string("this program was built without hiredis") + kInstall);
}
#endif

}  // namespace temper::datapool::bench
