// Volumes over several files, and drives that don't wait for each other.
#include "support.h"

namespace infinity::aio::testing {
namespace {

std::shared_ptr<const Descriptor> no_file(int drive) {
  return std::make_shared<const Descriptor>(::open("/dev/null", O_RDWR | O_CLOEXEC), "drive" + std::to_string(drive),
                                            true, drive);
}

Volume volume_of(int files, std::vector<int> pattern, int64_t stripe_bytes) {
  std::vector<std::shared_ptr<const Descriptor>> members;
  for (int i = 0; i < files; ++i) members.push_back(no_file(i));
  return {std::move(members), std::move(pattern), stripe_bytes};
}

// Files of two drives under one engine, striped 3 to 1.
struct TwoDrives {
  explicit TwoDrives(const std::string& backend, double slow_latency_seconds = 0.0)
      : slab(std::make_shared<const PinnedSlab>(16 * kMiB)),
        file({std::make_shared<File>(fast.get(), FileOptions{true, 0}),
              std::make_shared<File>(slow.get(), FileOptions{true, 1})},
             {0, 0, 1, 0}, 256 * kKiB) {
    file.reserve(16 * kMiB);
    EngineOptions options;
    options.backend = backend;
    options.queue_depth = 4;
    options.block_bytes = 128 * kKiB;
    options.drives = 2;
    options.slab = slab;
    make_worse(options, std::make_shared<WorseDrives>(std::vector<DriveLimit>{{0, slow_latency_seconds, slow.get()}}));
    engine = std::make_unique<Engine>(options);
  }

  std::shared_ptr<Transfer> start(Operation operation, int64_t offset, int64_t slab_offset, int64_t length) {
    return engine->start({operation, file.volume(), slab, {offset, slab_offset, length}, Priority::kPrefetch});
  }

  TemporaryPath fast;
  TemporaryPath slow;
  std::shared_ptr<const PinnedSlab> slab;
  StripedFile file;
  std::unique_ptr<Engine> engine;
};

}  // namespace

TEST_CASE("the stripes of a volume tile it, and the bytes of each file") {
  for (const auto& pattern : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1}, {2, 0, 1, 0, 0}, {1, 0, 2, 1, 1, 0}}) {
    int files = *std::max_element(pattern.begin(), pattern.end()) + 1;
    Volume volume = volume_of(files, pattern, 8192);
    for (auto [begin, end] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 200 * 4096}, {4096, 8192}, {3 * 4096, 77 * 4096}}) {
      std::vector<int> seen(static_cast<size_t>((end - begin) / 4096));
      int64_t total = 0;
      for (int member = 0; member < files; ++member) {
        int64_t at = begin;
        int64_t last = -1;
        int64_t bytes = 0;
        while (auto piece = volume.first_on(member, at, end)) {
          CHECK(piece->at >= at);
          CHECK(piece->at + piece->length <= end);
          CHECK((last < 0 || piece->offset == last));  // one behind the other in the file
          last = piece->offset + piece->length;
          CHECK(pattern[static_cast<size_t>(piece->at / 8192) % pattern.size()] == member);
          for (int64_t page = 0; page < piece->length / 4096; ++page) {
            ++seen[static_cast<size_t>((piece->at - begin) / 4096 + page)];
          }
          bytes += piece->length;
          at = piece->at + piece->length;
        }
        CHECK(bytes == volume.bytes_on(member, begin, end));
        if (begin == 0) CHECK(bytes == last);
        total += bytes;
      }
      CHECK(total == end - begin);
      CHECK(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }));
    }
  }
}

TEST_CASE("patterns that can't be are refused") {
  CHECK_THROWS_AS(volume_of(1, {0}, 4096), std::invalid_argument);
  CHECK_THROWS_AS(volume_of(2, {0, 2}, 4096), std::invalid_argument);
  CHECK_THROWS_AS(volume_of(2, {0, 0}, 4096), std::invalid_argument);
  CHECK_THROWS_AS(volume_of(2, {0, 1}, 5000), std::invalid_argument);
}

TEST_CASE("what was written over several drives is read back, whole and in parts") {
  for (const std::string& backend : available_backends()) {
    CAPTURE(backend);
    TwoDrives machine(backend);
    int64_t length = 5 * kMiB + 12 * kKiB;
    fill(*machine.slab, 0, length, 4096, 6);
    machine.start(Operation::kWrite, 4096, 0, length)->wait();
    machine.start(Operation::kRead, 4096, 8 * kMiB, length)->wait();
    CHECK(holds(*machine.slab, 8 * kMiB, length, 4096, 6));
    machine.start(Operation::kRead, kMiB - 4096, 15 * kMiB, 700 * kKiB)->wait();
    CHECK(holds(*machine.slab, 15 * kMiB, 700 * kKiB, kMiB - 4096, 6));
    Counters counters = machine.engine->counters();
    CHECK(counters.written_bytes == length);
    CHECK(counters.drives[0].written_bytes + counters.drives[1].written_bytes == length);
    CHECK(counters.drives[0].written_bytes > 2 * counters.drives[1].written_bytes);
    CHECK(counters.drives[0].read_seconds > 0.0);
    CHECK(counters.drives[1].write_seconds > 0.0);
    machine.engine->close();
  }
}

TEST_CASE("a slow drive takes no place of the others") {
  TwoDrives machine("threads", 0.2);
  auto both = machine.start(Operation::kWrite, 0, 0, 8 * kMiB);
  File alone(machine.fast.get());
  auto fast = machine.engine->start({Operation::kRead, alone.volume(), machine.slab, {0, 8 * kMiB, 2 * kMiB}});
  fast->wait();
  CHECK_FALSE(both->done());  // four blocks at a time, and 200 ms each time
  both->wait();
  CHECK(machine.engine->counters().drives[1].write_seconds > 0.19);
}

TEST_CASE("a limited drive keeps to its limit, with one ring or two") {
  for (int rings : {1, 2}) {
    CAPTURE(rings);
    TemporaryPath path;
    File file(path.get(), {true});
    file.reserve(4 * kMiB);
    EngineOptions options;
    options.rings = rings;
    options.block_bytes = 64 * kKiB;
    options.slab = std::make_shared<const PinnedSlab>(4 * kMiB);
    make_worse(options, std::make_shared<WorseDrives>(std::vector<DriveLimit>{{20e6, 0, path.get()}}));
    Engine engine(options);
    auto transfer = engine.start({Operation::kWrite, file.volume(), options.slab, {0, 0, 4 * kMiB}});
    transfer->wait();
    CHECK(transfer->times().done - transfer->times().submitted > 4 * kMiB / 20e6 * 0.9);
  }
}

TEST_CASE("the failure of a striped transfer names the file and where in it") {
  TwoDrives machine("threads");
  File(machine.slow.get()).close();
  CHECK(::truncate(machine.slow.get().c_str(), 256 * kKiB) == 0);
  auto failure = failure_of([&] { machine.start(Operation::kRead, 0, 0, 4 * kMiB)->wait(); });
  REQUIRE(failure.has_value());
  CHECK(failure->path == machine.slow.get());
  CHECK(failure->offset >= 256 * kKiB);
  CHECK(machine.engine->counters().queued_bytes == 0);
  machine.engine->close();
}

TEST_CASE("a file on a drive that the engine doesn't serve is refused") {
  FakeMachine machine;
  machine.file = no_file(1);
  CHECK_THROWS_AS(machine.start().start(machine.request(Operation::kRead, 0, 0, 4096)), std::invalid_argument);
}

TEST_CASE("each transfer leaves its times, oldest first") {
  FakeMachine machine;
  Engine& engine = machine.start();
  for (int64_t i = 1; i <= 3; ++i) engine.start(machine.request(Operation::kRead, 0, 0, i * 4096))->wait();
  engine.start(machine.request(Operation::kWrite, 0, 0, 4096, Priority::kWriteBack))->wait();
  std::vector<Timing> timings = engine.take_timings();
  REQUIRE(timings.size() == 4);
  for (int64_t i = 0; i < 3; ++i) CHECK(timings[static_cast<size_t>(i)].bytes == (i + 1) * 4096);
  CHECK(timings[3].operation == static_cast<uint8_t>(Operation::kWrite));
  CHECK(timings[3].priority == static_cast<uint8_t>(Priority::kWriteBack));
  for (const Timing& one : timings) CHECK((0 < one.queued && one.queued <= one.submitted && one.submitted <= one.done));
  CHECK(engine.take_timings().empty());
}

TEST_CASE("of the times of many transfers the last are kept") {
  FakeMachine machine;
  Engine& engine = machine.start();
  engine.start(machine.request(Operation::kRead, 0, 0, 12288))->wait();
  std::vector<Request> batch;
  for (int i = 0; i < 65536; ++i) batch.push_back(machine.request(Operation::kRead, 0, 0, 4096));
  engine.start_batch(batch);
  engine.drain();
  engine.start(machine.request(Operation::kRead, 0, 0, 8192))->wait();
  std::vector<Timing> timings = engine.take_timings();
  CHECK(timings.size() == 65536);
  CHECK(timings.front().bytes == 4096);
  CHECK(timings.back().bytes == 8192);
  CHECK(std::is_sorted(timings.begin(), timings.end(), [](auto& a, auto& b) { return a.done < b.done; }));
}

}  // namespace infinity::aio::testing
