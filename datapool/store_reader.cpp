#include "datapool/store_reader.h"

#include <rocksdb/db.h>
#include <unistd.h>

#include <algorithm>

#include "common/file.h"
#include "common/strings.h"
#include "datapool/archive.h"
#include "datapool/format.h"
#include "datapool/record.h"
#include "datapool/rocks_status.h"
#include "datapool/store_keys.h"

namespace temper::datapool {
namespace {

class RocksReader final : public StoreReader {
 public:
  RocksReader(std::unique_ptr<rocksdb::DB> db, std::string scratch, std::string archive)
      : db_(std::move(db)), scratch_(std::move(scratch)), archive_(std::move(archive)) {}
  ~RocksReader() override {
    db_.reset();
    (void)RemoveAll(scratch_);
  }

  Result<std::string> Read(int64_t group, int32_t rollout, std::optional<int32_t> attempt) override {
    RETURN_IF_ERROR(CatchUp());
    std::optional<std::pair<AttemptId, std::string>> found;
    RETURN_IF_ERROR(Scan(TrajectoryKey({group, rollout, 0}), [&](const AttemptId& id, const rocksdb::Slice& value) {
      if (id.group != group || id.rollout != rollout) return false;
      if (!attempt || *attempt == id.attempt) found = {id, value.ToString()};
      return true;
    }));
    if (!found) {
      // What has left the store may lie in the archive, which grows with each commit.
      ASSIGN_OR_RETURN(const Archive archive, Archive::Open(archive_));
      std::optional<AttemptId> last;
      for (auto it = archive.records().lower_bound({group, rollout, 0}); it != archive.records().end(); ++it) {
        if (it->first.group != group || it->first.rollout != rollout) break;
        if (!attempt || *attempt == it->first.attempt) last = it->first;
      }
      if (last) return archive.Read(*last);
      std::string name = std::to_string(group) + "." + std::to_string(rollout);
      if (attempt) name += "." + std::to_string(*attempt);
      return NotFound("no trajectory of " + name + " is stored");
    }
    return UnpackRecord(found->first, found->second);
  }

  Result<std::vector<AttemptId>> List(std::optional<int64_t> group) override {
    RETURN_IF_ERROR(CatchUp());
    std::vector<AttemptId> out;
    RETURN_IF_ERROR(Scan(TrajectoryKey({group.value_or(0), 0, 0}), [&](const AttemptId& id, const rocksdb::Slice&) {
      if (group && id.group != *group) return false;
      out.push_back(id);
      return true;
    }));
    ASSIGN_OR_RETURN(const Archive archive, Archive::Open(archive_));
    for (const auto& [id, place] : archive.records()) {
      if (!group || id.group == *group) out.push_back(id);
    }
    // A record that is on its way from the one to the other is in both.
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
    return out;
  }

 private:
  Status CatchUp() { return FromRocks(db_->TryCatchUpWithPrimary(), "pool store"); }

  template <typename Visit>
  Status Scan(const std::string& from, Visit visit) {
    std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator({}));
    for (it->Seek(from); it->Valid(); it->Next()) {
      std::optional<AttemptId> id = ParseTrajectoryKey({it->key().data(), it->key().size()});
      if (!id || !visit(*id, it->value())) break;
    }
    return FromRocks(it->status(), "pool store");
  }

  std::unique_ptr<rocksdb::DB> db_;
  const std::string scratch_, archive_;
};

}  // namespace

Result<std::unique_ptr<StoreReader>> StoreReader::Open(const std::string& run) {
  const std::string path = run + "/pool";
  if (!Exists(path + "/CURRENT")) return NotFound(run + ": no data pool there (" + path + ")");
  // A secondary keeps its own log files; they lie in the run folder and go with the reader.
  const std::string scratch = path + "/reader-" + std::to_string(getpid());
  RETURN_IF_ERROR(MakeDirs(scratch));
  rocksdb::Options options;
  options.max_open_files = -1;  // a secondary must keep files open that the pool may delete
  options.max_file_opening_threads = 1;
  options.keep_log_file_num = 1;
  options.info_log_level = rocksdb::WARN_LEVEL;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  rocksdb::DB* db = nullptr;
  rocksdb::Status s = rocksdb::DB::OpenAsSecondary(options, path, scratch, &db);
  if (!s.ok()) {
    (void)RemoveAll(scratch);
    return FromRocks(s, path);
  }
  return std::unique_ptr<StoreReader>(new RocksReader(std::unique_ptr<rocksdb::DB>(db), scratch, run + kArchiveDir));
}

Result<AttemptId> ParseAttemptId(const std::string& text) {
  const std::vector<std::string> parts = Split(text, '.');
  int64_t numbers[3] = {0, 0, 0};
  bool good = parts.size() == 2 || parts.size() == 3;
  for (size_t i = 0; good && i < parts.size(); ++i) good = ParseInt(parts[i], &numbers[i]) && numbers[i] >= 0 && (i == 0 || numbers[i] <= INT32_MAX);
  if (good && parts.size() == 3) good = numbers[2] >= 1;
  if (!good) return InvalidArgument("'" + text + "' is not GROUP.ROLLOUT or GROUP.ROLLOUT.ATTEMPT");
  return AttemptId{numbers[0], static_cast<int32_t>(numbers[1]), static_cast<int32_t>(numbers[2])};
}

}  // namespace temper::datapool
