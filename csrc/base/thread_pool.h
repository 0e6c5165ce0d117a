// The threads that share a job with the thread that brought it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/process.h"

namespace infinity {

// One job at a time; those who come meanwhile wait. Threads are started when they are first needed, and wait for the
// next job until the process ends.
class ThreadPool {
 public:
  // The pool of this process; a forked child gets one of its own.
  static ThreadPool& here();

  // Calls `body(i)` once for every i in [0, count), on up to `threads` threads, the caller among them. Returns when all
  // calls have; rethrows what the first of them to fail threw, after which no further ones are started.
  void run(int threads, int64_t count, const std::function<void(int64_t)>& body);

 private:
  void set_job(int64_t count, const std::function<void(int64_t)>& body);
  void start_threads(int wanted);
  void wait_for_jobs(int number);
  void take_part();

  ForkGuard guard_;
  std::mutex turn_;  // held throughout a job
  std::vector<std::thread> threads_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::condition_variable finished_;
  uint64_t job_ = 0;  // its number
  int helpers_ = 0;   // threads that take part, besides the caller
  int working_ = 0;   // of those, how many have not finished
  std::exception_ptr failure_;

  const std::function<void(int64_t)>* body_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
};

}  // namespace infinity
