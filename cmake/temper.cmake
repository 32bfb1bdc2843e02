# Helpers used by every part's CMakeLists.txt.
#   temper_library(NAME SOURCES a.cpp … DEPS lib …)      a static library, includes from the repository root
#   temper_adapter(NAME SOURCES … DEPS …)                the same for files that include gRPC or generated code
#   temper_test(NAME SOURCES … DEPS … [LABELS …] [TIMEOUT s])   a gtest binary registered with ctest (labels: unit by default;
#                                                        `long` keeps it out of the fast tier)
#   temper_python_test(NAME SCRIPT ARGS… [LABELS …] [TIMEOUT s])   a script of the long tier, run by $TEMPER_PYTHON, which
#                                                        tests/run.py sets (tests/setup_python.sh)
#   temper_commands(LIB)                                 LIB defines doors: linked into the binary (see common/command.h)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1")
set(CMAKE_C_FLAGS_RELEASE "-O2 -g1")
# Contraction would let the compiler choose between one and two roundings; every fma is explicit (docs/numerics.md).
add_compile_options(-ffp-contract=off -ffile-prefix-map=${CMAKE_SOURCE_DIR}=.)
set(TEMPER_WARNINGS -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Werror)

# Paths below the root are hashed as relative ones, so that clones and work trees share what is compiled.
find_program(TEMPER_CCACHE ccache)
if(TEMPER_CCACHE)
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${TEMPER_CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
endif()
# The linker is binutils' own: of Debian 12's faster ones, mold 1.10 was seen to hang, and makes binaries that do not start when chance
# puts the segment that is read-only after relocation into no page; lld 14 makes some in which an exception ends the process.

find_package(Threads REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(GTest REQUIRED)
find_package(fmt REQUIRED)

function(temper_library name)
  cmake_parse_arguments(A "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${A_SOURCES})
  target_include_directories(${name} PUBLIC ${CMAKE_SOURCE_DIR})
  target_compile_options(${name} PRIVATE ${TEMPER_WARNINGS})
  target_link_libraries(${name} PUBLIC ${A_DEPS} Threads::Threads)
endfunction()

function(temper_adapter name)
  cmake_parse_arguments(A "" "" "SOURCES;DEPS" ${ARGN})
  temper_library(${name} SOURCES ${A_SOURCES} DEPS ${A_DEPS})
  target_link_libraries(${name} PRIVATE temper_proto gRPC::grpc++)
endfunction()

function(temper_commands name)
  set_property(GLOBAL APPEND PROPERTY TEMPER_COMMAND_PARTS ${name})
endfunction()

function(temper_test name)
  cmake_parse_arguments(A "" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  add_executable(${name} ${A_SOURCES})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_compile_options(${name} PRIVATE ${TEMPER_WARNINGS})
  target_compile_definitions(${name} PRIVATE TEMPER_SOURCE_DIR="${CMAKE_SOURCE_DIR}" TEMPER_BUILD_DIR="${CMAKE_BINARY_DIR}")
  target_link_libraries(${name} PRIVATE ${A_DEPS} GTest::gmock GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name})
  if(NOT A_LABELS)
    set(A_LABELS unit)
  endif()
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 120)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${A_LABELS}" TIMEOUT ${A_TIMEOUT})
endfunction()

function(temper_python_test name script)
  cmake_parse_arguments(A "" "TIMEOUT" "LABELS" ${ARGN})
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 120)
  endif()
  add_test(NAME ${name} COMMAND sh -c "exec \"\${TEMPER_PYTHON:?run it with: temper test --long}\" \"$@\"" sh
           ${CMAKE_CURRENT_SOURCE_DIR}/${script} ${A_UNPARSED_ARGUMENTS})
  set_tests_properties(${name} PROPERTIES LABELS "long;python;${A_LABELS}" TIMEOUT ${A_TIMEOUT})
endfunction()
