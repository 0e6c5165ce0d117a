// One logical read or write: its range, its blocks, its state, and what it keeps alive.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "aio/buffer.h"
#include "aio/volume.h"
#include "base/error.h"
#include "base/process.h"

namespace infinity::aio {

enum class Operation : uint8_t { kRead, kWrite };

// Order of service, first to last. Blocks of one priority go in the order they came.
enum class Priority : uint8_t { kDemand, kPrefetch, kWriteBack };
inline constexpr int kPriorityCount = 3;

const char* operation_name(Operation operation);  // "read" or "write"

// Bytes that lie one behind the other in the file and in the slab.
struct Range {
  int64_t offset = 0;
  int64_t slab_offset = 0;
  int64_t length = 0;
};

// What a caller asks for: one transfer of a range of a file or volume.
struct Request {
  Operation operation = Operation::kRead;
  std::shared_ptr<const Volume> volume;
  std::shared_ptr<const PinnedSlab> slab;
  Range range;
  Priority priority = Priority::kPrefetch;

  // Of a file that keeps checksums: who asks verifies what was read (Volume::first_wrong), and has told what the pages
  // hold that are written (Volume::set_checksums).
  bool sums_by_caller = false;

  // Throws std::invalid_argument naming the numbers when the range isn't inside the slab or isn't aligned as the file
  // needs it.
  void check() const;
};

// What is true in each state, and who holds the memory:
enum class TransferState : uint8_t {
  kQueued,    // no byte has moved; the engine's queues and the caller own it; it holds volume and slab
  kInFlight,  // a ring has taken at least one block; the kernel may touch the slab; it holds volume and slab
  kDone,      // every byte has moved and every completion was read; volume and slab are let go
  kFailed,    // as kDone, but a block failed and later ones were not started: the bytes in the range are undefined
};

struct TransferTimes {
  double queued = 0.0;  // CLOCK_MONOTONIC seconds; 0.0 means not yet
  double submitted = 0.0;
  double done = 0.0;
};

// What one drive does of a transfer. The engine keeps these, under its own mutex.
struct DriveShare {
  int drive = 0;
  double submitted = 0.0;  // its first block, CLOCK_MONOTONIC seconds
  double ended = 0.0;      // its last block so far
  int64_t bytes = 0;
  int64_t blocks_in_flight = 0;
};

class Transfer;

// The part of a transfer that one submission moves, or what is left of it after a short one. It lives in a ring's slot
// from the moment it is taken until its last completion, and keeps its transfer, so file and slab outlive the I/O.
struct Block {
  std::shared_ptr<Transfer> transfer;
  Operation operation = Operation::kRead;
  std::shared_ptr<const Descriptor> file;
  std::byte* address = nullptr;
  int64_t offset = 0;       // bytes, in the file
  int64_t length = 0;       // bytes still to move
  int64_t taken_bytes = 0;  // length when it was taken
  int retries = 0;          // interruptions since the last progress
  uint32_t tag = 0;         // the slot, given back in the completion

  void advance(int64_t bytes);

  // Back to where it was when it was taken.
  void rewind();
};

// Owned by the submitter; the engine holds a second reference until the last block's completion has been read, so the
// submitter may walk away. The public half may be called by any thread, the other half only by the engine.
class Transfer {
 public:
  Transfer(Request request, std::string backend);

  bool done() const noexcept { return state() >= TransferState::kDone; }
  TransferState state() const noexcept { return state_.load(std::memory_order_acquire); }

  // Waits until done, then throws IoFailure if it failed, every time it is called.
  void wait();

  // Waits at most `limit`; whether it is done. Throws nothing about the transfer itself.
  bool wait_for(std::chrono::microseconds limit);

  // The same, with the OpenMP team of this thread, which sleeps meanwhile: see [Note: One team].
  bool wait_with_team_for(std::chrono::microseconds limit);

  // The second half of wait(): to be called when done.
  void throw_if_failed();

  Operation operation() const noexcept { return operation_; }
  Priority priority() const noexcept { return priority_; }
  const Range& range() const noexcept { return range_; }
  bool sums_by_caller() const noexcept { return sums_by_caller_; }
  TransferTimes times() const noexcept;

  // The failure of a transfer that is done and on which no wait has raised it yet.
  std::optional<Failure> unseen_failure() const;

  // ---- For the engine ----

  // Counts a block of `bytes` as in flight. False when one has failed: then no further block may start.
  bool begin_block(int64_t bytes);

  // Notes the end of one block; true when it was the last one out, and finish() must follow.
  bool end_block(std::optional<Failure> failure);

  // For a transfer whose remaining blocks can't be started: as if a block had failed. True when finish() must follow.
  bool refuse(Failure failure);

  // The slab that it still holds; null when done.
  std::shared_ptr<const PinnedSlab> slab() const;

  // Guarded by the engine's mutex: one for each drive that took a block of it.
  std::vector<DriveShare> shares;

  // The share of a drive, begun now where it has none yet.
  DriveShare& share_of(int drive, double now);

  // Whether finish() will find a failure. To be asked between end_block and finish.
  bool has_failed() const;

  // What a transfer holds until it is done. To be dropped without a lock: that may close a file and unmap the slab.
  struct Held {
    std::shared_ptr<const Volume> volume;
    std::shared_ptr<const PinnedSlab> slab;
  };

  // The one door to the end: gives up volume and slab and wakes everyone who waits.
  Held finish();

  // Where the block's bytes were to go or come from, with this errno or this reason.
  Failure describe(const Block& block, int error_number, std::string reason = {}) const;

  // The same for the transfer as a whole.
  Failure describe(int error_number, std::string reason = {}) const;

 private:
  // Lives apart, as a condition variable must not be destroyed in a forked child.
  struct Monitor {
    std::mutex mutex;
    std::condition_variable done;
  };

  bool last_one_out() const {
    return blocks_in_flight_ == 0 && (failure_.has_value() || taken_bytes_ == range_.length);
  }

  const Operation operation_;
  const Priority priority_;
  const std::string path_;
  const Range range_;
  const bool sums_by_caller_;
  const std::string backend_;
  std::atomic<TransferState> state_{TransferState::kQueued};
  std::atomic<double> queued_at_;
  std::atomic<double> submitted_at_{0.0};
  std::atomic<double> done_at_{0.0};
  std::atomic<bool> failure_seen_{false};
  OwnedByProcess<Monitor> monitor_;

  // Guarded by monitor_->mutex:
  std::shared_ptr<const Volume> volume_;
  std::shared_ptr<const PinnedSlab> slab_;
  int64_t taken_bytes_ = 0;
  int64_t blocks_in_flight_ = 0;
  std::optional<Failure> failure_;  // the first one
};

// What is left of a transfer for one member of its volume: that drive's queue holds it. Guarded by the engine's mutex.
class Lane {
 public:
  Lane(std::shared_ptr<Transfer> transfer, std::shared_ptr<const Volume> volume, std::shared_ptr<const PinnedSlab> slab,
       int member);

  // The next block, of at most `block_bytes`; none when all were taken or one of the transfer has failed.
  std::optional<Block> take_block(int64_t block_bytes);

  const std::shared_ptr<Transfer>& transfer() const noexcept { return transfer_; }
  int drive() const { return volume_->file(member_)->drive(); }
  int64_t left_bytes() const noexcept { return left_bytes_; }

 private:
  std::shared_ptr<Transfer> transfer_;
  std::shared_ptr<const Volume> volume_;
  std::shared_ptr<const PinnedSlab> slab_;
  int member_;
  int64_t left_bytes_ = 0;
  int64_t position_;  // in the volume; what lies before it in the range was taken
};

}  // namespace infinity::aio
