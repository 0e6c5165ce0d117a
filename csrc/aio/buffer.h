// PinnedSlab: the one piece of host memory that transfers read into and write from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/process.h"

namespace infinity::aio {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// Page-aligned anonymous memory, all of it present from the start: 2 MiB aligned, in huge pages where the kernel gives
// them, not inherited by forked children (see [Note: fork]). What is optional and was refused stands in notes().
// Immutable once made (the bytes are the caller's), so any thread may use it.
class PinnedSlab {
 public:
  // Throws OutOfMemory when the memory isn't there, std::invalid_argument when `bytes` isn't positive.
  explicit PinnedSlab(int64_t bytes, bool huge_pages = true, bool lock = false);

  // A slab around memory of someone else, who keeps it until every transfer with it is done. Nothing is asked of the
  // kernel for it. Throws std::invalid_argument when `data` isn't on a page boundary or `bytes` isn't positive.
  static std::shared_ptr<PinnedSlab> around(std::byte* data, int64_t bytes);
  PinnedSlab(const PinnedSlab&) = delete;
  PinnedSlab& operator=(const PinnedSlab&) = delete;
  ~PinnedSlab();

  std::byte* data() const noexcept { return data_; }
  int64_t bytes() const noexcept { return bytes_; }
  bool huge_pages() const noexcept { return huge_pages_; }  // some of it was huge when it was made
  // Where the part begins that is too short for a huge page.
  int64_t tail() const noexcept { return bytes_ / kHugePageBytes * kHugePageBytes; }
  // Whether there are small pages before tail() now, though not small pages alone.
  bool mixed() const;
  bool locked() const noexcept { return locked_; }
  const std::vector<std::string>& notes() const noexcept { return notes_; }
  const ForkGuard& guard() const noexcept { return guard_; }

 private:
  PinnedSlab(std::byte* data, int64_t bytes);

  void map();
  bool advise_huge();
  void populate();
  void measure_huge();
  void lock();

  const int64_t bytes_;
  const int64_t mapped_bytes_;  // bytes_ rounded up to whole pages; 0 where the memory is someone else's
  std::byte* data_ = nullptr;
  bool huge_pages_ = false;
  bool locked_ = false;
  std::vector<std::string> notes_;
  ForkGuard guard_;
};

}  // namespace infinity::aio
