// The ring thread: filling up, submitting, waiting, and what becomes of each completion.
#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "aio/checksums.h"
#include "aio/kernel.h"
#include "aio/state.h"
#include "base/process.h"

namespace infinity::aio {
namespace {

constexpr int64_t kLongSumBytes = int64_t{1} << 20;  // the drive shall not be without work while that much is summed
constexpr const char* kNoPollQueues =
    "the drive has no poll queues: turn iopoll off, or give its driver some (nvme.poll_queues)";

// Keeps memory and files that the kernel may use for an unknown time.
void keep_for_good(std::shared_ptr<const void> thing) {
  static auto* mutex = new std::mutex();
  static auto* things = new std::vector<std::shared_ptr<const void>>();
  std::lock_guard<std::mutex> lock(*mutex);
  things->push_back(std::move(thing));
}

// Owns the slots of the blocks in flight. Every method runs on the ring's own thread.
class RingLoop {
 public:
  RingLoop(EngineState& state, Drive& drive, Ring& ring, Backend& backend, const EngineOptions& options)
      : state_(state),
        drive_(drive),
        ring_(ring),
        backend_(backend),
        options_(options),
        slots_(static_cast<size_t>(backend.depth())) {
    for (uint32_t tag = 0; tag < slots_.size(); ++tag) slots_[tag].tag = tag;
    for (size_t tag = slots_.size(); tag > 0; --tag) free_.push_back(static_cast<uint32_t>(tag - 1));
  }

  // A turn: fill up, submit, wait, read the results. Ends when the engine closes and nothing is left to do.
  void run() {
    try {
      while (take_blocks()) {
        submit_and_verify();
        completions_.clear();
        backend_.reap(&completions_);
        for (const Completion& completion : completions_) on_completion(completion);
        pause_if_asked();
      }
      verify_arrived();
    } catch (const std::exception& error) {
      strand(error.what());
    }
  }

 private:
  bool take_blocks() {
    std::lock_guard<std::mutex> lock(state_.mutex);
    double now = monotonic_seconds();
    count_ended(now);
    ring_.reaped += static_cast<int64_t>(completions_.size());
    if (ring_.given_up && completions_.empty()) throw std::runtime_error(silence());
    ring_.given_up = false;  // it has answered after all
    first_taken_ = batch_.size();
    while (!free_.empty()) {
      std::optional<Block> taken = drive_.queues.take_block(options_.block_bytes, now);
      if (!taken.has_value()) break;
      uint32_t tag = free_.back();
      free_.pop_back();
      slots_[tag] = std::move(*taken);
      slots_[tag].tag = tag;
      batch_.push_back(&slots_[tag]);
    }
    ring_.has_room = false;
    if (drive_.rings.size() > 1 && drive_.queues.has_turn(now)) drive_.wake_rings(1);
    ring_.has_room = !free_.empty();
    ring_.in_flight = slots_.size() - free_.size();
    return !(state_.closing && free_.size() == slots_.size());
  }

  // [Note: the drive first]
  // Some drives, virtual ones above all, answer many blocks at once, and then have nothing to do until they are given
  // others. So what needs no sum is sent before what has arrived is verified, and each write as soon as its own sum is
  // made. Where all of that is soon done, it goes in one piece, for the sake of system calls.
  void submit_and_verify() {
    auto fresh = batch_.begin() + static_cast<std::ptrdiff_t>(first_taken_);
    auto is_sent_as_it_is = [](const Block* block) { return !is_checked(*block, Operation::kWrite); };
    auto to_sum = std::stable_partition(fresh, batch_.end(), is_sent_as_it_is);
    ready_.assign(batch_.begin(), to_sum);
    int64_t left = 0;
    for (const Block& block : arrived_) left += block.taken_bytes;
    for (auto one = to_sum; one != batch_.end(); ++one) left += (*one)->length;
    if (left >= kLongSumBytes) send_ready();
    verify_arrived();
    int64_t summed = 0;
    for (; to_sum != batch_.end(); ++to_sum) {
      if (summed >= kLongSumBytes) {
        send_ready();
        summed = 0;
      }
      const Block& block = **to_sum;
      block.file->checksums()->set_from(block.address, block.offset, block.length);
      summed += block.length;
      ready_.push_back(*to_sum);
    }
    backend_.submit(ready_);
    batch_.clear();
  }

  void send_ready() {
    if (ready_.empty()) return;
    backend_.submit(ready_);
    backend_.send();
    ready_.clear();
  }

  static bool is_checked(const Block& block, Operation operation) {
    return block.operation == operation && block.file->checksums() != nullptr && !block.transfer->sums_by_caller();
  }

  std::string silence() const {
    return "the drive has not answered for " + std::to_string(std::lround(options_.silence_seconds_max)) +
           " s: look for its errors in dmesg";
  }

  // Tells the engine what has ended and moved since the last time. Holding the mutex, so once a turn, not once a block.
  void count_ended(double now) {
    for (const EndedBlock& block : ended_) drive_.queues.block_ended(block, now);
    ended_.clear();
    for (size_t i = 0; i < moved_bytes_.size(); ++i) {
      drive_.queues.bytes_moved(static_cast<Operation>(i), std::exchange(moved_bytes_[i], 0));
    }
    state_.resubmitted_blocks += std::exchange(resubmitted_blocks_, 0);
  }

  void on_completion(const Completion& completion) {
    assert(completion.tag < slots_.size());
    Block& block = slots_[completion.tag];
    if (completion.result >= 0) {
      on_bytes(block, completion.result);
    } else if (completion.result == -EINTR || is_shortage(static_cast<int>(-completion.result))) {
      on_interruption(block, static_cast<int>(-completion.result));
    } else {
      auto error_number = static_cast<int>(-completion.result);
      bool unpolled = error_number == EOPNOTSUPP && options_.iopoll;
      end(block, block.transfer->describe(block, error_number, unpolled ? kNoPollQueues : ""));
    }
  }

  // A short direct transfer continues at the unfinished sector, so that offsets and memory stay aligned.
  void on_bytes(Block& block, int64_t moved) {
    moved = std::min(moved, block.length);
    if (moved < block.length && block.file->direct()) moved -= moved % block.file->alignment();
    moved_bytes_[static_cast<size_t>(block.operation)] += moved;
    block.advance(moved);
    if (block.length == 0 && is_checked(block, Operation::kRead)) {
      leave_slot(block);
      arrived_.push_back(std::move(block));
    } else if (block.length == 0) {
      end(block, std::nullopt);
    } else if (moved > 0) {
      block.retries = 0;
      resubmit(block);
    } else if (block.operation == Operation::kRead) {
      std::string wanted_end = std::to_string(block.offset + block.length);
      end(block, block.transfer->describe(block, ENODATA, "the file ends before offset " + wanted_end));
    } else {
      std::string reason = "nothing is written any more at offset " + std::to_string(block.offset);
      end(block, block.transfer->describe(block, EIO, std::move(reason)));
    }
  }

  void verify_arrived() {
    for (Block& block : arrived_) conclude(block, verified(block));
    arrived_.clear();
  }

  // The failure of a checked read whose bytes are not what was written.
  static std::optional<Failure> verified(Block& block) {
    block.rewind();
    std::optional<Checksums::Mismatch> wrong =
        block.file->checksums()->first_wrong(block.address, block.offset, block.length);
    if (!wrong.has_value()) return std::nullopt;
    Failure failure = block.transfer->describe(block, EBADMSG, wrong->in_words());
    failure.wrong_page = wrong->offset;
    return failure;
  }

  void on_interruption(Block& block, int error_number) {
    if (++block.retries > kRetriesMax) {
      std::string often = format_errno(error_number) + ", " + std::to_string(block.retries) + " times in a row";
      if (error_number == ENOMEM) often += ": free memory, or raise the limit of the container";
      end(block, block.transfer->describe(block, error_number, std::move(often)));
      return;
    }
    if (is_shortage(error_number)) {
      pause_ = std::max(pause_, pause_after(block.retries));
      if (error_number == ENOMEM) note_shortage();
    }
    resubmit(block);
  }

  void note_shortage() {
    if (std::exchange(shortage_noted_, true)) return;
    state_.note(
        "the kernel lacked memory for transfers (ENOMEM), which were tried again: free some, or training waits");
  }

  void resubmit(Block& block) {
    ++resubmitted_blocks_;
    batch_.push_back(&block);
  }

  void end(Block& block, std::optional<Failure> failure) {
    leave_slot(block);
    conclude(block, std::move(failure));
  }

  // The drive has done with it: there is room for another.
  void leave_slot(const Block& block) {
    free_.push_back(block.tag);
    ended_.push_back({block.transfer, block.file->drive(), block.taken_bytes});
  }

  void conclude(Block& block, std::optional<Failure> failure) {
    std::shared_ptr<Transfer> transfer = std::move(block.transfer);
    if (failure.has_value() && block.operation == Operation::kWrite) forget_sums(block);
    block.file.reset();
    if (!transfer->end_block(std::move(failure))) return;
    Transfer::Held held;  // let go after the lock
    std::lock_guard<std::mutex> lock(state_.mutex);
    count_ended(monotonic_seconds());
    held = state_.finish(transfer);
  }

  // Some pages of a write that failed are old and some new, as its transfer says.
  static void forget_sums(Block& block) {
    Checksums* checksums = block.file->checksums();
    if (checksums == nullptr) return;
    block.rewind();
    checksums->forget(block.offset, block.length);
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
      ring_.in_flight = 0;
    }
    state_.break_down(reason);
    verify_arrived();
    for (Block& block : slots_) {
      if (block.transfer == nullptr) continue;
      keep_for_good(block.file);
      keep_for_good(block.transfer->slab());
      end(block, block.transfer->describe(block, EIO, reason));
    }
    std::lock_guard<std::mutex> lock(state_.mutex);
    count_ended(monotonic_seconds());
  }

  EngineState& state_;
  Drive& drive_;
  Ring& ring_;
  Backend& backend_;
  const EngineOptions& options_;
  std::vector<Block> slots_;    // as many as the backend's depth; a block never moves while in flight
  std::vector<uint32_t> free_;  // slots without a block
  std::vector<Block*> batch_;   // to be submitted next
  std::vector<Block*> ready_;   // of these, what the backend can be given
  std::vector<Block> arrived_;  // checked reads that the drive has done with, to be verified
  size_t first_taken_ = 0;      // in batch_: what comes before it is submitted again
  std::vector<Completion> completions_;
  std::vector<EndedBlock> ended_;
  std::array<int64_t, 2> moved_bytes_{0, 0};
  int64_t resubmitted_blocks_ = 0;
  std::chrono::microseconds pause_{0};
  bool shortage_noted_ = false;
};

}  // namespace

void run_ring(EngineState& state, Drive& drive, Ring& ring, const EngineOptions& options, const BackendFactory& make,
              const BackendOptions& backend_options) {
  take_short_turns();
  std::unique_ptr<Backend> backend;
  std::exception_ptr refusal;
  try {
    backend = make(backend_options);
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
  RingLoop(state, drive, ring, *backend, options).run();
  std::lock_guard<std::mutex> lock(state.mutex);
  ring.has_room = false;
  ring.backend = nullptr;  // it is not woken any more, so it can go; but the completions it waits for may never come
  if (ring.given_up) keep_for_good(std::shared_ptr<Backend>(std::move(backend)));
}

}  // namespace infinity::aio
