// The stored form of one rollout's record, the unit of trust: what does not verify is never trained.
#pragma once

#include <string>
#include <string_view>

#include "common/status.h"
#include "datapool/types.h"

namespace temper::datapool {

// docs/formats/pool.md. Compressed where that saves an eighth. The checksum covers the key too: a record under another attempt's key
// does not verify.
std::string PackRecord(const AttemptId& id, std::string_view bytes);
// kDataLoss, with what is wrong: cut short, changed, or not a record.
Result<std::string> UnpackRecord(const AttemptId& id, std::string_view stored);

}  // namespace temper::datapool
