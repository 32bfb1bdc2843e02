#include "weightsync/wire.h"

#include "temper/v1/weightsync.pb.h"

namespace temper::weightsync {
namespace {

void ToProto(const Version& from, v1::Version* to) {
  to->set_epoch(from.epoch);
  to->set_step(from.step);
}
Version FromProto(const v1::Version& from) { return {from.epoch(), from.step()}; }

std::string DigestBytes(const Digest& d) {
  std::string bytes(16, '\0');
  for (int i = 0; i < 8; ++i) {
    bytes[i] = static_cast<char>(d.high >> (8 * i));
    bytes[8 + i] = static_cast<char>(d.low >> (8 * i));
  }
  return bytes;
}
bool ParseDigest(const std::string& bytes, Digest* d) {
  if (bytes.size() != 16) return false;
  *d = {};
  for (int i = 0; i < 8; ++i) {
    d->high |= uint64_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
    d->low |= uint64_t{static_cast<uint8_t>(bytes[8 + i])} << (8 * i);
  }
  return true;
}

}  // namespace

void ToProto(const Report& r, v1::SyncRequest* out) {
  out->set_worker(r.worker);
  out->set_incarnation(r.incarnation);
  out->set_seq(r.seq);
  out->set_pid(r.pid);
  if (r.active) ToProto(*r.active, out->mutable_active());
  if (r.staged) {
    ToProto(*r.staged, out->mutable_staged());
    out->set_staged_digest(DigestBytes(r.staged_digest));
    out->set_staged_bytes(r.staged_bytes);
  }
  if (r.refused) {
    ToProto(*r.refused, out->mutable_refused());
    out->set_refused_reason(r.refused_reason);
  }
  for (const Version& v : r.held) ToProto(v, out->add_held());
}

// kInvalidArgument: no name, too many versions held, a digest that is none.
Result<Report> FromProto(const v1::SyncRequest& in) {
  Report r;
  if (in.worker().empty() || in.worker().size() > 200) return InvalidArgument("worker: a name of 1 to 200 bytes");
  if (in.held_size() > 64) return InvalidArgument("held: more than 64 versions");
  r.worker = in.worker();
  r.incarnation = in.incarnation();
  r.seq = in.seq();
  r.pid = in.pid();
  if (in.has_active()) r.active = FromProto(in.active());
  if (in.has_staged()) {
    r.staged = FromProto(in.staged());
    if (!ParseDigest(in.staged_digest(), &r.staged_digest)) return InvalidArgument("staged_digest: 16 bytes");
    r.staged_bytes = in.staged_bytes();
  }
  if (in.has_refused()) {
    r.refused = FromProto(in.refused());
    r.refused_reason = in.refused_reason();
  }
  for (const v1::Version& v : in.held()) r.held.push_back(FromProto(v));
  return r;
}

void ToProto(const Manifest& m, v1::Manifest* out) {
  out->set_profile(m.profile);
  out->set_layout(m.layout);
  out->set_config_json(m.config_json);
  out->set_config_hash(m.config_hash);
  out->set_bytes(m.bytes);
}
Manifest FromProto(const v1::Manifest& m) { return {m.profile(), m.layout(), m.config_json(), m.config_hash(), m.bytes()}; }

void ToProto(const Answer& a, v1::SyncReply* out) {
  out->set_epoch(a.epoch);
  if (a.offer) {
    v1::VersionRecord* o = out->mutable_offer();
    ToProto(a.offer->version, o->mutable_version());
    o->set_digest(DigestBytes(a.offer->digest));
    o->set_bytes(a.offer->bytes);
    o->set_pid(a.offer->pid);
    o->set_fd(a.offer->fd);
    o->set_arena(a.offer->arena);
  }
  if (a.commit) ToProto(*a.commit, out->mutable_commit());
  out->set_lease_ms(static_cast<uint32_t>(a.lease_ms));
  out->set_refuse(a.refuse);
}

Result<Answer> FromProto(const v1::SyncReply& in) {
  Answer a;
  a.epoch = in.epoch();
  if (in.has_offer()) {
    const v1::VersionRecord& o = in.offer();
    VersionRecord record{.version = FromProto(o.version()), .bytes = o.bytes(), .pid = o.pid(), .fd = o.fd(), .arena = o.arena()};
    if (!ParseDigest(o.digest(), &record.digest)) return InvalidArgument("offer.digest: 16 bytes");
    a.offer = record;
  }
  if (in.has_commit()) a.commit = FromProto(in.commit());
  a.lease_ms = in.lease_ms();
  a.refuse = in.refuse();
  return a;
}

}  // namespace temper::weightsync
