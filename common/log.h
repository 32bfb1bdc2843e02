// Logging: one line an event.
//
//   log::Info("checkpoint written", {{"step", 40}, {"bytes", size}});
//   2026-01-02T03:04:05.678Z info trainer checkpoint written step=40 bytes=3400000
//
// The message is constant, values are fields. error = someone must act; warn = degraded; info = changes of state, readable
// at a glance; debug = off unless TEMPER_LOG=debug. Nothing per token. Thread-safe. Lines go to standard error (which the
// supervisor sends to RUN/logs/ROLE.log) until Init says otherwise.
#pragma once

#include <concepts>
#include <initializer_list>
#include <string>
#include <string_view>

#include "common/strings.h"

namespace temper::log {

struct Field {
  std::string_view key;
  std::string value;
  Field(std::string_view k, std::string v) : key(k), value(std::move(v)) {}
  Field(std::string_view k, std::string_view v) : key(k), value(v) {}
  Field(std::string_view k, const char* v) : key(k), value(v) {}
  Field(std::string_view k, bool v) : key(k), value(v ? "true" : "false") {}
  Field(std::string_view k, float v) : key(k), value(FormatFloat(v)) {}
  Field(std::string_view k, double v) : key(k), value(FormatDouble(v)) {}
  template <std::integral T>
  Field(std::string_view k, T v) : key(k), value(std::to_string(v)) {}
};
using Fields = std::initializer_list<Field>;

// `module` is the name in each line (the role); `path` empty = standard error. Call once, before threads.
void Init(const std::string& module, const std::string& path = "");

void Error(std::string_view message, Fields fields = {});
void Warn(std::string_view message, Fields fields = {});
void Info(std::string_view message, Fields fields = {});
void Debug(std::string_view message, Fields fields = {});

}  // namespace temper::log
