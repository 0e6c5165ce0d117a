// How transfers end, how rings end, and what is remembered of both.
#include "aio/state.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <utility>

#include "base/process.h"

namespace infinity::aio {
namespace {

constexpr size_t kUnseenFailuresMax = 1024;  // kept for Engine::close(), which raises the first
constexpr size_t kTimingsMax = 65536;        // kept for Engine::take_timings()
constexpr int kLooks = 4;                    // at a silent ring, per silence_seconds_max

void look_at(Ring& ring) {
  bool silent = ring.in_flight > 0 && ring.reaped == ring.reaped_before;
  ring.reaped_before = ring.reaped;
  ring.silent_looks = silent ? ring.silent_looks + 1 : 0;
  if (ring.silent_looks < kLooks || ring.backend == nullptr) return;
  ring.given_up = true;
  ring.backend->wake();  // it ends itself
}

}  // namespace

void Drive::wake_rings(int64_t blocks) {
  for (auto& ring : rings) {
    if (blocks <= 0) return;
    if (!ring->has_room) continue;
    ring->has_room = false;
    ring->backend->wake();
    --blocks;
  }
}

EngineState::EngineState(const EngineOptions& options) {
  for (int i = 0; i < options.drives; ++i) drives.push_back(std::make_unique<Drive>(TurnOptions{options.mix}));
}

void EngineState::note(std::string line) {
  std::lock_guard<std::mutex> lock(mutex);
  if (std::find(notes.begin(), notes.end(), line) == notes.end()) notes.push_back(std::move(line));
}

void EngineState::join() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    closing = true;
    for (auto& drive : drives) {
      for (auto& ring : drive->rings) {
        if (ring->backend != nullptr) ring->backend->wake();
      }
    }
  }
  std::lock_guard<std::mutex> lock(close_mutex);
  for (auto& drive : drives) {
    for (auto& ring : drive->rings) {
      if (ring->thread.joinable()) ring->thread.join();
    }
  }
  {
    std::lock_guard<std::mutex> state_lock(mutex);
    joined = true;
  }
  watchdog_ends.notify_all();
  if (watchdog.joinable()) watchdog.join();
}

void EngineState::discard_rings() {
  join();
  for (auto& drive : drives) drive->rings.clear();
  closing = false;
  joined = false;
}

Transfer::Held EngineState::finish(const std::shared_ptr<Transfer>& transfer) {
  bool failed = transfer->has_failed();
  if (failed) {
    ++failed_transfers_;
    for (auto& drive : drives) drive->queues.forget(transfer);
    keep_failure(transfer);
  } else {
    ++done_transfers_[static_cast<size_t>(transfer->operation())];
  }
  Transfer::Held held = transfer->finish();
  TransferTimes times = transfer->times();
  Timing timing{times.queued,
                times.done,
                times.done,
                0,
                -1,
                static_cast<uint8_t>(transfer->operation()),
                static_cast<uint8_t>(transfer->priority()),
                failed};
  if (transfer->shares.empty()) keep_timing(timing);
  for (const DriveShare& share : transfer->shares) {
    timing.submitted = share.submitted;
    // Another ring that has ended a block of it counts that when its turn comes.
    timing.done = share.blocks_in_flight == 0 ? share.ended : times.done;
    timing.bytes = share.bytes;
    timing.drive = share.drive;
    keep_timing(timing);
  }
  if (--active_transfers == 0) idle.notify_all();
  return held;
}

void EngineState::keep_failure(const std::shared_ptr<Transfer>& transfer) {
  auto seen = [](const std::shared_ptr<Transfer>& one) { return one->done() && !one->unseen_failure().has_value(); };
  failures_.erase(std::remove_if(failures_.begin(), failures_.end(), seen), failures_.end());
  if (failures_.size() < kUnseenFailuresMax) failures_.push_back(transfer);
}

void EngineState::keep_timing(const Timing& timing) {
  if (timings_.size() == kTimingsMax) timings_.pop_front();
  timings_.push_back(timing);
}

void EngineState::watch_rings(double silence_seconds_max) {
  std::chrono::duration<double> pause(silence_seconds_max / kLooks);
  std::unique_lock<std::mutex> lock(mutex);
  while (!watchdog_ends.wait_for(lock, pause, [this] { return joined; })) {
    for (auto& drive : drives) {
      for (auto& ring : drive->rings) look_at(*ring);
    }
  }
}

void EngineState::break_down(const std::string& reason) {
  std::vector<Transfer::Held> held;  // let go after the lock
  std::lock_guard<std::mutex> lock(mutex);
  broken = Failure{EIO, "setup", {}, 0, 0, {}, "a ring of the engine has died (" + reason + "): make a new engine"};
  std::vector<std::shared_ptr<Transfer>> stranded;
  for (auto& drive : drives) {
    for (auto& transfer : drive->queues.clear()) stranded.push_back(std::move(transfer));
  }
  for (const auto& transfer : stranded) {
    if (transfer->refuse(transfer->describe(EIO, reason))) held.push_back(finish(transfer));
  }
}

std::optional<Failure> EngineState::take_first_unseen_failure() {
  std::lock_guard<std::mutex> lock(mutex);
  std::optional<Failure> first;
  for (const auto& transfer : failures_) {
    first = transfer->unseen_failure();
    if (first.has_value()) break;
  }
  failures_.clear();
  return first;
}

std::vector<Timing> EngineState::take_timings() {
  std::deque<Timing> taken;
  {
    std::lock_guard<std::mutex> lock(mutex);
    taken.swap(timings_);
  }
  return {taken.begin(), taken.end()};
}

Counters EngineState::counters() {
  std::lock_guard<std::mutex> lock(mutex);
  double now = monotonic_seconds();
  Counters counters;
  counters.read_transfers = done_transfers_[0];
  counters.write_transfers = done_transfers_[1];
  counters.failed_transfers = failed_transfers_;
  counters.resubmitted_blocks = resubmitted_blocks;
  for (const auto& drive : drives) {
    DriveCounters one = drive->queues.counters(now);
    counters.read_bytes += one.read_bytes;
    counters.written_bytes += one.written_bytes;
    counters.in_flight_blocks += one.in_flight_blocks;
    counters.queued_bytes += one.queued_bytes;
    counters.drives.push_back(one);
  }
  return counters;
}

}  // namespace infinity::aio
