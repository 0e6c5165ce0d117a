// The engine on real files, over every backend that works here, alone and under many threads.
#include <sys/mman.h>

#include <thread>

#include "support.h"

namespace infinity::aio::testing {
namespace {

// A backend, and the way io_uring polls.
struct Variant {
  std::string name;
  bool iopoll = false;
  bool sqpoll = false;
};

std::ostream& operator<<(std::ostream& out, const Variant& one) {
  return out << one.name << (one.iopoll ? " iopoll" : "") << (one.sqpoll ? " sqpoll" : "");
}

std::vector<Variant> available_variants() {
  std::vector<Variant> variants;
  for (const std::string& name : available_backends()) {
    variants.push_back({name});
    if (name == kUringName) variants.push_back({name, false, true});
  }
  return variants;
}

struct Machine {
  explicit Machine(const Variant& backend, int queue_depth = 8, int64_t block_bytes = 64 * kKiB, int rings = 1,
                   int64_t slab_bytes = 16 * kMiB)
      : slab(std::make_shared<const PinnedSlab>(slab_bytes)), file(path.get(), {true}) {
    file.reserve(16 * kMiB);
    EngineOptions options;
    options.backend = backend.name;
    options.iopoll = backend.iopoll;
    options.sqpoll = backend.sqpoll;
    options.queue_depth = queue_depth;
    options.block_bytes = block_bytes;
    options.rings = rings;
    options.slab = slab;
    engine = std::make_unique<Engine>(options);
  }

  Request request(Operation operation, int64_t offset, int64_t slab_offset, int64_t length,
                  Priority priority = Priority::kPrefetch) const {
    return {operation, file.volume(), slab, {offset, slab_offset, length}, priority};
  }

  TemporaryPath path;
  std::shared_ptr<const PinnedSlab> slab;
  File file;
  std::unique_ptr<Engine> engine;
};

// One submitting thread: writes, reads back and compares, in its own part of file and slab.
void write_and_read_back(const std::vector<Request>& all, Engine& engine, int seed, int rounds,
                         std::atomic<int>* wrong) {
  Priority priorities[] = {Priority::kDemand, Priority::kPrefetch, Priority::kWriteBack};
  std::mt19937 random(static_cast<unsigned>(seed));
  for (int round = 0; round < rounds; ++round) {
    std::vector<Request> writes = all;
    for (Request& request : writes) {
      fill(*request.slab, request.range.slab_offset, request.range.length, request.range.offset, seed + round);
      request.operation = Operation::kWrite;
      request.priority = priorities[random() % 3];
    }
    for (const auto& transfer : engine.start_batch(writes)) transfer->wait();
    for (const Request& request : all) {
      std::memset(request.slab->data() + request.range.slab_offset, 0, static_cast<size_t>(request.range.length));
    }
    std::vector<std::shared_ptr<Transfer>> reads;
    for (Request request : all) {
      request.priority = priorities[random() % 3];
      reads.push_back(engine.start(request));
    }
    for (size_t i = all.size(); i > 0; --i) reads[i - 1]->wait();
    for (const Request& request : all) {
      const Range& range = request.range;
      if (!holds(*request.slab, range.slab_offset, range.length, range.offset, seed + round)) ++*wrong;
    }
  }
}

}  // namespace

TEST_CASE("what was written is read back, in blocks of every size") {
  for (const Variant& backend : available_variants()) {
    for (int64_t block_bytes : {int64_t{4096}, 96 * kKiB, 4 * kMiB}) {
      for (int queue_depth : {1, 8}) {
        CAPTURE(backend);
        CAPTURE(block_bytes);
        CAPTURE(queue_depth);
        Machine machine(backend, queue_depth, block_bytes);
        CHECK(machine.engine->backend() == backend.name);
        int64_t length = kMiB + 8192;
        fill(*machine.slab, 4096, length, 8192, 1);
        machine.engine->start(machine.request(Operation::kWrite, 8192, 4096, length))->wait();
        machine.engine->start(machine.request(Operation::kRead, 8192, 8 * kMiB, length, Priority::kDemand))->wait();
        CHECK(holds(*machine.slab, 8 * kMiB, length, 8192, 1));
        Counters counters = machine.engine->counters();
        CHECK(counters.read_bytes == length);
        CHECK(counters.written_bytes == length);
        CHECK(counters.read_transfers == 1);
        CHECK(counters.write_transfers == 1);
        machine.engine->close();
      }
    }
  }
}

TEST_CASE("the kernel's errors come through with their errno") {
  for (const Variant& backend : available_variants()) {
    CAPTURE(backend);
    Machine machine(backend);
    auto past_end =
        failure_of([&] { machine.engine->start(machine.request(Operation::kRead, 15 * kMiB, 0, 2 * kMiB))->wait(); });
    REQUIRE(past_end.has_value());
    CHECK(past_end->error_number == ENODATA);
    CHECK(past_end->backend == backend.name);
    if (backend.name == kLinuxAioName) continue;  // knows no character devices
    File full("/dev/full");
    auto no_space = failure_of([&] {
      machine.engine->start({Operation::kWrite, full.volume(), machine.slab, {0, 0, 4096}, Priority::kDemand})->wait();
    });
    REQUIRE(no_space.has_value());
    CHECK(no_space->error_number == ENOSPC);
  }
}

TEST_CASE("a drive is polled for completions, or the reason why not is given") {
  auto backends = available_backends();
  if (std::find(backends.begin(), backends.end(), kUringName) == backends.end()) return;
  for (bool sqpoll : {false, true}) {
    CAPTURE(sqpoll);
    Machine machine({kUringName, true, sqpoll}, 4, 64 * kKiB);
    fill(*machine.slab, 0, 2 * kMiB, 0, 2);
    auto failure = failure_of([&] {
      machine.engine->start(machine.request(Operation::kWrite, 0, 0, 2 * kMiB))->wait();
      machine.engine->start(machine.request(Operation::kRead, 0, 4 * kMiB, 2 * kMiB))->wait();
    });
    if (failure.has_value()) {
      CHECK(failure->error_number == EOPNOTSUPP);
      CHECK(failure->reason.find("poll queues") != std::string::npos);
    } else {
      CHECK(holds(*machine.slab, 4 * kMiB, 2 * kMiB, 0, 2));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // asleep on its bell
    auto again = machine.engine->start(machine.request(Operation::kWrite, 0, 0, 4096));
    CHECK(again->wait_for(std::chrono::milliseconds(10'000)));
    machine.file.close();
  }
}

TEST_CASE("a batch of many small transfers moves each to its place") {
  for (const Variant& backend : available_variants()) {
    CAPTURE(backend);
    Machine machine(backend, 8, 16 * kKiB);
    std::vector<Range> ranges;  // the file's pages in reverse order
    for (int64_t i = 0; i < 40; ++i) ranges.push_back({(39 - i) * 32 * kKiB, i * 32 * kKiB, (i % 4 + 1) * 8 * kKiB});
    for (const Range& range : ranges) fill(*machine.slab, range.slab_offset, range.length, range.offset, 3);
    auto move = [&](Operation operation) {
      std::vector<Request> requests;
      for (const Range& range : ranges) {
        requests.push_back({operation, machine.file.volume(), machine.slab, range, Priority::kDemand});
      }
      for (const auto& transfer : machine.engine->start_batch(std::move(requests))) transfer->wait();
    };
    move(Operation::kWrite);
    std::memset(machine.slab->data(), 0, 2 * kMiB);
    move(Operation::kRead);
    int64_t total = 0;
    for (const Range& range : ranges) {
      CHECK(holds(*machine.slab, range.slab_offset, range.length, range.offset, 3));
      total += range.length;
    }
    CHECK(machine.engine->counters().read_bytes == total);
  }
}

TEST_CASE("blocks lie anywhere in a slab that doesn't end with a huge page") {
  for (const Variant& backend : available_variants()) {
    for (int64_t slab_bytes : {kMiB + 4096, 5 * kMiB}) {
      CAPTURE(backend);
      CAPTURE(slab_bytes);
      Machine machine(backend, 8, 4 * kMiB, 1, slab_bytes);
      int64_t tail = machine.slab->tail();
      CHECK(tail == slab_bytes / (2 * kMiB) * (2 * kMiB));
      std::vector<Range> places = {{0, 0, slab_bytes}, {8192, slab_bytes - 4096, 4096}, {0, tail, slab_bytes - tail}};
      if (tail > 0) {
        places.push_back({4096, tail - 4096, 4096});
        places.push_back({12288, tail - 4096, 8192});
        places.push_back({0, 4096, tail});
      }
      for (const Range& place : places) {
        CAPTURE(place.slab_offset);
        CAPTURE(place.length);
        fill(*machine.slab, place.slab_offset, place.length, place.offset, 3);
        auto move = [&](Operation operation) {
          machine.engine->start(machine.request(operation, place.offset, place.slab_offset, place.length))->wait();
        };
        move(Operation::kWrite);
        std::memset(machine.slab->data() + place.slab_offset, 0, static_cast<size_t>(place.length));
        move(Operation::kRead);
        CHECK(holds(*machine.slab, place.slab_offset, place.length, place.offset, 3));
      }
    }
  }
}

TEST_CASE("a slab that lost a huge page is not registered, says so, and works") {
  auto slab = std::make_shared<const PinnedSlab>(8 * kMiB);
  if (!slab->huge_pages() || slab->mixed()) return;  // no huge pages to be had here
  // In small pages, and to stay so: khugepaged would make a huge one of them again at any time.
  REQUIRE(::madvise(slab->data() + 2 * kMiB, 2 * kMiB, MADV_NOHUGEPAGE) == 0);
  REQUIRE(::madvise(slab->data() + 2 * kMiB, 4096, MADV_DONTNEED) == 0);
  slab->data()[2 * kMiB] = std::byte{0};
  REQUIRE(slab->mixed());
  for (const Variant& backend : available_variants()) {
    CAPTURE(backend);
    EngineOptions options;
    options.backend = backend.name;
    options.sqpoll = backend.sqpoll;
    options.slab = slab;
    Engine engine(options);
    std::string notes;
    for (const std::string& note : engine.notes()) notes += note + "\n";
    CHECK((notes.find("the slab of 8 MiB is not registered") != std::string::npos) == (backend.name == kUringName));
    TemporaryPath path;
    File file(path.get(), {true});
    file.reserve(8 * kMiB);
    fill(*slab, 0, 8 * kMiB, 0, 7);
    engine.start({Operation::kWrite, file.volume(), slab, {0, 0, 8 * kMiB}, Priority::kWriteBack})->wait();
    std::memset(slab->data(), 0, 8 * kMiB);
    engine.start({Operation::kRead, file.volume(), slab, {0, 0, 8 * kMiB}, Priority::kDemand})->wait();
    CHECK(holds(*slab, 0, 8 * kMiB, 0, 7));
  }
}

TEST_CASE("a slab that wasn't announced works, too") {
  for (const Variant& backend : available_variants()) {
    CAPTURE(backend);
    Machine machine(backend);
    auto other = std::make_shared<const PinnedSlab>(kMiB, false);
    fill(*other, 0, kMiB, 0, 5);
    Request request = machine.request(Operation::kWrite, 0, 0, kMiB);
    request.slab = other;
    machine.engine->start(request)->wait();
    machine.engine->start(machine.request(Operation::kRead, 0, kMiB, kMiB))->wait();
    CHECK(holds(*machine.slab, kMiB, kMiB, 0, 5));
  }
}

TEST_CASE("files come and go under one engine, more than a table of them holds") {
  for (const Variant& backend : available_variants()) {
    CAPTURE(backend);
    Machine machine(backend);
    std::vector<std::unique_ptr<File>> kept;  // some stay open, so that slots of the closed ones are used again
    std::vector<std::unique_ptr<TemporaryPath>> paths;
    for (int i = 0; i < 150; ++i) {
      paths.push_back(std::make_unique<TemporaryPath>());
      auto file = std::make_unique<File>(paths.back()->get(), FileOptions{true});
      fill(*machine.slab, 0, 4096, 0, i);
      Request request = machine.request(Operation::kWrite, 0, 0, 4096);
      request.volume = file->volume();
      auto write = machine.engine->start(request);
      request.volume.reset();
      if (i % 2 == 0) {
        kept.push_back(std::move(file));
      } else {
        file->close();
      }
      write->wait();
    }
    for (int i = 0; i < 150; ++i) {
      File again(paths[static_cast<size_t>(i)]->get());
      Request request = machine.request(Operation::kRead, 0, 4096, 4096);
      request.volume = i % 2 == 0 ? kept[static_cast<size_t>(i / 2)]->volume() : again.volume();
      machine.engine->start(request)->wait();
      CHECK(holds(*machine.slab, 4096, 4096, 0, i));
    }
  }
}

TEST_CASE("an idle engine ends at once, and one with work ends after it") {
  for (const Variant& backend : available_variants()) {
    CAPTURE(backend);
    for (int i = 0; i < 5; ++i) Machine(backend, 4, 4096, 2);
    Machine machine(backend, 4, 4096, 2);
    auto transfer = machine.engine->start(machine.request(Operation::kWrite, 0, 0, 4 * kMiB));
    machine.engine.reset();
    CHECK(transfer->state() == TransferState::kDone);
  }
}

TEST_CASE("many threads, many transfers, several rings: every byte arrives") {
  constexpr int kThreads = 4;
  for (const Variant& backend : available_variants()) {
    for (int rings : {1, 2}) {
      CAPTURE(backend);
      CAPTURE(rings);
      Machine machine(backend, 8, 16 * kKiB, rings);
      std::atomic<int> wrong{0};
      std::vector<std::thread> threads;
      for (int thread = 0; thread < kThreads; ++thread) {
        std::vector<Request> requests;
        for (int64_t i = 0; i < 8; ++i) {
          int64_t at = thread * 4 * kMiB + i * 96 * kKiB;
          requests.push_back(machine.request(Operation::kRead, at, at, (i % 3 + 1) * 20 * kKiB));
        }
        threads.emplace_back([requests, &machine, thread, &wrong] {
          write_and_read_back(requests, *machine.engine, thread * 100, 6, &wrong);
        });
      }
      threads.emplace_back([&machine] {  // one who only looks
        for (int i = 0; i < 200; ++i) {
          CHECK(machine.engine->counters().in_flight_blocks >= 0);
          machine.engine->drain_for(std::chrono::milliseconds(0));
        }
      });
      for (auto& thread : threads) thread.join();
      CHECK(wrong == 0);
      machine.engine->close();
      CHECK(machine.engine->counters().write_transfers == kThreads * 8 * 6);
      CHECK(machine.engine->counters().queued_bytes == 0);
    }
  }
}

TEST_CASE("many threads on a drive full of small faults: every byte arrives") {
  FakeMachine machine(true, 4, 16 * kKiB, 2);
  std::mt19937 random(7);
  machine.drive->reverse = true;
  machine.drive->script = [&random](const Block& block) -> std::optional<int64_t> {
    switch (random() % 6) {
      case 0:
        return -EINTR;
      case 1:
        return -EAGAIN;
      case 2:
        return block.length > 5000 ? 5000 : block.length;
      default:
        return std::nullopt;
    }
  };
  Engine& engine = machine.start();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    std::vector<Request> requests;
    for (int64_t i = 0; i < 6; ++i) {
      int64_t at = thread * kMiB + i * 128 * kKiB;
      requests.push_back(machine.request(Operation::kRead, at, at, (i % 3 + 1) * 40 * kKiB));
    }
    threads.emplace_back(
        [requests, &engine, thread, &wrong] { write_and_read_back(requests, engine, thread * 100, 5, &wrong); });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  engine.close();
  CHECK(engine.counters().resubmitted_blocks > 0);
}

}  // namespace infinity::aio::testing
