// What an engine has moved, and when: numbers alone.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "aio/faults.h"

namespace infinity::aio {

// Of one drive, since the engine was made.
struct DriveCounters {
  int64_t read_bytes = 0;  // really moved, part by part
  int64_t written_bytes = 0;
  double read_seconds = 0.0;  // during which at least one read was in flight
  double write_seconds = 0.0;
  int64_t in_flight_blocks = 0;  // with a backend now
  int64_t queued_bytes = 0;      // waiting for a ring now
};

struct Counters {
  int64_t read_bytes = 0;  // of all drives
  int64_t written_bytes = 0;
  int64_t read_transfers = 0;  // done without a failure
  int64_t write_transfers = 0;
  int64_t failed_transfers = 0;
  int64_t in_flight_blocks = 0;
  int64_t queued_bytes = 0;
  int64_t resubmitted_blocks = 0;             // submitted again: the remainder of short ones, and interrupted ones
  std::array<int64_t, kFaultKinds> faults{};  // on purpose, by Fault
  std::vector<DriveCounters> drives;
};

// What one drive moved of a transfer that is over: from its first block there to its last.
struct Timing {
  double queued = 0.0;  // CLOCK_MONOTONIC seconds
  double submitted = 0.0;
  double done = 0.0;
  int64_t bytes = 0;
  int32_t drive = 0;      // -1 for a transfer that failed before it reached one
  uint8_t operation = 0;  // of Operation
  uint8_t priority = 0;   // of Priority
  uint8_t failed = 0;
};

}  // namespace infinity::aio
