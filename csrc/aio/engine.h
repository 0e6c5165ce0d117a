// Engine: takes requests from any thread and moves their bytes on its own ring threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "buffer.h"
#include "process.h"
#include "transfer.h"

namespace infinity::aio {

struct EngineOptions {
  std::string backend = "auto";            // "io_uring", "threads", or the best that works here
  int queue_depth = 32;                    // blocks in flight per ring
  int64_t block_bytes = int64_t{1} << 20;  // bytes per submission, a multiple of 4096
  int rings = 1;                           // ring threads, each with a backend of its own
  std::shared_ptr<const PinnedSlab> slab;  // to be registered with the kernel; transfers may use other slabs, too
};

struct Counters {
  int64_t read_bytes = 0;  // really moved, part by part
  int64_t written_bytes = 0;
  int64_t read_transfers = 0;  // done without a failure
  int64_t write_transfers = 0;
  int64_t failed_transfers = 0;
  int64_t in_flight_blocks = 0;    // with a backend now
  int64_t queued_blocks = 0;       // waiting for a ring now
  int64_t resubmitted_blocks = 0;  // submitted again: the rest of short ones, and interrupted ones
};

// [Note: priority]
// There is one queue per priority, shared by all rings and holding whole transfers. A ring takes the next block only
// when it has fewer than queue_depth in flight, always from the most urgent queue that has any. So a demand read waits
// for at most the blocks already in flight, never for what is queued. The queues have no limit of their own: every
// transfer in them holds memory of a slab, so the callers' leases bound them.
//
// Any thread may call any method. Throws std::invalid_argument for requests that can't be, IoFailure for what the
// system refuses, std::runtime_error in a forked child (see [Note: fork]); there close() and the destructor do nothing.
class Engine {
 public:
  explicit Engine(EngineOptions options);

  // With a backend from elsewhere; for tests.
  Engine(EngineOptions options, const std::string& name, const BackendFactory& factory);

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Waits for everything under way and joins the ring threads. Throws nothing: failures that nobody saw are lost here.
  ~Engine();

  std::shared_ptr<Transfer> start(Request request);

  // All or none: every request is checked before the first is started.
  std::vector<std::shared_ptr<Transfer>> start_batch(std::vector<Request> requests);

  // Waits until nothing is queued or in flight.
  void drain();

  // The same for at most `limit`; whether nothing is left.
  bool drain_for(std::chrono::milliseconds limit);

  // From now on start() throws std::invalid_argument. The first half of close().
  void refuse_new();

  // Refuses new transfers, drains, joins the ring threads; then throws the first failure that no wait has raised. Later
  // calls do nothing.
  void close();

  Counters counters() const;
  std::vector<std::string> notes() const;
  const std::string& backend() const noexcept { return backend_; }

  // As asked for, but without the slab: the rings hold that, until they are joined.
  const EngineOptions& options() const noexcept { return options_; }

 private:
  struct State;
  class RingThread;

  void start_rings(const std::string& name, const BackendFactory& factory);

  EngineOptions options_;
  std::string backend_;
  OwnedByProcess<State> state_;
};

}  // namespace infinity::aio
