// Descriptor: the open file, shared by its handle, by volumes and by the transfers that use it. Volume: where logical
// bytes lie, in one file or in stripes over a file on each of several drives.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "aio/checksums.h"
#include "base/error.h"
#include "base/process.h"

namespace infinity::aio {

// An open file descriptor: closed when the last owner (the File, or the last transfer on it) lets go.
class Descriptor {
 public:
  Descriptor(int fd, std::string path, bool direct, int drive = 0, int64_t alignment = kPageBytes,
             std::unique_ptr<Checksums> checksums = nullptr);
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();

  int fd() const noexcept { return fd_; }
  uint64_t id() const noexcept { return id_; }  // never used twice, unlike the descriptor's number
  const std::string& path() const noexcept { return path_; }
  bool direct() const noexcept { return direct_; }
  int64_t alignment() const noexcept;            // of every transfer (bytes)
  int drive() const noexcept { return drive_; }  // which of the engine's drives it lies on

  // Checksums of its pages, or null: see [Note: integrity] in checksums.h.
  Checksums* checksums() const noexcept { return checksums_.get(); }

  // `body` runs once, on the thread that drops the last reference, just before the descriptor is closed. A backend that
  // lends the file to the kernel (a registered-file table) takes it back there.
  void on_close(std::function<void()> body) const;

 private:
  const int fd_;
  const uint64_t id_;
  const std::string path_;
  const bool direct_;
  const int drive_;
  const int64_t alignment_;
  const std::unique_ptr<Checksums> checksums_;
  ForkGuard guard_;
  mutable std::mutex mutex_;
  mutable std::vector<std::function<void()>> closers_;
};

// [Note: striping]
// Logical bytes are cut into stripes of stripe_bytes. Stripe k lies on member pattern[k % pattern.size()], behind the
// earlier stripes of that member. A member that stands in the pattern twice as often as another holds twice the bytes
// of any long range, so drives of different bandwidth end a transfer together. Every drive has rings of its own: blocks
// that wait for a slow one take no place of the others.
class Volume {
 public:
  // The whole of one file.
  explicit Volume(std::shared_ptr<const Descriptor> file);

  // Throws std::invalid_argument when the pattern names a member that isn't there or leaves one out, or when
  // stripe_bytes isn't a multiple of 4096.
  Volume(std::vector<std::shared_ptr<const Descriptor>> files, std::vector<int> pattern, int64_t stripe_bytes);

  // Bytes that lie one behind the other in one file and in the volume.
  struct Piece {
    int64_t at = 0;      // in the volume
    int64_t offset = 0;  // in the file
    int64_t length = 0;
  };

  // Of the logical bytes [begin, end): the first piece that lies on `member`, or none.
  std::optional<Piece> first_on(int member, int64_t begin, int64_t end) const;

  // How many of the logical bytes [begin, end) lie on `member`.
  int64_t bytes_on(int member, int64_t begin, int64_t end) const;

  // What the pages of the logical bytes [begin, begin + length) must hold, in their order: to be stored with a file
  // that outlives this process, and given to its descriptors in the next one. Both throw std::invalid_argument where a
  // file keeps no checksums, or the numbers aren't whole pages.
  std::vector<PageSum> checksums(int64_t begin, int64_t length) const;
  void set_checksums(int64_t begin, const std::vector<PageSum>& sums) const;

  // The failure of a read that has put the logical bytes [begin, begin + length) at `bytes`, where a page of them isn't
  // what it must hold. Throws as the two above.
  std::optional<Failure> first_wrong(const std::byte* bytes, int64_t begin, int64_t length,
                                     const std::string& backend) const;

  // Whether all its files keep checksums.
  bool checked() const;

  int members() const noexcept { return static_cast<int>(files_.size()); }
  const std::shared_ptr<const Descriptor>& file(int member) const { return files_[static_cast<size_t>(member)]; }
  bool striped() const noexcept { return files_.size() > 1; }
  int64_t alignment() const noexcept { return alignment_; }  // of memory, offsets and lengths: what all files want

  // The file's path; of several, joined by commas.
  std::string path() const;

 private:
  // Calls `body` with the file of each piece of the range, the piece's offset in the file, and its pages.
  template <typename Body>
  void for_each_piece(int64_t begin, int64_t length, Body body) const;

  const std::vector<std::shared_ptr<const Descriptor>> files_;
  const std::vector<int> pattern_;  // empty for one file
  const int64_t stripe_bytes_;
  int64_t alignment_ = 1;
  std::vector<int64_t> rank_;                // of each slot of the pattern: how many before it are on the same member
  std::vector<int64_t> stripes_per_cycle_;   // of each member
  std::vector<std::vector<int64_t>> skips_;  // of each member and slot: stripes to its next one, from 0
};

}  // namespace infinity::aio
