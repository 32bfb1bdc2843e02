#include "job/initial_model.h"

#include <tuple>
#include <utility>

#include "agents/task.h"
#include "agents/terminal_tasks.h"
#include "common/rng.h"
#include "engine/files/model_file.h"
#include "engine/parameters.h"
#include "text/task_vocabulary.h"
#include "text/tokenizer.h"
#include "trainer/frozen_model.h"

namespace temper::job {
namespace {

struct Created {
  engine::ModelConfig config;
  text::TextFiles text;
};

// Every text an agent may meet in the tasks; their words become the vocabulary.
Result<std::vector<std::string>> TaskTexts(const TaskList& list) {
  if (list.generator == "terminal") return agents::TerminalWords();
  if (list.generator == "sum") return std::vector<std::string>{agents::MakeSumTasks(0, 1, agents::Split::kTrain)->Get(0).instruction};
  ASSIGN_OR_RETURN(std::unique_ptr<agents::TaskSource> tasks, agents::LoadJsonlTasks(list.jsonl));
  std::vector<std::string> texts;
  for (int64_t i = 0; i < tasks->size(); ++i) {
    const agents::Task task = tasks->Get(i);
    texts.push_back(task.instruction);
    for (const agents::TaskFile& file : task.files) {
      texts.push_back(file.path);
      texts.push_back(file.content);
    }
  }
  return texts;
}

Result<Created> Create(const Job& job) {
  const Job::Create& create = *job.model.create;
  std::vector<std::string> texts;
  for (const Job::Source& source : job.sources) {
    ASSIGN_OR_RETURN(const std::vector<std::string> more, TaskTexts(source.train));
    texts.insert(texts.end(), more.begin(), more.end());
  }
  const text::TaskTextFiles files = text::MakeTaskVocabulary(texts);
  ASSIGN_OR_RETURN(text::Tokenizer tokenizer, text::Tokenizer::FromJson(files.tokenizer_json));
  Created created;
  created.text.tokenizer_json = files.tokenizer_json;
  created.text.tokenizer_config_json = files.tokenizer_config_json;
  engine::ModelConfig& config = created.config;
  config.vocab = tokenizer.size();
  config.layers = create.layers;
  config.width = create.width;
  config.heads = create.heads;
  config.kv_heads = create.kv_heads;
  config.head_dim = create.width / create.heads;
  config.ffn = create.ffn;
  config.max_positions = create.max_positions;
  const std::optional<int32_t> end = tokenizer.TokenId(text::TaskTokens::kEnd);
  TEMPER_CHECK(end) << "the task vocabulary has no end token";
  config.eos_ids = {*end};
  RETURN_IF_ERROR(config.Validate().WithContext("model.create"));
  return created;
}

}  // namespace

Result<engine::ModelConfig> PolicyConfig(const Job& job) {
  if (job.model.create) {
    ASSIGN_OR_RETURN(Created created, Create(job));
    return created.config;
  }
  auto file = engine::LoadModelConfig(job.model.path);
  if (!file.ok()) return file.status().WithContext("model.path");
  return file->config;
}

Result<OtherModels> ReadOtherModels(const Job& job, const engine::ModelConfig& policy) {
  OtherModels others;
  const trainer::Algorithm& algorithm = job.algorithm.algorithm;
  if (algorithm.ReadsReference() && job.trainer.reference.empty()) others.reference = policy;
  std::optional<text::TextFiles> text;
  const std::tuple<const char*, const std::string&, std::optional<engine::ModelConfig>*> named[] = {
      {"trainer.reference", job.trainer.reference, &others.reference}, {"trainer.teacher", job.trainer.teacher, &others.teacher}};
  for (const auto& [key, path, config] : named) {
    if (path.empty()) continue;
    auto file = engine::LoadModelConfig(path);
    if (!file.ok()) return file.status().WithContext(key);
    if (!text) {
      if (job.model.create) {
        ASSIGN_OR_RETURN(Created created, Create(job));
        text = std::move(created.text);
      } else {
        ASSIGN_OR_RETURN(text, engine::LoadTextFiles(job.model.path));
      }
    }
    if (Status s = trainer::CheckFrozenModel(path, file->config, file->text, policy, *text); !s.ok()) return s.WithContext(key);
    *config = file->config;
  }
  return others;
}

std::string PolicyPath(const Job& job, const std::string& run_dir) {
  return job.model.create ? run_dir + "/model" : job.model.path;
}

Status WriteInitialModel(const Job& job, const std::string& run_dir) {
  if (!job.model.create) return Status::Ok();
  ASSIGN_OR_RETURN(Created created, Create(job));
  const engine::Parameters params = engine::InitParameters(created.config, Rng(job.seed).Fork("parameters").seed());
  return engine::SaveHuggingFace(PolicyPath(job, run_dir), created.config, params, created.text, engine::FileType::kF32);
}

}  // namespace temper::job
