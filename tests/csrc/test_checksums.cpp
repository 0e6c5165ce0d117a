// A read returns the bytes that were written, or fails: on real files over every backend, and on a drive that lies.
#include "aio/checksums.h"

#include "support.h"

namespace infinity::aio::testing {
namespace {

constexpr PageSum kZeros = 0x98f94189;  // of a page of zeros
using Unwritten = Checksums::Unwritten;

FileOptions checked(bool create = true, int drive = 0) {
  FileOptions options;
  options.create = create;
  options.drive = drive;
  options.checksums = true;
  return options;
}

// Changes a file behind its engine's back.
class Intruder {
 public:
  explicit Intruder(const std::string& path) : fd_(::open(path.c_str(), O_RDWR | O_CLOEXEC)) { REQUIRE(fd_ >= 0); }
  Intruder(const Intruder&) = delete;
  Intruder& operator=(const Intruder&) = delete;
  ~Intruder() { ::close(fd_); }

  void flip(int64_t bit) const {
    unsigned char byte;
    REQUIRE(pread(fd_, &byte, 1, bit / 8) == 1);
    byte ^= static_cast<unsigned char>(1U << (bit % 8));
    REQUIRE(pwrite(fd_, &byte, 1, bit / 8) == 1);
    REQUIRE(fsync(fd_) == 0);
  }

  void truncate(int64_t bytes) const { REQUIRE(ftruncate(fd_, bytes) == 0); }

 private:
  const int fd_;
};

struct CheckedMachine {
  explicit CheckedMachine(const std::string& backend, int rings = 1)
      : slab(std::make_shared<const PinnedSlab>(4 * kMiB)), file(path.get(), checked()) {
    file.reserve(2 * kMiB);
    EngineOptions options;
    options.backend = backend;
    options.queue_depth = 4;
    options.block_bytes = 64 * kKiB;
    options.rings = rings;
    options.slab = slab;
    engine = std::make_unique<Engine>(options);
  }

  std::shared_ptr<Transfer> write(int64_t offset, int64_t length) const {
    return engine->start({Operation::kWrite, file.volume(), slab, {offset, offset, length}});
  }

  std::optional<Failure> read(int64_t offset, int64_t length) const {
    auto transfer = engine->start({Operation::kRead, file.volume(), slab, {offset, 2 * kMiB + offset, length}});
    return failure_of([&] { transfer->wait(); });
  }

  TemporaryPath path;
  std::shared_ptr<const PinnedSlab> slab;
  File file;
  std::unique_ptr<Engine> engine;
};

// A drive in memory under a checked file.
struct CheckedFake {
  explicit CheckedFake(bool direct = true, int rings = 1, Unwritten unwritten = Unwritten::kZeros)
      : machine(direct, 4, 64 * kKiB, rings) {
    machine.file = std::make_shared<const Descriptor>(::open("/dev/null", O_RDWR | O_CLOEXEC), "fake.arena", direct, 0,
                                                      kPageBytes, std::make_unique<Checksums>(unwritten));
  }

  std::optional<Failure> move(Operation operation, int64_t offset, int64_t slab_offset, int64_t length) const {
    auto transfer = machine.engine->start(machine.request(operation, offset, slab_offset, length));
    return failure_of([&] { transfer->wait(); });
  }

  FakeMachine machine;
};

}  // namespace

TEST_CASE("the table keeps its entries across chunk borders, and knows which are missing") {
  constexpr int64_t kChunk = 64 * kMiB;
  for (auto unwritten : {Unwritten::kZeros, Unwritten::kUnknown, Unwritten::kFirstRead}) {
    Checksums table(unwritten);
    PageSum untold = unwritten == Unwritten::kZeros ? kZeros : kUnknownPage;
    std::vector<PageSum> found(6);
    table.get(kChunk - 3 * 4096, 6, found.data());
    CHECK(found == std::vector<PageSum>(6, untold));
    std::vector<PageSum> told{11, 12, 13, 14};
    table.set(kChunk - 2 * 4096, 4, told.data());
    table.get(kChunk - 3 * 4096, 6, found.data());
    CHECK(found == std::vector<PageSum>{untold, 11, 12, 13, 14, untold});
    table.forget(kChunk - 4096, 2 * 4096);
    table.get(kChunk - 3 * 4096, 6, found.data());
    CHECK(found == std::vector<PageSum>{untold, 11, 0, 0, 14, untold});
    table.get(int64_t{1} << 62, 6, found.data());
    CHECK(found == std::vector<PageSum>(6, untold));
  }
}

TEST_CASE("the first wrong page of many is named") {
  Checksums table(Unwritten::kUnknown);
  PinnedSlab slab(kMiB);
  fill(slab, 0, kMiB, 0, 3);
  CHECK_FALSE(table.first_wrong(slab.data(), 0, kMiB).has_value());  // unknown
  table.set_from(slab.data(), 8192, kMiB);
  CHECK_FALSE(table.first_wrong(slab.data(), 8192, kMiB).has_value());
  for (int64_t page : {255, 200, 64, 63, 1, 0}) {
    slab.data()[page * 4096 + 4095] ^= std::byte{1};
    auto wrong = table.first_wrong(slab.data(), 8192, kMiB);
    REQUIRE(wrong.has_value());
    CHECK(wrong->offset == 8192 + page * 4096);
    CHECK(wrong->expected != wrong->actual);
  }
}

TEST_CASE("a file that is only read holds what its first read found") {
  Checksums table(Unwritten::kFirstRead);
  PinnedSlab slab(kMiB);
  fill(slab, 0, kMiB, 0, 3);
  CHECK_FALSE(table.first_wrong(slab.data() + 8192, 16384, 100 * 4096).has_value());
  CHECK_FALSE(table.first_wrong(slab.data(), 8192, kMiB).has_value());  // the rest is seen first now
  for (int64_t page : {255, 101, 2, 0}) {
    slab.data()[page * 4096] ^= std::byte{128};
    auto wrong = table.first_wrong(slab.data(), 8192, kMiB);
    REQUIRE(wrong.has_value());
    CHECK(wrong->offset == 8192 + page * 4096);
    CHECK(wrong->in_words().find("its first read found") != std::string::npos);
  }
}

TEST_CASE("whatever aligned parts are written and read, every read verifies") {
  for (const std::string& name : available_backends()) {
    CAPTURE(name);
    CheckedMachine machine(name, 2);
    std::mt19937 random(5);
    CHECK_FALSE(machine.read(0, 2 * kMiB).has_value());  // nothing but zeros
    for (int round = 0; round < 20; ++round) {
      auto first = static_cast<int64_t>(random() % 512);
      auto pages = static_cast<int64_t>(1 + random() % 80);
      int64_t length = std::min(pages, 512 - first) * 4096;
      fill(*machine.slab, first * 4096, length, first * 4096, round);
      if (random() % 3 > 0) machine.write(first * 4096, length)->wait();
      CHECK_FALSE(machine.read(static_cast<int64_t>(random() % 256) * 4096, kMiB).has_value());
    }
  }
}

TEST_CASE("who has asked for it verifies what was read, and says what is written") {
  for (const std::string& name : available_backends()) {
    CAPTURE(name);
    CheckedMachine machine(name, 2);
    Volume volume(machine.file.descriptor());
    auto move = [&](Operation operation) {
      Request request{operation, machine.file.volume(), machine.slab, {8192, 0, 64 * kKiB}};
      request.sums_by_caller = true;
      machine.engine->start(std::move(request))->wait();
    };
    fill(*machine.slab, 0, 64 * kKiB, 8192, 1);
    std::vector<PageSum> sums(16);
    sum_pages(machine.slab->data(), sums.size(), sums.data());
    move(Operation::kWrite);
    CHECK(volume.checksums(8192, 64 * kKiB) == std::vector<PageSum>(16, kZeros));  // no entry yet
    CHECK(machine.read(8192, 64 * kKiB).has_value());
    volume.set_checksums(8192, sums);
    CHECK_FALSE(machine.read(8192, 64 * kKiB).has_value());
    sums[5] ^= 1;
    volume.set_checksums(8192, sums);
    move(Operation::kRead);  // and doesn't fail
    std::optional<Failure> found = volume.first_wrong(machine.slab->data(), 8192, 64 * kKiB, name);
    std::optional<Failure> told = machine.read(8192, 64 * kKiB);
    REQUIRE((found.has_value() && told.has_value()));
    CHECK(found->message() == told->message());
    CHECK(found->wrong_page == 8192 + 5 * 4096);
  }
}

TEST_CASE("a bit that is flipped on the drive is found, wherever it is") {
  for (const std::string& name : available_backends()) {
    CAPTURE(name);
    CheckedMachine machine(name);
    fill(*machine.slab, 0, kMiB, 0, 9);
    machine.write(0, kMiB)->wait();
    Intruder intruder(machine.path.get());
    std::mt19937_64 random(1);
    std::vector<int64_t> bits{0, 7, 4096 * 8 - 1, 4096 * 8, kMiB * 8 - 1, kMiB * 8, 2 * kMiB * 8 - 1};
    for (int i = 0; i < 20; ++i) bits.push_back(static_cast<int64_t>(random() % (2 * kMiB * 8)));
    for (int64_t bit : bits) {
      CAPTURE(bit);
      intruder.flip(bit);
      auto failure = machine.read(0, 2 * kMiB);
      REQUIRE(failure.has_value());
      CHECK(failure->error_number == EBADMSG);
      CHECK(failure->wrong_page == bit / 8 / 4096 * 4096);
      CHECK(failure->path == machine.path.get());
      CHECK((failure->offset == 0 && failure->length == 2 * kMiB));
      CHECK(failure->message().find("page at offset " + std::to_string(failure->wrong_page)) != std::string::npos);
      intruder.flip(bit);
    }
    CHECK_FALSE(machine.read(0, 2 * kMiB).has_value());
  }
}

TEST_CASE("a striped transfer names the file of the wrong page, and where in it") {
  for (const std::string& name : available_backends()) {
    CAPTURE(name);
    TemporaryPath paths[2];
    auto slab = std::make_shared<const PinnedSlab>(4 * kMiB);
    StripedFile file({std::make_shared<File>(paths[0].get(), checked(true, 0)),
                      std::make_shared<File>(paths[1].get(), checked(true, 1))},
                     {0, 0, 1}, 64 * kKiB);
    file.reserve(2 * kMiB);
    EngineOptions options;
    options.backend = name;
    options.block_bytes = 32 * kKiB;
    options.drives = 2;
    options.slab = slab;
    Engine engine(options);
    auto start = [&](Operation operation, int64_t slab_offset) {
      return engine.start({operation, file.volume(), slab, {4096, slab_offset, kMiB}, Priority::kPrefetch});
    };
    fill(*slab, 0, kMiB, 0, 4);
    start(Operation::kWrite, 0)->wait();
    start(Operation::kRead, 2 * kMiB)->wait();
    for (int member : {0, 1}) {
      Intruder intruder(paths[member].get());
      for (int64_t page : {2, 17, 40}) {
        intruder.flip((page * 4096 + 100) * 8);
        auto transfer = start(Operation::kRead, 2 * kMiB);
        auto failure = failure_of([&] { transfer->wait(); });
        REQUIRE(failure.has_value());
        CHECK(failure->path == paths[member].get());
        CHECK(failure->wrong_page == page * 4096);
        CHECK((failure->offset <= page * 4096 && page * 4096 < failure->offset + failure->length));
        intruder.flip((page * 4096 + 100) * 8);
      }
    }
    start(Operation::kRead, 2 * kMiB)->wait();
  }
}

TEST_CASE("a file that was truncated underneath and has grown again has lost what it held") {
  for (const std::string& name : available_backends()) {
    CAPTURE(name);
    CheckedMachine machine(name);
    fill(*machine.slab, 0, 2 * kMiB, 0, 9);
    machine.write(0, 2 * kMiB)->wait();
    Intruder(machine.path.get()).truncate(4096);
    auto past_the_end = machine.read(kMiB, kMiB);
    REQUIRE(past_the_end.has_value());
    CHECK(past_the_end->error_number == ENODATA);
    machine.write(kMiB, kMiB)->wait();
    CHECK_FALSE(machine.read(kMiB, kMiB).has_value());
    CHECK_FALSE(machine.read(0, 4096).has_value());
    auto hole = machine.read(4096, 4096);
    REQUIRE(hole.has_value());
    CHECK((hole->error_number == EBADMSG && hole->wrong_page == 4096));
  }
}

TEST_CASE("what the table holds goes with the file into another process") {
  for (const std::string& name : available_backends()) {
    CAPTURE(name);
    CheckedMachine machine(name);
    fill(*machine.slab, 0, kMiB, 0, 6);
    machine.write(0, kMiB)->wait();
    std::vector<PageSum> sums = machine.file.volume()->checksums(0, 2 * kMiB);
    REQUIRE(sums.size() == 512);
    CHECK(sums[256] == kZeros);
    std::vector<PageSum> written(256);
    sum_pages(machine.slab->data(), written.size(), written.data());
    CHECK(std::equal(written.begin(), written.end(), sums.begin()));
    Intruder(machine.path.get()).flip(12345);
    File again(machine.path.get(), checked(false));
    auto read = [&] {
      auto transfer = machine.engine->start({Operation::kRead, again.volume(), machine.slab, {0, 2 * kMiB, kMiB}});
      return failure_of([&] { transfer->wait(); });
    };
    CHECK_FALSE(read().has_value());  // the file's contents are unknown
    again.volume()->set_checksums(0, sums);
    REQUIRE(read().has_value());
    CHECK(read()->wrong_page == 0);
  }
}

TEST_CASE("sums over stripes come in the order of the bytes") {
  Checksums* tables[2];
  std::vector<std::shared_ptr<const Descriptor>> files;
  for (int i = 0; i < 2; ++i) {
    auto table = std::make_unique<Checksums>(Unwritten::kUnknown);
    tables[i] = table.get();
    files.push_back(std::make_shared<const Descriptor>(::open("/dev/null", O_RDWR | O_CLOEXEC), "drive", true, i,
                                                       kPageBytes, std::move(table)));
  }
  Volume volume(files, {0, 1, 0}, 8192);
  std::vector<PageSum> told;
  for (PageSum i = 0; i < 20; ++i) told.push_back(100 + i);
  volume.set_checksums(4096, told);
  CHECK(volume.checksums(4096, 20 * 4096) == told);
  CHECK(volume.checksums(3 * 4096, 2 * 4096) == std::vector<PageSum>{102, 103});
  std::vector<PageSum> found(4);
  tables[1]->get(0, 4, found.data());
  CHECK(found == std::vector<PageSum>{101, 102, 107, 108});
}

TEST_CASE("sums of no whole pages, and of a file without, are refused") {
  TemporaryPath paths[2];
  File file(paths[0].get(), checked());
  CHECK(file.volume()->checked());
  for (auto [offset, length] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 4096}, {0, 4095}, {-4096, 4096}, {0, -4096}, {INT64_MAX - 4095, 4096}}) {
    CHECK_THROWS_AS(file.volume()->checksums(offset, length), std::invalid_argument);
  }
  CHECK(file.volume()->checksums(4096, 0).empty());
  File plain(paths[1].get(), {true});
  CHECK_FALSE(plain.volume()->checked());
  CHECK_THROWS_AS(plain.volume()->checksums(0, 4096), std::invalid_argument);
  CHECK_THROWS_AS(plain.volume()->set_checksums(0, {1}), std::invalid_argument);
}

TEST_CASE("a checked file takes whole pages only, though it be buffered") {
  for (bool direct : {true, false}) {
    CheckedFake fake(direct);
    CHECK(fake.machine.file->alignment() == 4096);
    CHECK_THROWS_AS(fake.machine.request(Operation::kRead, 512, 0, 4096).check(), std::invalid_argument);
    CHECK_THROWS_AS(fake.machine.request(Operation::kRead, 0, 0, 1024).check(), std::invalid_argument);
  }
}

TEST_CASE("small faults of the drive are no mismatches, whatever the seed") {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    CAPTURE(seed);
    CheckedFake fake(seed % 2 == 0, 1 + static_cast<int>(seed % 3));
    FaultPlan plan;
    plan.seed = seed;
    plan.delay_seconds_max = 0.0005;
    for (auto [fault, rate] : std::vector<std::pair<Fault, double>>{{Fault::kInterrupted, 0.15},
                                                                    {Fault::kAgain, 0.15},
                                                                    {Fault::kShort, 0.3},
                                                                    {Fault::kLate, 0.1},
                                                                    {Fault::kOvertaken, 0.2}}) {
      plan.rates[static_cast<size_t>(fault)] = rate;
    }
    fake.machine.make_worse(plan);
    fake.machine.start();
    fill(*fake.machine.slab, 0, kMiB, 0, static_cast<int>(seed));
    CHECK_FALSE(fake.move(Operation::kWrite, 0, 0, kMiB).has_value());
    CHECK_FALSE(fake.move(Operation::kRead, 0, 2 * kMiB, kMiB).has_value());
    CHECK(holds(*fake.machine.slab, 2 * kMiB, kMiB, 0, static_cast<int>(seed)));
  }
}

TEST_CASE("no corrupted transfer and no lost write goes unnoticed, whatever the seed") {
  const uint64_t seeds = campaign_seeds(24);
  int64_t corrupted = 0;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    CAPTURE(seed);
    CheckedFake fake(true, 1 + static_cast<int>(seed % 2));
    FaultPlan plan;
    plan.seed = seed;
    for (Fault fault : {Fault::kCorrupt, Fault::kLost}) plan.rates[static_cast<size_t>(fault)] = 0.03;
    auto worse = fake.machine.make_worse(plan);
    Engine& engine = fake.machine.start();
    for (int round = 0; round < 2; ++round) {
      int seed_of_round = static_cast<int>(seed) + round;
      fill(*fake.machine.slab, 0, kMiB, 0, seed_of_round);
      REQUIRE_FALSE(fake.move(Operation::kWrite, 0, 0, kMiB).has_value());  // it reports success, whatever it did
      for (int64_t part = 0; part < kMiB; part += 128 * kKiB) {
        auto failure = fake.move(Operation::kRead, part, 2 * kMiB + part, 128 * kKiB);
        if (!failure.has_value()) REQUIRE(holds(*fake.machine.slab, 2 * kMiB + part, 128 * kKiB, part, seed_of_round));
      }
    }
    std::vector<std::byte>& bytes = fake.machine.drive->bytes;
    bool sound = std::equal(bytes.begin(), bytes.begin() + kMiB, fake.machine.slab->data());
    Counters counters = engine.counters();
    int64_t faults = worse->count_of(Fault::kCorrupt) + worse->count_of(Fault::kLost);
    if (!sound) CHECK(counters.failed_transfers > 0);
    if (faults == 0) CHECK(counters.failed_transfers == 0);
    corrupted += counters.failed_transfers;
  }
  CHECK(corrupted * 24 > 20 * static_cast<int64_t>(seeds));
}

TEST_CASE("a page whose write failed is unknown until it is written again") {
  CheckedFake fake;
  bool fails = true;
  fake.machine.drive->script = [&fails](const Block& block) -> std::optional<int64_t> {
    if (!fails || block.operation == Operation::kRead || block.offset != 64 * kKiB) return std::nullopt;
    return -EIO;
  };
  fake.machine.start();
  fill(*fake.machine.slab, 0, 128 * kKiB, 0, 1);
  REQUIRE(fake.move(Operation::kWrite, 0, 0, 128 * kKiB).has_value());
  std::vector<PageSum> sums(32);
  fake.machine.file->checksums()->get(0, 32, sums.data());
  CHECK(std::count(sums.begin(), sums.begin() + 16, kUnknownPage) == 0);
  CHECK(std::count(sums.begin() + 16, sums.end(), kUnknownPage) == 16);
  CHECK_FALSE(fake.move(Operation::kRead, 0, 2 * kMiB, 128 * kKiB).has_value());  // old or new, as the writer was told
  fails = false;
  REQUIRE_FALSE(fake.move(Operation::kWrite, 0, 0, 128 * kKiB).has_value());
  fake.machine.drive->bytes[64 * kKiB] ^= std::byte{4};
  CHECK(fake.move(Operation::kRead, 0, 2 * kMiB, 128 * kKiB).has_value());
}

TEST_CASE("a write of which the ring died is unknown") {
  CheckedFake fake;
  fake.machine.drive->dies = true;
  fake.machine.start();
  REQUIRE(fake.move(Operation::kWrite, 0, 0, 64 * kKiB).has_value());
  std::vector<PageSum> sums(16, 1);
  fake.machine.file->checksums()->get(0, 16, sums.data());
  CHECK(std::count(sums.begin(), sums.end(), kUnknownPage) == 16);
}

// A drive in memory that works on one block at a time, of a size that takes long to sum.
struct SlowFake : CheckedFake {
  SlowFake() {
    machine.options.queue_depth = 1;
    machine.options.block_bytes = kMiB;
  }

  std::vector<std::shared_ptr<Transfer>> start_two(Operation operation) const {
    return machine.engine->start_batch(
        {machine.request(operation, 0, 0, kMiB), machine.request(operation, kMiB, kMiB, kMiB)});
  }
};

TEST_CASE("the drive is given the next read before the last one is verified") {
  SlowFake slow;
  slow.machine.start();
  std::vector<std::shared_ptr<Transfer>> reads;
  std::vector<bool> verified;
  slow.machine.drive->script = [&](const Block& block) {
    if (block.offset > 0) verified.push_back(reads[0]->done());
    return std::nullopt;
  };
  slow.machine.drive->hold();
  reads = slow.start_two(Operation::kRead);
  slow.machine.drive->let_go();
  for (const auto& read : reads) read->wait();
  CHECK(verified == std::vector<bool>{false});
}

TEST_CASE("a write is sent as soon as its own sum is made") {
  SlowFake slow;
  slow.machine.options.queue_depth = 2;
  std::vector<PageSum> next;  // of the first page of the other write, when one is submitted
  slow.machine.drive->script = [&](const Block& block) {
    next.emplace_back();
    slow.machine.file->checksums()->get(block.offset == 0 ? kMiB : 0, 1, &next.back());
    return std::nullopt;
  };
  fill(*slow.machine.slab, 0, 2 * kMiB, 0, 1);
  slow.machine.start();
  for (const auto& write : slow.start_two(Operation::kWrite)) write->wait();
  REQUIRE(next.size() == 2);
  CHECK(next[0] == kZeros);  // not summed yet
  CHECK(next[1] != kZeros);
}

TEST_CASE("what has arrived is verified though the engine closes, and though the ring dies") {
  for (bool dies : {false, true}) {
    CAPTURE(dies);
    SlowFake slow;
    slow.machine.start();
    slow.machine.drive->hold();
    auto reads = slow.start_two(Operation::kRead);
    slow.machine.drive->wait_submitted(1);
    slow.machine.drive->dies_sending = dies;
    slow.machine.engine->refuse_new();
    slow.machine.drive->let_go();
    CHECK_FALSE(failure_of([&] { reads[0]->wait(); }).has_value());
    CHECK(failure_of([&] { reads[1]->wait(); }).has_value() == dies);
  }
}

}  // namespace infinity::aio::testing
