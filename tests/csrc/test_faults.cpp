// The engine on a drive that is short, interrupted, out of order, broken or slow, by script.
#include <thread>

#include "support.h"

namespace infinity::aio::testing {
namespace {

void put(FakeDrive& drive, int seed) {
  for (size_t i = 0; i < drive.bytes.size(); ++i) drive.bytes[i] = pattern(static_cast<int64_t>(i), seed);
}

}  // namespace

TEST_CASE("short transfers go on where they stopped: at the page for a direct file, at the byte for a buffered one") {
  for (bool direct : {true, false}) {
    CAPTURE(direct);
    FakeMachine machine(direct, 4, 64 * kKiB);
    put(*machine.drive, 1);
    machine.drive->script = [](const Block& block) -> std::optional<int64_t> {
      if (block.length == 64 * kKiB) return 10'000;
      return std::nullopt;
    };
    Engine& engine = machine.start();
    engine.start(machine.request(Operation::kRead, kMiB, 4096, 256 * kKiB))->wait();
    CHECK(holds(*machine.slab, 4096, 256 * kKiB, kMiB, 1));
    CHECK(engine.counters().resubmitted_blocks == 4);
    CHECK(engine.counters().read_bytes == 256 * kKiB);
    std::vector<int64_t> gathers_from_nvme;
    for (auto [offset, length] : machine.drive->log) {
      if (length < 64 * kKiB) gathers_from_nvme.push_back(length);
    }
    CHECK(gathers_from_nvme == std::vector<int64_t>(4, 64 * kKiB - (direct ? 8192 : 10'000)));
  }
}

TEST_CASE("a short write loses nothing") {
  FakeMachine machine(false, 4, 64 * kKiB);
  machine.drive->script = [](const Block& block) -> std::optional<int64_t> { return (block.length + 1) / 2; };
  fill(*machine.slab, 0, 200'000, 5, 9);
  machine.start().start(machine.request(Operation::kWrite, 5, 0, 200'000))->wait();
  for (int64_t i = 0; i < 200'000; ++i) REQUIRE(machine.drive->bytes[static_cast<size_t>(5 + i)] == pattern(5 + i, 9));
  CHECK(machine.engine->counters().written_bytes == 200'000);
}

TEST_CASE("interruptions are tried again, but not for ever") {
  for (int error_number : {EINTR, EAGAIN, ENOMEM}) {
    CAPTURE(error_number);
    FakeMachine machine;
    put(*machine.drive, 2);
    int left = 5;
    machine.drive->script = [&left, error_number](const Block&) -> std::optional<int64_t> {
      if (left == 0) return std::nullopt;
      --left;
      return -error_number;
    };
    Engine& engine = machine.start();
    engine.start(machine.request(Operation::kRead, 0, 0, 128 * kKiB))->wait();
    CHECK(holds(*machine.slab, 0, 128 * kKiB, 0, 2));
    CHECK(engine.counters().resubmitted_blocks == 5);

    machine.drive->hold();
    left = -1;
    machine.drive->let_go();
    auto hopeless = engine.start(machine.request(Operation::kRead, 0, 0, 4096));
    auto failure = failure_of([&] { hopeless->wait(); });
    CHECK(failure->error_number == error_number);
    CHECK(failure->reason.find("101 times in a row") != std::string::npos);
    bool noted = false;
    for (const std::string& note : engine.notes()) noted = noted || note.find("ENOMEM") != std::string::npos;
    CHECK(noted == (error_number == ENOMEM));
  }
}

TEST_CASE("a read past the end and a write that moves nothing are failures that say so") {
  FakeMachine machine;
  machine.drive->script = [](const Block& block) -> std::optional<int64_t> {
    return std::max<int64_t>(0, std::min(block.length, 100'000 - block.offset));  // the file has 100000 bytes
  };
  Engine& engine = machine.start();
  auto read = failure_of([&] { engine.start(machine.request(Operation::kRead, 65536, 0, 65536))->wait(); });
  REQUIRE(read.has_value());
  CHECK(read->error_number == ENODATA);
  CHECK(read->message() ==
        "read 64 KiB at offset 65536 of fake.arena: the file ends before offset 131072, backend fake");
  auto write = failure_of([&] { engine.start(machine.request(Operation::kWrite, kMiB, 0, 4096))->wait(); });
  CHECK(write->error_number == EIO);
  engine.close();
}

TEST_CASE("a failed block fails its transfer alone, stops its later blocks, and gives everything back") {
  FakeMachine machine(true, 2, 64 * kKiB);
  put(*machine.drive, 3);
  machine.drive->script = [](const Block& block) -> std::optional<int64_t> {
    if (block.offset == kMiB + 64 * kKiB) return -EIO;
    return std::nullopt;
  };
  Engine& engine = machine.start();
  auto bad = engine.start(machine.request(Operation::kRead, kMiB, 0, kMiB));
  auto good = engine.start(machine.request(Operation::kRead, 3 * kMiB, 2 * kMiB, kMiB));
  good->wait();
  CHECK(holds(*machine.slab, 2 * kMiB, kMiB, 3 * kMiB, 3));
  auto failure = failure_of([&] { bad->wait(); });
  REQUIRE(failure.has_value());
  CHECK(failure->error_number == EIO);
  CHECK(std::string(failure->operation) == "read");
  CHECK(failure->path == "fake.arena");
  CHECK(failure->offset == kMiB);
  CHECK(failure->length == kMiB);
  CHECK(failure->backend == "fake");
  engine.drain();
  Counters counters = engine.counters();
  CHECK(counters.failed_transfers == 1);
  CHECK(counters.read_transfers == 1);
  CHECK(counters.queued_bytes == 0);
  CHECK(counters.in_flight_blocks == 0);
  CHECK(counters.read_bytes < 2 * kMiB);
  engine.close();
  CHECK(machine.slab.use_count() == 1);  // only now: a ring lets go of it after it has woken who drains
}

TEST_CASE("close raises the first unseen failure, once") {
  FakeMachine machine;
  machine.drive->script = [](const Block& block) -> std::optional<int64_t> {
    return block.offset == 0 ? -EIO : block.offset == kMiB ? -ENOSPC : -EROFS;
  };
  Engine& engine = machine.start();
  auto seen = engine.start(machine.request(Operation::kWrite, 0, 0, 4096));
  CHECK_THROWS_AS(seen->wait(), IoFailure);
  engine.start(machine.request(Operation::kWrite, kMiB, 0, 4096));
  engine.drain();
  engine.start(machine.request(Operation::kWrite, 2 * kMiB, 0, 4096));
  CHECK(failure_of([&] { engine.close(); })->error_number == ENOSPC);
  engine.close();
  CHECK_THROWS_AS(engine.start(machine.request(Operation::kRead, 0, 0, 4096)), std::invalid_argument);
}

TEST_CASE("completions may come in any order") {
  FakeMachine machine(true, 16, 16 * kKiB);
  machine.drive->reverse = true;
  put(*machine.drive, 4);
  Engine& engine = machine.start();
  std::vector<Request> requests;
  for (int64_t i = 0; i < 8; ++i)
    requests.push_back(machine.request(Operation::kRead, i * kMiB / 2, i * kMiB / 4, kMiB / 4));
  auto transfers = engine.start_batch(std::move(requests));
  for (int64_t i = 0; i < 8; ++i) {
    transfers[static_cast<size_t>(i)]->wait();
    CHECK(holds(*machine.slab, i * kMiB / 4, kMiB / 4, i * kMiB / 2, 4));
  }
}

TEST_CASE("demand goes before prefetch before write-back, first come first served in each") {
  FakeMachine machine(true, 1, 4096);
  machine.drive->hold();
  Engine& engine = machine.start();
  engine.start(machine.request(Operation::kWrite, 0, 0, 3 * 4096, Priority::kWriteBack));
  machine.drive->wait_submitted(1);
  engine.start(machine.request(Operation::kRead, 100 * 4096, 0, 2 * 4096, Priority::kPrefetch));
  engine.start(machine.request(Operation::kRead, 200 * 4096, 0, 2 * 4096, Priority::kDemand));
  engine.start(machine.request(Operation::kRead, 300 * 4096, 0, 4096, Priority::kPrefetch));
  engine.start(machine.request(Operation::kRead, 400 * 4096, 0, 4096, Priority::kDemand));
  CHECK(engine.counters().queued_bytes == 8 * 4096);
  CHECK(engine.counters().in_flight_blocks == 1);
  machine.drive->let_go();
  engine.drain();
  std::vector<int64_t> pages;
  for (auto [offset, length] : machine.drive->log) pages.push_back(offset / 4096);
  CHECK(pages == std::vector<int64_t>{0, 200, 201, 400, 100, 101, 300, 1, 2});
}

TEST_CASE("a ring never has more blocks in flight than its depth") {
  FakeMachine machine(true, 3, 4096, 2);
  machine.drive->hold();
  Engine& engine = machine.start();
  auto transfer = engine.start(machine.request(Operation::kRead, 0, 0, 20 * 4096));
  machine.drive->wait_submitted(6);
  CHECK(engine.counters().in_flight_blocks == 6);
  CHECK(engine.counters().queued_bytes == 14 * 4096);
  machine.drive->let_go();
  transfer->wait();
}

TEST_CASE("file and slab live until the last completion, even without other owners") {
  FakeMachine machine;
  machine.drive->hold();
  Engine& engine = machine.start();
  std::weak_ptr<const PinnedSlab> slab = machine.slab;
  std::weak_ptr<const Descriptor> file = machine.file;
  auto transfer = engine.start(machine.request(Operation::kWrite, 0, 0, kMiB));
  std::weak_ptr<Transfer> watched = transfer;
  transfer.reset();
  machine.slab.reset();
  machine.file.reset();
  machine.drive->wait_submitted(4);
  CHECK_FALSE(slab.expired());
  CHECK_FALSE(file.expired());
  machine.drive->let_go();
  engine.drain();
  engine.close();
  CHECK(slab.expired());
  CHECK(file.expired());
  CHECK(watched.expired());
}

TEST_CASE("a done transfer holds no memory, even if the transfer is still owned") {
  FakeMachine machine;
  auto transfer = machine.start().start(machine.request(Operation::kWrite, 0, 0, kMiB));
  transfer->wait();
  machine.engine->close();
  CHECK(machine.slab.use_count() == 1);
  CHECK(machine.file.use_count() == 1);
}

TEST_CASE("an engine that is dropped finishes its work first") {
  FakeMachine machine(true, 2, 4096);
  machine.drive->hold();
  fill(*machine.slab, 0, kMiB, 0, 6);
  auto transfer = machine.start().start(machine.request(Operation::kWrite, 0, 0, kMiB));
  std::thread later([&machine] {
    machine.drive->wait_submitted(2);
    machine.drive->let_go();
  });
  machine.engine.reset();
  later.join();
  CHECK(transfer->state() == TransferState::kDone);
  CHECK(machine.drive->bytes[kMiB - 1] == pattern(kMiB - 1, 6));
}

TEST_CASE("a batch is started as a whole or not at all") {
  FakeMachine machine;
  Engine& engine = machine.start();
  std::vector<Request> requests{machine.request(Operation::kRead, 0, 0, 4096),
                                machine.request(Operation::kRead, 0, 4 * kMiB, 4096)};
  CHECK_THROWS_AS(engine.start_batch(requests), std::invalid_argument);
  CHECK(engine.start_batch({}).empty());
  engine.drain();
  CHECK(machine.drive->log.empty());
}

TEST_CASE("an engine whose backend can't be made isn't made, and leaves no thread behind") {
  FakeMachine machine(true, 4, 4096, 3);
  machine.drive->refuse_instance = 3;
  CHECK(failure_of([&] { machine.start(); })->error_number == EPERM);
  CHECK(machine.drive->instances == 3);
}

TEST_CASE("a ring that dies fails what it has and what is queued, and says so to those who come later") {
  FakeMachine machine(true, 2, 4096);
  machine.drive->dies = true;
  machine.drive->hold();
  Engine& engine = machine.start();
  auto first = engine.start(machine.request(Operation::kRead, 0, 0, 16 * 4096));
  machine.drive->wait_submitted(2);
  auto second = engine.start_batch({machine.request(Operation::kRead, 0, 0, 4096)}).front();
  machine.drive->let_go();
  CHECK(failure_of([&] { first->wait(); })->error_number == EIO);
  CHECK(failure_of([&] { second->wait(); })->error_number == EIO);
  engine.drain();
  CHECK(engine.counters().queued_bytes == 0);
  CHECK(engine.counters().in_flight_blocks == 0);
  CHECK_THROWS_AS(engine.start(machine.request(Operation::kRead, 0, 0, 4096)), IoFailure);
  engine.close();
}

TEST_CASE("several rings say the same thing once") {
  FakeMachine machine(true, 4, 4096, 3);
  CHECK(machine.start().notes() == std::vector<std::string>{"the fake drive isn't real"});
}

TEST_CASE("options out of range are refused") {
  for (auto change : std::vector<std::function<void(EngineOptions&)>>{
           [](EngineOptions& o) { o.queue_depth = 0; }, [](EngineOptions& o) { o.queue_depth = 5000; },
           [](EngineOptions& o) { o.block_bytes = 0; }, [](EngineOptions& o) { o.block_bytes = 5000; },
           [](EngineOptions& o) { o.block_bytes = int64_t{2} << 30; }, [](EngineOptions& o) { o.rings = 0; },
           [](EngineOptions& o) { o.rings = 100; }, [](EngineOptions& o) { o.backend = "magic"; },
           [](EngineOptions& o) { o.drives = 0; },
           [](EngineOptions& o) {
             o.backend = "threads";
             o.iopoll = true;
           }}) {
    EngineOptions options;
    change(options);
    CHECK_THROWS_AS(Engine{options}, std::invalid_argument);
  }
}

}  // namespace infinity::aio::testing
