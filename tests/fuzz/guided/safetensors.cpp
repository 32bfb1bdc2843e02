// A safetensors file, by itself and as the weights of a model.
#include "engine/files/model_file.h"
#include "engine/files/safetensors.h"
#include "tests/fuzz/guided/guided.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace temper;
  static const GuidedFolder folder(TEMPER_FUZZ_MODEL);
  const std::string path = folder.Put("model.safetensors", Bytes(data, size));
  if (const auto file = engine::SafetensorsFile::Open(path); file.ok()) {
    for (const engine::FileTensor& tensor : file->tensors()) {
      std::vector<float> values(tensor.count);
      engine::ReadElements(tensor.type, tensor.bytes, values);
    }
  }
  (void)engine::LoadModel(folder.path()).ok();
  return 0;
}
