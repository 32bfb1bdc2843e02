// proto <-> types of weight sync, one to one.
#pragma once

#include "common/status.h"
#include "weightsync/types.h"

namespace temper::v1 {
class Manifest;
class SyncReply;
class SyncRequest;
}  // namespace temper::v1

namespace temper::weightsync {

void ToProto(const Report& report, v1::SyncRequest* out);
// kInvalidArgument: no name, too many versions held, a digest that is none.
Result<Report> FromProto(const v1::SyncRequest& in);

void ToProto(const Answer& answer, v1::SyncReply* out);
// kInvalidArgument: a digest that is none.
Result<Answer> FromProto(const v1::SyncReply& in);

void ToProto(const Manifest& manifest, v1::Manifest* out);
Manifest FromProto(const v1::Manifest& in);

}  // namespace temper::weightsync
