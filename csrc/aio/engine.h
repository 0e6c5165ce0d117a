// Engine: takes requests from any thread and moves their bytes on its own ring threads.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "aio/backend.h"
#include "aio/counters.h"
#include "aio/options.h"
#include "aio/transfer.h"
#include "base/process.h"

namespace infinity::aio {

struct EngineState;

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
