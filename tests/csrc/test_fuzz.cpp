// The fuzzers' programs with bytes by draw, for machines and minutes without a fuzzer; `make fuzz` lets coverage lead.
#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "fuzz/programs.h"

namespace infinity::aio::testing {
namespace {

template <typename Program>
void run_by_lot(Program program, int times) {
  for (int seed = 0; seed < times; ++seed) {
    CAPTURE(seed);
    std::mt19937 draws(static_cast<unsigned>(seed));
    std::vector<uint8_t> bytes(draws() % 400);
    for (uint8_t& each : bytes) each = static_cast<uint8_t>(draws());
    program(bytes.data(), bytes.size());
  }
}

}  // namespace

TEST_CASE("programs of transfers by draw do what their model does") {
  run_by_lot(fuzz_engine, 150);
}

TEST_CASE("stripes by draw lie where counting finds them") {
  run_by_lot(fuzz_volume, 2000);
}

}  // namespace infinity::aio::testing
