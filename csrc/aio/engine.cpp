// Choosing a backend, starting threads, and putting requests into the queues.
#include "aio/engine.h"

#include <cerrno>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "aio/state.h"
#include "base/error.h"

namespace infinity::aio {
namespace {

void check_range(const char* name, int value, int high) {
  if (value >= 1 && value <= high) return;
  throw std::invalid_argument(std::string(name) + " must be from 1 to " + std::to_string(high) + ", got " +
                              std::to_string(value));
}

EngineOptions checked(EngineOptions options) {
  check_range("queue_depth", options.queue_depth, 4096);
  check_range("rings", options.rings, 64);
  check_range("drives", options.drives, 64);
  int64_t block_bytes = options.block_bytes;
  if (block_bytes < kPageBytes || block_bytes > (int64_t{1} << 30) || block_bytes % kPageBytes != 0) {
    throw std::invalid_argument("block_bytes must be a multiple of 4096 from 4096 to 1073741824, got " +
                                std::to_string(block_bytes));
  }
  if (!(options.silence_seconds_max >= 0.0 && options.silence_seconds_max <= 1e6)) {
    throw std::invalid_argument("silence_seconds_max must be from 0 to 1000000, got " +
                                std::to_string(options.silence_seconds_max));
  }
  if ((options.iopoll || options.sqpoll) && options.backend != "auto" && options.backend != kUringName) {
    throw std::invalid_argument("iopoll and sqpoll are options of io_uring; the backend is " + options.backend);
  }
  return options;
}

}  // namespace

std::vector<BackendProbe> probe_backends() {
  return {probe_uring(), probe_linux_aio(), probe_threads()};
}

BackendFactory backend_factory(const std::string& name) {
  if (name == kUringName) return make_uring_backend;
  if (name == kLinuxAioName) return make_linux_aio_backend;
  if (name == kThreadsName) return make_threads_backend;
  throw std::invalid_argument("there is no backend \"" + name + "\": choose auto, " + kUringName + ", " +
                              kLinuxAioName + " or " + kThreadsName);
}

Engine::Engine(EngineOptions options)
    : options_(checked(std::move(options))), state_(std::make_unique<EngineState>(options_)) {
  choose_backend();
}

Engine::Engine(EngineOptions options, const std::string& name, const BackendFactory& factory)
    : options_(checked(std::move(options))), state_(std::make_unique<EngineState>(options_)) {
  start_rings(name, factory);
}

Engine::~Engine() = default;

// The one that was asked for; or the ladder, downwards to the first that works, with a note of why not the better ones.
void Engine::choose_backend() {
  if (options_.backend != "auto") {
    start_rings(options_.backend, backend_factory(options_.backend));
    return;
  }
  std::string refusals;
  for (const BackendProbe& rung : probe_backends()) {
    std::string refusal = rung.reason;
    if (rung.available) {
      try {
        start_rings(rung.name, backend_factory(rung.name));
        if (!refusals.empty()) state_->note(refusals + "Using " + rung.name);
        if (rung.name != kUringName && (options_.iopoll || options_.sqpoll)) {
          state_->note("iopoll and sqpoll are options of io_uring: " + rung.name + " goes without them");
        }
        return;
      } catch (const IoFailure& failure) {
        refusal = failure.failure().reason;
      }
    }
    refusals += refusal + ". ";
  }
  throw IoFailure({ENOSYS, "setup", {}, 0, 0, "auto", "no backend works here: " + refusals});
}

// Starts one ring after the other, and the watchdog; or discards those that are up and throws.
void Engine::start_rings(const std::string& name, const BackendFactory& factory) {
  backend_ = name;
  try {
    for (int i = 0; i < options_.drives * options_.rings; ++i) start_ring(i, factory);
  } catch (...) {
    state_->discard_rings();
    throw;
  }
  if (options_.silence_seconds_max > 0) start_watchdog();
  options_.slab.reset();
}

// Returns when its thread has made a backend; throws what was in the way of that.
void Engine::start_ring(int number, const BackendFactory& factory) {
  EngineState& state = *state_;
  BackendFactory make = options_.wrap ? options_.wrap(factory, number) : factory;
  BackendOptions backend_options{options_.queue_depth, options_.slab, options_.iopoll, options_.sqpoll,
                                 [&state](std::string line) { state.note(std::move(line)); }};

  Drive& drive = *state.drives[static_cast<size_t>(number / options_.rings)];
  auto owned = std::make_unique<Ring>();
  Ring& ring = *owned;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    drive.rings.push_back(std::move(owned));
  }
  auto body = [&state, &drive, &ring, &options = options_, make, backend_options] {
    run_ring(state, drive, ring, options, make, backend_options);
  };
  try {
    ring.thread = start_io_thread("inf-ring" + std::to_string(number), std::move(body));
  } catch (const std::system_error& error) {
    throw IoFailure({error.code().value(), "setup", {}, 0, 0, backend_, "no thread to be had for a ring"});
  }
  std::unique_lock<std::mutex> lock(state.mutex);
  state.ready.wait(lock, [&ring] { return ring.ready; });
  if (ring.refusal != nullptr) std::rethrow_exception(ring.refusal);
}

void Engine::start_watchdog() {
  EngineState& state = *state_;
  try {
    state.watchdog =
        start_io_thread("inf-watch", [&state, limit = options_.silence_seconds_max] { state.watch_rings(limit); });
  } catch (const std::system_error&) {
    state.note("no thread could be had to watch for a drive that stops answering: raise ulimit -u");
  }
}

std::shared_ptr<Transfer> Engine::start(Request request) {
  std::vector<Request> one;
  one.push_back(std::move(request));
  return std::move(start_batch(std::move(one)).front());
}

std::vector<std::shared_ptr<Transfer>> Engine::start_batch(std::vector<Request> requests) {
  state_.guard().check("an engine");
  for (const Request& request : requests) check(request);
  std::vector<std::shared_ptr<Transfer>> transfers;
  transfers.reserve(requests.size());
  std::vector<Lane> lanes;
  for (Request& request : requests) {
    std::shared_ptr<const Volume> volume = request.volume;
    std::shared_ptr<const PinnedSlab> slab = request.slab;
    transfers.push_back(std::make_shared<Transfer>(std::move(request), backend_));
    for (int member = 0; member < volume->members(); ++member) {
      Lane lane(transfers.back(), volume, slab, member);
      if (lane.left_bytes() > 0) lanes.push_back(std::move(lane));
    }
  }
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->closing) throw std::invalid_argument("the engine is closed");
  if (state_->broken.has_value()) throw IoFailure(*state_->broken);
  state_->active_transfers += static_cast<int64_t>(transfers.size());
  for (Lane& lane : lanes) state_->drives[static_cast<size_t>(lane.drive())]->queues.push(std::move(lane));
  for (auto& drive : state_->drives) {
    int64_t queued_bytes = drive->queues.queued_bytes();
    if (queued_bytes > 0) drive->wake_rings((queued_bytes + options_.block_bytes - 1) / options_.block_bytes);
  }
  return transfers;
}

void Engine::check(const Request& request) const {
  request.check();
  for (int member = 0; member < request.volume->members(); ++member) {
    const Descriptor& file = *request.volume->file(member);
    if (file.drive() < options_.drives) continue;
    throw std::invalid_argument(file.path() + " lies on drive " + std::to_string(file.drive()) +
                                ", but the engine serves " + std::to_string(options_.drives));
  }
}

void Engine::drain() {
  while (!drain_for(std::chrono::milliseconds(1000))) {
  }
}

bool Engine::drain_for(std::chrono::milliseconds limit) {
  if (state_.guard().in_child()) return true;
  std::unique_lock<std::mutex> lock(state_->mutex);
  return state_->idle.wait_for(lock, limit, [this] { return state_->active_transfers == 0; });
}

void Engine::refuse_new() {
  if (state_.guard().in_child()) return;
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->closing = true;
}

void Engine::close() {
  if (state_.guard().in_child()) return;
  refuse_new();
  drain();
  state_->join();
  std::optional<Failure> failure = state_->take_first_unseen_failure();
  if (failure.has_value()) throw IoFailure(std::move(*failure));
}

Counters Engine::counters() const {
  state_.guard().check("an engine");
  return state_->counters();
}

std::vector<Timing> Engine::take_timings() {
  state_.guard().check("an engine");
  return state_->take_timings();
}

std::vector<std::string> Engine::notes() const {
  state_.guard().check("an engine");
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->notes;
}

}  // namespace infinity::aio
