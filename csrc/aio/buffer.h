// PinnedSlab: the one piece of host memory that transfers read into and write from.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/process.h"

namespace infinity::aio {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// [Note: Present later]
// The kernel needs 0.1 s for a GiB, and 2 s if a virtual machine gets it from its host first. So a slab can be used as
// soon as it is mapped: a separate thread makes the pages present in order, and the first use of a page makes it
// present, too. The thread adds 0 atomically to a byte of each page, which may already hold data. MADV_POPULATE_WRITE
// would hold the lock of the address space, and block every other mmap. The rings register the slab when all of it is
// present, because registering makes pages present, too.

// Anonymous memory, 2 MiB aligned, in huge pages if available, not inherited by forked children (see [Note: fork]).
// Refused optional requests are in notes(). Any thread may use it.
class PinnedSlab {
 public:
  // All of it is present from the start, or in a while: see [Note: Present later]. Throws OutOfMemory when the memory
  // isn't there, std::invalid_argument when `bytes` isn't positive.
  explicit PinnedSlab(int64_t bytes, bool huge_pages = true, bool lock = false, bool in_background = false);

  // A slab around memory that its owner keeps until every transfer with it is done; it is used as it is. Throws
  // std::invalid_argument when `data` isn't on a page boundary or `bytes` isn't positive.
  static std::shared_ptr<PinnedSlab> around(std::byte* data, int64_t bytes);
  PinnedSlab(const PinnedSlab&) = delete;
  PinnedSlab& operator=(const PinnedSlab&) = delete;
  ~PinnedSlab();

  std::byte* data() const noexcept { return data_; }
  int64_t bytes() const noexcept { return bytes_; }
  // Gives the pages of [offset, offset + bytes) back to the kernel; their bytes are lost. Until fill_again() has made
  // all pages present, is_present() is false. No ring may have the slab registered, and no transfer may use it. Throws
  // std::invalid_argument for bounds and alignment, std::runtime_error if the kernel refuses.
  void release(int64_t offset, int64_t bytes);
  // After release(): all pages become present in a while, as at the start.
  void fill_again();
  // Whether all pages are present, and what follows is known. It stays so until release().
  bool is_present() const noexcept { return present_.load(std::memory_order_acquire); }
  void wait_until_present() const;
  bool huge_pages() const noexcept {
    return is_present() && huge_pages_;
  }  // some of it was huge when it became present
  // Where the part begins that is too short for a huge page.
  int64_t tail() const noexcept { return bytes_ / kHugePageBytes * kHugePageBytes; }
  // Whether there are small pages before tail() now, though not small pages alone.
  bool mixed() const;
  bool locked() const noexcept { return is_present() && locked_; }
  std::vector<std::string> notes() const;
  const ForkGuard& guard() const noexcept { return guard_; }

 private:
  PinnedSlab(std::byte* data, int64_t bytes);

  void map();
  bool advise_huge();
  void start_filler();
  void fill();
  void populate();
  void finish();
  void measure_huge();
  void lock();

  const int64_t bytes_;
  const int64_t mapped_bytes_;  // bytes_ rounded up to whole pages; 0 where the memory is someone else's
  std::byte* data_ = nullptr;
  std::atomic<bool> present_{false};  // set last: who sees it may read what follows
  const bool wants_lock_ = false;
  bool asked_for_huge_ = false;
  bool huge_pages_ = false;
  bool locked_ = false;
  std::vector<std::string> notes_;        // of the mapping
  std::vector<std::string> later_notes_;  // of the pages
  std::atomic<bool> stopping_{false};
  std::unique_ptr<std::thread> filler_;
  ForkGuard guard_;
};

// Bytes of this process's slabs that are still to become present: what the kernel calls available holds them, too.
int64_t absent_bytes();

}  // namespace infinity::aio
