// Waking threads, counting them, and waiting for the last.
#include "base/thread_pool.h"

#include <algorithm>
#include <string>
#include <system_error>

#include "base/openmp.h"

namespace infinity {

// Never destroyed: its threads wait on it until the process ends. In a forked child there are no threads, and its locks
// may have been held; see [Note: fork] in process.h.
ThreadPool& ThreadPool::here() {
  static std::atomic<ThreadPool*> current{nullptr};
  ThreadPool* pool = current.load(std::memory_order_acquire);
  while (pool == nullptr || pool->guard_.in_child()) {
    auto* made = new ThreadPool;
    if (current.compare_exchange_strong(pool, made, std::memory_order_acq_rel)) return *made;
    delete made;
  }
  return *pool;
}

void ThreadPool::run(int threads, int64_t count, const std::function<void(int64_t)>& body) {
  if (count <= 1 || threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::lock_guard<std::mutex> turn(turn_);
  if (Parallel parallel = openmp_parallel()) {  // [Note: One team]
    set_job(count, body);
    parallel([](void* pool) { static_cast<ThreadPool*>(pool)->take_part(); }, this, static_cast<unsigned>(threads), 0);
    if (failure_) std::rethrow_exception(failure_);
    return;
  }
  int helpers = static_cast<int>(std::min<int64_t>(threads, count)) - 1;
  start_threads(helpers);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    set_job(count, body);
    helpers_ = working_ = std::min<int>(helpers, static_cast<int>(threads_.size()));
    ++job_;
  }
  wake_.notify_all();
  take_part();
  std::unique_lock<std::mutex> lock(mutex_);
  finished_.wait(lock, [this] { return working_ == 0; });
  if (failure_) std::rethrow_exception(failure_);
}

void ThreadPool::set_job(int64_t count, const std::function<void(int64_t)>& body) {
  body_ = &body;
  count_ = count;
  next_.store(0, std::memory_order_relaxed);
  failure_ = nullptr;
}

// As many as the system gives: with fewer, the others do more.
void ThreadPool::start_threads(int wanted) {
  while (static_cast<int>(threads_.size()) < wanted) {
    int number = static_cast<int>(threads_.size());
    try {
      threads_.push_back(
          start_io_thread("inf-update-" + std::to_string(number), [this, number] { wait_for_jobs(number); }));
    } catch (const std::system_error&) {
      return;
    }
  }
}

void ThreadPool::wait_for_jobs(int number) {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this, &seen] { return job_ != seen; });
    seen = job_;
    if (number >= helpers_) continue;
    lock.unlock();
    take_part();
    lock.lock();
    if (--working_ == 0) finished_.notify_one();
  }
}

void ThreadPool::take_part() {
  try {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) (*body_)(i);
  } catch (...) {
    next_.store(count_, std::memory_order_relaxed);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

}  // namespace infinity
