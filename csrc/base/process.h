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
// A child made by fork() (as a DataLoader's worker) has a copy of every object, but only the forking thread, and no
// slab: no page in flight is ever copied on write. Its copies of locks may be held and of condition variables waited on
// by missing threads, and another mapping may take the slab's addresses. So the child must not lock, join, unmap or
// destroy anything here: owners leak it, and calls that need it throw. The leak ends with the child.
//
// [Note: descriptors and fork]
// The space of an unlinked file, an flock, and the files and memory registered with a ring last as long as any
// descriptor of the file. A child with copies would keep all of that after its parent was killed. So before fork()
// returns in the child, it gives up descriptors opened by open_kept_from_children(). Each number then belongs to an
// unusable descriptor, so that no file of the child gets it, which the leaked object would take for its own.
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

// For a thread with little work for which a drive waits: from Linux 6.12 on, a thread with short turns runs sooner
// among computing threads, for the same total time. Does nothing on older kernels, or if it is forbidden.
void take_short_turns();

// CLOCK_MONOTONIC in seconds: the clock of Python's time.monotonic().
double monotonic_seconds();

}  // namespace infinity
