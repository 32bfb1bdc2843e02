#include "trainer/ranks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <iterator>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "engine/buffer.h"
#include "trainer/frozen_model.h"
#include "weightsync/manifest.h"

namespace temper::trainer {
namespace {

// ---- what goes over a control link: a header, then so many bytes. Both ends are the same program on machines of one byte order.

enum What : uint32_t {
  kLoad = 1,  // which model, its manifest; then a Broadcast
  kForward,   // which model, keep, a chunk; answered with its logprobs
  kLikeliest,  // a count, which model, a chunk; answered with LikelyTokens
  kBackward,  // one coefficient an item; answered with nothing
  kReduce,    // then a Reduce
  kAnswer,
  kFailed,  // why, in words
  kBeat,    // from a rank that works: it lives
};
constexpr uint64_t kMaxBytes = uint64_t{1} << 36;

struct Header {
  uint32_t what = 0, zero = 0;
  uint64_t bytes = 0;
};

Status SendPacket(Link& link, uint32_t what, std::string_view payload) {
  const Header header = {what, 0, payload.size()};
  RETURN_IF_ERROR(link.Send(std::as_bytes(std::span(&header, 1))));
  return link.Send(std::as_bytes(std::span(payload)));
}

struct Packet {
  uint32_t what = 0;
  std::string payload;
};

Result<Packet> ReceivePacket(Link& link) {
  Header header;
  RETURN_IF_ERROR(link.Receive(std::as_writable_bytes(std::span(&header, 1))));
  if (header.bytes > kMaxBytes) return DataLoss(fmt::format("a packet of {} bytes between ranks", header.bytes));
  Packet packet = {header.what, std::string(header.bytes, '\0')};
  RETURN_IF_ERROR(link.Receive(std::as_writable_bytes(std::span(packet.payload))));
  return packet;
}

class Writer {
 public:
  template <typename T>
  Writer& Put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  template <typename T>
  Writer& PutAll(std::span<const T> values) {
    Put<uint64_t>(values.size());
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
    return *this;
  }
  Writer& PutText(std::string_view text) { return PutAll(std::span<const char>(text)); }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  T Get() {
    T value{};
    Copy(&value, sizeof value);
    return value;
  }
  template <typename T>
  std::vector<T> GetAll() {
    const auto count = Get<uint64_t>();
    if (count > bytes_.size() / sizeof(T)) ok_ = false;
    std::vector<T> values(ok_ ? count : 0);
    Copy(values.data(), values.size() * sizeof(T));
    return values;
  }
  std::string GetText() {
    const std::vector<char> text = GetAll<char>();
    return {text.begin(), text.end()};
  }
  // Everything was there and nothing is left.
  bool Done() const { return ok_ && bytes_.empty(); }

 private:
  void Copy(void* to, size_t size) {
    ok_ = ok_ && size <= bytes_.size();
    if (!ok_ || size == 0) return;
    std::memcpy(to, bytes_.data(), size);
    bytes_.remove_prefix(size);
  }
  std::string_view bytes_;
  bool ok_ = true;
};

std::string PackChunk(RankModel model, const BatchChunk& chunk, bool keep) {
  const engine::TreeBatch& t = chunk.tree;
  Writer w;
  w.Put(model).Put<uint8_t>(keep).Put<uint8_t>(chunk.silent).Put<uint8_t>(chunk.recompute).Put<int32_t>(chunk.chunk_nodes);
  for (const auto* list : {&t.token, &t.parent, &t.tout, &t.pos, &t.kept}) w.PutAll(std::span<const int32_t>(*list));
  w.PutAll(std::span<const float>(t.inv_temperature)).PutAll(std::span<const uint8_t>(chunk.wanted));
  w.Put<uint64_t>(t.kept_sets.size());
  for (const std::string& set : t.kept_sets) w.PutText(set);
  w.PutAll(std::span<const engine::TreeBatch::Target>(t.targets));
  return w.Take();
}

bool UnpackChunk(std::string_view bytes, RankModel* model, BatchChunk* chunk, bool* keep) {
  Reader r(bytes);
  engine::TreeBatch& t = chunk->tree;
  *model = r.Get<RankModel>();
  *keep = r.Get<uint8_t>() != 0;
  chunk->silent = r.Get<uint8_t>() != 0;
  chunk->recompute = r.Get<uint8_t>() != 0;
  chunk->chunk_nodes = r.Get<int32_t>();
  for (auto* list : {&t.token, &t.parent, &t.tout, &t.pos, &t.kept}) *list = r.GetAll<int32_t>();
  t.inv_temperature = r.GetAll<float>();
  chunk->wanted = r.GetAll<uint8_t>();
  const auto sets = r.Get<uint64_t>();
  for (uint64_t i = 0; i < sets && i < kMaxBytes && bytes.size() > i; ++i) t.kept_sets.push_back(r.GetText());
  t.targets = r.GetAll<engine::TreeBatch::Target>();
  return r.Done() && *model <= RankModel::kTeacher;
}

// ---- how a batch is cut

int64_t TokensOf(const Rollout& rollout) {
  int64_t tokens = 0;
  for (const TokenRun& run : rollout.runs) tokens += static_cast<int64_t>(run.ids.size());
  return tokens;
}

// The ranks of things of these sizes, in their order: each goes where its middle lies.
std::vector<int> Deal(const std::vector<int64_t>& sizes, int ranks) {
  int64_t total = 0, before = 0;
  for (const int64_t size : sizes) total += size;
  std::vector<int> out;
  for (const int64_t size : sizes) {
    const double middle = static_cast<double>(before) + static_cast<double>(size) / 2;
    out.push_back(total == 0 ? 0 : std::min(ranks - 1, static_cast<int>(middle * ranks / static_cast<double>(total))));
    before += size;
  }
  return out;
}

}  // namespace

Result<Batch> BuildRankedBatch(std::vector<Group> groups, const BatchOptions& options, int ranks) {
  if (ranks == 1) return BuildBatch(std::move(groups), options);
  RETURN_IF_ERROR(PutInOrder(groups));
  TEMPER_CHECK(options.silent.empty() || options.silent.size() == groups.size()) << options.silent.size();
  // Of each rank: its rollouts, by group.
  struct Part {
    std::vector<Group> groups;
    std::vector<size_t> whose;    // index in `groups` above
    std::vector<size_t> skipped;  // rollouts of the group on ranks before
    std::vector<uint8_t> silent;
  };
  std::vector<Part> parts(static_cast<size_t>(ranks));
  std::vector<std::vector<int>> rank_of(groups.size());
  for (const uint8_t silent : {0, 1}) {
    std::vector<size_t> members;
    std::vector<int64_t> by_group, by_rollout;
    for (size_t g = 0; g < groups.size(); ++g) {
      if ((!options.silent.empty() && options.silent[g]) != (silent != 0)) continue;
      members.push_back(g);
      by_group.push_back(0);
      for (const Rollout& rollout : groups[g].rollouts) {
        by_rollout.push_back(TokensOf(rollout));
        by_group.back() += by_rollout.back();
      }
    }
    const bool whole = static_cast<int>(members.size()) >= ranks;
    const std::vector<int> dealt = Deal(whole ? by_group : by_rollout, ranks);
    size_t at = 0;
    for (size_t m = 0; m < members.size(); ++m) {
      for (size_t i = 0; i < groups[members[m]].rollouts.size(); ++i) rank_of[members[m]].push_back(dealt[whole ? m : at++]);
    }
  }
  std::vector<size_t> rollouts;
  for (size_t g = 0; g < groups.size(); ++g) {
    rollouts.push_back(groups[g].rollouts.size());
    for (size_t i = 0; i < rollouts[g]; ++i) {
      Part& part = parts[static_cast<size_t>(rank_of[g][i])];
      if (part.whose.empty() || part.whose.back() != g) {
        part.groups.push_back({.group = groups[g].group, .version_admitted = groups[g].version_admitted, .rollouts = {}});
        part.whose.push_back(g);
        part.skipped.push_back(i);
        if (!options.silent.empty()) part.silent.push_back(options.silent[g]);
      }
      part.groups.back().rollouts.push_back(std::move(groups[g].rollouts[i]));
    }
    groups[g].rollouts.clear();
  }

  Batch batch;
  batch.groups = std::move(groups);
  batch.samples.resize(batch.groups.size());
  for (size_t g = 0; g < batch.groups.size(); ++g) {
    batch.groups[g].rollouts.resize(rollouts[g]);
    batch.samples[g].resize(rollouts[g]);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    Part& part = parts[static_cast<size_t>(rank)];
    BatchOptions own = options;
    own.silent = part.silent;
    ASSIGN_OR_RETURN(Batch built, BuildBatch(std::move(part.groups), own));
    const auto offset = static_cast<int32_t>(batch.chunks.size());
    for (size_t p = 0; p < part.whose.size(); ++p) {
      for (size_t i = 0; i < built.groups[p].rollouts.size(); ++i) {
        const size_t g = part.whose[p], to = part.skipped[p] + i;
        batch.groups[g].rollouts[to] = std::move(built.groups[p].rollouts[i]);
        batch.samples[g][to] = std::move(built.samples[p][i]);
        for (SampledToken& token : batch.samples[g][to]) token.chunk += offset;
      }
    }
    for (BatchChunk& chunk : built.chunks) {
      chunk.rank = rank;
      batch.chunks.push_back(std::move(chunk));
    }
    batch.logical_tokens += built.logical_tokens;
    batch.tree_tokens += built.tree_tokens;
  }
  return batch;
}

// ---- rank 0

Ranks::Ranks(engine::TrainPass& pass, RankLinks* links) : pass_(pass), links_(links) {}

Result<std::string> Ranks::Ask(int rank, uint32_t what, std::string_view payload) {
  Link& link = links_->control[static_cast<size_t>(rank - 1)];
  RETURN_IF_ERROR(SendPacket(link, what, payload));
  while (true) {
    ASSIGN_OR_RETURN(Packet packet, ReceivePacket(link));
    if (packet.what == kBeat) continue;
    if (packet.what == kAnswer) return std::move(packet.payload);
    if (packet.what == kFailed) return Internal(fmt::format("trainer rank {}: {}", rank, packet.payload));
    return DataLoss(fmt::format("trainer rank {} answered with packet {}", rank, packet.what));
  }
}

Status Ranks::Load(RankModel model, const engine::ComputeWeights& weights) {
  weights_[static_cast<size_t>(model)] = weights;
  if (size() == 1) return Status::Ok();
  const weightsync::Manifest manifest = weightsync::MakeManifest(weights.config(), weights.profile());
  Writer w;
  w.Put(model).PutText(manifest.profile).PutText(manifest.layout).PutText(manifest.config_json);
  const std::string payload = w.Take();
  for (Link& link : links_->control) RETURN_IF_ERROR(SendPacket(link, kLoad, payload));
  // (Rank 0 sends from them and writes nothing.)
  const std::span<const std::byte> bytes = weights.bytes();
  return links_->collective->Broadcast({const_cast<std::byte*>(bytes.data()), bytes.size()});
}

Status Ranks::ForEach(const Batch& batch, const std::function<Status(size_t chunk)>& work) {
  std::atomic<bool> failed{false};
  std::vector<Status> ends(static_cast<size_t>(size()));
  auto run = [&](int rank) {
    for (size_t c = 0; c < batch.chunks.size() && !failed; ++c) {
      if (batch.chunks[c].rank != rank) continue;
      Status done = work(c);
      if (done.ok()) continue;
      ends[static_cast<size_t>(rank)] = std::move(done);
      failed = true;
    }
  };
  {
    std::vector<std::jthread> others;
    for (int rank = 1; rank < size(); ++rank) others.emplace_back(run, rank);
    run(0);
  }
  for (const Status& end : ends) RETURN_IF_ERROR(end);
  return Status::Ok();
}

Result<std::vector<float>> Ranks::Forward(RankModel model, const BatchChunk& chunk, bool keep) {
  if (chunk.rank == 0) {
    ASSIGN_OR_RETURN(const std::span<const float> row, pass_.Forward(weights_[static_cast<size_t>(model)], chunk.tree, Wanting(chunk, keep)));
    return std::vector<float>(row.begin(), row.end());
  }
  ASSIGN_OR_RETURN(const std::string answer, Ask(chunk.rank, kForward, PackChunk(model, chunk, keep)));
  if (answer.size() != static_cast<size_t>(chunk.tree.items()) * sizeof(float)) {
    return DataLoss(fmt::format("trainer rank {}: {} bytes of logprobs for {} items", chunk.rank, answer.size(), chunk.tree.items()));
  }
  std::vector<float> row(static_cast<size_t>(chunk.tree.items()));
  std::memcpy(row.data(), answer.data(), answer.size());
  return row;
}

Result<LikelyTokens> Ranks::Likeliest(RankModel model, const BatchChunk& chunk, int count) {
  if (chunk.rank == 0) return trainer::Likeliest(pass_, weights_[static_cast<size_t>(model)], chunk, count);
  Writer w;
  const std::string packed = PackChunk(model, chunk, /*keep=*/false);
  w.Put<int32_t>(count).PutText(packed);
  ASSIGN_OR_RETURN(const std::string answer, Ask(chunk.rank, kLikeliest, w.Take()));
  Reader r(answer);
  LikelyTokens likely;
  likely.begin = r.GetAll<int32_t>();
  likely.token = r.GetAll<int32_t>();
  likely.logprob = r.GetAll<float>();
  const bool whole = r.Done() && likely.begin.size() == static_cast<size_t>(chunk.tree.size()) + 1 && likely.token.size() == likely.logprob.size() &&
                     likely.begin.back() == static_cast<int32_t>(likely.token.size());
  if (!whole) return DataLoss(fmt::format("trainer rank {}: a broken list of likeliest tokens", chunk.rank));
  return likely;
}

Status Ranks::Backward(const BatchChunk& chunk, std::span<const float> coef, engine::Gradients& grads) {
  if (chunk.rank == 0) {
    pass_.Backward(coef, grads);
    return Status::Ok();
  }
  Writer w;
  w.PutAll(coef);
  return Ask(chunk.rank, kBackward, w.Take()).status();
}

Status Ranks::Reduce(engine::Gradients& grads) {
  if (size() == 1) return Status::Ok();
  for (Link& link : links_->control) RETURN_IF_ERROR(SendPacket(link, kReduce, ""));
  return links_->collective->Reduce(grads.flat());
}

Result<std::vector<std::vector<float>>> Ranks::Score(RankModel model, const Batch& batch) {
  std::vector<std::vector<float>> logprobs(batch.chunks.size());
  const auto score = [&](size_t c) -> Status {
    ASSIGN_OR_RETURN(logprobs[c], Forward(model, batch.chunks[c], /*keep=*/false));
    return Status::Ok();
  };
  RETURN_IF_ERROR(ForEach(batch, score));
  return logprobs;
}

// ---- the other ranks

namespace {

class RankLoop {
 public:
  RankLoop(engine::Engine& engine, Link control, Collective& collective)
      : pass_(engine), control_(std::move(control)), collective_(collective), beats_([this](std::stop_token stop) { Beat(stop); }) {}

  Status Run() {
    while (control_.Wait().ok()) {  // the end of rank 0 is the end of all
      ASSIGN_OR_RETURN(const Packet packet, ReceivePacket(control_));
      if (packet.what == kLoad || packet.what == kReduce) {
        // Not answered: rank 0 is in the collective, whose end tells it.
        RETURN_IF_ERROR(packet.what == kLoad ? Load(packet.payload) : Reduce());
        continue;
      }
      SetWorking(true);
      Result<std::string> answer = packet.what == kForward     ? Forward(packet.payload)
                                   : packet.what == kLikeliest ? Likeliest(packet.payload)
                                   : packet.what == kBackward  ? Backward(packet.payload)
                                                               : Result<std::string>(DataLoss(fmt::format("packet {}", packet.what)));
      SetWorking(false);
      RETURN_IF_ERROR(SendPacket(control_, answer.ok() ? kAnswer : kFailed, answer.ok() ? *answer : answer.status().message()));
    }
    return Status::Ok();
  }

 private:
  Status Load(std::string_view payload) {
    Reader r(payload);
    const auto model = r.Get<RankModel>();
    weightsync::Manifest manifest;
    manifest.profile = r.GetText();
    manifest.layout = r.GetText();
    manifest.config_json = r.GetText();
    if (!r.Done() || model > RankModel::kTeacher) return DataLoss("a broken packet");
    ASSIGN_OR_RETURN(const engine::Profile profile, engine::ParseProfile(manifest.profile));
    ASSIGN_OR_RETURN(const engine::ModelConfig config, weightsync::ReadConfig(manifest.config_json));
    if (manifest.layout != engine::ComputeLayoutId(profile)) return InvalidArgument("layout '" + manifest.layout + "' is not this build's");
    const auto index = static_cast<size_t>(model);
    const size_t bytes = engine::ComputeBytes(config, profile);
    auto* const memory = memory_[index].Get<std::byte>(bytes);
    RETURN_IF_ERROR(collective_.Broadcast({memory, bytes}));
    ASSIGN_OR_RETURN(weights_[index], engine::ComputeWeights::View(config, profile, {memory, bytes}, nullptr));
    if (model == RankModel::kPolicy && grads_.flat().empty()) grads_ = engine::Gradients(config);
    return Status::Ok();
  }

  Status Reduce() {
    RETURN_IF_ERROR(collective_.Reduce(grads_.flat()));
    grads_.SetZero();
    return Status::Ok();
  }

  // Reads what PackChunk wrote; the weights of its model.
  Result<const engine::ComputeWeights*> Unpack(std::string_view packed, BatchChunk& chunk, bool& keep) const {
    RankModel model;
    chunk = {};
    if (!UnpackChunk(packed, &model, &chunk, &keep)) return DataLoss("a broken packet");
    const engine::ComputeWeights& weights = weights_[static_cast<size_t>(model)];
    if (weights.empty()) return FailedPrecondition("the model was not loaded");
    return &weights;
  }

  Result<std::string> Forward(std::string_view payload) {
    bool keep = false;
    ASSIGN_OR_RETURN(const engine::ComputeWeights* weights, Unpack(payload, chunk_, keep));
    ASSIGN_OR_RETURN(const std::span<const float> row, pass_.Forward(*weights, chunk_.tree, Wanting(chunk_, keep)));
    return std::string(reinterpret_cast<const char*>(row.data()), row.size_bytes());
  }

  Result<std::string> Likeliest(std::string_view payload) {
    Reader r(payload);
    const auto count = r.Get<int32_t>();
    const std::string packed = r.GetText();
    if (!r.Done() || count < 1) return DataLoss("a broken packet");
    bool keep = false;
    BatchChunk chunk;
    ASSIGN_OR_RETURN(const engine::ComputeWeights* weights, Unpack(packed, chunk, keep));
    ASSIGN_OR_RETURN(const LikelyTokens likely, trainer::Likeliest(pass_, *weights, chunk, count));
    Writer w;
    w.PutAll(std::span<const int32_t>(likely.begin)).PutAll(std::span<const int32_t>(likely.token)).PutAll(std::span<const float>(likely.logprob));
    return w.Take();
  }

  Result<std::string> Backward(std::string_view payload) {
    Reader r(payload);
    const std::vector<float> coef = r.GetAll<float>();
    if (!r.Done() || coef.size() != static_cast<size_t>(chunk_.tree.items())) return DataLoss("a broken packet");
    pass_.Backward(coef, grads_);
    return std::string();
  }

  // ---- signs of life while a chunk is computed, which may take minutes

  void SetWorking(bool working) {
    const std::lock_guard lock(mutex_);  // no beat is half sent when an answer begins
    working_ = working;
    changed_.notify_all();
  }
  void Beat(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested()) {
      changed_.wait_for(lock, stop, std::chrono::seconds(1), [] { return false; });
      if (working_) (void)SendPacket(control_, kBeat, "");
    }
  }

  engine::TrainPass pass_;
  Link control_;
  Collective& collective_;
  engine::Buffer memory_[3];
  engine::ComputeWeights weights_[3];
  engine::Gradients grads_;
  BatchChunk chunk_;  // of the last Forward
  std::mutex mutex_;
  std::condition_variable_any changed_;
  bool working_ = false;
  std::jthread beats_;
};

}  // namespace

Status ServeRank(engine::Engine& engine, Link control, Collective& collective) { return RankLoop(engine, std::move(control), collective).Run(); }

}  // namespace temper::trainer
