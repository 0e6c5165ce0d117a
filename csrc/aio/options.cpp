// The limits of each option.
#include "aio/options.h"

#include <stdexcept>

#include "base/page.h"

namespace infinity::aio {
namespace {

void check_range(const char* name, int value, int high) {
  if (value >= 1 && value <= high) return;
  throw std::invalid_argument(std::string(name) + " must be from 1 to " + std::to_string(high) + ", got " +
                              std::to_string(value));
}

}  // namespace

void EngineOptions::check() const {
  check_range("queue_depth", queue_depth, 4096);
  check_range("rings", rings, 64);
  check_range("drives", drives, 64);
  if (block_bytes < kPageBytes || block_bytes > (int64_t{1} << 30) || block_bytes % kPageBytes != 0) {
    throw std::invalid_argument("block_bytes must be a multiple of 4096 from 4096 to 1073741824, got " +
                                std::to_string(block_bytes));
  }
  if (!limits.empty() && static_cast<int>(limits.size()) != drives) {
    throw std::invalid_argument("limits must be empty or one per drive: " + std::to_string(drives) + ", got " +
                                std::to_string(limits.size()));
  }
  if (faults.has_value()) faults->check();
  if (!(silence_seconds_max >= 0.0 && silence_seconds_max <= 1e6)) {
    throw std::invalid_argument("silence_seconds_max must be from 0 to 1000000, got " +
                                std::to_string(silence_seconds_max));
  }
  if ((iopoll || sqpoll) && backend != "auto" && backend != kUringName) {
    throw std::invalid_argument("iopoll and sqpoll are options of io_uring; the backend is " + backend);
  }
}

}  // namespace infinity::aio
