// The queue, the ring threads, and what becomes of each completion.
#include "engine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace infinity::aio {
namespace {

constexpr int kRetriesMax = 100;             // interruptions of one block in a row, then it fails
constexpr size_t kUnseenFailuresMax = 1024;  // kept for close(), which raises the first
constexpr std::chrono::microseconds kPauseMax{1000};

const EngineOptions& checked(const EngineOptions& options) {
  auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
  if (options.queue_depth < 1 || options.queue_depth > 4096) {
    refuse("queue_depth must be from 1 to 4096, got " + std::to_string(options.queue_depth));
  }
  if (options.block_bytes < kPageBytes || options.block_bytes > (int64_t{1} << 30) ||
      options.block_bytes % kPageBytes != 0) {
    refuse("block_bytes must be a multiple of 4096 from 4096 to 1073741824, got " +
           std::to_string(options.block_bytes));
  }
  if (options.rings < 1 || options.rings > 64)
    refuse("rings must be from 1 to 64, got " + std::to_string(options.rings));
  return options;
}

// For what the kernel may still touch though nobody can say when it stops.
void keep_for_good(std::shared_ptr<const void> thing) {
  static auto* mutex = new std::mutex();
  static auto* things = new std::vector<std::shared_ptr<const void>>();
  std::lock_guard<std::mutex> lock(*mutex);
  things->push_back(std::move(thing));
}

}  // namespace

// Everything that the ring threads share.
struct Engine::State {
  // A ring thread as the others see it.
  struct Ring {
    std::thread thread;
    Backend* backend = nullptr;  // null before it is made and once it is going away
    bool has_room = false;       // it sleeps with fewer blocks in flight than it could have
    bool ready = false;
    std::exception_ptr refusal;  // why its backend could not be made
  };

  mutable std::mutex mutex;  // of all down to the counters
  std::condition_variable idle;
  std::condition_variable ready;
  std::array<std::deque<std::shared_ptr<Transfer>>, kPriorityCount> queues;
  std::vector<std::unique_ptr<Ring>> rings;
  int64_t active_transfers = 0;  // started and not finished
  bool closing = false;
  std::optional<Failure> broken;  // a ring has died: nothing can be started any more
  std::vector<std::shared_ptr<Transfer>> failures;
  std::vector<std::string> notes;
  std::mutex close_mutex;  // lets one close() at a time join the threads

  std::atomic<int64_t> read_bytes{0};
  std::atomic<int64_t> written_bytes{0};
  std::atomic<int64_t> read_transfers{0};
  std::atomic<int64_t> write_transfers{0};
  std::atomic<int64_t> failed_transfers{0};
  std::atomic<int64_t> in_flight_blocks{0};
  std::atomic<int64_t> queued_blocks{0};
  std::atomic<int64_t> resubmitted_blocks{0};

  ~State() { join(); }

  void note(std::string line) {
    std::lock_guard<std::mutex> lock(mutex);
    if (std::find(notes.begin(), notes.end(), line) == notes.end()) notes.push_back(std::move(line));
  }

  void join() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      closing = true;
      for (auto& ring : rings) {
        if (ring->backend != nullptr) ring->backend->wake();
      }
    }
    std::lock_guard<std::mutex> lock(close_mutex);
    for (auto& ring : rings) {
      if (ring->thread.joinable()) ring->thread.join();
    }
  }

  // Wakes rings that sleep with room to spare: one for a single block, all for more. Holding the mutex.
  void wake_rings(int64_t blocks) {
    for (auto& ring : rings) {
      if (!ring->has_room) continue;
      ring->has_room = false;
      ring->backend->wake();
      if (--blocks <= 0) return;
    }
  }

  // The next block by priority. Holding the mutex.
  std::optional<Block> take_block() {
    for (auto& queue : queues) {
      while (!queue.empty()) {
        std::optional<Block> block = queue.front()->take_block();
        if (block.has_value()) {
          --queued_blocks;
          return block;
        }
        queue.pop_front();
      }
    }
    return std::nullopt;
  }

  // A transfer's last block has ended: first the books, then the news.
  void finish(const std::shared_ptr<Transfer>& transfer) {
    bool failed = transfer->has_failed();
    if (failed) {
      ++failed_transfers;
      queued_blocks -= transfer->blocks_left();
      keep_failure(transfer);
    } else {
      ++(transfer->operation() == Operation::kRead ? read_transfers : write_transfers);
    }
    transfer->finish();
    std::lock_guard<std::mutex> lock(mutex);
    if (--active_transfers == 0) idle.notify_all();
  }

  void keep_failure(const std::shared_ptr<Transfer>& transfer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto seen = [](const std::shared_ptr<Transfer>& one) { return one->done() && !one->unseen_failure().has_value(); };
    failures.erase(std::remove_if(failures.begin(), failures.end(), seen), failures.end());
    if (failures.size() < kUnseenFailuresMax) failures.push_back(transfer);
  }

  std::optional<Failure> take_first_unseen_failure() {
    std::lock_guard<std::mutex> lock(mutex);
    std::optional<Failure> first;
    for (const auto& transfer : failures) {
      first = transfer->unseen_failure();
      if (first.has_value()) break;
    }
    failures.clear();
    return first;
  }

  // A ring has died: what is queued will never run. Transfers with blocks on other rings end when those come back.
  void break_down(const std::string& reason) {
    std::vector<std::shared_ptr<Transfer>> stranded;
    {
      std::lock_guard<std::mutex> lock(mutex);
      broken = Failure{EIO, "setup", {}, 0, 0, {}, "a ring of the engine has died (" + reason + "): make a new engine"};
      for (auto& queue : queues) {
        stranded.insert(stranded.end(), queue.begin(), queue.end());
        queue.clear();
      }
    }
    for (const auto& transfer : stranded) {
      if (transfer->refuse(transfer->describe(EIO, reason))) finish(transfer);
    }
  }
};

// One ring: owns a backend and the slots of the blocks in flight. Every method runs on the ring's own thread.
class Engine::RingThread {
 public:
  RingThread(State& state, State::Ring& ring, Backend& backend)
      : state_(state), ring_(ring), backend_(backend), slots_(static_cast<size_t>(backend.depth())) {
    for (uint32_t tag = 0; tag < slots_.size(); ++tag) slots_[tag].tag = tag;
    for (size_t tag = slots_.size(); tag > 0; --tag) free_.push_back(static_cast<uint32_t>(tag - 1));
  }

  // A turn: fill up, submit, wait, read the results. Ends when the engine closes and nothing is left to do.
  void run() {
    try {
      while (take_blocks()) {
        backend_.submit(batch_);
        batch_.clear();
        completions_.clear();
        backend_.reap(&completions_);
        for (const Completion& completion : completions_) on_completion(completion);
        pause_if_asked();
      }
    } catch (const std::exception& error) {
      strand(error.what());
    }
  }

 private:
  bool take_blocks() {
    std::lock_guard<std::mutex> lock(state_.mutex);
    while (!free_.empty()) {
      std::optional<Block> taken = state_.take_block();
      if (!taken.has_value()) break;
      ++state_.in_flight_blocks;
      uint32_t tag = free_.back();
      free_.pop_back();
      slots_[tag] = std::move(*taken);
      slots_[tag].tag = tag;
      batch_.push_back(&slots_[tag]);
    }
    ring_.has_room = !free_.empty();
    return !(state_.closing && free_.size() == slots_.size());
  }

  void on_completion(const Completion& completion) {
    assert(completion.tag < slots_.size());
    Block& block = slots_[completion.tag];
    if (completion.result >= 0) {
      on_bytes(block, completion.result);
    } else if (completion.result == -EINTR || completion.result == -EAGAIN) {
      on_interruption(block, static_cast<int>(-completion.result));
    } else {
      end(block, block.transfer->describe(static_cast<int>(-completion.result)));
    }
  }

  // A short direct transfer goes on at the page that it did not finish: offsets and memory must stay aligned.
  void on_bytes(Block& block, int64_t moved) {
    moved = std::min(moved, block.length);
    if (block.file->direct() && moved < block.length) moved -= moved % kPageBytes;
    (block.operation == Operation::kRead ? state_.read_bytes : state_.written_bytes) += moved;
    block.advance(moved);
    if (block.length == 0) {
      end(block, std::nullopt);
    } else if (moved > 0) {
      block.retries = 0;
      resubmit(block);
    } else if (block.operation == Operation::kRead) {
      int64_t wanted_end = block.transfer->offset() + block.transfer->length();
      end(block, block.transfer->describe(ENODATA, "the file ends before offset " + std::to_string(wanted_end)));
    } else {
      end(block,
          block.transfer->describe(EIO, "nothing is written any more at offset " + std::to_string(block.offset)));
    }
  }

  void on_interruption(Block& block, int error_number) {
    if (++block.retries > kRetriesMax) {
      end(block, block.transfer->describe(error_number));
      return;
    }
    if (error_number == EAGAIN) {
      pause_ = std::max(pause_,
                        std::min<std::chrono::microseconds>(std::chrono::microseconds(10) * block.retries, kPauseMax));
    }
    resubmit(block);
  }

  void resubmit(Block& block) {
    ++state_.resubmitted_blocks;
    batch_.push_back(&block);
  }

  void end(Block& block, std::optional<Failure> failure) {
    std::shared_ptr<Transfer> transfer = std::move(block.transfer);
    block.file.reset();
    free_.push_back(block.tag);
    --state_.in_flight_blocks;
    if (transfer->end_block(std::move(failure))) state_.finish(transfer);
  }

  // The kernel was short of something: let it breathe before asking again.
  void pause_if_asked() {
    if (pause_.count() > 0) std::this_thread::sleep_for(pause_);
    pause_ = std::chrono::microseconds(0);
  }

  // The backend has thrown, so completions can't be read any more. The kernel may still move bytes of the blocks in
  // flight: their transfers fail, but file and slab are kept for good.
  void strand(const std::string& reason) {
    {
      std::lock_guard<std::mutex> lock(state_.mutex);
      ring_.has_room = false;
    }
    state_.break_down(reason);
    for (Block& block : slots_) {
      if (block.transfer == nullptr) continue;
      keep_for_good(block.file);
      keep_for_good(block.transfer->slab());
      end(block, block.transfer->describe(EIO, reason));
    }
  }

  State& state_;
  State::Ring& ring_;
  Backend& backend_;
  std::vector<Block> slots_;    // as many as the backend's depth; a block never moves while in flight
  std::vector<uint32_t> free_;  // slots without a block
  std::vector<Block*> batch_;   // to be submitted next
  std::vector<Completion> completions_;
  std::chrono::microseconds pause_{0};
};

Engine::Engine(EngineOptions options) : options_(checked(options)), state_(std::make_unique<State>()) {
  if (options_.backend != "auto") {
    start_rings(options_.backend, backend_factory(options_.backend));
    return;
  }
  BackendProbe best = probe_uring();
  std::string refusal = best.reason;
  if (best.available) {
    try {
      start_rings(kUringName, backend_factory(kUringName));
      return;
    } catch (const IoFailure& failure) {
      refusal = failure.failure().reason;
    }
  }
  state_->note(refusal + ". Using threads");
  start_rings(kThreadsName, backend_factory(kThreadsName));
}

Engine::Engine(EngineOptions options, const std::string& name, const BackendFactory& factory)
    : options_(checked(options)), state_(std::make_unique<State>()) {
  start_rings(name, factory);
}

Engine::~Engine() = default;

// Makes each backend on its own ring thread, and returns when all are up; or joins those that are and throws.
void Engine::start_rings(const std::string& name, const BackendFactory& factory) {
  State& state = *state_;
  backend_ = name;
  BackendOptions options{options_.queue_depth, options_.slab,
                         [&state](std::string line) { state.note(std::move(line)); }};
  auto body = [&state, factory, options](State::Ring& ring) {
    std::unique_ptr<Backend> backend;
    std::exception_ptr refusal;
    try {
      backend = factory(options);
    } catch (...) {
      refusal = std::current_exception();
    }
    {
      std::lock_guard<std::mutex> lock(state.mutex);
      ring.backend = backend.get();
      ring.refusal = refusal;
      ring.ready = true;
    }
    state.ready.notify_all();
    if (backend == nullptr) return;
    RingThread(state, ring, *backend).run();
    std::lock_guard<std::mutex> lock(state.mutex);
    ring.has_room = false;
    ring.backend = nullptr;  // from here on nobody wakes it, so it can go
  };

  std::exception_ptr refusal;
  for (int i = 0; i < options_.rings && refusal == nullptr; ++i) {
    auto ring = std::make_unique<State::Ring>();
    State::Ring& mine = *ring;
    {
      std::lock_guard<std::mutex> lock(state.mutex);
      state.rings.push_back(std::move(ring));
    }
    try {
      mine.thread = start_io_thread("inf-ring" + std::to_string(i), [body, &mine] { body(mine); });
    } catch (const std::system_error& error) {
      refusal = std::make_exception_ptr(
          IoFailure({error.code().value(), "setup", {}, 0, 0, name, "no thread to be had for a ring"}));
      break;
    }
    std::unique_lock<std::mutex> lock(state.mutex);
    state.ready.wait(lock, [&mine] { return mine.ready; });
    refusal = mine.refusal;
  }
  if (refusal == nullptr) {
    options_.slab.reset();
    return;
  }
  state.join();
  state.rings.clear();
  state.closing = false;
  std::rethrow_exception(refusal);
}

std::shared_ptr<Transfer> Engine::start(Request request) {
  std::vector<Request> one;
  one.push_back(std::move(request));
  return std::move(start_batch(std::move(one)).front());
}

std::vector<std::shared_ptr<Transfer>> Engine::start_batch(std::vector<Request> requests) {
  state_.guard().check("an engine");
  for (const Request& request : requests) request.check();
  std::vector<std::shared_ptr<Transfer>> transfers;
  transfers.reserve(requests.size());
  int64_t blocks = 0;
  for (Request& request : requests) {
    transfers.push_back(std::make_shared<Transfer>(std::move(request), options_.block_bytes, backend_));
    blocks += transfers.back()->blocks_left();
  }
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->closing) throw std::invalid_argument("the engine is closed");
  if (state_->broken.has_value()) throw IoFailure(*state_->broken);
  for (const auto& transfer : transfers) state_->queues[static_cast<size_t>(transfer->priority())].push_back(transfer);
  state_->active_transfers += static_cast<int64_t>(transfers.size());
  state_->queued_blocks += blocks;
  state_->wake_rings(blocks);
  return transfers;
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
  Counters counters;
  counters.read_bytes = state_->read_bytes;
  counters.written_bytes = state_->written_bytes;
  counters.read_transfers = state_->read_transfers;
  counters.write_transfers = state_->write_transfers;
  counters.failed_transfers = state_->failed_transfers;
  counters.in_flight_blocks = state_->in_flight_blocks;
  counters.queued_blocks = state_->queued_blocks;
  counters.resubmitted_blocks = state_->resubmitted_blocks;
  return counters;
}

std::vector<std::string> Engine::notes() const {
  state_.guard().check("an engine");
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->notes;
}

}  // namespace infinity::aio
