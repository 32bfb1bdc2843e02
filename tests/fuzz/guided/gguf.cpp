// A GGUF file: its model, its tokenizer and every element of its tensors.
#include "engine/files/gguf.h"
#include "engine/files/model_file.h"
#include "tests/fuzz/guided/guided.h"
#include "text/text_model.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace temper;
  static const GuidedFolder folder;
  const std::string path = folder.Put("x.gguf", Bytes(data, size));
  if (const auto file = engine::GgufFile::Open(path); file.ok()) {
    for (const engine::FileTensor& tensor : file->tensors()) {
      std::vector<float> values(tensor.count);
      engine::ReadElements(tensor.type, tensor.bytes, values);
    }
  }
  if (auto model = engine::LoadModel(path); model.ok()) (void)text::LoadTextModel(model->text).ok();
  return 0;
}
