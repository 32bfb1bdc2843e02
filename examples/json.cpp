// Boost.JSON, compiled once for the example programs.
#include <boost/json/src.hpp>
