// Checksums: what every page of a file must hold. In memory with the open file: its writes set them, its reads ask.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/crc32c.h"

namespace infinity::aio {

// [Note: integrity]
// A ring sums the pages of a block when it submits the write, and compares them when the read has ended. A caller that
// passes over the bytes anyway may do both instead (Request::sums_by_caller). Every page that a read delivers is one
// of:
//   - written by us: it has the bytes of its last write, or the read fails;
//   - never written, in a file that we made: it is zero, or the read fails;
//   - never written, in a file opened read-only: it has the bytes of its first read, or the read fails;
//   - unknown and not verified: never written, in another existing file; or its last write failed.
//
// The sums are not on the drive. So this detects lost and misplaced writes, old and misplaced pages, truncation, and
// writes by other processes. It can't detect bytes that were wrong in memory before the write was submitted or after
// the read was verified, nor changes that keep the CRC-32C: one in 2^32 by chance, but none of up to 3 bits, of an odd
// number of bits, or within 32 bits in a row.
//
// A read of pages that are being written may fail. Any thread may call. All offsets and lengths are whole pages.
class Checksums {
 public:
  // What pages hold that were never written here.
  enum class Unwritten {
    kZeros,
    kUnknown,
    kFirstRead,  // what their first read finds
  };
  explicit Checksums(Unwritten unwritten);

  // Says that the pages at `offset` hold these bytes from now on.
  void set_from(const std::byte* bytes, int64_t offset, int64_t length);

  // Marks them as unknown.
  void forget(int64_t offset, int64_t length);

  struct Mismatch {
    int64_t offset = 0;  // of the page, in the file
    PageSum expected = 0;
    PageSum actual = 0;
    Unwritten unwritten = Unwritten::kUnknown;

    // The reason of a failure, with the next move.
    std::string in_words() const;
  };

  // The first page whose bytes are not what it must hold, or none. Of Unwritten::kFirstRead, it keeps the sums of pages
  // that it sees first.
  std::optional<Mismatch> first_wrong(const std::byte* bytes, int64_t offset, int64_t length);

  // The sums themselves, `count` pages from `offset` on.
  void get(int64_t offset, size_t count, PageSum* sums) const;
  void set(int64_t offset, size_t count, const PageSum* sums);

 private:
  // The sums of 64 MiB of the file; made when one of them is set first.
  static constexpr size_t kChunkPages = 16384;
  using Chunk = std::array<std::atomic<PageSum>, kChunkPages>;

  // The chunk with a page of this number; null where it was not made.
  Chunk* find(size_t page) const;
  Chunk& make(size_t page);

  const Unwritten unwritten_;
  const PageSum never_written_;
  mutable std::mutex mutex_;  // of chunks_; the sums in them are read and set without it
  std::unordered_map<size_t, std::unique_ptr<Chunk>> chunks_;
};

}  // namespace infinity::aio
