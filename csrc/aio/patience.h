// Patience: how often the kernel is asked again that is short of something, and how long each time is waited for it.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>

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

}  // namespace infinity::aio
