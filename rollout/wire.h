// proto <-> types of the rollout service, one to one.
#pragma once

#include "rollout/client.h"

namespace temper::v1 {
class GenerateChunk;
class GenerateRequest;
}  // namespace temper::v1

namespace temper::rollout {

void ToProto(const GenerateRequest& request, v1::GenerateRequest* out);
GenerateRequest FromProto(const v1::GenerateRequest& in);

void ToProto(const Chunk& chunk, v1::GenerateChunk* out);
Chunk FromProto(const v1::GenerateChunk& in);

}  // namespace temper::rollout
