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
// A ring sums the pages of a block when it submits the write, and holds the pages of a block against their sums when
// the read has ended; or whoever asked for the transfer does both, on a pass that it makes over the bytes anyway
// (Request::sums_by_caller). So every page that a read delivers is one of these:
//   - written by us: it holds what was written last, or the read fails;
//   - never written, in a file that we made: it reads as zero, or the read fails;
//   - never written, in a file opened to be read only: it holds what its first read found, or the read fails;
//   - unknown, and delivered as it is: never written, in any other file that was there; or its last write has failed,
//     which the writer was told.
// A drive that loses a write, puts it elsewhere, gives back an older page or one of another place, and a file that was
// truncated or written by somebody else, are all found this way, since the sums don't lie on the drive. What is not
// found: bytes that were wrong in memory before the write was submitted or after the read was verified, and a change of
// a page that leaves its CRC-32C as it was: by chance one in 2^32, and never one of up to 3 bits, of an odd number of
// bits, or within 32 bits in a row.
//
// A read of pages that are being written may fail: who reads waits for the write first.
//
// Calls may come from any thread. All offsets and lengths are whole pages.
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

  // Says that nobody knows what they hold.
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
