// Bell: the eventfd by which other threads and closing files reach a ring that sleeps in the kernel.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace infinity::aio {

// Closed with its owner. ring() may come from any thread, silence() from the one that listens.
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
