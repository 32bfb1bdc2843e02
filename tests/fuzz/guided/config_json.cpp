// A config.json beside weights that fit one of its kind.
#include "engine/files/model_config_json.h"
#include "engine/files/model_file.h"
#include "tests/fuzz/guided/guided.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace temper;
  static const GuidedFolder folder(TEMPER_FUZZ_MODEL);
  const std::string json = Bytes(data, size);
  if (!engine::ParseConfigJson(json).ok()) return 0;
  folder.Put("config.json", json);
  (void)engine::LoadModel(folder.path()).ok();
  return 0;
}
