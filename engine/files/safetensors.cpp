#include "engine/files/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "common/file.h"
#include "engine/bf16.h"
#include "text/json.h"
#include "text/utf8.h"

namespace temper::engine {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;  // bytes, as the format says
constexpr size_t kMaxDims = 8;

template <typename T>
T Load(const std::byte* p) {
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}

}  // namespace

Result<SafetensorsFile> SafetensorsFile::Open(const std::string& path, std::vector<ForeignTensor>* foreign) {
  ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Open(path));
  SafetensorsFile out(std::move(mapped));
  const std::span<const std::byte> bytes = out.file_.bytes();
  auto bad = [&](const std::string& what) { return InvalidArgument(path + ": " + what); };
  if (bytes.size() < 8) return bad("too short for a safetensors file");
  const uint64_t header_size = Load<uint64_t>(bytes.data());
  if (header_size > kMaxHeader || header_size > bytes.size() - 8) {
    return bad("the header's length " + std::to_string(header_size) + " is beyond the file");
  }
  const std::span<const std::byte> data = bytes.subspan(8 + header_size);
  auto header = text::ParseJson({reinterpret_cast<const char*>(bytes.data()) + 8, header_size});
  if (!header.ok()) return header.status().WithContext(path);
  if (!header->is_dict()) return bad("the header is no object");
  for (const auto& [key, value] : header->as_dict().items()) {
    const std::string& name = key.as_string();
    if (name == "__metadata__") {
      if (!value.is_dict()) return bad("__metadata__ is no object");
      for (const auto& [k, v] : value.as_dict().items()) {
        if (!v.is_string()) return bad("__metadata__." + text::Shown(k.as_string(), 100) + " is no string");
        out.metadata_[k.as_string()] = v.as_string();
      }
      continue;
    }
    FileTensor t;
    t.name = name;
    const std::string where = "tensor " + text::Shown(name, 100);
    const std::string dtype = value.StringOr("dtype", "");
    std::optional<FileType> type;
    for (FileType f : {FileType::kF32, FileType::kF16, FileType::kBF16, FileType::kF64}) {
      if (dtype == FileTypeName(f)) type = f;
    }
    if (!type && !foreign) return bad(where + ": the dtype '" + text::Shown(dtype, 100) + "' is not supported");
    const text::Value *shape = value.Find("shape"), *offsets = value.Find("data_offsets");
    if (!shape || !shape->is_list() || shape->as_list().size() > kMaxDims) return bad(where + ": shape is missing or malformed");
    t.count = 1;
    for (const text::Value& dim : shape->as_list()) {
      if (!dim.is_int() || dim.as_int() < 0) return bad(where + ": shape holds what is no size");
      t.shape.push_back(dim.as_int());
      if (__builtin_mul_overflow(t.count, static_cast<uint64_t>(dim.as_int()), &t.count)) {
        return bad(where + ": shape is beyond the file");
      }
    }
    if (!type) {
      foreign->push_back({name, dtype, static_cast<int64_t>(std::min<uint64_t>(t.count, INT64_MAX))});
      continue;
    }
    t.type = *type;
    if (!offsets || !offsets->is_list() || offsets->as_list().size() != 2 || !offsets->as_list()[0].is_int() || !offsets->as_list()[1].is_int()) {
      return bad(where + ": data_offsets is missing or malformed");
    }
    const int64_t begin = offsets->as_list()[0].as_int(), end = offsets->as_list()[1].as_int();
    if (begin < 0 || end < begin || static_cast<uint64_t>(end) > data.size()) {
      return bad(where + ": data_offsets lie beyond the file");
    }
    if (t.count > data.size() || FileTypeBytes(t.type, t.count) != static_cast<uint64_t>(end - begin)) {
      return bad(where + ": data_offsets do not fit its shape");
    }
    t.bytes = data.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    out.by_name_[name] = out.tensors_.size();
    out.tensors_.push_back(std::move(t));
  }
  RETURN_IF_ERROR(CheckApart(out.tensors_).WithContext(path));
  return out;
}

const FileTensor* SafetensorsFile::Find(std::string_view name) const {
  auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

namespace {

// Converts and writes one tensor in pieces.
Status WriteTensor(int fd, const TensorToWrite& t, FileType type) {
  constexpr size_t kPiece = 1 << 18;  // elements
  if (type == FileType::kF64) {
    return WriteAll(fd, {reinterpret_cast<const char*>(t.f64.data()), t.f64.size() * sizeof(double)});
  }
  if (type == FileType::kF32) {
    return WriteAll(fd, {reinterpret_cast<const char*>(t.f32.data()), t.f32.size() * sizeof(float)});
  }
  std::vector<uint16_t> piece;
  for (size_t at = 0; at < t.f32.size(); at += kPiece) {
    const auto part = t.f32.subspan(at, std::min(kPiece, t.f32.size() - at));
    piece.resize(part.size());
    std::transform(part.begin(), part.end(), piece.begin(), ToBf16);
    RETURN_IF_ERROR(WriteAll(fd, {reinterpret_cast<const char*>(piece.data()), piece.size() * 2}));
  }
  return Status::Ok();
}

}  // namespace

Status WriteSafetensors(const std::string& path, std::span<const TensorToWrite> tensors, FileType type,
                        const std::map<std::string, std::string>& metadata) {
  TEMPER_CHECK(type == FileType::kF32 || type == FileType::kF64 || type == FileType::kBF16) << FileTypeName(type);
  text::Dict header, meta;
  meta.Set("format", "pt");
  for (const auto& [key, value] : metadata) meta.Set(key, value);
  header.Set("__metadata__", meta);
  uint64_t at = 0;
  for (const TensorToWrite& t : tensors) {
    const uint64_t count = type == FileType::kF64 ? t.f64.size() : t.f32.size();
    uint64_t expected = 1;
    text::List shape;
    for (int64_t d : t.shape) {
      shape.push_back(d);
      expected *= static_cast<uint64_t>(d);
    }
    TEMPER_CHECK(expected == count) << t.name << ": " << count << " elements for its shape";
    const uint64_t end = at + FileTypeBytes(type, count);
    header.Set(t.name, text::MakeDict({{"dtype", FileTypeName(type)}, {"shape", shape},
                                       {"data_offsets", text::List{static_cast<int64_t>(at), static_cast<int64_t>(end)}}}));
    at = end;
  }
  std::string text = text::CompactJson(header);
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t size = text.size();

  const std::string temporary = path + ".tmp" + std::to_string(getpid());
  Fd fd(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd.valid()) return ErrnoStatus("cannot create " + temporary, errno);
  auto write = [&]() -> Status {
    RETURN_IF_ERROR(WriteAll(fd.get(), {reinterpret_cast<const char*>(&size), 8}));
    RETURN_IF_ERROR(WriteAll(fd.get(), text));
    for (const TensorToWrite& t : tensors) RETURN_IF_ERROR(WriteTensor(fd.get(), t, type));
    if (fsync(fd.get()) != 0) return ErrnoStatus("cannot sync " + temporary, errno);
    return Rename(temporary, path);
  };
  const Status status = write();
  if (!status.ok()) {
    unlink(temporary.c_str());
    return status.WithContext("writing " + path);
  }
  return SyncDir(DirName(path));
}

}  // namespace temper::engine
