// What asking the kernel takes: patience where it is short of something, and a bell that wakes a ring asleep in it.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace infinity::aio {

// In a row, then it is a failure: with the pauses in between, after a second.
inline constexpr int kRetriesMax = 100;

inline constexpr std::chrono::microseconds kPauseMax{10'000};

// Whether a kernel that says so may have what it lacks soon.
inline bool is_shortage(int error_number) {
  return error_number == EAGAIN || error_number == EBUSY || error_number == ENOMEM;
}

// Twice as long after each refusal in a row, the first of which is 1.
inline std::chrono::microseconds pause_after(int refusals) {
  return std::min(std::chrono::microseconds(5) * (1 << std::min(refusals, 12)), kPauseMax);
}

// Counts refusals of one thing in a row. It is to be asked for again no sooner than the pause allows, or the count says
// nothing about time.
class Patience {
 public:
  // It was refused; whether it is to be asked for again.
  bool bears_refusal() {
    due_ = std::chrono::steady_clock::now() + pause_after(++refusals_);
    return refusals_ <= kRetriesMax;
  }

  // How long to wait before that.
  std::chrono::microseconds left() const {
    auto left = due_ - std::chrono::steady_clock::now();
    return std::max(std::chrono::ceil<std::chrono::microseconds>(left), std::chrono::microseconds(0));
  }

  void renew() { *this = Patience(); }

 private:
  int refusals_ = 0;
  std::chrono::steady_clock::time_point due_{};
};

// The eventfd by which other threads and closing files reach a ring that sleeps in the kernel. ring() may come from any
// thread, silence() from the one that listens.
class Bell {
 public:
  // Throws IoFailure naming the backend when there is none to be had.
  explicit Bell(const char* backend) : fd_(eventfd(0, EFD_CLOEXEC)) {
    if (fd_ >= 0) return;
    throw IoFailure({errno, "setup", {}, 0, 0, backend, "no eventfd to be had (" + format_errno(errno) + ")"});
  }
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;
  ~Bell() { ::close(fd_); }

  int fd() const noexcept { return fd_; }

  void ring() const {
    uint64_t one = 1;
    while (::write(fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  // Takes back every ring so far; waits for one if there was none.
  void silence() const {
    uint64_t count = 0;
    while (::read(fd_, &count, sizeof count) < 0 && errno == EINTR) {
    }
  }

 private:
  const int fd_;
};

}  // namespace infinity::aio
