#include "datapool/store.h"

#include <malloc.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/write_batch.h>

#include <map>
#include <mutex>

#include "common/file.h"
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

 private:
  std::mutex mutex_;
  std::optional<std::string> state_;
  std::map<AttemptId, std::string> records_;
  std::map<int64_t, std::string> ledger_;
};

class RocksStore final : public Store {
  static constexpr size_t kRoom = 64;  // of a key and its lengths in a batch

 public:
  explicit RocksStore(std::unique_ptr<rocksdb::DB> db) : db_(std::move(db)) {}

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
    rocksdb::WriteOptions options;
    options.sync = sync;
    if (s.ok()) s = db_->Write(options, &batch);
    if (s.ok()) dropped_ = std::max(dropped_, write.drop_ledger_to);
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

 private:
  std::unique_ptr<rocksdb::DB> db_;
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
  return std::unique_ptr<Store>(new RocksStore(std::unique_ptr<rocksdb::DB>(db)));
}

}  // namespace temper::datapool
