// Which block goes next: the policy alone, with a clock of its own.
#include "aio/turns.h"
#include "support.h"

namespace infinity::aio::testing {
namespace {

constexpr auto kRead = Operation::kRead;
constexpr auto kWrite = Operation::kWrite;

// A drive on which prefetch reads and write-backs always wait, and which moves blocks one after the other.
struct Busy {
  explicit Busy(Mix mix) {
    TurnOptions options;
    options.mix = mix;
    options.burst_bytes = 8 * kMiB;
    options.background_bytes = 2 * kMiB;
    turns = std::make_unique<Turns>(options);
  }

  // The operations of as many blocks as may be in flight at once, up to `count`.
  std::string fill(int count, int64_t bytes) {
    std::string taken;
    for (int i = 0; i < count; ++i) {
      std::optional<Priority> chosen = turns->next(heads, now);
      if (!chosen.has_value()) break;
      Operation operation = *heads[static_cast<size_t>(*chosen)];
      turns->taken(operation, *chosen, bytes, now);
      in_flight.push_back({operation, *chosen, bytes});
      taken += *chosen == Priority::kDemand ? 'D' : operation == kRead ? 'r' : 'w';
    }
    return taken;
  }

  void end_all() {
    for (auto [operation, priority, bytes] : in_flight) turns->ended(operation, priority, bytes, now);
    in_flight.clear();
  }

  struct One {
    Operation operation;
    Priority priority;
    int64_t bytes;
  };
  std::unique_ptr<Turns> turns;
  Turns::Heads heads{std::nullopt, kRead, kWrite};
  std::vector<One> in_flight;
  double now = 100.0;
};

}  // namespace

TEST_CASE("interleaved reads and writes alternate by bytes, whatever the block") {
  Busy large(Mix::kInterleaved);
  CHECK(large.fill(8, kMiB) == "wrwrwrwr");
  Busy small(Mix::kInterleaved);
  std::string taken = small.fill(1024, 64 * kKiB);
  CHECK(std::count(taken.begin(), taken.end(), 'r') == 512);
  CHECK(taken.find("rw") != std::string::npos);
}

TEST_CASE("bursts never have both in flight, and neither direction starves") {
  Busy drive(Mix::kBursts);
  std::string taken;
  for (int i = 0; i < 64; ++i) {
    std::string batch = drive.fill(4, kMiB);
    CHECK(!batch.empty());
    CHECK((batch.find('r') == std::string::npos || batch.find('w') == std::string::npos));
    drive.end_all();
    taken += batch;
  }
  CHECK(std::count(taken.begin(), taken.end(), 'r') == std::count(taken.begin(), taken.end(), 'w'));
  CHECK(taken.substr(0, 16) == "wwwwwwwwrrrrrrrr");
}

TEST_CASE("one direction alone keeps the drive full in either mix") {
  for (Mix mix : {Mix::kInterleaved, Mix::kBursts}) {
    Busy drive(mix);
    drive.heads = {std::nullopt, kRead, std::nullopt};
    CHECK(drive.fill(100, kMiB).size() == 100);
  }
}

TEST_CASE("what comes to wait goes next when reads and writes interleave") {
  Busy drive(Mix::kInterleaved);
  drive.heads = {std::nullopt, std::nullopt, kWrite};
  drive.fill(1, 4096);
  drive.heads = {std::nullopt, kRead, kWrite};
  CHECK(drive.fill(2, 4096) == "rr");
}

TEST_CASE("where prefetch and write-back want the same direction, prefetch goes first") {
  Busy drive(Mix::kBursts);
  drive.heads = {std::nullopt, kWrite, kWrite};
  CHECK(drive.turns->next(drive.heads, drive.now) == Priority::kPrefetch);
}

TEST_CASE("demand goes at once, even into a burst of the other direction") {
  for (Mix mix : {Mix::kInterleaved, Mix::kBursts}) {
    Busy drive(mix);
    drive.heads = {std::nullopt, std::nullopt, kWrite};
    drive.fill(4, kMiB);
    drive.heads = {kRead, kRead, kWrite};
    CHECK(drive.fill(3, kMiB) == "DDD");
  }
}

TEST_CASE("the background keeps little in flight while demand is about, and all again after a while") {
  Busy drive(Mix::kInterleaved);
  drive.heads = {kRead, std::nullopt, kWrite};
  CHECK(drive.fill(1, kMiB) == "D");
  drive.heads = {std::nullopt, std::nullopt, kWrite};
  CHECK(drive.fill(100, kMiB) == "ww");
  drive.end_all();
  drive.now += 0.01;
  CHECK(drive.fill(100, kMiB) == "ww");
  drive.now += 0.1;
  CHECK(drive.fill(100, kMiB).size() == 100);
}

TEST_CASE("a block larger than what the background may hold goes alone") {
  Busy drive(Mix::kInterleaved);
  drive.heads = {kRead, std::nullopt, std::nullopt};
  drive.fill(1, 4096);
  drive.heads = {std::nullopt, std::nullopt, kWrite};
  CHECK(drive.fill(5, 8 * kMiB) == "w");
}

TEST_CASE("the names of the mixes") {
  CHECK(mix_of("bursts") == Mix::kBursts);
  CHECK(mix_of("interleaved") == Mix::kInterleaved);
  CHECK_THROWS_AS(mix_of("both"), std::invalid_argument);
}

}  // namespace infinity::aio::testing
