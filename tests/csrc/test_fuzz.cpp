// The fuzzers' programs with bytes at random, for machines and minutes without a fuzzer; `make fuzz` lets coverage lead.
#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "fuzz/programs.h"

namespace infinity::aio::testing {
namespace {

template <typename Program>
void run_at_random(Program program, int times) {
  for (int seed = 0; seed < times; ++seed) {
    CAPTURE(seed);
    std::mt19937 draws(static_cast<unsigned>(seed));
    std::vector<uint8_t> bytes(draws() % 400);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(draws());
    program(bytes.data(), bytes.size());
  }
}

}  // namespace

TEST_CASE("programs of transfers at random do what their model does") {
  run_at_random(fuzz_engine, 150);
}

TEST_CASE("stripes at random lie where counting finds them") {
  run_at_random(fuzz_volume, 2000);
}

}  // namespace infinity::aio::testing
