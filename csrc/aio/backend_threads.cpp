// The backend for places that refuse io_uring, such as containers under their default seccomp profile: a few worker
// threads in pread and pwrite, which every kernel and sandbox knows.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "aio/backend.h"
#include "base/process.h"

namespace infinity::aio {
namespace {

// Beyond this many, drives gain nothing and the scheduler loses.
constexpr int kWorkersMax = 16;

int64_t run_block(const Block& block) {
  auto length = static_cast<size_t>(block.length);
  ssize_t moved = block.operation == Operation::kRead ? pread(block.file->fd(), block.address, length, block.offset)
                                                      : pwrite(block.file->fd(), block.address, length, block.offset);
  return moved >= 0 ? moved : -errno;
}

class ThreadsBackend final : public Backend {
 public:
  explicit ThreadsBackend(const BackendOptions& options) {
    int wanted = std::min(options.queue_depth, kWorkersMax);
    workers_.reserve(static_cast<size_t>(wanted));
    finished_.reserve(static_cast<size_t>(wanted));
    try {
      for (int i = 0; i < wanted; ++i) {
        workers_.push_back(start_io_thread("inf-io" + std::to_string(i), [this] { work(); }));
      }
    } catch (const std::system_error& error) {
      if (workers_.empty())
        throw IoFailure({error.code().value(), "setup", {}, 0, 0, kThreadsName, "no thread to be had"});
      options.note("only " + std::to_string(workers_.size()) + " of " + std::to_string(wanted) +
                   " I/O threads could be started (" + error.what() + "): raise the limit on processes (ulimit -u)");
    }
  }

  ~ThreadsBackend() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    work_there_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int depth() const override { return static_cast<int>(workers_.size()); }

  void submit(const std::vector<Block*>& blocks) override {
    if (blocks.empty()) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting_.insert(waiting_.end(), blocks.begin(), blocks.end());
    }
    if (blocks.size() == 1) {
      work_there_.notify_one();
    } else {
      work_there_.notify_all();
    }
  }

  void reap(std::vector<Completion>* completions) override {
    std::unique_lock<std::mutex> lock(mutex_);
    news_.wait(lock, [this] { return woken_ || !finished_.empty(); });
    woken_ = false;
    completions->insert(completions->end(), finished_.begin(), finished_.end());
    finished_.clear();
  }

  void wake() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    news_.notify_one();
  }

 private:
  // One worker. It leaves only when told to and nothing waits; by then the engine has reaped everything anyway.
  void work() {
    take_short_turns();
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      work_there_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      Block* block = waiting_.front();
      waiting_.pop_front();
      uint32_t tag = block->tag;
      lock.unlock();
      int64_t result = run_block(*block);
      lock.lock();
      finished_.push_back({tag, result});
      news_.notify_one();
    }
  }

  std::mutex mutex_;  // of everything below but workers_
  std::condition_variable work_there_;
  std::condition_variable news_;
  std::deque<Block*> waiting_;
  std::vector<Completion> finished_;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace

BackendProbe probe_threads() {
  return {kThreadsName, true, "pread and pwrite on up to " + std::to_string(kWorkersMax) + " threads a ring"};
}

std::unique_ptr<Backend> make_threads_backend(const BackendOptions& options) {
  return std::make_unique<ThreadsBackend>(options);
}

}  // namespace infinity::aio
