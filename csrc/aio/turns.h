// Turns: which of a drive's waiting transfers gives the next block. Pure arithmetic on what is in flight: no lock, no
// clock, no I/O. The engine owns one per drive and asks it with the engine's mutex held.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "aio/transfer.h"

namespace infinity::aio {

enum class Mix : uint8_t {
  kInterleaved,  // waiting reads and writes alternate, equal bytes of each
  kBursts,       // the drive reads for a while, then writes for a while, never both
};

// "interleaved" or "bursts"; throws std::invalid_argument for anything else.
Mix mix_of(const std::string& name);

struct TurnOptions {
  Mix mix = Mix::kInterleaved;
  int64_t burst_bytes = int64_t{64} << 20;      // of one direction, while the other waits
  int64_t background_bytes = int64_t{2} << 20;  // prefetch and write-back in flight while demand reads are about
  double demand_seconds = 0.05;                 // how long after the last demand that is
};

// [Note: priority]
// Demand goes ahead of everything. It cannot overtake what the drive has already taken in, so for a little while after
// a demand the background (prefetch and write-back) keeps only background_bytes in flight: that is about what a drive
// needs to stay busy, and all that the next demand waits for. Between prefetch and write-back the mix decides; where
// both want the same direction, prefetch goes first.
class Turns {
 public:
  // The operation at the head of each priority's queue, where one waits.
  using Heads = std::array<std::optional<Operation>, kPriorityCount>;

  explicit Turns(TurnOptions options) : options_(options) {}

  // The queue to take the next block from, or none: nothing waits, or what waits shall wait longer.
  std::optional<Priority> next(const Heads& heads, double now);

  // A block of `bytes` was taken, or has ended.
  void taken(Operation operation, Priority priority, int64_t bytes, double now);
  void ended(Operation operation, Priority priority, int64_t bytes, double now);

 private:
  bool background_is_full(double now) const;
  bool may_go(Operation direction) const;
  void turn_to(Operation direction);

  TurnOptions options_;
  int64_t demand_in_flight_ = 0;                       // bytes
  std::array<int64_t, 2> background_in_flight_{0, 0};  // bytes, by operation
  Operation direction_ = Operation::kRead;             // of the current burst, or of the last block
  int64_t left_in_turn_ = 0;                           // bytes until the other direction's turn, if it waits
  double last_demand_ = -1e9;
};

}  // namespace infinity::aio
