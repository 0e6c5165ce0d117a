// Drives made worse on purpose: slower than they are, or failing as a bad drive or a bad day of the kernel does. Faults
// are drawn from a seed, so that a test that failed can be repeated.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "aio/backend.h"

namespace infinity::aio {

// A drive slower than it is, to see what a slow one would do. Zero means as it is.
struct DriveLimit {
  double bytes_per_s = 0.0;
  double latency_seconds = 0.0;  // of each block, at least

  // What each of `rings` may have so that together they keep to the limit.
  DriveLimit shared_by(int rings) const { return {bytes_per_s / rings, latency_seconds}; }
};

// What may happen to one submission. At most one of those above kLate does.
enum class Fault : uint8_t {
  kInterrupted,  // EINTR, nothing moved
  kAgain,        // EAGAIN, nothing moved
  kIo,           // EIO; perhaps a part was moved
  kSpace,        // ENOSPC of a write, perhaps after a part; EIO of a read
  kMemory,       // ENOMEM, nothing moved
  kShort,        // a part was moved and reported
  kCorrupt,      // one bit of what was moved is wrong, and success is reported
  kLost,         // of a write: nothing was moved, and success is reported. Of a read: EIO
  kStuck,        // nothing is ever reported
  kLate,         // reported later, by up to delay_seconds_max
  kOvertaken,    // reported after some that were submitted later
};
inline constexpr size_t kFaultKinds = 11;

const char* fault_name(Fault fault);  // as Python spells it

struct FaultPlan {
  uint64_t seed = 0;
  std::array<double, kFaultKinds> rates{};  // of each Fault: the probability per submission
  double delay_seconds_max = 0.002;
  int64_t after_blocks = 0;  // the first submissions of each ring go well

  double rate(Fault fault) const { return rates[static_cast<size_t>(fault)]; }

  // Throws std::invalid_argument when the rates are no probabilities, or those of which one happens add up to more
  // than 1.
  void check() const;
};

// How often each happened, over all rings of an engine.
using FaultTally = std::array<std::atomic<int64_t>, kFaultKinds>;

// Backends of `factory` whose completions come no sooner than `limit` lets them, and on which the plan comes true.
// `ring`: from 0, as each ring draws draws of its own.
BackendFactory worsened(BackendFactory factory, DriveLimit limit, const std::optional<FaultPlan>& plan, int ring,
                        std::shared_ptr<FaultTally> tally);

}  // namespace infinity::aio
