// DriveQueues: what waits for one drive, the turns that choose the next block, and what went through. Guarded by the
// engine's mutex.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "aio/transfer.h"
#include "aio/turns.h"

namespace infinity::aio {

// Seconds during which at least one block of a kind was in flight.
class BusyClock {
 public:
  void change(int64_t blocks, double now) {
    if (in_flight_ == 0 && blocks > 0) since_ = now;
    in_flight_ += blocks;
    if (in_flight_ == 0 && blocks < 0) seconds_ += now - since_;
  }
  double seconds(double now) const { return seconds_ + (in_flight_ > 0 ? now - since_ : 0.0); }
  int64_t in_flight() const { return in_flight_; }

 private:
  int64_t in_flight_ = 0;
  double since_ = 0.0;
  double seconds_ = 0.0;
};

// Of one drive, since the engine was made.
struct DriveCounters {
  int64_t read_bytes = 0;  // really moved, part by part
  int64_t written_bytes = 0;
  double read_seconds = 0.0;  // during which at least one read was in flight
  double write_seconds = 0.0;
  int64_t in_flight_blocks = 0;  // with a backend now
  int64_t queued_bytes = 0;      // waiting for a ring now
};

// A block that its drive has done with.
struct EndedBlock {
  std::shared_ptr<Transfer> transfer;
  int drive;
  int64_t taken_bytes;
};

// One queue per priority, shared by the drive's rings and holding whole transfers (see [Note: priority] in turns.h).
// The queues have no limit of their own: every transfer in them holds memory of a slab, so the callers' leases bound
// them.
class DriveQueues {
 public:
  explicit DriveQueues(const TurnOptions& options) : turns_(options) {}

  void push(Lane lane);

  // The next block whose turn it is, or none.
  std::optional<Block> take_block(int64_t block_bytes, double now);

  // Whether take_block() would give one.
  bool has_turn(double now) { return turns_.next(heads(), now).has_value(); }

  // A block that was taken here has ended, and so many bytes of either operation have moved.
  void block_ended(const EndedBlock& block, double now);
  void bytes_moved(Operation operation, int64_t bytes) { moved_bytes_[static_cast<size_t>(operation)] += bytes; }

  // Takes the transfer's lanes out of the queues.
  void forget(const std::shared_ptr<Transfer>& transfer);

  // Takes everything out: the transfers of all lanes, one for each lane.
  std::vector<std::shared_ptr<Transfer>> clear();

  int64_t queued_bytes() const { return queued_bytes_; }
  DriveCounters counters(double now) const;

 private:
  Turns::Heads heads() const;

  std::array<std::deque<Lane>, kPriorityCount> queues_;
  Turns turns_;
  int64_t queued_bytes_ = 0;
  std::array<int64_t, 2> moved_bytes_{0, 0};  // by operation
  std::array<BusyClock, 2> busy_;             // by operation
};

}  // namespace infinity::aio
