// A program of transfers, held against the bytes that they should have left.
#include <cerrno>
#include <stdexcept>

#include "../support.h"
#include "programs.h"

namespace infinity::aio::testing {
namespace {

constexpr int64_t kPages = 64;       // of the drive
constexpr int64_t kSlabPages = 128;  // half of the slab to write from, half to read into
constexpr int kUnknown = -1;         // what a page holds after a write that failed

FakeMachine machine_of(Source& source) {
  bool direct = source.below(2) == 0;
  int depth = 1 + static_cast<int>(source.below(6));
  int64_t block_bytes = kPageBytes << source.below(4);
  int rings = 1 + static_cast<int>(source.below(2));
  return FakeMachine(direct, depth, block_bytes, rings, kSlabPages * kPageBytes, kPages * kPageBytes);
}

FaultPlan plan_of(Source& source) {
  FaultPlan plan;
  plan.seed = source.byte();
  plan.delay_seconds_max = 0.0001;
  for (Fault fault : {Fault::kInterrupted, Fault::kAgain, Fault::kIo, Fault::kSpace, Fault::kMemory, Fault::kShort,
                      Fault::kLate, Fault::kOvertaken}) {
    plan.rates[static_cast<size_t>(fault)] = static_cast<double>(source.below(8)) / 64.0;
  }
  return plan;
}

class Program {
 public:
  explicit Program(Source source) : source_(source), machine_(machine_of(source_)), content_(kPages, 0) {
    machine_.make_worse(plan_of(source_));
    machine_.drive->reverse = source_.below(2) == 1;
    machine_.start();
  }

  void run() {
    for (int steps = 0; !source_.empty() && steps < 64; ++steps) step();
    while (!under_way_.empty()) finish(0);
    machine_.engine->drain();
    try {
      machine_.engine->close();
    } catch (const IoFailure&) {
      expect(false, "every failure was waited for");
    }
    // Only now: a ring may count what it ended of another ring's transfer a turn later.
    Counters counters = machine_.engine->counters();
    expect(counters.in_flight_blocks == 0 && counters.queued_bytes == 0, "nothing is left when all is over");
    expect(machine_.slab.use_count() == 1 && machine_.file.use_count() == 1, "what is over holds nothing");
  }

 private:
  struct UnderWay {
    std::shared_ptr<Transfer> transfer;
    Operation operation;
    int64_t page;
    int64_t slab_page;
    int64_t pages;
    int version;  // that a write brings
  };

  void step() {
    switch (source_.below(8)) {
      case 0:
        if (!under_way_.empty()) finish(static_cast<size_t>(source_.below(static_cast<int64_t>(under_way_.size()))));
        break;
      case 1:
        refused();
        break;
      case 2:
        machine_.engine->take_timings();
        break;
      case 3:
      case 4:
      case 5:
        start(Operation::kWrite);
        break;
      default:
        start(Operation::kRead);
    }
  }

  // A request that can't be: unaligned, outside of the slab, or empty.
  void refused() {
    int64_t offset = source_.below(3) * 512;
    int64_t length = (source_.below(4) - 1) * 2048;
    int64_t slab_offset = (source_.below(3) - 1) * (5 * kMiB);
    bool fits = slab_offset == 0 && length > 0 && offset % kPageBytes == 0 && length % kPageBytes == 0;
    if (fits) return;
    try {
      machine_.engine->start(machine_.request(Operation::kRead, offset, slab_offset, length))->wait();
      expect(!machine_.file->direct() && slab_offset == 0 && length > 0, "what can't be is refused");
    } catch (const std::invalid_argument&) {
    } catch (const IoFailure&) {
    }
  }

  void start(Operation operation) {
    int64_t pages = 1 + source_.below(24);
    int64_t page = source_.below(kPages - pages + 1);
    int64_t half = kSlabPages / 2;
    int64_t slab_page = source_.below(half - pages + 1) + (operation == Operation::kRead ? half : 0);
    auto priority = static_cast<Priority>(source_.below(kPriorityCount));
    finish_what_meets(page, slab_page, pages);
    int version = ++versions_;
    if (operation == Operation::kWrite) {
      fill(*machine_.slab, slab_page * kPageBytes, pages * kPageBytes, page * kPageBytes, version);
    }
    Request request =
        machine_.request(operation, page * kPageBytes, slab_page * kPageBytes, pages * kPageBytes, priority);
    under_way_.push_back({machine_.engine->start(request), operation, page, slab_page, pages, version});
  }

  // Transfers of the same bytes are never under way together: their order would be anyone's.
  void finish_what_meets(int64_t page, int64_t slab_page, int64_t pages) {
    for (size_t i = under_way_.size(); i-- > 0;) {
      const UnderWay& other = under_way_[i];
      bool on_drive = page < other.page + other.pages && other.page < page + pages;
      bool in_slab = slab_page < other.slab_page + other.pages && other.slab_page < slab_page + pages;
      if (on_drive || in_slab) finish(i);
    }
  }

  void finish(size_t index) {
    UnderWay one = under_way_[index];
    under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(index));
    auto failure = failure_of([&] { one.transfer->wait(); });
    if (failure.has_value()) {
      int number = failure->error_number;
      expect(number == EIO || number == ENOSPC || number == ENOMEM || number == EAGAIN || number == EINTR,
             "a failure has the errno that the drive gave");
    }
    for (int64_t i = 0; i < one.pages; ++i) {
      int& content = content_[static_cast<size_t>(one.page + i)];
      if (one.operation == Operation::kWrite) {
        content = failure.has_value() ? kUnknown : one.version;
      } else if (!failure.has_value() && content != kUnknown) {
        expect(page_holds(one.slab_page + i, one.page + i, content), "a read gives what was written last");
      }
    }
  }

  bool page_holds(int64_t slab_page, int64_t page, int version) const {
    if (version > 0) return holds(*machine_.slab, slab_page * kPageBytes, kPageBytes, page * kPageBytes, version);
    const std::byte* bytes = machine_.slab->data() + slab_page * kPageBytes;
    return std::all_of(bytes, bytes + kPageBytes, [](std::byte byte) { return byte == std::byte{0}; });
  }

  Source source_;
  FakeMachine machine_;
  std::vector<int> content_;  // of byte page: the version that was written last, 0 for none
  std::vector<UnderWay> under_way_;
  int versions_ = 0;
};

}  // namespace

void fuzz_engine(const uint8_t* data, size_t size) {
  Program(Source(data, size)).run();
}

}  // namespace infinity::aio::testing
