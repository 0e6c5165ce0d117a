// The policy behind [Note: priority].
#include "aio/turns.h"

#include <cassert>
#include <stdexcept>

namespace infinity::aio {
namespace {

// Bytes of one direction while the other waits, if they alternate.
constexpr int64_t kInterleavedBytes = int64_t{1} << 20;

Operation other(Operation direction) {
  return direction == Operation::kRead ? Operation::kWrite : Operation::kRead;
}

size_t index(Operation direction) {
  return static_cast<size_t>(direction);
}

}  // namespace

Mix mix_of(const std::string& name) {
  if (name == "interleaved") return Mix::kInterleaved;
  if (name == "bursts") return Mix::kBursts;
  throw std::invalid_argument("mix must be \"interleaved\" or \"bursts\", got \"" + name + "\"");
}

std::optional<Priority> Turns::next(const Heads& heads, double now) {
  if (heads[static_cast<size_t>(Priority::kDemand)].has_value()) return Priority::kDemand;
  const auto& prefetch = heads[static_cast<size_t>(Priority::kPrefetch)];
  const auto& write_back = heads[static_cast<size_t>(Priority::kWriteBack)];
  if ((!prefetch.has_value() && !write_back.has_value()) || background_is_full(now)) return std::nullopt;
  if (!prefetch.has_value() || !write_back.has_value() || *prefetch == *write_back) {
    Priority chosen = prefetch.has_value() ? Priority::kPrefetch : Priority::kWriteBack;
    Operation direction = prefetch.has_value() ? *prefetch : *write_back;
    if (!may_go(direction)) return std::nullopt;
    turn_to(direction);
    if (options_.mix == Mix::kInterleaved) left_in_turn_ = 0;  // what comes to wait goes next
    return chosen;
  }
  Operation direction = left_in_turn_ > 0 ? direction_ : other(direction_);
  if (!may_go(direction)) return std::nullopt;
  turn_to(direction);
  return direction == *prefetch ? Priority::kPrefetch : Priority::kWriteBack;
}

void Turns::taken(Operation operation, Priority priority, int64_t bytes, double now) {
  if (priority == Priority::kDemand) {
    demand_in_flight_ += bytes;
    last_demand_ = now;
    return;
  }
  background_in_flight_[index(operation)] += bytes;
  left_in_turn_ -= bytes;
}

void Turns::ended(Operation operation, Priority priority, int64_t bytes, double now) {
  if (priority == Priority::kDemand) {
    demand_in_flight_ -= bytes;
    last_demand_ = now;
    return;
  }
  background_in_flight_[index(operation)] -= bytes;
  assert(background_in_flight_[index(operation)] >= 0 && demand_in_flight_ >= 0);
}

bool Turns::background_is_full(double now) const {
  if (demand_in_flight_ == 0 && now - last_demand_ > options_.demand_seconds) return false;
  return background_in_flight_[0] + background_in_flight_[1] >= options_.background_bytes;
}

// In bursts, one direction begins when the last block of the other has ended.
bool Turns::may_go(Operation direction) const {
  return options_.mix == Mix::kInterleaved || background_in_flight_[index(other(direction))] == 0;
}

void Turns::turn_to(Operation direction) {
  if (direction == direction_ && left_in_turn_ > 0) return;
  direction_ = direction;
  left_in_turn_ = options_.mix == Mix::kBursts ? options_.burst_bytes : kInterleavedBytes;
}

}  // namespace infinity::aio
