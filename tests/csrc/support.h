// What the C++ tests share: temporary files, patterns, and drives that fail by script or at random.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "aio/engine.h"
#include "aio/file.h"
#include "faulty/faults.h"

namespace infinity::aio::testing {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;

// A path that exists for one test at most.
class TemporaryPath {
 public:
  TemporaryPath() {
    static std::atomic<int> last{0};
    const char* folder = std::getenv("INFINITY_TEST_DIR");
    path_ = std::string(folder != nullptr ? folder : "/tmp") + "/aio-" + std::to_string(getpid()) + "-" +
            std::to_string(++last);
  }
  ~TemporaryPath() { ::unlink(path_.c_str()); }

  const std::string& get() const { return path_; }

 private:
  std::string path_;
};

// Number of seeds of a random test: a thousand and more on request.
inline uint64_t campaign_seeds(uint64_t usual) {
  const char* asked = std::getenv("INFINITY_FAULT_SEEDS");
  return asked != nullptr ? std::strtoull(asked, nullptr, 10) : usual;
}

// Byte at `offset` of a file in tests: differs between neighbouring pages and between seeds.
inline std::byte pattern(int64_t offset, int seed) {
  return static_cast<std::byte>((offset + offset / kPageBytes * 7 + seed * 31) & 0xff);
}

inline void fill(const PinnedSlab& slab, int64_t slab_offset, int64_t length, int64_t offset, int seed) {
  for (int64_t i = 0; i < length; ++i) slab.data()[slab_offset + i] = pattern(offset + i, seed);
}

inline bool holds(const PinnedSlab& slab, int64_t slab_offset, int64_t length, int64_t offset, int seed) {
  for (int64_t i = 0; i < length; ++i) {
    if (slab.data()[slab_offset + i] != pattern(offset + i, seed)) return false;
  }
  return true;
}

inline std::vector<std::string> available_backends() {
  std::vector<std::string> names;
  for (const BackendProbe& one : probe_backends()) {
    if (one.available) names.push_back(one.name);
  }
  return names;
}

// The failure that `body` throws.
template <typename Body>
std::optional<Failure> failure_of(Body body) {
  try {
    body();
  } catch (const IoFailure& failure) {
    return failure.failure();
  }
  return std::nullopt;
}

// A drive in memory, shared by the fake backends of one engine. Set its script before the engine starts, or while held.
struct FakeDrive {
  explicit FakeDrive(int64_t size = 8 * kMiB) : bytes(static_cast<size_t>(size)) {}

  // The result of a submission: none moves the block, a positive one moves so many bytes, a negative one is an errno.
  std::function<std::optional<int64_t>(const Block&)> script = [](const Block&) { return std::nullopt; };
  bool reverse = false;     // completions come last first
  int refuse_instance = 0;  // the number of the backend that can't be made, from 1
  bool dies = false;        // reap() throws as soon as it has blocks
  bool dies_sending = false;

  std::mutex mutex;
  std::condition_variable changed;
  bool held = false;  // completions are kept back
  int instances = 0;
  size_t submitted = 0;
  std::vector<std::byte> bytes;
  std::vector<std::pair<int64_t, int64_t>> log;  // offset and length of each submission, in order

  void hold() {
    std::lock_guard<std::mutex> lock(mutex);
    held = true;
  }
  void let_go() {
    std::lock_guard<std::mutex> lock(mutex);
    held = false;
    changed.notify_all();
  }
  void wait_submitted(size_t count) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return submitted >= count; });
  }
};

class FakeBackend final : public Backend {
 public:
  FakeBackend(std::shared_ptr<FakeDrive> drive, const BackendOptions& options)
      : drive_(std::move(drive)), depth_(options.queue_depth) {
    options.note("the fake drive isn't real");
    std::lock_guard<std::mutex> lock(drive_->mutex);
    if (++drive_->instances == drive_->refuse_instance) throw IoFailure({EPERM, "setup", {}, 0, 0, "fake", "no more"});
  }

  int depth() const override { return depth_; }

  void submit(const std::vector<Block*>& blocks) override {
    std::lock_guard<std::mutex> lock(drive_->mutex);
    for (Block* block : blocks) {
      drive_->log.emplace_back(block->offset, block->length);
      pending_.push_back({block->tag, move(*block)});
      ++drive_->submitted;
    }
    drive_->changed.notify_all();
  }

  void send() override {
    if (drive_->dies_sending) throw std::runtime_error("the ring is gone");
  }

  void reap(std::vector<Completion>* completions) override {
    std::unique_lock<std::mutex> lock(drive_->mutex);
    drive_->changed.wait(lock, [this] { return woken_ || (!pending_.empty() && !drive_->held); });
    if (drive_->dies && !pending_.empty()) throw std::runtime_error("the ring is gone");
    woken_ = false;
    if (drive_->held) return;
    if (drive_->reverse) std::reverse(pending_.begin(), pending_.end());
    completions->insert(completions->end(), pending_.begin(), pending_.end());
    pending_.clear();
  }

  void wake() override {
    std::lock_guard<std::mutex> lock(drive_->mutex);
    woken_ = true;
    drive_->changed.notify_all();
  }

 private:
  int64_t move(const Block& block) {
    int64_t result = drive_->script(block).value_or(block.length);
    auto at = static_cast<size_t>(block.offset);
    for (int64_t i = 0; i < result; ++i) {
      std::byte& stored = drive_->bytes[at + static_cast<size_t>(i)];
      (block.operation == Operation::kRead ? block.address[i] : stored) =
          block.operation == Operation::kRead ? stored : block.address[i];
    }
    return result;
  }

  const std::shared_ptr<FakeDrive> drive_;
  const int depth_;
  std::vector<Completion> pending_;
  bool woken_ = false;
};

// An engine on a fake drive, a file of the wanted kind, and a slab.
struct FakeMachine {
  explicit FakeMachine(bool direct = true, int queue_depth = 4, int64_t block_bytes = 64 * kKiB, int rings = 1,
                       int64_t slab_bytes = 4 * kMiB, int64_t drive_bytes = 8 * kMiB)
      : drive(std::make_shared<FakeDrive>(drive_bytes)),
        file(std::make_shared<const Descriptor>(::open("/dev/null", O_RDWR | O_CLOEXEC), "fake.arena", direct)),
        slab(std::make_shared<const PinnedSlab>(slab_bytes)) {
    options.queue_depth = queue_depth;
    options.block_bytes = block_bytes;
    options.rings = rings;
  }

  // Before start(); for good.
  std::shared_ptr<WorseDrives> make_worse(const FaultPlan& plan) {
    auto worse = std::make_shared<WorseDrives>(std::vector<DriveLimit>(), plan);
    aio::make_worse(options, worse);
    return worse;
  }

  Engine& start() {
    engine = std::make_unique<Engine>(options, "fake", [drive = drive](const BackendOptions& backend_options) {
      return std::make_unique<FakeBackend>(drive, backend_options);
    });
    return *engine;
  }

  Request request(Operation operation, int64_t offset, int64_t slab_offset, int64_t length,
                  Priority priority = Priority::kPrefetch) const {
    return {operation, std::make_shared<const Volume>(file), slab, {offset, slab_offset, length}, priority};
  }

  EngineOptions options;
  std::shared_ptr<FakeDrive> drive;
  std::shared_ptr<const Descriptor> file;
  std::shared_ptr<const PinnedSlab> slab;
  std::unique_ptr<Engine> engine;
};

}  // namespace infinity::aio::testing
