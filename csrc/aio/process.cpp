// Threads, clock and fork.
#include "process.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>

#include <cstdint>
#include <stdexcept>

namespace infinity::aio {
namespace {

constexpr uint64_t kTurnNanoseconds = 100'000;

// As the kernel lays it out (sched_setattr(2), version 0): not every C library names it.
struct SchedAttr {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime;
  uint64_t deadline;
  uint64_t period;
};

}  // namespace

void ForkGuard::check(const char* what) const {
  if (in_child()) {
    throw std::runtime_error(std::string(what) +
                             " belongs to the process that made it and can't be used in a forked child: make a new one "
                             "there, or start the child with spawn");
  }
}

std::thread start_io_thread(const std::string& name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  struct Restore {
    sigset_t* mask;
    ~Restore() { pthread_sigmask(SIG_SETMASK, mask, nullptr); }
  } restore{&before};
  std::thread thread(std::move(body));
  pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  return thread;
}

void take_short_turns() {
  SchedAttr wanted{};
  wanted.size = sizeof wanted;
  if (syscall(SYS_sched_getattr, 0, &wanted, sizeof wanted, 0) != 0) return;
  if (wanted.policy != 0) return;  // SCHED_OTHER; whoever chose another had a reason
  wanted.size = sizeof wanted;
  wanted.runtime = kTurnNanoseconds;
  wanted.deadline = wanted.period = 0;
  (void)syscall(SYS_sched_setattr, 0, &wanted, 0);
}

double monotonic_seconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace infinity::aio
