// Engine: takes requests from any thread and moves their bytes on its own ring threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "aio/backend.h"
#include "aio/queues.h"
#include "base/process.h"

namespace infinity::aio {

// Given the factory of a backend and the number of its ring, over all drives from 0, returns the factory to use.
using WrapBackend = std::function<BackendFactory(BackendFactory factory, int ring)>;

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
  double silence_seconds_max = 300.0;      // see [Note: silence] in state.h; 0 for as long as it takes
  WrapBackend wrap = nullptr;              // tests make drives worse with it
};

// Since the engine was made.
struct Counters {
  int64_t read_bytes = 0;  // of all drives
  int64_t written_bytes = 0;
  int64_t read_transfers = 0;  // done without a failure
  int64_t write_transfers = 0;
  int64_t failed_transfers = 0;
  int64_t in_flight_blocks = 0;
  int64_t queued_bytes = 0;
  int64_t resubmitted_blocks = 0;  // submitted again: the remainder of short ones, and interrupted ones
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

struct EngineState;

// Any thread may call any method. Throws std::invalid_argument for requests that can't be, IoFailure for what the
// system refuses, std::runtime_error in a forked child (see [Note: fork]); there close() and the destructor do nothing.
class Engine {
 public:
  // Throws std::invalid_argument naming the option that can't be.
  explicit Engine(EngineOptions options);

  // With a backend from elsewhere; for tests.
  Engine(EngineOptions options, const std::string& name, const BackendFactory& factory);

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Waits for all transfers and joins the ring threads. Throws nothing: failures that no wait has thrown are lost.
  ~Engine();

  std::shared_ptr<Transfer> start(Request request);

  // All or none: every request is checked before the first is started.
  std::vector<std::shared_ptr<Transfer>> start_batch(std::vector<Request> requests);

  // Waits until nothing is queued or in flight.
  void drain();

  // The same for at most `limit`; whether nothing is left.
  bool drain_for(std::chrono::milliseconds limit);

  // From now on start() throws std::invalid_argument. close() begins with it.
  void refuse_new();

  // Refuses new transfers, drains, joins the ring threads; then throws the first failure that no wait has raised. Later
  // calls do nothing.
  void close();

  Counters counters() const;

  // The transfers that are over since the last call, one for each drive that they reached, in the order in which they
  // ended: the last 65536 of them.
  std::vector<Timing> take_timings();

  std::vector<std::string> notes() const;
  const std::string& backend() const noexcept { return backend_; }

  // As asked for, but without the slab: the rings hold that, until they are joined.
  const EngineOptions& options() const noexcept { return options_; }

 private:
  void choose_backend();
  void start_rings(const std::string& name, const BackendFactory& factory);
  void start_ring(int number, const BackendFactory& factory);
  void start_watchdog();
  void check(const Request& request) const;

  EngineOptions options_;
  std::string backend_;
  OwnedByProcess<EngineState> state_;
};

}  // namespace infinity::aio
