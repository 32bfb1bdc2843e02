#include "trainer/checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "common/faults.h"
#include "common/file.h"
#include "common/json.h"
#include "common/log.h"
#include "common/rng.h"
#include "common/strings.h"
#include "engine/files/model_file.h"
#include "engine/files/safetensors.h"

namespace temper::trainer {
namespace {

constexpr const char* kManifest = "checkpoint.json";
constexpr int64_t kFormat = 2;
constexpr const char* kOptimizer = "optimizer.safetensors";
constexpr const char* kSeal = ",\"hash\":\"";
constexpr const char* kWriting = ".writing-";  // a folder that is not whole yet: kWriting + STEP

std::string Folder(const std::string& run_dir) { return run_dir + "/checkpoints"; }

// 64 bits; against accidents, not adversaries.
class Hash {
 public:
  explicit Hash(size_t bytes) : hash_(Mix64(bytes)) {}  // of all pieces
  // Pieces of whole words; the last one may end within a word.
  void Add(std::span<const std::byte> bytes) {
    size_t at = 0;
    for (; at + 8 <= bytes.size(); at += 8) {
      uint64_t word;
      std::memcpy(&word, bytes.data() + at, 8);
      hash_ = (hash_ ^ word) * 0x9e3779b97f4a7c15u;
      hash_ ^= hash_ >> 32;
    }
    for (; at < bytes.size(); ++at) hash_ = Mix64(hash_ ^ static_cast<uint64_t>(bytes[at]));
  }
  std::string Hex() const { return fmt::format("{:016x}", Mix64(hash_)); }

 private:
  uint64_t hash_;
};

std::string HashBytes(std::span<const std::byte> bytes) {
  Hash hash(bytes.size());
  hash.Add(bytes);
  return hash.Hex();
}

// Read, not mapped: a mapped file would be resident beside everything else that the trainer holds.
Result<std::string> HashFile(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(path, errno);
  struct stat st {};
  if (::fstat(fd.get(), &st) != 0) return ErrnoStatus(path, errno);
  Hash hash(static_cast<size_t>(st.st_size));
  std::vector<std::byte> piece(size_t{1} << 20);
  for (off_t at = 0; at < st.st_size;) {
    size_t have = 0;
    const size_t want = std::min<size_t>(piece.size(), static_cast<size_t>(st.st_size - at));
    while (have < want) {
      const ssize_t n = ::pread(fd.get(), piece.data() + have, want - have, at + static_cast<off_t>(have));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return ErrnoStatus(path, errno);
      if (n == 0) return DataLoss(path + " became shorter while it was read");
      have += static_cast<size_t>(n);
    }
    hash.Add({piece.data(), want});
    at += static_cast<off_t>(want);
  }
  return hash.Hex();
}

Status SyncFile(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(path, errno);
  if (::fsync(fd.get()) != 0) return ErrnoStatus(path + ": fsync", errno);
  return Status::Ok();
}

// Steps of the checkpoint folders, newest first.
Result<std::vector<int64_t>> Steps(const std::string& run_dir) {
  std::vector<int64_t> steps;
  if (!IsDirectory(Folder(run_dir))) return steps;
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDir(Folder(run_dir)));
  for (const std::string& name : names) {
    int64_t step;
    if (ParseInt(name, &step) && step >= 0 && std::to_string(step) == name) steps.push_back(step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

Status WriteOptimizer(const std::string& path, const AdamW& optimizer) {
  std::vector<engine::TensorToWrite> tensors;
  for (const auto& [prefix, moment] : {std::pair("m.", &optimizer.first_moment()), std::pair("v.", &optimizer.second_moment())}) {
    for (size_t i = 0; i < moment->tensors().size(); ++i) {
      const engine::TensorSpec& spec = moment->tensors()[i];
      tensors.push_back({.name = prefix + spec.name, .shape = spec.shape, .f32 = moment->tensor(i)});
    }
  }
  return engine::WriteSafetensors(path, tensors, engine::FileType::kF32);
}

Status ReadMoment(const engine::SafetensorsFile& file, const std::string& prefix, engine::Parameters& moment) {
  for (size_t i = 0; i < moment.tensors().size(); ++i) {
    const engine::TensorSpec& spec = moment.tensors()[i];
    const engine::FileTensor* tensor = file.Find(prefix + spec.name);
    if (!tensor || tensor->shape != spec.shape) {
      return DataLoss(fmt::format("{}: tensor {}{} is missing or of another shape", kOptimizer, prefix, spec.name));
    }
    engine::ReadElements(tensor->type, tensor->bytes, moment.tensor(i));
  }
  return Status::Ok();
}

// A field of the list of contents that counts something.
Result<int64_t> Count(const JsonRef& manifest, const char* name) {
  ASSIGN_OR_RETURN(const JsonRef field, manifest.Field(name));
  ASSIGN_OR_RETURN(const int64_t count, field.Int());
  if (count < 0) return field.Error("below 0");
  return count;
}

// Text whose last key is the hash of all before it.
bool IsSealed(const std::string& text) {
  const size_t at = text.rfind(kSeal);
  return at != std::string::npos && text == SealManifest(text.substr(0, at) + "}");
}

Result<Checkpoint> LoadCheckpoint(const std::string& dir) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(dir + "/" + kManifest, 1 << 20));
  ASSIGN_OR_RETURN(const json::value value, ParseJson(text));
  const JsonRef manifest(value);
  ASSIGN_OR_RETURN(const JsonRef format_field, manifest.Field("format"));
  ASSIGN_OR_RETURN(const int64_t format, format_field.Int());
  if (format != kFormat) return FailedPrecondition(fmt::format("checkpoint format {} is not known here", format));
  if (!IsSealed(text)) return DataLoss(fmt::format("{}: its bytes do not match its hash", kManifest));
  RETURN_IF_ERROR(manifest.OnlyKeys({"format", "step", "optimizer_steps", "sft_tokens", "plan", "files", "hash"}));
  ASSIGN_OR_RETURN(const JsonRef files, manifest.Field("files"));
  if (!files.value().is_object()) return files.Error("expected an object");
  for (const auto& [name, hash] : files.value().get_object()) {
    const std::string file(name);
    ASSIGN_OR_RETURN(const std::string found, HashFile(dir + "/" + file));
    if (!hash.is_string() || found != std::string_view(hash.get_string())) {
      return DataLoss(fmt::format("{}: bytes do not match their hash", file));
    }
  }
  if (!files.Has("model.safetensors") || !files.Has(kOptimizer)) return DataLoss("the list of files is incomplete");

  Checkpoint checkpoint;
  ASSIGN_OR_RETURN(checkpoint.step, Count(manifest, "step"));
  ASSIGN_OR_RETURN(checkpoint.sft_tokens, Count(manifest, "sft_tokens"));
  ASSIGN_OR_RETURN(const int64_t optimizer_steps, Count(manifest, "optimizer_steps"));
  ASSIGN_OR_RETURN(const JsonRef plan, manifest.Field("plan"));
  if (!plan.value().is_object()) return plan.Error("expected an object");
  checkpoint.plan_json = PrintJson(plan.value());
  ASSIGN_OR_RETURN(engine::ModelFile model, engine::LoadModel(dir));
  checkpoint.params = std::move(model.params);
  ASSIGN_OR_RETURN(const engine::SafetensorsFile optimizer, engine::SafetensorsFile::Open(dir + "/" + kOptimizer));
  engine::Parameters m(checkpoint.params.config()), v(checkpoint.params.config());
  RETURN_IF_ERROR(ReadMoment(optimizer, "m.", m));
  RETURN_IF_ERROR(ReadMoment(optimizer, "v.", v));
  checkpoint.optimizer.Restore(optimizer_steps, std::move(m), std::move(v));
  return checkpoint;
}

}  // namespace

std::string SealManifest(std::string body) {
  const std::string hash = HashBytes(std::as_bytes(std::span(body)));
  if (!body.empty()) body.pop_back();  // the closing brace
  return body + kSeal + hash + "\"}\n";
}

Status SaveCheckpoint(const std::string& run_dir, const Checkpoint& checkpoint, const text::TextFiles& text, int keep, int64_t best) {
  const std::string folder = Folder(run_dir);
  const std::string name = std::to_string(checkpoint.step);
  const std::string temporary = folder + "/" + kWriting + name, final_path = folder + "/" + name;
  RETURN_IF_ERROR(MakeDirs(folder));
  RETURN_IF_ERROR(RemoveAll(temporary));
  RETURN_IF_ERROR(engine::SaveHuggingFace(temporary, checkpoint.params.config(), checkpoint.params, text, engine::FileType::kF32));
  RETURN_IF_ERROR(WriteOptimizer(temporary + "/" + kOptimizer, checkpoint.optimizer));

  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDir(temporary));
  ASSIGN_OR_RETURN(const json::value plan, ParseJson(checkpoint.plan_json));
  JsonWriter manifest;
  manifest.BeginObject().Key("format").Int(kFormat).Key("step").Int(checkpoint.step);
  manifest.Key("optimizer_steps").Int(checkpoint.optimizer.steps()).Key("sft_tokens").Int(checkpoint.sft_tokens);
  manifest.Key("plan").Value(plan).Key("files").BeginObject();
  for (const std::string& file : names) {
    RETURN_IF_ERROR(SyncFile(temporary + "/" + file));
    ASSIGN_OR_RETURN(const std::string hash, HashFile(temporary + "/" + file));
    manifest.Key(file).String(hash);
  }
  manifest.EndObject().EndObject();
  RETURN_IF_ERROR(Faults::Get().Hit("trainer.checkpoint_half"));
  RETURN_IF_ERROR(WriteFileAtomic(temporary + "/" + kManifest, SealManifest(manifest.Take())));
  RETURN_IF_ERROR(SyncDir(temporary));
  // A folder of that step can only be left from before a rollback, or broken.
  RETURN_IF_ERROR(RemoveAll(final_path));
  RETURN_IF_ERROR(Rename(temporary, final_path));
  RETURN_IF_ERROR(SyncDir(folder));

  ASSIGN_OR_RETURN(const std::vector<int64_t> steps, Steps(run_dir));
  int newer = 0;
  for (int64_t step : steps) {
    // What is newer was made before a rollback and is no longer part of this run.
    if (step <= checkpoint.step && (newer++ < keep || step == best)) continue;
    RETURN_IF_ERROR(RemoveAll(folder + "/" + std::to_string(step)));
  }
  // Of a save that did not end, at a step that this run may never reach again.
  ASSIGN_OR_RETURN(const std::vector<std::string> left, ListDir(folder));
  for (const std::string& entry : left) {
    if (entry.rfind(kWriting, 0) == 0) RETURN_IF_ERROR(RemoveAll(folder + "/" + entry));
  }
  return Status::Ok();
}

std::string StartModelPath(const std::string& run_dir) { return run_dir + "/reference"; }

Status SaveStartModel(const std::string& run_dir, const engine::Parameters& params, const text::TextFiles& text) {
  const std::string temporary = run_dir + "/" + kWriting + "reference";
  RETURN_IF_ERROR(RemoveAll(temporary));
  RETURN_IF_ERROR(engine::SaveHuggingFace(temporary, params.config(), params, text, engine::FileType::kF32));
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDir(temporary));
  for (const std::string& file : names) RETURN_IF_ERROR(SyncFile(temporary + "/" + file));
  RETURN_IF_ERROR(SyncDir(temporary));
  RETURN_IF_ERROR(RemoveAll(StartModelPath(run_dir)));
  RETURN_IF_ERROR(Rename(temporary, StartModelPath(run_dir)));
  return SyncDir(run_dir);
}

Result<Checkpoint> LoadNewestCheckpoint(const std::string& run_dir, std::string* passed_over) {
  ASSIGN_OR_RETURN(const std::vector<int64_t> steps, Steps(run_dir));
  for (int64_t step : steps) {
    const std::string dir = Folder(run_dir) + "/" + std::to_string(step);
    Result<Checkpoint> checkpoint = LoadCheckpoint(dir);
    if (checkpoint.ok() && checkpoint->step == step) return checkpoint;
    const std::string fault = checkpoint.ok() ? "its step is another" : checkpoint.status().message();
    log::Warn("checkpoint passed over", {{"path", dir}, {"error", fault}});
    if (passed_over) *passed_over += (passed_over->empty() ? "" : "; ") + dir + ": " + fault;
  }
  return NotFound(run_dir + ": no valid checkpoint");
}

}  // namespace temper::trainer
