// The tokenizer.json that says what the tokenizer.ggml.* metadata of a GGUF file say.
#pragma once

#include "common/status.h"
#include "text/tokenizer.h"
#include "text/value.h"

namespace temper::text {

// Errors: InvalidArgument naming the kind or the pre-tokenizer that is not supported, or the entry that is wrong.
Result<Value> TokenizerJsonOf(const GgufTokenizer& gguf);

}  // namespace temper::text
