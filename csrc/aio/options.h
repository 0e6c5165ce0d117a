// EngineOptions: how an engine drives its drives.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "aio/backend.h"
#include "aio/buffer.h"
#include "aio/faults.h"
#include "aio/turns.h"

namespace infinity::aio {

struct EngineOptions {
  std::string backend = "auto";            // a name of probe_backends(), or the best that works here
  int queue_depth = 32;                    // blocks in flight per ring
  int64_t block_bytes = int64_t{1} << 20;  // bytes per submission, a multiple of 4096
  int rings = 1;                           // ring threads per drive, each with a backend of its own
  std::shared_ptr<const PinnedSlab> slab;  // to be registered with the kernel; transfers may use other slabs, too
  int drives = 1;                          // files say which of them they lie on
  Mix mix = Mix::kInterleaved;             // how reads and writes share a drive
  bool iopoll = false;                     // io_uring only: poll the drive for completions
  bool sqpoll = false;                     // io_uring only: a kernel thread polls for submissions
  std::vector<DriveLimit> limits;          // makes drives slower than they are; empty, or one per drive
  std::optional<FaultPlan> faults;         // makes drives fail
  double silence_seconds_max = 300.0;      // see [Note: silence] in watchdog.h; 0 for as long as it takes

  // Throws std::invalid_argument naming the option that can't be.
  void check() const;
};

}  // namespace infinity::aio
