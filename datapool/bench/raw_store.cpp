#include "datapool/bench/raw_store.h"

#include <rocksdb/db.h>
#include <rocksdb/version.h>
#include <rocksdb/write_batch.h>

#include "datapool/rocks_status.h"
#include "datapool/store_keys.h"

namespace temper::datapool::bench {
namespace {

class Rocks final : public RawStore {
 public:
  explicit Rocks(std::unique_ptr<rocksdb::DB> db) : db_(std::move(db)) {}
  Status Write(const std::vector<const std::string*>& records) override {
    rocksdb::WriteBatch batch;
    rocksdb::Status s;
    for (const std::string* record : records) {
      if (s.ok()) s = batch.Put(TrajectoryKey({next_++, 0, 1}), *record);
    }
    if (s.ok()) s = db_->Write({}, &batch);
    return FromRocks(s, "raw RocksDB");
  }

 private:
  const std::unique_ptr<rocksdb::DB> db_;
  int64_t next_ = 0;
};

}  // namespace

Result<std::unique_ptr<RawStore>> RawStore::Open(const std::string& path) {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.compression = rocksdb::kNoCompression;
  rocksdb::DB* db = nullptr;
  const rocksdb::Status s = rocksdb::DB::Open(options, path, &db);
  if (!s.ok()) return FromRocks(s, path);
  return std::unique_ptr<RawStore>(new Rocks(std::unique_ptr<rocksdb::DB>(db)));
}

std::string RocksVersion() {
  return std::to_string(ROCKSDB_MAJOR) + "." + std::to_string(ROCKSDB_MINOR) + "." + std::to_string(ROCKSDB_PATCH);
}

}  // namespace temper::datapool::bench
