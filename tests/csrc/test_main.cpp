// The test programs of csrc/aio and csrc/optim; the cases are in the other files. Built by sanitized.py, run by test_cpp.py.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
