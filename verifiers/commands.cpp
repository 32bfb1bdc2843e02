#include "verifiers/commands.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "common/file.h"
#include "common/strings.h"
#include "sandbox/door.h"
#include "verifiers/verifier.h"

namespace temper::verifiers {
namespace {

constexpr char kUsage[] =
    "usage: temper verifier run NAME --case FILE [OPTIONS]\n"
    "       temper verifier run --command 'CMD' --case FILE [OPTIONS]\n"
    "\n"
    "Verifies one case and prints the verdict as one JSON object. NAME is a built-in verifier (exact); CMD is run by sh in a\n"
    "fresh sandbox: the case comes on standard input, its files lie in /work, and CMD writes one JSON object with `reward` to\n"
    "file descriptor 3. Paths of the host that CMD names (with a '/') are shown to it read-only.\n"
    "\n"
    "  --case FILE        {\"task\":{…},\"outcome\":\"…\",\"final_text\":\"…\",\"metadata\":{…},\"files\":[{\"path\":\"a\",\"text\":\"…\"}]};\n"
    "                     - is standard input; a file: text|base64|link|\"folder\":true, mode; or \"files\":{\"a\":\"text\"}\n"
    "  --files DIR        more files of the work folder\n"
    "  --timeout S        deadline of the verifier (20)\n"
    "  --limits K=V,…     as in `temper sandbox run`\n"
    "  --mount SRC:DST    shows a host folder or file read-only; may be given again\n"
    "  --rootfs DIR       system folders from DIR instead of the host's own\n"
    "\n"
    "Exit code: 0 a verdict was reached, 1 infra_failure, 2 bad usage or bad case.\n";

int Bad(const std::string& message) {
  std::fprintf(stderr, "temper verifier run: %s\n", message.c_str());
  return 2;
}

// The words of a shell command, quotes removed; near enough to find the paths in it.
std::vector<std::string> Words(const std::string& text) {
  std::vector<std::string> words;
  std::string word;
  char quote = 0;
  for (char c : text) {
    if (quote ? c == quote : (c == '\'' || c == '"')) {
      quote = quote ? 0 : c;
    } else if (!quote && std::string(" \t\n;|&<>()").find(c) != std::string::npos) {
      if (!word.empty()) words.push_back(std::move(word));
      word.clear();
    } else {
      word.push_back(c);
    }
  }
  if (!word.empty()) words.push_back(std::move(word));
  return words;
}

bool IsSystemPath(const std::string& path) {
  for (const char* folder : {"/usr/", "/bin/", "/sbin/", "/lib", "/dev/", "/proc/", "/etc/", "/work/", "/temper/"}) {
    if (path.rfind(folder, 0) == 0) return true;
  }
  return false;
}

// Shows what the command names of the host below /host, and names it so.
void ShowHostPaths(std::string* command, std::vector<sandbox::Mount>* mounts) {
  std::vector<std::string> words = Words(*command);
  // Longer ones first: a path may be the beginning of another.
  std::sort(words.begin(), words.end(), [](auto& a, auto& b) { return a.size() > b.size(); });
  for (const std::string& word : words) {
    if (word.find('/') == std::string::npos || word == "/" || !Exists(word)) continue;
    std::string source = AbsolutePath(word);
    if (IsSystemPath(source)) continue;
    std::string target = "/host/" + std::to_string(mounts->size()) + "/" + BaseName(source);
    for (size_t at = command->find(word); at != std::string::npos; at = command->find(word, at + target.size())) {
      command->replace(at, word.size(), target);
    }
    mounts->push_back(sandbox::Mount{source, target});
  }
}

int Run(int argc, char** argv) {
  std::string name, command, case_path;
  CommandOptions options;
  std::vector<sandbox::File> files;
  static const std::vector<std::string> kOptions = {"--case", "--command", "--files", "--timeout", "--limits", "--mount", "--rootfs"};
  for (int i = 1; i < argc; ++i) {
    std::string arg = argv[i];
    if (arg == "--help" || arg == "-h") return std::fputs(kUsage, stdout) < 0;
    if (arg.rfind("--", 0) != 0) {
      if (!name.empty()) return Bad("unexpected '" + arg + "'");
      name = arg;
      continue;
    }
    if (std::find(kOptions.begin(), kOptions.end(), arg) == kOptions.end()) {
      std::string near = Nearest(arg, kOptions);
      return Bad("unknown option '" + arg + "'" + (near.empty() ? "" : "; did you mean '" + near + "'?"));
    }
    if (++i >= argc) return Bad("option " + arg + " needs a value");
    std::string value = argv[i];
    if (arg == "--case") case_path = value;
    if (arg == "--command") command = value;
    if (arg == "--files") {
      auto folder = sandbox::ReadFolder(value);
      if (!folder.ok()) return Bad("--files: " + folder.status().message());
      files = std::move(*folder);
    }
    if (arg == "--timeout" && !(ParseDouble(value, &options.timeout_s) && options.timeout_s > 0)) {
      return Bad("--timeout '" + value + "' is not seconds above 0");
    }
    if (arg == "--limits") {
      Status status = sandbox::ParseLimits(value, &options.limits);
      if (!status.ok()) return Bad(status.message());
    }
    if (arg == "--mount") {
      auto mount = sandbox::ParseMount(value);
      if (!mount.ok()) return Bad(mount.status().message());
      options.mounts.push_back(*mount);
    }
    if (arg == "--rootfs") options.rootfs = AbsolutePath(value);
  }
  if (name.empty() == command.empty()) return Bad("give either the NAME of a verifier or --command");
  if (case_path.empty()) return Bad("--case FILE is missing");
  auto text = case_path == "-" ? ReadAll(STDIN_FILENO, 1 << 30) : ReadFile(case_path, 1 << 30);
  if (!text.ok()) return Bad("--case: " + text.status().message());
  auto the_case = CaseFromJson(*text);
  if (!the_case.ok()) return Bad(case_path + ": " + the_case.status().message());
  for (sandbox::File& f : files) the_case->files.push_back(std::move(f));

  Verdict verdict;
  if (!name.empty()) {
    auto verifier = MakeBuiltinVerifier(name);
    if (!verifier.ok()) return Bad(verifier.status().message());
    verdict = (*verifier)->Verify(*the_case);
  } else {
    auto own = sandbox::OwnSandboxes::Start();
    if (!own.ok()) {
      std::fprintf(stderr, "temper verifier run: %s\n", own.status().message().c_str());
      return 1;
    }
    ShowHostPaths(&command, &options.mounts);
    options.command = {"/bin/sh", "-c", command};
    verdict = MakeCommandVerifier(options, &(*own)->service())->Verify(*the_case);
  }
  std::printf("%s\n", VerdictToJson(verdict).c_str());
  return verdict.outcome == VerdictOutcome::kScored ? 0 : 1;
}

}  // namespace

const std::vector<Command>& Commands() {
  static const std::vector<Command> commands = {{"verifier", "run", "judge one case with a verifier", &Run}};
  return commands;
}

}  // namespace temper::verifiers
