// What a thread and a forked child may touch. Used by all that owns memory, a lock or a thread.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace infinity {

// [Note: fork]
// A child made by fork() (a DataLoader worker, say) has a copy of every object but only the forking thread, and no
// slab: the slab is kept out of the child so that no page in flight is ever copied on write. Locks may have been copied
// while somebody held them, condition variables while somebody waited on them, and another mapping may take the slab's
// addresses. So nothing here may be locked, joined, unmapped or destroyed in the child: owners leave it behind, and the
// calls that would need it say so. The leak ends with the child.
//
// [Note: descriptors and fork]
// What the kernel ties to an open file lives as long as any descriptor of it: the space of a file without a name, an
// flock, the files and the memory that are registered with a ring. A child that kept its copies would hold all of that
// after its parent was killed. So a descriptor that is opened by open_kept_from_children() is given up in the child
// before fork() returns there. At its number lies then one that can't be read, written or locked, so that the number is
// not given to a file of the child, which the object left behind would take for its own.
class ForkGuard {
 public:
  bool in_child() const noexcept { return getpid() != pid_; }

  // Throws std::runtime_error naming `what` when called in a forked child.
  void check(const char* what) const;

 private:
  pid_t pid_ = getpid();
};

// Closed until it is opened, which happens once. Those who wait at it wake without a lock that each of them would take.
class Gate {
 public:
  void wait() noexcept;
  void open() noexcept;

 private:
  std::atomic<uint32_t> is_open_{0};
};

// Calls `open`, which gives a descriptor, or something below 0, and returns what it gives. No child ever has the
// descriptor; see [Note: descriptors and fork]. Nothing that is called here may fork.
int open_kept_from_children(const std::function<int()>& open);

// Calls `close`, which closes such a descriptor, in whichever process.
void close_kept_from_children(int fd, const std::function<void()>& close);

// Sole owner of a T that is destroyed only by the process that made it.
template <typename T>
class OwnedByProcess {
 public:
  explicit OwnedByProcess(std::unique_ptr<T> value) : value_(std::move(value)) {}
  OwnedByProcess(const OwnedByProcess&) = delete;
  OwnedByProcess& operator=(const OwnedByProcess&) = delete;
  ~OwnedByProcess() {
    if (guard_.in_child()) (void)value_.release();
  }

  T* operator->() const noexcept { return value_.get(); }
  T& operator*() const noexcept { return *value_; }
  const ForkGuard& guard() const noexcept { return guard_; }

 private:
  std::unique_ptr<T> value_;
  ForkGuard guard_;
};

// Starts a thread with every signal blocked, so that Ctrl-C always reaches the application's own threads. The name (at
// most 15 characters) shows in top -H and in debuggers. Throws std::system_error if the system has no thread to give.
std::thread start_io_thread(const std::string& name, std::function<void()> body);

// For a thread that has little to do and that a drive waits for: from Linux 6.12 on, one that takes short turns gets
// them sooner beside threads that compute, though no more time in all. Older kernels ignore what is asked for, and
// where it is forbidden nothing is lost.
void take_short_turns();

// CLOCK_MONOTONIC in seconds: the clock of Python's time.monotonic().
double monotonic_seconds();

}  // namespace infinity
