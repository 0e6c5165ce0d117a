// Queues, and the count of what is taken from them and comes back.
#include "aio/queues.h"

#include <algorithm>
#include <utility>

namespace infinity::aio {

void DriveQueues::push(Lane lane) {
  queued_bytes_ += lane.left_bytes();
  queues_[static_cast<size_t>(lane.transfer()->priority())].push_back(std::move(lane));
}

std::optional<Block> DriveQueues::take_block(int64_t block_bytes, double now) {
  while (std::optional<Priority> chosen = turns_.next(heads(), now)) {
    auto& queue = queues_[static_cast<size_t>(*chosen)];
    Lane& lane = queue.front();
    std::optional<Block> block = lane.take_block(block_bytes);
    if (block.has_value()) {
      queued_bytes_ -= block->length;
      turns_.taken(block->operation, *chosen, block->length, now);
      busy_[static_cast<size_t>(block->operation)].change(1, now);
      DriveShare& share = block->transfer->share_of(lane.drive(), now);
      share.bytes += block->length;
      ++share.blocks_in_flight;
    }
    if (!block.has_value() || lane.left_bytes() == 0) {
      queued_bytes_ -= lane.left_bytes();
      queue.pop_front();
    }
    if (block.has_value()) return block;
  }
  return std::nullopt;
}

void DriveQueues::block_ended(const EndedBlock& block, double now) {
  Transfer& transfer = *block.transfer;
  turns_.ended(transfer.operation(), transfer.priority(), block.taken_bytes, now);
  busy_[static_cast<size_t>(transfer.operation())].change(-1, now);
  DriveShare& share = transfer.share_of(block.drive, now);
  share.ended = now;
  --share.blocks_in_flight;
}

void DriveQueues::forget(const std::shared_ptr<Transfer>& transfer) {
  for (auto& queue : queues_) {
    auto gone = std::stable_partition(queue.begin(), queue.end(),
                                      [&](const Lane& lane) { return lane.transfer() != transfer; });
    for (auto lane = gone; lane != queue.end(); ++lane) queued_bytes_ -= lane->left_bytes();
    queue.erase(gone, queue.end());
  }
}

std::vector<std::shared_ptr<Transfer>> DriveQueues::clear() {
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (auto& queue : queues_) {
    for (const Lane& lane : queue) transfers.push_back(lane.transfer());
    queue.clear();
  }
  queued_bytes_ = 0;
  return transfers;
}

DriveCounters DriveQueues::counters(double now) const {
  const auto& [reads, writes] = busy_;
  return {
      moved_bytes_[0], moved_bytes_[1], reads.seconds(now), writes.seconds(now), reads.in_flight() + writes.in_flight(),
      queued_bytes_};
}

Turns::Heads DriveQueues::heads() const {
  Turns::Heads heads;
  for (size_t i = 0; i < queues_.size(); ++i) {
    if (!queues_[i].empty()) heads[i] = queues_[i].front().transfer()->operation();
  }
  return heads;
}

}  // namespace infinity::aio
