// The queues, the ring threads, and what becomes of each completion.
#include "aio/engine.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "aio/checksums.h"
#include "aio/patience.h"

namespace infinity::aio {
namespace {

constexpr int64_t kLongSumBytes = int64_t{1} << 20;  // the drive shall not be without work while that much is summed
constexpr size_t kUnseenFailuresMax = 1024;          // kept for close(), which raises the first
constexpr size_t kTimingsMax = 65536;                // kept for take_timings()
constexpr int kLooks = 4;                            // at a silent ring, per silence_seconds_max
constexpr const char* kNoPollQueues =
    "the drive has no poll queues: turn iopoll off, or give its driver some (nvme.poll_queues)";

const EngineOptions& checked(const EngineOptions& options) {
  auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
  auto check_range = [&refuse](const char* name, int value, int high) {
    if (value >= 1 && value <= high) return;
    refuse(std::string(name) + " must be from 1 to " + std::to_string(high) + ", got " + std::to_string(value));
  };
  check_range("queue_depth", options.queue_depth, 4096);
  check_range("rings", options.rings, 64);
  check_range("drives", options.drives, 64);
  if (options.block_bytes < kPageBytes || options.block_bytes > (int64_t{1} << 30) ||
      options.block_bytes % kPageBytes != 0) {
    refuse("block_bytes must be a multiple of 4096 from 4096 to 1073741824, got " +
           std::to_string(options.block_bytes));
  }
  if (!options.limits.empty() && static_cast<int>(options.limits.size()) != options.drives) {
    refuse("limits must be empty or one per drive: " + std::to_string(options.drives) + ", got " +
           std::to_string(options.limits.size()));
  }
  if (options.faults.has_value()) options.faults->check();
  if (!(options.silence_seconds_max >= 0.0 && options.silence_seconds_max <= 1e6)) {
    refuse("silence_seconds_max must be from 0 to 1000000, got " + std::to_string(options.silence_seconds_max));
  }
  if ((options.iopoll || options.sqpoll) && options.backend != "auto" && options.backend != kUringName) {
    refuse(std::string("iopoll and sqpoll are options of io_uring; the backend is ") + options.backend);
  }
  return options;
}

// For what the kernel may still touch though nobody can say when it stops.
void keep_for_good(std::shared_ptr<const void> thing) {
  static auto* mutex = new std::mutex();
  static auto* things = new std::vector<std::shared_ptr<const void>>();
  std::lock_guard<std::mutex> lock(*mutex);
  things->push_back(std::move(thing));
}

// The share of a drive in a transfer, begun now where it has none yet. Holding the mutex.
DriveShare& share_of(Transfer& transfer, int drive, double now) {
  auto& shares = transfer.shares;
  auto found = std::find_if(shares.begin(), shares.end(), [&](const DriveShare& one) { return one.drive == drive; });
  if (found != shares.end()) return *found;
  shares.push_back({drive, now});
  return shares.back();
}

// Seconds during which at least one block of a kind was in flight.
class BusyClock {
 public:
  void change(int64_t blocks, double now) {
    if (in_flight_ == 0 && blocks > 0) since_ = now;
    in_flight_ += blocks;
    if (in_flight_ == 0 && blocks < 0) seconds_ += now - since_;
  }
  double seconds(double now) const { return seconds_ + (in_flight_ > 0 ? now - since_ : 0.0); }
  int64_t in_flight() const { return in_flight_; }

 private:
  int64_t in_flight_ = 0;
  double since_ = 0.0;
  double seconds_ = 0.0;
};

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
    size_t in_flight = 0;        // blocks, when it last slept
    int64_t reaped = 0;          // completions
    int64_t reaped_before = 0;   // at the last look
    int silent_looks = 0;        // in a row
    bool given_up = false;
  };

  // One drive: what waits for it, who serves it, what went through it.
  struct Drive {
    explicit Drive(const TurnOptions& options) : turns(options) {}

    std::array<std::deque<Lane>, kPriorityCount> queues;
    Turns turns;
    std::vector<std::unique_ptr<Ring>> rings;
    int64_t queued_bytes = 0;
    std::array<int64_t, 2> moved_bytes{0, 0};  // by operation
    std::array<BusyClock, 2> busy;             // by operation

    Turns::Heads heads() const {
      Turns::Heads heads;
      for (size_t i = 0; i < queues.size(); ++i) {
        if (!queues[i].empty()) heads[i] = queues[i].front().transfer()->operation();
      }
      return heads;
    }

    // The next block whose turn it is, or none.
    std::optional<Block> take_block(int64_t block_bytes, double now) {
      while (std::optional<Priority> chosen = turns.next(heads(), now)) {
        auto& queue = queues[static_cast<size_t>(*chosen)];
        Lane& lane = queue.front();
        std::optional<Block> block = lane.take_block(block_bytes);
        if (block.has_value()) {
          queued_bytes -= block->length;
          turns.taken(block->operation, *chosen, block->length, now);
          busy[static_cast<size_t>(block->operation)].change(1, now);
          DriveShare& share = share_of(*block->transfer, lane.drive(), now);
          share.bytes += block->length;
          ++share.blocks_in_flight;
        }
        if (!block.has_value() || lane.left_bytes() == 0) {
          queued_bytes -= lane.left_bytes();
          queue.pop_front();
        }
        if (block.has_value()) return block;
      }
      return std::nullopt;
    }

    // Wakes rings that sleep with room to spare, as many as there are blocks.
    void wake_rings(int64_t blocks) {
      for (auto& ring : rings) {
        if (blocks <= 0) return;
        if (!ring->has_room) continue;
        ring->has_room = false;
        ring->backend->wake();
        --blocks;
      }
    }

    // Takes the transfer's lanes out of the queues.
    void forget(const std::shared_ptr<Transfer>& transfer) {
      for (auto& queue : queues) {
        auto gone = std::stable_partition(queue.begin(), queue.end(),
                                          [&](const Lane& lane) { return lane.transfer() != transfer; });
        for (auto lane = gone; lane != queue.end(); ++lane) queued_bytes -= lane->left_bytes();
        queue.erase(gone, queue.end());
      }
    }
  };

  mutable std::mutex mutex;  // of everything below but close_mutex
  std::condition_variable idle;
  std::condition_variable ready;
  std::vector<std::unique_ptr<Drive>> drives;
  int64_t active_transfers = 0;  // started and not finished
  bool closing = false;
  std::optional<Failure> broken;  // a ring has died: nothing can be started any more
  std::vector<std::shared_ptr<Transfer>> failures;
  std::vector<std::string> notes;
  std::vector<Timing> timings;  // a circle once it is full
  size_t oldest_timing = 0;
  std::array<int64_t, 2> done_transfers{0, 0};  // by operation
  int64_t failed_transfers = 0;
  int64_t resubmitted_blocks = 0;
  std::shared_ptr<FaultTally> faults = std::make_shared<FaultTally>();
  std::mutex close_mutex;  // lets one close() at a time join the threads
  std::thread watch;
  std::condition_variable watch_ends;
  bool joined = false;

  explicit State(const EngineOptions& options) {
    TurnOptions turns;
    turns.mix = options.mix;
    for (int i = 0; i < options.drives; ++i) drives.push_back(std::make_unique<Drive>(turns));
  }

  ~State() { join(); }

  void note(std::string line) {
    std::lock_guard<std::mutex> lock(mutex);
    if (std::find(notes.begin(), notes.end(), line) == notes.end()) notes.push_back(std::move(line));
  }

  void join() {
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
    watch_ends.notify_all();
    if (watch.joinable()) watch.join();
  }

  // The thread of [Note: silence].
  void watch_rings(double silence_seconds_max) {
    std::chrono::duration<double> pause(silence_seconds_max / kLooks);
    std::unique_lock<std::mutex> lock(mutex);
    while (!watch_ends.wait_for(lock, pause, [this] { return joined; })) {
      for (auto& drive : drives) {
        for (auto& ring : drive->rings) look_at(*ring);
      }
    }
  }

  void look_at(Ring& ring) {
    bool silent = ring.in_flight > 0 && ring.reaped == ring.reaped_before;
    ring.reaped_before = ring.reaped;
    ring.silent_looks = silent ? ring.silent_looks + 1 : 0;
    if (ring.silent_looks < kLooks || ring.backend == nullptr) return;
    ring.given_up = true;
    ring.backend->wake();
  }

  // A transfer's last block has ended: first the books, then the news. Holding the mutex.
  [[nodiscard]] Transfer::Held finish(const std::shared_ptr<Transfer>& transfer) {
    bool failed = transfer->has_failed();
    if (failed) {
      ++failed_transfers;
      for (auto& drive : drives) drive->forget(transfer);
      keep_failure(transfer);
    } else {
      ++done_transfers[static_cast<size_t>(transfer->operation())];
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
      // Another ring that has ended a block of it writes that into the books when it comes to it.
      timing.done = share.blocks_in_flight == 0 ? share.ended : times.done;
      timing.bytes = share.bytes;
      timing.drive = share.drive;
      keep_timing(timing);
    }
    if (--active_transfers == 0) idle.notify_all();
    return held;
  }

  void keep_failure(const std::shared_ptr<Transfer>& transfer) {
    auto seen = [](const std::shared_ptr<Transfer>& one) { return one->done() && !one->unseen_failure().has_value(); };
    failures.erase(std::remove_if(failures.begin(), failures.end(), seen), failures.end());
    if (failures.size() < kUnseenFailuresMax) failures.push_back(transfer);
  }

  void keep_timing(const Timing& timing) {
    if (timings.size() < kTimingsMax) {
      timings.push_back(timing);
    } else {
      timings[oldest_timing] = timing;
      oldest_timing = (oldest_timing + 1) % kTimingsMax;
    }
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
    std::vector<Transfer::Held> held;  // let go after the lock
    std::lock_guard<std::mutex> lock(mutex);
    broken = Failure{EIO, "setup", {}, 0, 0, {}, "a ring of the engine has died (" + reason + "): make a new engine"};
    std::vector<std::shared_ptr<Transfer>> stranded;
    for (auto& drive : drives) {
      for (auto& queue : drive->queues) {
        for (const Lane& lane : queue) stranded.push_back(lane.transfer());
        queue.clear();
      }
      drive->queued_bytes = 0;
    }
    for (const auto& transfer : stranded) {
      if (transfer->refuse(transfer->describe(EIO, reason))) held.push_back(finish(transfer));
    }
  }
};

// One ring: owns a backend and the slots of the blocks in flight. Every method runs on the ring's own thread.
class Engine::RingThread {
 public:
  RingThread(State& state, State::Drive& drive, State::Ring& ring, Backend& backend, const EngineOptions& options)
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
  // What ended since the books were last written. They are written under the engine's mutex, once a turn.
  struct Ended {
    Operation operation;
    Priority priority;
    int64_t taken_bytes;
    int drive;
    std::shared_ptr<Transfer> transfer;
  };

  bool take_blocks() {
    std::lock_guard<std::mutex> lock(state_.mutex);
    double now = monotonic_seconds();
    write_books(now);
    ring_.reaped += static_cast<int64_t>(completions_.size());
    if (ring_.given_up && completions_.empty()) throw std::runtime_error(silence());
    ring_.given_up = false;  // it has answered after all
    first_taken_ = batch_.size();
    while (!free_.empty()) {
      std::optional<Block> taken = drive_.take_block(options_.block_bytes, now);
      if (!taken.has_value()) break;
      uint32_t tag = free_.back();
      free_.pop_back();
      slots_[tag] = std::move(*taken);
      slots_[tag].tag = tag;
      batch_.push_back(&slots_[tag]);
    }
    ring_.has_room = false;
    if (drive_.rings.size() > 1 && drive_.turns.next(drive_.heads(), now).has_value()) drive_.wake_rings(1);
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

  // Holding the mutex.
  void write_books(double now) {
    for (const Ended& one : ended_) {
      drive_.turns.ended(one.operation, one.priority, one.taken_bytes, now);
      drive_.busy[static_cast<size_t>(one.operation)].change(-1, now);
      DriveShare& share = share_of(*one.transfer, one.drive, now);
      share.ended = now;
      --share.blocks_in_flight;
    }
    ended_.clear();
    for (size_t i = 0; i < moved_bytes_.size(); ++i) drive_.moved_bytes[i] += std::exchange(moved_bytes_[i], 0);
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

  // A short direct transfer goes on at the sector that it did not finish: offsets and memory must stay aligned.
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
    ended_.push_back(
        {block.operation, block.transfer->priority(), block.taken_bytes, block.file->drive(), block.transfer});
  }

  void conclude(Block& block, std::optional<Failure> failure) {
    std::shared_ptr<Transfer> transfer = std::move(block.transfer);
    if (failure.has_value() && block.operation == Operation::kWrite) forget_sums(block);
    block.file.reset();
    if (!transfer->end_block(std::move(failure))) return;
    Transfer::Held held;  // let go after the lock
    std::lock_guard<std::mutex> lock(state_.mutex);
    write_books(monotonic_seconds());
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
    write_books(monotonic_seconds());
  }

  State& state_;
  State::Drive& drive_;
  State::Ring& ring_;
  Backend& backend_;
  const EngineOptions& options_;
  std::vector<Block> slots_;    // as many as the backend's depth; a block never moves while in flight
  std::vector<uint32_t> free_;  // slots without a block
  std::vector<Block*> batch_;   // to be submitted next
  std::vector<Block*> ready_;   // of these, what the backend can be given
  std::vector<Block> arrived_;  // checked reads that the drive has done with, to be verified
  size_t first_taken_ = 0;      // in batch_: what comes before it is submitted again
  std::vector<Completion> completions_;
  std::vector<Ended> ended_;
  std::array<int64_t, 2> moved_bytes_{0, 0};
  int64_t resubmitted_blocks_ = 0;
  std::chrono::microseconds pause_{0};
  bool shortage_noted_ = false;
};

Engine::Engine(EngineOptions options) : options_(checked(options)), state_(std::make_unique<State>(options_)) {
  choose_backend();
}

Engine::Engine(EngineOptions options, const std::string& name, const BackendFactory& factory)
    : options_(checked(options)), state_(std::make_unique<State>(options_)) {
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

// Makes each backend on its own ring thread, and returns when all are up; or joins those that are and throws.
void Engine::start_rings(const std::string& name, const BackendFactory& factory) {
  State& state = *state_;
  backend_ = name;
  BackendOptions options;
  options.queue_depth = options_.queue_depth;
  options.slab = options_.slab;
  options.iopoll = options_.iopoll;
  options.sqpoll = options_.sqpoll;
  options.note = [&state](std::string line) { state.note(std::move(line)); };
  auto body = [&state, options, &engine = options_](const BackendFactory& make, State::Drive& drive,
                                                    State::Ring& ring) {
    take_short_turns();
    std::unique_ptr<Backend> backend;
    std::exception_ptr refusal;
    try {
      backend = make(options);
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
    RingThread(state, drive, ring, *backend, engine).run();
    std::lock_guard<std::mutex> lock(state.mutex);
    ring.has_room = false;
    ring.backend = nullptr;  // from here on nobody wakes it, so it can go; but what it would wait for may never come
    if (ring.given_up) keep_for_good(std::shared_ptr<Backend>(std::move(backend)));
  };

  std::exception_ptr refusal;
  int count = options_.drives * options_.rings;
  for (int i = 0; i < count && refusal == nullptr; ++i) {
    auto number = static_cast<size_t>(i / options_.rings);
    State::Drive& drive = *state.drives[number];
    BackendFactory make =
        options_.limits.empty() ? factory : throttled(factory, options_.limits[number].shared_by(options_.rings));
    if (options_.faults.has_value()) make = faulty(std::move(make), *options_.faults, i, state.faults);
    auto ring = std::make_unique<State::Ring>();
    State::Ring& mine = *ring;
    {
      std::lock_guard<std::mutex> lock(state.mutex);
      drive.rings.push_back(std::move(ring));
    }
    try {
      mine.thread =
          start_io_thread("inf-ring" + std::to_string(i), [body, make, &drive, &mine] { body(make, drive, mine); });
    } catch (const std::system_error& error) {
      refusal = std::make_exception_ptr(
          IoFailure({error.code().value(), "setup", {}, 0, 0, name, "no thread to be had for a ring"}));
      break;
    }
    std::unique_lock<std::mutex> lock(state.mutex);
    state.ready.wait(lock, [&mine] { return mine.ready; });
    refusal = mine.refusal;
  }
  if (refusal == nullptr && options_.silence_seconds_max > 0) {
    try {
      state.watch =
          start_io_thread("inf-watch", [&state, limit = options_.silence_seconds_max] { state.watch_rings(limit); });
    } catch (const std::system_error&) {
      state.note("no thread could be had to watch for a drive that stops answering: raise ulimit -u");
    }
  }
  if (refusal == nullptr) {
    options_.slab.reset();
    return;
  }
  state.join();
  for (auto& drive : state.drives) drive->rings.clear();
  state.closing = false;
  state.joined = false;
  std::rethrow_exception(refusal);
}

std::shared_ptr<Transfer> Engine::start(Request request) {
  std::vector<Request> one;
  one.push_back(std::move(request));
  return std::move(start_batch(std::move(one)).front());
}

std::vector<std::shared_ptr<Transfer>> Engine::start_batch(std::vector<Request> requests) {
  state_.guard().check("an engine");
  for (const Request& request : requests) {
    request.check();
    for (int member = 0; member < request.volume->members(); ++member) {
      const Descriptor& file = *request.volume->file(member);
      if (file.drive() < options_.drives) continue;
      throw std::invalid_argument(file.path() + " lies on drive " + std::to_string(file.drive()) +
                                  ", but the engine serves " + std::to_string(options_.drives));
    }
  }
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
  for (Lane& lane : lanes) {
    State::Drive& drive = *state_->drives[static_cast<size_t>(lane.drive())];
    drive.queued_bytes += lane.left_bytes();
    auto priority = static_cast<size_t>(lane.transfer()->priority());
    drive.queues[priority].push_back(std::move(lane));
  }
  for (auto& drive : state_->drives) {
    if (drive->queued_bytes > 0) {
      drive->wake_rings((drive->queued_bytes + options_.block_bytes - 1) / options_.block_bytes);
    }
  }
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
  state_.guard().check("an engine");
  std::lock_guard<std::mutex> lock(state_->mutex);
  double now = monotonic_seconds();
  Counters counters;
  counters.read_transfers = state_->done_transfers[0];
  counters.write_transfers = state_->done_transfers[1];
  counters.failed_transfers = state_->failed_transfers;
  counters.resubmitted_blocks = state_->resubmitted_blocks;
  for (size_t i = 0; i < kFaultKinds; ++i) counters.faults[i] = (*state_->faults)[i].load(std::memory_order_relaxed);
  for (const auto& drive : state_->drives) {
    const auto& [reads, writes] = drive->busy;
    counters.drives.push_back({drive->moved_bytes[0], drive->moved_bytes[1], reads.seconds(now), writes.seconds(now),
                               reads.in_flight() + writes.in_flight(), drive->queued_bytes});
    const DriveCounters& last = counters.drives.back();
    counters.read_bytes += last.read_bytes;
    counters.written_bytes += last.written_bytes;
    counters.in_flight_blocks += last.in_flight_blocks;
    counters.queued_bytes += last.queued_bytes;
  }
  return counters;
}

std::vector<Timing> Engine::take_timings() {
  state_.guard().check("an engine");
  std::vector<Timing> taken;
  std::lock_guard<std::mutex> lock(state_->mutex);
  taken.swap(state_->timings);
  std::rotate(taken.begin(), taken.begin() + static_cast<std::ptrdiff_t>(state_->oldest_timing), taken.end());
  state_->oldest_timing = 0;
  return taken;
}

std::vector<std::string> Engine::notes() const {
  state_.guard().check("an engine");
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->notes;
}

}  // namespace infinity::aio
