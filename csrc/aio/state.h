// EngineState: what an engine's threads share, under one mutex, and what the ring threads and the watchdog do.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "aio/engine.h"

namespace infinity::aio {

// A ring as other threads see it.
struct Ring {
  std::thread thread;
  Backend* backend = nullptr;  // null before it is made and once it is going away
  bool has_room = false;       // it sleeps with fewer blocks in flight than it could have
  bool ready = false;
  std::exception_ptr refusal;  // why its backend could not be made
  size_t in_flight = 0;        // blocks, when it last slept
  int64_t reaped = 0;          // completions
  int64_t reaped_before = 0;   // at the watchdog's last look
  int silent_looks = 0;        // in a row
  bool given_up = false;
};

// One drive: what waits for it, and the rings that serve it.
struct Drive {
  explicit Drive(const TurnOptions& options) : queues(options) {}

  // Wakes rings that sleep with room to spare, as many as there are blocks.
  void wake_rings(int64_t blocks);

  DriveQueues queues;
  std::vector<std::unique_ptr<Ring>> rings;
};

struct EngineState {
  explicit EngineState(const EngineOptions& options);
  ~EngineState() { join(); }

  void note(std::string line);

  // Ends the ring threads, once nothing is in flight, and the watchdog.
  void join();

  // The same, and forgets the rings: others may be started.
  void discard_rings();

  // A transfer's last block has ended: first counts it, then wakes who waits for it. Holding the mutex; what it gives
  // is to be dropped without.
  [[nodiscard]] Transfer::Held finish(const std::shared_ptr<Transfer>& transfer);

  // [Note: silence]
  // A drive, or the network behind it, can stop answering without an error, and a wait would never end. So a thread of
  // the engine checks each ring four times per silence_seconds_max. A ring with blocks in flight and without
  // completions at four checks in a row is treated as broken: its transfers fail, and the memory and files that the
  // kernel may still use are kept for good. Checks are counted, not seconds, so that a stopped and continued process
  // gives up nothing.

  // The body of that thread. Returns once the rings have been joined.
  void watch_rings(double silence_seconds_max);

  // A ring has died: what is queued will never run. Transfers with blocks on other rings end when those come back.
  void break_down(const std::string& reason);

  std::optional<Failure> take_first_unseen_failure();
  std::vector<Timing> take_timings();
  Counters counters();

  std::mutex mutex;  // of everything below but close_mutex
  std::condition_variable idle;
  std::condition_variable ready;
  std::vector<std::unique_ptr<Drive>> drives;
  int64_t active_transfers = 0;  // started and not finished
  bool closing = false;
  std::optional<Failure> broken;  // a ring has died: nothing can be started any more
  std::vector<std::string> notes;
  int64_t resubmitted_blocks = 0;
  std::mutex close_mutex;  // lets one join() at a time join the threads
  std::thread watchdog;
  std::condition_variable watchdog_ends;
  bool joined = false;

 private:
  // Holding the mutex.
  void keep_failure(const std::shared_ptr<Transfer>& transfer);
  void keep_timing(const Timing& timing);

  std::vector<std::shared_ptr<Transfer>> failures_;
  std::deque<Timing> timings_;
  std::array<int64_t, 2> done_transfers_{0, 0};  // by operation
  int64_t failed_transfers_ = 0;
};

// The body of a ring thread: takes blocks from its drive's queues, moves them through a backend, and reads every
// result. Makes the backend, says in `ring` whether there is one, and ends when the engine closes and nothing is left.
// What is passed by reference outlives the thread.
void run_ring(EngineState& state, Drive& drive, Ring& ring, const EngineOptions& options, const BackendFactory& make,
              const BackendOptions& backend_options);

}  // namespace infinity::aio
