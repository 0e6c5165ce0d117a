// What bytes of a fuzzer are made into: small programs that drive the core, each held against a model of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace infinity::aio::testing {

// Transfers over a drive in memory that interrupts, shortens, delays, reorders and fails them at random: whatever is
// asked for is done right, fails as an I/O error, or is refused as std::invalid_argument.
void fuzz_engine(const uint8_t* data, size_t size);

// Stripes over several drives: every byte has one place, and each drive's part of a range is what counting finds.
void fuzz_volume(const uint8_t* data, size_t size);

// Takes numbers out of the fuzzer's bytes; zeros when they are used up.
class Source {
 public:
  Source(const uint8_t* data, size_t size) : data_(data), end_(data + size) {}

  bool empty() const { return data_ == end_; }
  uint8_t byte() { return empty() ? uint8_t{0} : *data_++; }

  // From 0 to `bound` - 1.
  int64_t below(int64_t bound) { return ((int64_t{byte()} << 8) | byte()) % bound; }

 private:
  const uint8_t* data_;
  const uint8_t* end_;
};

// Ends the program where the core did something else than its model: a fuzzer takes that for a crash.
inline void expect(bool held, const char* what) {
  if (held) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

}  // namespace infinity::aio::testing
