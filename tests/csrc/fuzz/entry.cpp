// What libFuzzer calls. Which program: -DINFINITY_FUZZ=fuzz_engine.
#include "programs.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  infinity::aio::testing::INFINITY_FUZZ(data, size);
  return 0;
}
