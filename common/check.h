// TEMPER_CHECK(cond) << "more": aborts with file, line and message when an invariant is broken. On in every build.
#pragma once

#include <sstream>

namespace temper {

// Collects the message of a failed check and aborts in its destructor.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

// Lets TEMPER_CHECK be an expression of type void.
struct CheckVoidify {
  void operator&(std::ostream&) {}
};

}  // namespace temper

#define TEMPER_CHECK(cond) \
  (cond) ? (void)0 : ::temper::CheckVoidify() & ::temper::CheckFailure(__FILE__, __LINE__, #cond).stream()
