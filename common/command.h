// A door of the command line: `temper GROUP NAME args…` (docs/doors.md). Each part lists its doors in `<part>/commands.h` as
// `const std::vector<Command>& Commands();` (in the part's namespace); main.cpp joins the lists into one table.
#pragma once

#include <string>
#include <vector>

namespace temper {

struct Command {
  const char* group;    // "text", or "" when the command has one word (`temper doctor`)
  const char* name;     // "encode"
  const char* summary;  // one line for --help
  // argv[0] is "temper GROUP NAME"; returns the exit code: 0 done, 1 the work failed, 2 bad usage or bad input.
  int (*run)(int argc, char** argv);
};

}  // namespace temper
