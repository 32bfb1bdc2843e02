#include "datapool/store.h"

#include <malloc.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/write_batch.h>
#include <sys/statvfs.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <thread>

#include "common/file.h"
#include "common/log.h"
#include "datapool/record.h"
#include "datapool/rocks_status.h"
#include "datapool/store_keys.h"

namespace temper::datapool {
namespace {

class MemoryStore final : public Store {
 public:
  Status Write(const StoreWrite& write, bool) override {
    std::lock_guard lock(mutex_);
    if (!write.state.empty()) state_ = write.state;
    for (const auto& [id, record] : write.records) records_[id] = record;
    for (const auto& [seq, line] : write.ledger) ledger_[seq] = line;
    ledger_.erase(ledger_.begin(), ledger_.upper_bound(write.drop_ledger_to));
    for (int64_t group : write.drop_groups) records_.erase(records_.lower_bound({group, 0, 0}), records_.lower_bound({group + 1, 0, 0}));
    return Status::Ok();
  }
  Result<std::optional<std::string>> State() override {
    std::lock_guard lock(mutex_);
    return state_;
  }
  Result<std::vector<std::pair<int64_t, std::string>>> Ledger() override {
    std::lock_guard lock(mutex_);
    return std::vector<std::pair<int64_t, std::string>>(ledger_.begin(), ledger_.end());
  }
  Result<std::string> Trajectory(const AttemptId& id) override {
    std::lock_guard lock(mutex_);
    auto it = records_.find(id);
    if (it == records_.end()) return NotFound("no such trajectory");
    return UnpackRecord(id, it->second);
  }
  Result<std::vector<std::pair<AttemptId, std::string>>> Records(int64_t group) override {
    std::lock_guard lock(mutex_);
    return std::vector<std::pair<AttemptId, std::string>>(records_.lower_bound({group, 0, 0}), records_.lower_bound({group + 1, 0, 0}));
  }
  Result<StoreSpace> Space() override {
    std::lock_guard lock(mutex_);
    StoreSpace space;
    for (const auto& [id, record] : records_) space.used += static_cast<int64_t>(record.size());
    return space;
  }

 private:
  std::mutex mutex_;
  std::optional<std::string> state_;
  std::map<AttemptId, std::string> records_;
  std::map<int64_t, std::string> ledger_;
};

class RocksStore final : public Store {
  static constexpr size_t kRoom = 64;  // of a key and its lengths in a batch

 public:
  RocksStore(std::unique_ptr<rocksdb::DB> db, std::string path) : db_(std::move(db)), path_(std::move(path)) {}
  ~RocksStore() override {
    if (reclaiming_.joinable()) reclaiming_.join();
  }

  Status Write(const StoreWrite& write, bool sync) override {
    size_t bytes = write.state.size() + kRoom;
    for (const auto& [id, record] : write.records) bytes += record.size() + kRoom;
    for (const auto& [seq, line] : write.ledger) bytes += line.size() + kRoom;
    rocksdb::WriteBatch batch(bytes);
    rocksdb::Status s;
    auto put = [&](const std::string& key, const std::string& value) {
      if (s.ok()) s = batch.Put(key, value);
    };
    if (!write.state.empty()) put(kStateKey, write.state);
    for (const auto& [id, record] : write.records) put(TrajectoryKey(id), record);
    for (const auto& [seq, line] : write.ledger) put(LedgerKey(seq), line);
    if (write.drop_ledger_to > dropped_ && s.ok()) s = batch.DeleteRange(LedgerKey(dropped_ + 1), LedgerKey(write.drop_ledger_to + 1));
    for (size_t i = 0; i < write.drop_groups.size() && s.ok();) {
      size_t end = i + 1;
      while (end < write.drop_groups.size() && write.drop_groups[end] == write.drop_groups[end - 1] + 1) ++end;
      s = batch.DeleteRange(TrajectoryKey({write.drop_groups[i], 0, 0}), TrajectoryKey({write.drop_groups[end - 1] + 1, 0, 0}));
      i = end;
    }
    rocksdb::WriteOptions options;
    options.sync = sync;
    if (s.ok()) s = db_->Write(options, &batch);
    if (s.ok()) dropped_ = std::max(dropped_, write.drop_ledger_to);
    if (s.ok() && !write.drop_groups.empty()) Reclaim();
    return FromRocks(s, "pool store");
  }

  Result<std::optional<std::string>> State() override {
    std::string value;
    rocksdb::Status s = db_->Get({}, kStateKey, &value);
    if (s.IsNotFound()) return std::optional<std::string>();
    RETURN_IF_ERROR(FromRocks(s, "pool store"));
    return std::optional<std::string>(std::move(value));
  }

  Result<std::vector<std::pair<int64_t, std::string>>> Ledger() override {
    std::vector<std::pair<int64_t, std::string>> out;
    std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator({}));
    for (it->Seek("l"); it->Valid() && it->key().starts_with("l"); it->Next()) {
      rocksdb::Slice key = it->key();
      key.remove_prefix(1);
      out.emplace_back(static_cast<int64_t>(GetBig({key.data(), key.size()})), it->value().ToString());
    }
    RETURN_IF_ERROR(FromRocks(it->status(), "pool store"));
    return out;
  }

  Result<std::string> Trajectory(const AttemptId& id) override {
    std::string value;
    RETURN_IF_ERROR(FromRocks(db_->Get({}, TrajectoryKey(id), &value), "pool store"));
    return UnpackRecord(id, value);
  }

  Result<std::vector<std::pair<AttemptId, std::string>>> Records(int64_t group) override {
    std::vector<std::pair<AttemptId, std::string>> out;
    std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator({}));
    for (it->Seek(TrajectoryKey({group, 0, 0})); it->Valid(); it->Next()) {
      const std::optional<AttemptId> id = ParseTrajectoryKey({it->key().data(), it->key().size()});
      if (!id || id->group != group) break;
      out.emplace_back(*id, it->value().ToString());
    }
    RETURN_IF_ERROR(FromRocks(it->status(), "pool store"));
    return out;
  }

  Result<StoreSpace> Space() override {
    StoreSpace space;
    ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDir(path_));
    for (const std::string& name : names) {
      // One that has gone meanwhile takes no space.
      if (Result<int64_t> size = FileSize(path_ + "/" + name); size.ok()) space.used += *size;
    }
    struct statvfs disk {};
    if (statvfs(path_.c_str(), &disk) != 0) return ErrnoStatus(path_, errno);
    space.free = static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
    return space;
  }

 private:
  // Merges away the keys that were dropped, so that the files of their records go. One at a time, beside the writes; what is dropped
  // while it runs waits for the next drop.
  void Reclaim() {
    if (reclaim_runs_.exchange(true)) return;
    if (reclaiming_.joinable()) reclaiming_.join();
    reclaiming_ = std::thread([this] {
      rocksdb::CompactRangeOptions options;
      options.exclusive_manual_compaction = false;
      options.bottommost_level_compaction = rocksdb::BottommostLevelCompaction::kForceOptimized;
      const std::string begin = TrajectoryKey({0, 0, 0}), end = TrajectoryKey({INT64_MAX, 0, 0});
      const rocksdb::Slice from(begin), to(end);
      if (const rocksdb::Status s = db_->CompactRange(options, &from, &to); !s.ok()) {
        log::Warn("dropped records keep their space for now", {{"error", s.ToString()}});
      }
      reclaim_runs_ = false;
    });
  }

  std::unique_ptr<rocksdb::DB> db_;
  const std::string path_;
  std::atomic<bool> reclaim_runs_{false};
  std::thread reclaiming_;
  int64_t dropped_ = 0;
};

// RocksDB's buffers come and go by the megabyte. Given back to the kernel each time, a fifth of a write is the clearing of new pages.
void KeepFreedMemory() {
  static const int done = mallopt(M_TRIM_THRESHOLD, 256 << 20) + mallopt(M_MMAP_THRESHOLD, 32 << 20);
  (void)done;
}

}  // namespace

std::unique_ptr<Store> MakeMemoryStore() { return std::make_unique<MemoryStore>(); }

Result<std::unique_ptr<Store>> OpenRocksStore(const std::string& path) {
  KeepFreedMemory();
  RETURN_IF_ERROR(MakeDirs(path));
  RETURN_IF_ERROR(SyncDir(DirName(path)));  // RocksDB syncs what it holds, not its own name
  rocksdb::Options options;
  options.create_if_missing = true;
  // The trainer and the worker share the cores: one thread for compaction, one for flushes.
  options.env->SetBackgroundThreads(1, rocksdb::Env::LOW);
  options.env->SetBackgroundThreads(1, rocksdb::Env::HIGH);
  options.max_background_jobs = 2;
  options.max_subcompactions = 1;
  options.max_file_opening_threads = 1;
  options.write_buffer_size = 32 << 20;
  options.max_total_wal_size = 64 << 20;
  // Records lie in files of their own, so that merging keys does not copy them again and again; a file goes when all its records are dropped.
  options.enable_blob_files = true;
  options.min_blob_size = 1024;
  options.blob_file_size = 32 << 20;
  options.enable_blob_garbage_collection = true;
  options.max_open_files = 128;
  // A record that is damaged, but for the last one half written, is an error: skipping it would lose what was promised.
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords;
  options.keep_log_file_num = 2;
  // Records are compressed by themselves.
  options.compression = rocksdb::kNoCompression;
  options.info_log_level = rocksdb::WARN_LEVEL;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  rocksdb::DB* db = nullptr;
  rocksdb::Status s = rocksdb::DB::Open(options, path, &db);
  if (!s.ok()) return FromRocks(s, path);
  return std::unique_ptr<Store>(new RocksStore(std::unique_ptr<rocksdb::DB>(db), path));
}

}  // namespace temper::datapool
