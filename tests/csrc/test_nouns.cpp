// error, slab, file and transfer, each by itself.
#include <sys/stat.h>

#include "support.h"

namespace infinity::aio::testing {

TEST_CASE("bytes and errno values are put into words") {
  CHECK(format_bytes(0) == "0 B");
  CHECK(format_bytes(1023) == "1023 B");
  CHECK(format_bytes(4 * kMiB) == "4 MiB");
  CHECK(format_bytes(kMiB + kMiB / 2) == "1.50 MiB");
  CHECK(format_bytes(int64_t{12} << 30) == "12 GiB");
  CHECK(format_errno(EIO) == "EIO (Input/output error)");
  CHECK(format_errno(9999).find("errno 9999") == 0);
}

TEST_CASE("a failure names operation, length, offset, path, errno and backend") {
  Failure failure{EIO, "read", "/x/rank0.arena", int64_t{12} << 30, 4 * kMiB, "io_uring", {}};
  CHECK(failure.message() ==
        "read 4 MiB at offset 12884901888 of /x/rank0.arena: EIO (Input/output error), backend io_uring");
  Failure opening{ENOENT, "open", "/x", 0, 0, {}, {}};
  CHECK(opening.message() == "open /x: ENOENT (No such file or directory)");
}

TEST_CASE("a slab is aligned to 2 MiB, zero, and all there") {
  for (int64_t bytes : {int64_t{1}, int64_t{4096}, 3 * kMiB, 8 * kMiB}) {
    PinnedSlab slab(bytes);
    CHECK(slab.bytes() == bytes);
    CHECK(reinterpret_cast<uintptr_t>(slab.data()) % kHugePageBytes == 0);
    CHECK(slab.data()[bytes - 1] == std::byte{0});
    slab.data()[bytes - 1] = std::byte{1};
  }
}

TEST_CASE("a slab says what it didn't get") {
  CHECK_FALSE(PinnedSlab(4096).huge_pages());
  CHECK(PinnedSlab(4096).notes().size() == 1);
  CHECK(PinnedSlab(4096, false).notes().empty());
  PinnedSlab locked(kMiB, false, true);
  CHECK(locked.locked() == locked.notes().empty());
}

TEST_CASE("a slab that can't be is refused, with its size in words") {
  CHECK_THROWS_AS(PinnedSlab(0), std::invalid_argument);
  CHECK_THROWS_AS(PinnedSlab(-1), std::invalid_argument);
  for (int64_t bytes : {int64_t{1} << 50, INT64_MAX}) {
    std::string message;
    try {
      PinnedSlab slab(bytes);
    } catch (const std::bad_alloc& error) {
      message = error.what();
    }
    CHECK(message.find("no memory for a slab of " + format_bytes(bytes)) == 0);
  }
}

TEST_CASE("a file is made once, private, and reserves without shrinking") {
  TemporaryPath path;
  File file(path.get(), {true});
  CHECK(file.direct() == file.notes().empty());
  struct stat status{};
  REQUIRE(::stat(path.get().c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0600);
  CHECK(failure_of([&] { File again(path.get(), {true}); })->error_number == EEXIST);
  file.reserve(kMiB);
  CHECK(file.size_bytes() == kMiB);
  file.reserve(4096);
  CHECK(file.size_bytes() == kMiB);
  file.sync();
  CHECK_THROWS_AS(file.reserve(0), std::invalid_argument);
}

TEST_CASE("a file that can't be opened or filled says why") {
  auto missing = failure_of([] { File file("/nowhere/at/all"); });
  REQUIRE(missing.has_value());
  CHECK(missing->error_number == ENOENT);
  CHECK(std::string(missing->operation) == "open");
  TemporaryPath path;
  File file(path.get(), {true});
  auto full = failure_of([&] { file.reserve(int64_t{1} << 60); });
  REQUIRE(full.has_value());
  CHECK(std::string(full->operation) == "reserve");
}

TEST_CASE("a closed file refuses everything but close") {
  TemporaryPath path;
  File file(path.get(), {true});
  file.close();
  file.close();
  CHECK_THROWS_AS(file.sync(), std::invalid_argument);
  CHECK_THROWS_AS(file.descriptor(), std::invalid_argument);
}

TEST_CASE("a descriptor outlives its file while a transfer shares it, and announces its end") {
  TemporaryPath path;
  File file(path.get(), {true});
  std::shared_ptr<const Descriptor> shared = file.descriptor();
  bool closed = false;
  shared->on_close([&closed] { closed = true; });
  file.close();
  CHECK(fcntl(shared->fd(), F_GETFD) >= 0);
  CHECK_FALSE(closed);
  shared.reset();
  CHECK(closed);
}

TEST_CASE("requests outside slab or alignment are refused by their numbers") {
  FakeMachine direct(true);
  auto check = [](const FakeMachine& machine, int64_t offset, int64_t slab_offset, int64_t length) {
    machine.request(Operation::kRead, offset, slab_offset, length).check();
  };
  check(direct, 0, 0, 4 * kMiB);
  check(direct, 4096, 4 * kMiB - 4096, 4096);
  for (auto [offset, slab_offset, length] : std::vector<std::array<int64_t, 3>>{{0, 0, 0},
                                                                                {0, 0, -4096},
                                                                                {-4096, 0, 4096},
                                                                                {0, -4096, 4096},
                                                                                {0, 4096, 4 * kMiB},
                                                                                {0, 0, 4 * kMiB + 4096},
                                                                                {0, INT64_MAX - 4095, 4096},
                                                                                {INT64_MAX - 4095, 0, 8192},
                                                                                {1, 0, 4096},
                                                                                {0, 1, 4096},
                                                                                {0, 0, 4097}}) {
    CHECK_THROWS_AS(check(direct, offset, slab_offset, length), std::invalid_argument);
  }
  FakeMachine buffered(false);
  check(buffered, 1, 3, 5);
  CHECK_THROWS_WITH_AS(
      check(direct, 77, 0, 4096),
      "read of 4096 bytes at offset 77 of fake.arena and slab offset 0: this file needs offset, length and slab offset "
      "in multiples of 4096",
      std::invalid_argument);
}

TEST_CASE("a transfer is cut into blocks that tile it") {
  FakeMachine machine;
  for (int64_t length : {int64_t{4096}, 64 * kKiB, 64 * kKiB + 4096, 3 * kMiB}) {
    Request request = machine.request(Operation::kWrite, kMiB, 8192, length);
    auto transfer = std::make_shared<Transfer>(request, "none");
    Lane lane(transfer, request.volume, request.slab, 0);
    int64_t expected = (length + 64 * kKiB - 1) / (64 * kKiB);
    CHECK(lane.left_bytes() == length);
    CHECK(transfer->state() == TransferState::kQueued);
    int64_t at = 0;
    std::vector<Block> blocks;
    while (auto block = lane.take_block(64 * kKiB)) {
      CHECK(block->offset == kMiB + at);
      CHECK(block->address == machine.slab->data() + 8192 + at);
      CHECK(block->length == std::min(64 * kKiB, length - at));
      at += block->length;
      blocks.push_back(std::move(*block));
    }
    CHECK(at == length);
    CHECK(static_cast<int64_t>(blocks.size()) == expected);
    CHECK(transfer->state() == TransferState::kInFlight);
    for (size_t i = 0; i < blocks.size(); ++i) CHECK(transfer->end_block(std::nullopt) == (i + 1 == blocks.size()));
    transfer->finish();
    CHECK(transfer->state() == TransferState::kDone);
    transfer->wait();
  }
}

TEST_CASE("after its first failure a transfer gives no more blocks, and ends with its last one out") {
  FakeMachine machine;
  Request request = machine.request(Operation::kRead, 0, 0, kMiB);
  auto transfer = std::make_shared<Transfer>(request, "none");
  Lane lane(transfer, request.volume, request.slab, 0);
  auto first = lane.take_block(64 * kKiB);
  auto second = lane.take_block(64 * kKiB);
  CHECK_FALSE(transfer->end_block(transfer->describe(EIO)));
  CHECK_FALSE(lane.take_block(64 * kKiB).has_value());
  CHECK(transfer->end_block(transfer->describe(ENOSPC)));
  CHECK_FALSE(transfer->done());
  transfer->finish();
  CHECK(transfer->state() == TransferState::kFailed);
  CHECK(transfer->unseen_failure()->error_number == EIO);
  for (int i = 0; i < 2; ++i) CHECK(failure_of([&] { transfer->wait(); })->error_number == EIO);
  CHECK_FALSE(transfer->unseen_failure().has_value());
}

TEST_CASE("wait_for gives up in time, and times are in order") {
  FakeMachine machine;
  Request request = machine.request(Operation::kRead, 0, 0, 4096);
  auto transfer = std::make_shared<Transfer>(request, "none");
  CHECK_FALSE(transfer->wait_for(std::chrono::milliseconds(1)));
  CHECK(transfer->times().queued > 0.0);
  CHECK(transfer->times().submitted == 0.0);
  auto block = Lane(transfer, request.volume, request.slab, 0).take_block(4096);
  CHECK(transfer->end_block(std::nullopt));
  CHECK(transfer->times().done == 0.0);
  transfer->finish();
  TransferTimes times = transfer->times();
  CHECK(times.queued <= times.submitted);
  CHECK(times.submitted <= times.done);
}

}  // namespace infinity::aio::testing
