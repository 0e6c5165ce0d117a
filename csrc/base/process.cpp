// Threads, clock and fork.
#include "base/process.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <vector>

namespace infinity {
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

// The descriptors that no child gets. Locked while they are opened and closed and while a child is made, so that none
// is ever copied that is not listed. Never destroyed: a thread may close files while the process ends.
class KeptFromChildren {
 public:
  static KeptFromChildren& here() {
    static auto* const made = new KeptFromChildren;
    return *made;
  }

  std::mutex mutex;
  std::vector<int> descriptors;

 private:
  KeptFromChildren() {
    int status = pthread_atfork([] { here().mutex.lock(); }, [] { here().mutex.unlock(); }, [] { here().give_up(); });
    if (status != 0) throw std::system_error(status, std::generic_category(), "pthread_atfork");
  }

  // In the child, by its only thread. Only what POSIX allows there: what other threads held stays locked.
  void give_up() {
    for (int fd : descriptors) {
      int inert = open("/", O_PATH | O_CLOEXEC);
      if (inert < 0) {  // no descriptor is free, or no folder is there
        ::close(fd);
      } else if (inert != fd) {
        dup3(inert, fd, O_CLOEXEC);
        ::close(inert);
      }
    }
    descriptors.clear();
    mutex.unlock();
  }
};

}  // namespace

int open_kept_from_children(const std::function<int()>& open) {
  auto& kept = KeptFromChildren::here();
  std::lock_guard<std::mutex> lock(kept.mutex);
  kept.descriptors.reserve(kept.descriptors.size() + 1);
  int fd = open();
  if (fd >= 0) kept.descriptors.push_back(fd);
  return fd;
}

void close_kept_from_children(int fd, const std::function<void()>& close) {
  auto& kept = KeptFromChildren::here();
  std::lock_guard<std::mutex> lock(kept.mutex);
  auto place = std::find(kept.descriptors.begin(), kept.descriptors.end(), fd);
  if (place != kept.descriptors.end()) kept.descriptors.erase(place);
  close();
}

void ForkGuard::check(const char* what) const {
  if (in_child()) {
    throw std::runtime_error(std::string(what) +
                             " belongs to the process that made it and can't be used in a forked child: make a new one "
                             "there, or start the child with spawn");
  }
}

void Gate::wait() noexcept {
  while (is_open_.load(std::memory_order_acquire) == 0) {
    syscall(SYS_futex, &is_open_, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
  }
}

void Gate::open() noexcept {
  is_open_.store(1, std::memory_order_release);
  syscall(SYS_futex, &is_open_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
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
  if (wanted.policy != 0) return;  // not SCHED_OTHER: chosen on purpose
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

}  // namespace infinity
