// What programs of tests do that are meant to be a nuisance. Header only: they link nothing.
#pragma once

#include <sys/prctl.h>
#include <unistd.h>

#include <functional>

namespace temper {

[[noreturn]] inline void SleepForEver() {
  for (;;) pause();
}

// Two forks and a session of its own: nobody's child, in nobody's process group, under a name that looks like the kernel's own.
inline void Daemon(const std::function<void()>& work) {
  if (fork() != 0) return;
  setsid();
  if (fork() != 0) _exit(0);
  prctl(PR_SET_NAME, "kworker/0:0");
  work();
  _exit(0);
}

}  // namespace temper
