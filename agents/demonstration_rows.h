// Demonstrations as rows of token ids, token for token what the gateway would make of the same conversation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "agents/terminal_tasks.h"
#include "common/status.h"
#include "text/text_model.h"

namespace temper::agents {

struct DemonstrationRow {
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;  // 1 = the assistant's, end token included: what supervised training learns
};

// FailedPrecondition when the model's template does not render a conversation's beginning as a beginning of the whole.
Result<DemonstrationRow> ToRow(const Demonstration& demonstration, const text::TextModel& model);

}  // namespace temper::agents
