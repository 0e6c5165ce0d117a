// Mapping, huge pages, prefaulting and locking of the slab.
#include "aio/buffer.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "base/crc32c.h"
#include "base/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace infinity::aio {
namespace {

std::atomic<int64_t> absent{0};

int64_t round_up(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Checked, so that rounding can't overflow: no machine has this much.
int64_t checked_bytes(int64_t bytes) {
  if (bytes <= 0) throw std::invalid_argument("a slab needs a positive number of bytes, got " + std::to_string(bytes));
  if (bytes > int64_t{1} << 56) throw OutOfMemory("no memory for a slab of " + format_bytes(bytes));
  return bytes;
}

// What the kernel could give now without swapping, or -1 where it doesn't say.
int64_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string line;
  while (std::getline(meminfo, line)) {
    int64_t kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %" SCNd64 " kB", &kib) == 1) return kib * 1024;
  }
  return -1;
}

// Bytes of huge pages behind [begin, end), or -1 where the kernel doesn't say. A neighbour that the kernel has merged
// into a mapping is counted with it, hence the bound on each.
int64_t huge_bytes_behind(uintptr_t begin, uintptr_t end) {
  std::ifstream smaps("/proc/self/smaps");
  if (!smaps) return -1;
  int64_t total = 0;
  int64_t inside = 0;  // bytes of this mapping in [begin, end)
  std::string line;
  while (std::getline(smaps, line)) {
    uintptr_t from = 0;
    uintptr_t to = 0;
    int64_t kib = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2) {
      inside = from < end && to > begin ? static_cast<int64_t>(std::min(to, end) - std::max(from, begin)) : 0;
    } else if (inside > 0 && std::sscanf(line.c_str(), "AnonHugePages: %" SCNd64 " kB", &kib) == 1) {
      total += std::min(kib * 1024, inside);
    }
  }
  return total;
}

std::string memlock_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : format_bytes(static_cast<int64_t>(limit.rlim_cur));
}

// Makes a page present and leaves its bytes as they are, also where others write to them meanwhile. `nothing` is 0,
// which the compiler must not see: it would only read.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread")))
#endif
void touch(std::byte* page, unsigned char nothing) {
  __atomic_fetch_or(reinterpret_cast<unsigned char*>(page), nothing, __ATOMIC_RELAXED);
}

}  // namespace

int64_t absent_bytes() {
  return absent.load(std::memory_order_relaxed);
}

PinnedSlab::PinnedSlab(int64_t bytes, bool huge_pages, bool lock, bool in_background)
    : bytes_(checked_bytes(bytes)), mapped_bytes_(round_up(bytes, kPageBytes)), wants_lock_(lock) {
  map();
  try {
    asked_for_huge_ = huge_pages && advise_huge();
    if (in_background) {
      start_filler();
    } else {
      populate();
      finish();
    }
  } catch (...) {
    munmap(data_, static_cast<size_t>(mapped_bytes_));
    throw;
  }
}

PinnedSlab::PinnedSlab(std::byte* data, int64_t bytes)
    : bytes_(checked_bytes(bytes)), mapped_bytes_(0), data_(data), present_(true) {
  if (data == nullptr || reinterpret_cast<uintptr_t>(data) % kPageBytes != 0) {
    throw std::invalid_argument("a slab around other memory must begin on a page boundary");
  }
}

std::shared_ptr<PinnedSlab> PinnedSlab::around(std::byte* data, int64_t bytes) {
  return std::shared_ptr<PinnedSlab>(new PinnedSlab(data, bytes));
}

PinnedSlab::~PinnedSlab() {
  if (guard_.in_child()) {
    (void)filler_.release();
    return;
  }
  stopping_ = true;
  if (filler_ != nullptr) filler_->join();
  if (mapped_bytes_ > 0) munmap(data_, static_cast<size_t>(mapped_bytes_));
}

std::vector<std::string> PinnedSlab::notes() const {
  std::vector<std::string> all = notes_;
  if (is_present()) all.insert(all.end(), later_notes_.begin(), later_notes_.end());
  return all;
}

void PinnedSlab::release(int64_t offset, int64_t bytes) {
  guard_.check("a slab");
  if (offset < 0 || bytes <= 0 || bytes > mapped_bytes_ - offset || offset % kPageBytes != 0 ||
      bytes % kPageBytes != 0) {
    throw std::invalid_argument("pages of a slab of " + format_bytes(mapped_bytes_) + " can't be released from " +
                                std::to_string(offset) + " on for " + std::to_string(bytes) + " bytes");
  }
  if (filler_ != nullptr) {
    stopping_ = true;
    filler_->join();
    filler_.reset();
    stopping_ = false;
  }
  present_ = false;
  if (std::exchange(locked_, false)) munlock(data_, static_cast<size_t>(mapped_bytes_));
  if (madvise(data_ + offset, static_cast<size_t>(bytes), MADV_DONTNEED) != 0) {
    throw std::runtime_error("pages of the slab can't be released: madvise gave " + format_errno(errno));
  }
}

void PinnedSlab::fill_again() {
  guard_.check("a slab");
  if (is_present() || filler_ != nullptr) return;
  later_notes_.clear();
  start_filler();
}

void PinnedSlab::wait_until_present() const {
  while (!is_present()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Maps more than asked for and gives back what isn't in the aligned range.
void PinnedSlab::map() {
  int64_t available = available_bytes();
  if (available >= 0) available = std::max(int64_t{0}, available - absent_bytes());
  if (available >= 0 && mapped_bytes_ > available) {  // prefaulting it would have the kernel kill processes
    throw OutOfMemory("no memory for a slab of " + format_bytes(bytes_) + ": " + format_bytes(available) +
                      " are available; lower the pinned budget");
  }
  size_t wanted = static_cast<size_t>(mapped_bytes_ + kHugePageBytes);
  void* mapping = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) {
    throw OutOfMemory("no memory for a slab of " + format_bytes(bytes_) + ": mmap gave " + format_errno(errno));
  }
  auto* begin = static_cast<std::byte*>(mapping);
  auto address = reinterpret_cast<uintptr_t>(begin);
  size_t head = static_cast<size_t>(-address & (kHugePageBytes - 1));
  size_t tail = wanted - head - static_cast<size_t>(mapped_bytes_);
  data_ = begin + head;
  if (head > 0) munmap(begin, head);
  if (tail > 0) munmap(data_ + mapped_bytes_, tail);
  madvise(data_, static_cast<size_t>(mapped_bytes_), MADV_DONTFORK);
}

bool PinnedSlab::advise_huge() {
  if (mapped_bytes_ < kHugePageBytes) {
    notes_.push_back("the slab of " + format_bytes(bytes_) + " is smaller than a huge page (2 MiB): using small pages");
    return false;
  }
  if (madvise(data_, static_cast<size_t>(mapped_bytes_), MADV_HUGEPAGE) == 0) return true;
  notes_.push_back("huge pages are refused here (madvise gave " + format_errno(errno) +
                   "): using small pages, which costs storage bandwidth");
  return false;
}

void PinnedSlab::start_filler() {
  absent += mapped_bytes_;
  try {
    filler_ = std::make_unique<std::thread>(start_io_thread("inf-fill", [this] {
      fill();
      if (!stopping_) finish();
    }));
  } catch (const std::system_error&) {  // no thread to be had
    absent -= mapped_bytes_;
    populate();
    finish();
  }
}

void PinnedSlab::fill() {
  volatile unsigned char zero = 0;
  unsigned char nothing = zero;
  int64_t begin = 0;
  for (; begin < mapped_bytes_ && !stopping_; begin += kHugePageBytes) {
    int64_t end = std::min(begin + kHugePageBytes, mapped_bytes_);
    for (int64_t at = begin; at < end; at += kPageBytes) touch(data_ + at, nothing);
    absent -= end - begin;
  }
  if (begin < mapped_bytes_) absent -= mapped_bytes_ - begin;
}

// What is known only of memory that is present.
void PinnedSlab::finish() {
  if (asked_for_huge_) measure_huge();
  if (wants_lock_) lock();
  present_.store(true, std::memory_order_release);
}

void PinnedSlab::populate() {
  int status;
  do {
    status = madvise(data_, static_cast<size_t>(mapped_bytes_), MADV_POPULATE_WRITE);
  } while (status != 0 && (errno == EINTR || errno == EAGAIN));
  if (status == 0) return;
  if (errno != EINVAL && errno != ENOSYS) {
    throw OutOfMemory("no memory for a slab of " + format_bytes(bytes_) + ": filling it gave " + format_errno(errno));
  }
  for (int64_t at = 0; at < mapped_bytes_; at += kPageBytes) {  // Linux before 5.14
    *const_cast<volatile std::byte*>(data_ + at) = std::byte{0};
  }
}

void PinnedSlab::measure_huge() {
  auto begin = reinterpret_cast<uintptr_t>(data_);
  int64_t huge = huge_bytes_behind(begin, begin + static_cast<uintptr_t>(mapped_bytes_));
  huge_pages_ = huge != 0;
  int64_t possible = mapped_bytes_ / kHugePageBytes * kHugePageBytes;
  if (huge >= 0 && huge < possible - possible / 10) {
    later_notes_.push_back(
        "only " + format_bytes(huge) + " of the slab's " + format_bytes(bytes_) +
        " are in huge pages, which costs storage bandwidth: check /sys/kernel/mm/transparent_hugepage/"
        "enabled, and that free memory isn't fragmented");
  }
}

bool PinnedSlab::mixed() const {
  if (!huge_pages_) return false;
  auto begin = reinterpret_cast<uintptr_t>(data_);
  int64_t huge = huge_bytes_behind(begin, begin + static_cast<uintptr_t>(mapped_bytes_));
  return huge > 0 && huge < tail();
}

void PinnedSlab::lock() {
  locked_ = mlock(data_, static_cast<size_t>(mapped_bytes_)) == 0;
  if (!locked_) {
    later_notes_.push_back("the slab of " + format_bytes(bytes_) + " can't be locked (mlock gave " +
                           format_errno(errno) + "; the memlock limit is " + memlock_limit() +
                           "): going on unlocked; raise it with ulimit -l or the container's memlock setting");
  }
}

}  // namespace infinity::aio
