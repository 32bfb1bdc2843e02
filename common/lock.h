// Looking at a lock that others take with LockFile (common/file.h).
#pragma once

#include <string>

namespace temper {

// Whether some process holds the lock of that file. True as well where the file cannot be opened for a reason other than its
// absence: nobody is said to be gone by mistake. Holds a shared lock for an instant, so LockFile may fail beside it: whoever
// takes a lock that is looked at tries more than once. Thread-safe.
bool LockHeld(const std::string& path);

}  // namespace temper
