// The smallest model of the quickstart's shape (grouped queries, tied head), for tests that need weights and not their meaning.
// A test that needs another size changes the field it is about.
#pragma once

#include "engine/config.h"

namespace temper {

inline engine::ModelConfig TinyModel(int vocab) {
  engine::ModelConfig c;
  c.vocab = vocab;
  c.layers = 2;
  c.width = 32;
  c.heads = 2;
  c.kv_heads = 1;
  c.head_dim = 16;
  c.ffn = 48;
  c.max_positions = 128;
  return c;
}

}  // namespace temper
