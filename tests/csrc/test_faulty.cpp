// Faults by draw: what the engine makes good, what it says, and what only a checksum could find.
#include <cmath>
#include <thread>

#include "support.h"

namespace infinity::aio::testing {
namespace {

const uint64_t kSeeds = campaign_seeds(60);

FaultPlan plan_of(uint64_t seed, const std::vector<std::pair<Fault, double>>& rates) {
  FaultPlan plan;
  plan.seed = seed;
  plan.delay_seconds_max = 0.0005;
  for (auto [fault, rate] : rates) plan.rates[static_cast<size_t>(fault)] = rate;
  return plan;
}

// Writes in the one half of the slab, and room to read in the other.
struct Bench {
  explicit Bench(const FaultPlan& plan, bool direct = true, int rings = 1)
      : machine(direct, 4, 64 * kKiB, rings), worse(machine.make_worse(plan)) {
    machine.start();
  }

  std::shared_ptr<Transfer> write(int64_t number, int seed) {
    fill(*machine.slab, number * kLength, kLength, number * kLength, seed);
    return machine.engine->start(machine.request(Operation::kWrite, number * kLength, number * kLength, kLength));
  }

  std::shared_ptr<Transfer> read(int64_t number) {
    return machine.engine->start(
        machine.request(Operation::kRead, number * kLength, 2 * kMiB + number * kLength, kLength));
  }

  bool read_well(int64_t number, int seed) const {
    return holds(*machine.slab, 2 * kMiB + number * kLength, kLength, number * kLength, seed);
  }

  static constexpr int64_t kLength = 256 * kKiB;
  FakeMachine machine;
  std::shared_ptr<WorseDrives> worse;
};

bool fails(const std::shared_ptr<Transfer>& transfer) {
  return failure_of([&] { transfer->wait(); }).has_value();
}

}  // namespace

TEST_CASE("interruptions, short transfers, delays and any order change no byte, whatever the seed") {
  int64_t seen = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    CAPTURE(seed);
    Bench bench(plan_of(seed, {{Fault::kInterrupted, 0.15},
                               {Fault::kAgain, 0.15},
                               {Fault::kShort, 0.3},
                               {Fault::kLate, 0.1},
                               {Fault::kOvertaken, 0.2}}),
                seed % 2 == 0, 1 + static_cast<int>(seed % 3));
    std::vector<std::shared_ptr<Transfer>> all;
    for (int64_t i = 0; i < 8; ++i) all.push_back(bench.write(i, static_cast<int>(seed)));
    for (const auto& one : all) one->wait();
    all.clear();
    for (int64_t i = 0; i < 8; ++i) all.push_back(bench.read(i));
    for (int64_t i = 0; i < 8; ++i) {
      all[static_cast<size_t>(i)]->wait();
      REQUIRE(bench.read_well(i, static_cast<int>(seed)));
    }
    Counters counters = bench.machine.engine->counters();
    CHECK(counters.read_bytes == 2 * kMiB);
    CHECK(counters.written_bytes == 2 * kMiB);
    CHECK(counters.failed_transfers == 0);
    int64_t faults = bench.worse->count_of(Fault::kShort) + bench.worse->count_of(Fault::kAgain);
    seen += faults;
    CHECK(counters.resubmitted_blocks >= faults);
  }
  CHECK(seen > static_cast<int64_t>(kSeeds));
}

TEST_CASE("a transfer that reports success holds the right bytes, and one that failed says what and where") {
  int64_t failed = 0;
  int64_t whole = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    CAPTURE(seed);
    Bench bench(plan_of(seed, {{Fault::kAgain, 0.05},
                               {Fault::kIo, 0.02},
                               {Fault::kSpace, 0.02},
                               {Fault::kMemory, 0.01},
                               {Fault::kShort, 0.1},
                               {Fault::kOvertaken, 0.2}}));
    for (int64_t i = 0; i < 8; ++i) {
      auto failure = failure_of([&] { bench.write(i, static_cast<int>(seed))->wait(); });
      if (failure.has_value()) {
        ++failed;
        CHECK(std::string(failure->operation) == "write");
        CHECK(failure->offset == i * Bench::kLength);
        CHECK((failure->error_number == EIO || failure->error_number == ENOSPC || failure->error_number == ENOMEM));
      } else if (!fails(bench.read(i))) {
        ++whole;
        REQUIRE(bench.read_well(i, static_cast<int>(seed)));
      }
    }
    bench.machine.engine->drain();
    Counters counters = bench.machine.engine->counters();
    CHECK(counters.in_flight_blocks == 0);
    CHECK(counters.queued_bytes == 0);
    bench.machine.engine->close();
    CHECK(bench.machine.slab.use_count() == 1);
    CHECK(bench.machine.file.use_count() == 1);
  }
  CHECK(failed > static_cast<int64_t>(kSeeds) / 4);
  CHECK(whole > static_cast<int64_t>(kSeeds));
}

TEST_CASE("what a part of a failed write has left behind is old or new, page by page") {
  bool part = false;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Bench bench(plan_of(seed, {{Fault::kIo, 1.0}}));
    REQUIRE(fails(bench.write(0, 3)));
    bool whole_bytes = true;
    for (int64_t i = 0; i < Bench::kLength; ++i) {
      std::byte found = bench.machine.drive->bytes[static_cast<size_t>(i)];
      part = part || (found != std::byte{0} && found == pattern(i, 3));
      whole_bytes = whole_bytes && (found == std::byte{0} || found == pattern(i, 3));
    }
    REQUIRE(whole_bytes);
  }
  CHECK(part);
}

TEST_CASE("a lost write reports success and leaves the old bytes") {
  Bench bench(plan_of(1, {{Fault::kLost, 1.0}}));
  bench.write(0, 5)->wait();
  CHECK(bench.machine.drive->log.empty());
  CHECK(bench.machine.drive->bytes[100] == std::byte{0});
  CHECK(bench.worse->count_of(Fault::kLost) == 4);
  CHECK(fails(bench.read(0)));
}

TEST_CASE("a corrupted transfer is wrong in one bit of each block, and the writer's memory is not touched") {
  FaultPlan plan = plan_of(8, {{Fault::kCorrupt, 1.0}});
  auto bits_off = [](const std::byte* bytes, int64_t offset, int seed) {
    int bits = 0;
    for (int64_t i = 0; i < Bench::kLength; ++i) {
      bits += __builtin_popcount(static_cast<unsigned>(bytes[i] ^ pattern(offset + i, seed)));
    }
    return bits;
  };
  Bench bench(plan);
  bench.write(0, 2)->wait();
  CHECK(holds(*bench.machine.slab, 0, Bench::kLength, 0, 2));
  CHECK(bits_off(bench.machine.drive->bytes.data(), 0, 2) == 4);
  for (size_t i = 0; i < Bench::kLength; ++i) bench.machine.drive->bytes[i] = pattern(static_cast<int64_t>(i), 2);
  bench.read(0)->wait();
  CHECK(bits_off(bench.machine.slab->data() + 2 * kMiB, 0, 2) == 4);
}

TEST_CASE("a drive that stops answering is given up: its transfers fail in words, and nothing hangs") {
  for (double after : {0.0, 6.0}) {
    FakeMachine machine(true, 4, 64 * kKiB);
    FaultPlan plan = plan_of(1, {{Fault::kStuck, 1.0}});
    plan.after_blocks = static_cast<int64_t>(after);
    machine.make_worse(plan);
    machine.options.silence_seconds_max = 0.2;
    Engine& engine = machine.start();
    auto first = engine.start(machine.request(Operation::kRead, 0, 0, kMiB));
    auto failure = failure_of([&] { first->wait(); });
    REQUIRE(failure.has_value());
    CHECK(failure->error_number == EIO);
    CHECK(failure->reason.find("has not answered for") != std::string::npos);
    engine.drain();
    CHECK_THROWS_AS(engine.start(machine.request(Operation::kRead, 0, 0, 4096)), IoFailure);
    engine.close();
  }
}

TEST_CASE("a ring that is idle, and one that is slow but answers, are not given up") {
  FakeMachine machine(true, 1, 4096);
  machine.options.silence_seconds_max = 0.4;
  make_worse(machine.options, std::make_shared<WorseDrives>(std::vector<DriveLimit>{{0, 0.2, ""}}));
  Engine& engine = machine.start();
  engine.start(machine.request(Operation::kRead, 0, 0, 4 * 4096))->wait();
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  engine.start(machine.request(Operation::kRead, 0, 0, 4 * 4096))->wait();
}

TEST_CASE("the same seed gives the same faults, another seed others") {
  auto faults_of = [](uint64_t seed) {
    Bench bench(plan_of(seed, {{Fault::kIo, 0.1}, {Fault::kShort, 0.2}, {Fault::kOvertaken, 0.3}}));
    std::vector<bool> found;
    for (int64_t i = 0; i < 8; ++i) found.push_back(fails(bench.write(i, 1)));
    std::vector<int64_t> counts;
    for (size_t kind = 0; kind < kFaultKinds; ++kind) counts.push_back(bench.worse->count_of(static_cast<Fault>(kind)));
    return std::make_pair(found, counts);
  };
  CHECK(faults_of(4) == faults_of(4));
  CHECK(faults_of(4).second != faults_of(5).second);
}

TEST_CASE("every backend is made to fail the same way") {
  for (const std::string& name : available_backends()) {
    CAPTURE(name);
    TemporaryPath path;
    auto slab = std::make_shared<const PinnedSlab>(4 * kMiB);
    File file(path.get(), {true});
    file.reserve(2 * kMiB);
    EngineOptions options;
    options.backend = name;
    options.queue_depth = 4;
    options.block_bytes = 64 * kKiB;
    options.slab = slab;
    FaultPlan plan = plan_of(11, {{Fault::kAgain, 0.1}, {Fault::kShort, 0.3}, {Fault::kOvertaken, 0.3}});
    make_worse(options, std::make_shared<WorseDrives>(std::vector<DriveLimit>(), plan));
    Engine engine(options);
    fill(*slab, 0, kMiB, 0, 7);
    engine.start({Operation::kWrite, file.volume(), slab, {0, 0, kMiB}})->wait();
    engine.start({Operation::kRead, file.volume(), slab, {0, 2 * kMiB, kMiB}})->wait();
    CHECK(holds(*slab, 2 * kMiB, kMiB, 0, 7));
    CHECK(engine.counters().resubmitted_blocks > 5);
    engine.close();
  }
}

TEST_CASE("plans that can't be are refused") {
  for (auto change : std::vector<std::function<void(FaultPlan&)>>{
           [](FaultPlan& plan) { plan.rates[0] = -0.1; }, [](FaultPlan& plan) { plan.rates[0] = 1.5; },
           [](FaultPlan& plan) { plan.rates[0] = std::nan(""); },
           [](FaultPlan& plan) { plan.rates[0] = plan.rates[1] = 0.6; },
           [](FaultPlan& plan) { plan.delay_seconds_max = -1; }, [](FaultPlan& plan) { plan.after_blocks = -1; }}) {
    FaultPlan plan;
    change(plan);
    CHECK_THROWS_AS(WorseDrives({}, plan), std::invalid_argument);
  }
  EngineOptions options;
  options.silence_seconds_max = -1;
  CHECK_THROWS_AS(Engine{options}, std::invalid_argument);
}

}  // namespace infinity::aio::testing
