// FaultyBackend: wraps any backend, draws the fault of each submission, and holds completions back until they are due.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/process.h"
#include "faults.h"

namespace infinity::aio {
namespace {

constexpr double kOvertakenSecondsMax = 0.001;

constexpr std::array<const char*, kFaultKinds> kNames{
    "interrupted", "again", "io",    "space", "memory",   "short",
    "corrupt",     "lost",  "stuck", "late",  "overtaken"};  // by Fault

// Numbers that depend on nothing but seed, ring and the number of the submission: the order in which a drive answers
// changes no draw. (The finalizer of splitmix64, by Sebastiano Vigna.)
class Draws {
 public:
  Draws(uint64_t seed, int ring, uint64_t submission)
      : state_(mix(mix(seed) + static_cast<uint64_t>(ring)) + mix(submission)) {}

  uint64_t bits() { return mix(state_ += 0x9e3779b97f4a7c15ULL); }
  double fraction() { return static_cast<double>(bits() >> 11) * 0x1.0p-53; }
  int64_t below(int64_t bound) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(bound)); }

 private:
  static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
    return value ^ (value >> 31);
  }

  uint64_t state_;
};

struct FreeMemory {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using AlignedMemory = std::unique_ptr<std::byte, FreeMemory>;

AlignedMemory copy_of(const std::byte* bytes, int64_t length) {
  int64_t rounded = (length + kPageBytes - 1) / kPageBytes * kPageBytes;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kPageBytes, static_cast<size_t>(rounded)));
  if (memory == nullptr) throw std::bad_alloc();
  std::memcpy(memory, bytes, static_cast<size_t>(length));
  return AlignedMemory(memory);
}

class FaultyBackend final : public Backend {
 public:
  FaultyBackend(std::unique_ptr<Backend> inner, std::shared_ptr<WorseDrives> worse, int rings, int ring)
      : inner_(std::move(inner)), worse_(std::move(worse)), plan_(worse_->plan()), rings_(rings), ring_(ring) {
    slots_.resize(static_cast<size_t>(inner_->depth()));
  }

  int depth() const override { return inner_->depth(); }

  void submit(const std::vector<Block*>& blocks) override {
    forwarded_.clear();
    for (Block* block : blocks) decide(*block);
    serve(forwarded_);
    inner_blocks_ += forwarded_.size();
    inner_->submit(forwarded_);
  }

  void send() override { inner_->send(); }

  void reap(std::vector<Completion>* completions) override {
    if (deliver(completions)) return;
    if (inner_blocks_ > 0 || answers_.empty()) {
      arrived_.clear();
      inner_->reap(&arrived_);
      inner_blocks_ -= arrived_.size();
      for (const Completion& one : arrived_) keep(one.tag, outcome(one));
    } else {
      sleep_until_due();
    }
    deliver(completions);
  }

  void wake() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    changed_.notify_one();
    inner_->wake();
  }

 private:
  // A block as the inner backend sees it, and what shall become of it.
  struct Slot {
    Block block;
    AlignedMemory bounce;  // what is written instead of the block's own memory
    int error_number = 0;  // reported whatever was moved
    bool reports_part = false;
    bool flips_read = false;
    bool overtaken = false;
    double served = 0.0;  // when the limited drive will have done it
    double late_seconds = 0.0;
    uint64_t random_bits = 0;
  };

  struct Answer {
    double due;
    bool overtaken;
    Completion completion;
  };

  void decide(const Block& block) {
    Draws draws(plan_.seed, ring_, submissions_);
    Slot& slot = slots_[block.tag];
    slot = Slot{};
    slot.block = block;
    if (static_cast<int64_t>(submissions_++) < plan_.after_blocks) {
      forwarded_.push_back(&slot.block);
      return;
    }
    if (happens(Fault::kLate, draws.fraction())) slot.late_seconds = draws.fraction() * plan_.delay_seconds_max;
    slot.overtaken = happens(Fault::kOvertaken, draws.fraction());
    if (slot.overtaken) slot.late_seconds += draws.fraction() * kOvertakenSecondsMax;
    double draw = draws.fraction();
    slot.random_bits = draws.bits();
    for (size_t kind = 0; kind < static_cast<size_t>(Fault::kLate); ++kind) {
      auto fault = static_cast<Fault>(kind);
      draw -= plan_.rate(fault);
      if (draw < 0) {
        inject(slot, fault, draws);
        return;
      }
    }
    forwarded_.push_back(&slot.block);
  }

  bool happens(Fault fault, double draw) {
    if (draw >= plan_.rate(fault)) return false;
    worse_->count(fault);
    return true;
  }

  void inject(Slot& slot, Fault fault, Draws& draws) {
    Block& block = slot.block;
    bool writes = block.operation == Operation::kWrite;
    switch (fault) {
      case Fault::kInterrupted:
        return answer(slot, fault, -EINTR);
      case Fault::kAgain:
        return answer(slot, fault, -EAGAIN);
      case Fault::kMemory:
        return answer(slot, fault, -ENOMEM);
      case Fault::kIo:
      case Fault::kSpace:
        slot.error_number = writes && fault == Fault::kSpace ? ENOSPC : EIO;
        if (draws.bits() % 2 == 0 || !shorten(block, draws)) return answer(slot, fault, -slot.error_number);
        break;
      case Fault::kShort:
        if (!shorten(block, draws)) return pass(slot);
        slot.reports_part = true;
        break;
      case Fault::kCorrupt:
        slot.flips_read = !writes;
        if (writes) {
          slot.bounce = copy_of(block.address, block.length);
          flip(slot.bounce.get(), block.length, slot.random_bits);
          block.address = slot.bounce.get();
        }
        break;
      case Fault::kLost:
        return answer(slot, fault, writes ? block.length : -EIO);
      case Fault::kStuck:
      default:
        worse_->count(fault);
        return;
    }
    worse_->count(fault);
    pass(slot);
  }

  void pass(Slot& slot) { forwarded_.push_back(&slot.block); }

  // Without asking the drive.
  void answer(Slot& slot, Fault fault, int64_t result) {
    worse_->count(fault);
    keep(slot.block.tag, result);
  }

  // Leaves a part of the block, in whole pages for a direct file; false where it is too short to have one.
  static bool shorten(Block& block, Draws& draws) {
    int64_t unit = block.file->direct() ? kPageBytes : 1;
    int64_t units = block.length / unit;
    if (units < 2) return false;
    block.length = unit * (1 + draws.below(units - 1));
    return true;
  }

  static void flip(std::byte* bytes, int64_t length, uint64_t random_bits) {
    auto bit = random_bits % (static_cast<uint64_t>(length) * 8);
    bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
  }

  // What is reported for what the drive has answered.
  int64_t outcome(const Completion& one) {
    Slot& slot = slots_[one.tag];
    if (slot.error_number != 0) return -slot.error_number;
    if (one.result <= 0) return one.result;
    if (slot.flips_read) flip(slot.block.address, one.result, slot.random_bits);
    // Drives move sectors of 512 bytes: a part need not end at a page.
    if (slot.reports_part && slot.block.file->direct() && one.result > kPageBytes) {
      return one.result - static_cast<int64_t>(slot.random_bits % 8) * 512;
    }
    return one.result;
  }

  // A block is served when those before it have been, at this ring's share of the limited rate, and not before its
  // latency is over.
  void serve(const std::vector<Block*>& blocks) {
    double now = monotonic_seconds();
    for (const Block* block : blocks) {
      const DriveLimit* limit = worse_->limit_of(block->file->path());
      if (limit == nullptr) continue;
      double share = limit->bytes_per_s / rings_;
      free_at_ = std::max(free_at_, now) + (share > 0 ? static_cast<double>(block->length) / share : 0.0);
      slots_[block->tag].served = std::max(free_at_, now + limit->latency_seconds);
    }
  }

  // The block is done with here; its answer is given when it is due.
  void keep(uint32_t tag, int64_t result) {
    Slot& slot = slots_[tag];
    double due = std::max(monotonic_seconds(), slot.served) + slot.late_seconds;
    answers_.push_back({due, slot.overtaken, {tag, result}});
    slot.block = Block{};
    slot.bounce.reset();
  }

  bool deliver(std::vector<Completion>* completions) {
    double now = monotonic_seconds();
    size_t before = completions->size();
    auto waits = [now](const Answer& one) { return one.due > now; };
    auto ready = std::stable_partition(answers_.begin(), answers_.end(), waits);
    std::stable_partition(ready, answers_.end(), [](const Answer& one) { return !one.overtaken; });
    for (auto one = ready; one != answers_.end(); ++one) completions->push_back(one->completion);
    answers_.erase(ready, answers_.end());
    return completions->size() > before;
  }

  void sleep_until_due() {
    auto first = std::min_element(answers_.begin(), answers_.end(),
                                  [](const Answer& a, const Answer& b) { return a.due < b.due; });
    double seconds = first->due - monotonic_seconds();
    std::unique_lock<std::mutex> lock(mutex_);
    if (seconds > 0) changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return woken_; });
    woken_ = false;
  }

  const std::unique_ptr<Backend> inner_;
  const std::shared_ptr<WorseDrives> worse_;
  const FaultPlan& plan_;  // of worse_
  const int rings_;        // of the drive
  const int ring_;
  uint64_t submissions_ = 0;
  double free_at_ = 0.0;           // when the limited drive will have served everything submitted so far
  std::vector<Slot> slots_;        // by tag
  std::vector<Block*> forwarded_;  // of this turn: what goes to the inner backend
  size_t inner_blocks_ = 0;        // blocks that the inner backend has
  std::vector<Answer> answers_;    // answers that are not due
  std::vector<Completion> arrived_;

  std::mutex mutex_;  // of woken_
  std::condition_variable changed_;
  bool woken_ = false;
};

}  // namespace

const char* fault_name(Fault fault) {
  return kNames[static_cast<size_t>(fault)];
}

void FaultPlan::check() const {
  double sum = 0.0;
  for (size_t kind = 0; kind < kFaultKinds; ++kind) {
    auto fault = static_cast<Fault>(kind);
    if (!(rate(fault) >= 0.0 && rate(fault) <= 1.0)) {
      throw std::invalid_argument(std::string("the rate of \"") + fault_name(fault) + "\" must be from 0 to 1, got " +
                                  std::to_string(rate(fault)));
    }
    if (fault < Fault::kLate) sum += rate(fault);
  }
  if (sum > 1.0 + 1e-9) {
    throw std::invalid_argument("the rates of faults of which one happens at a time sum up to " + std::to_string(sum) +
                                ", more than 1");
  }
  if (!(delay_seconds_max >= 0.0 && delay_seconds_max <= 3600.0)) {
    throw std::invalid_argument("delay_seconds_max must be from 0 to 3600, got " + std::to_string(delay_seconds_max));
  }
  if (after_blocks < 0) {
    throw std::invalid_argument("after_blocks must not be negative, got " + std::to_string(after_blocks));
  }
}

bool DriveLimit::concerns(const std::string& file) const {
  if (file.compare(0, path.size(), path) != 0) return false;
  return path.empty() || file.size() == path.size() || file[path.size()] == '/';
}

WorseDrives::WorseDrives(std::vector<DriveLimit> limits, const FaultPlan& plan)
    : limits_(std::move(limits)), plan_(plan) {
  plan_.check();
}

const DriveLimit* WorseDrives::limit_of(const std::string& file) const {
  auto limit =
      std::find_if(limits_.begin(), limits_.end(), [&file](const DriveLimit& one) { return one.concerns(file); });
  return limit != limits_.end() ? &*limit : nullptr;
}

void make_worse(EngineOptions& options, std::shared_ptr<WorseDrives> worse) {
  options.wrap = [worse = std::move(worse), rings = options.rings](BackendFactory factory, int ring) {
    return [factory = std::move(factory), worse, rings, ring](const BackendOptions& backend_options) {
      return std::make_unique<FaultyBackend>(factory(backend_options), worse, rings, ring);
    };
  };
}

}  // namespace infinity::aio
