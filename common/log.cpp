#include "common/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <memory>

namespace temper::log {
namespace {

std::shared_ptr<spdlog::logger> Make(const std::string& module, const std::string& path) {
  spdlog::sink_ptr sink;
  if (path.empty()) {
    sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  } else {
    sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(path);
  }
  auto logger = std::make_shared<spdlog::logger>(module, sink);
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %l %n %v", spdlog::pattern_time_type::utc);
  const char* level = std::getenv("TEMPER_LOG");
  logger->set_level(level ? spdlog::level::from_str(level) : spdlog::level::info);
  logger->flush_on(spdlog::level::debug);
  return logger;
}

std::shared_ptr<spdlog::logger>& Logger() {
  static auto* logger = new std::shared_ptr<spdlog::logger>(Make("temper", ""));
  return *logger;
}

// Values with spaces, quotes or control bytes are quoted so that a line stays a line and splits at spaces.
void AppendValue(std::string* line, const std::string& value) {
  bool plain = !value.empty();
  for (unsigned char c : value) plain = plain && c > ' ' && c != '"' && c != '=' && c != 127;
  if (plain) {
    *line += value;
    return;
  }
  *line += '"';
  for (char c : value) {
    if (c == '"' || c == '\\') {
      *line += '\\';
      *line += c;
    } else if (c == '\n') {
      *line += "\\n";
    } else if (static_cast<unsigned char>(c) < ' ' || c == 127) {
      *line += "\\x" + HexEncode(std::string_view(&c, 1));
    } else {
      *line += c;
    }
  }
  *line += '"';
}

void Write(spdlog::level::level_enum level, std::string_view message, Fields fields) {
  auto& logger = Logger();
  if (!logger->should_log(level)) return;
  std::string line(message);
  for (const Field& field : fields) {
    line += ' ';
    line += field.key;
    line += '=';
    AppendValue(&line, field.value);
  }
  logger->log(level, spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace

void Init(const std::string& module, const std::string& path) { Logger() = Make(module, path); }

void Error(std::string_view message, Fields fields) { Write(spdlog::level::err, message, fields); }
void Warn(std::string_view message, Fields fields) { Write(spdlog::level::warn, message, fields); }
void Info(std::string_view message, Fields fields) { Write(spdlog::level::info, message, fields); }
void Debug(std::string_view message, Fields fields) { Write(spdlog::level::debug, message, fields); }

}  // namespace temper::log
