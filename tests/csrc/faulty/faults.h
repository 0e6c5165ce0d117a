// Drives made worse for tests: slower, or failing at random as bad drives, cables and kernels do. The draws come from a
// seed, so that a test that failed can be repeated.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "aio/engine.h"

namespace infinity::aio {

// Makes a drive slower. Zero means no limit.
struct DriveLimit {
  double bytes_per_s = 0.0;      // upper bound
  double latency_seconds = 0.0;  // lower bound, of each block
  std::string path;              // of a file on the drive, or of a folder that holds the files; empty for every file

  bool concerns(const std::string& file) const;
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

// Limits, a plan, and how often each fault has happened so far. Engines may share one; their rings share the counts.
class WorseDrives {
 public:
  // The first limit that concerns a file counts. Throws std::invalid_argument for a plan that can't be.
  explicit WorseDrives(std::vector<DriveLimit> limits, const FaultPlan& plan = {});

  // Null for a file that no limit concerns.
  const DriveLimit* limit_of(const std::string& file) const;
  const FaultPlan& plan() const { return plan_; }

  void count(Fault fault) { counts_[static_cast<size_t>(fault)].fetch_add(1, std::memory_order_relaxed); }
  int64_t count_of(Fault fault) const { return counts_[static_cast<size_t>(fault)].load(std::memory_order_relaxed); }

 private:
  const std::vector<DriveLimit> limits_;
  const FaultPlan plan_;
  std::array<std::atomic<int64_t>, kFaultKinds> counts_{};
};

// Makes the drives of an engine with these options worse. Reads `options.rings`, which share a drive's limit.
void make_worse(EngineOptions& options, std::shared_ptr<WorseDrives> worse);

}  // namespace infinity::aio
