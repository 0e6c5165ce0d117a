// File and StripedFile: the handles that a caller opens and closes. A transfer takes the volume behind one.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "aio/volume.h"
#include "base/process.h"

namespace infinity::aio {

struct FileOptions {
  bool create = false;  // make the file, mode 0600, and fail if it exists; otherwise it must exist
  int drive = 0;        // the number, from 0, of the rings that shall serve it; files on one drive share a number
  bool fine_alignment =
      false;               // take transfers aligned as finely as the drive does, where it says so, not only at 4096
  bool read_only = false;  // for files that one may not write
  // Lock the file for this descriptor (flock); never follow a link. The lock lasts until the last transfer has ended,
  // even after the process was killed: its next holder knows that no write is in flight.
  bool exclusive = false;
  bool checksums = false;  // sum what is written, verify what is read; transfers then move whole pages
};

// A file for transfers. Opened O_DIRECT; buffered, with a note, where the file system refuses that. Calls may come from
// any thread. Every failing call throws IoFailure, a call after close() throws std::invalid_argument, and one in a
// forked child std::runtime_error.
class File {
 public:
  explicit File(const std::string& path, const FileOptions& options = {});

  // Makes room for at least `bytes` on the drive, so that no later write can run out of space.
  void reserve(int64_t bytes);

  // Waits until the data of finished writes is on the drive (fdatasync).
  void sync();

  // Lets go of the descriptor; transfers in flight keep it open until they end. May be called again.
  void close();

  int64_t size_bytes() const;
  const std::string& path() const noexcept { return path_; }
  bool direct() const noexcept { return direct_; }
  int64_t alignment() const { return descriptor()->alignment(); }
  std::vector<std::string> notes() const;

  // The open file, to be shared by a transfer; as it is, and as a volume of its own.
  std::shared_ptr<const Descriptor> descriptor() const { return volume()->file(0); }
  std::shared_ptr<const Volume> volume() const;

 private:
  void note(std::string line);

  const std::string path_;
  bool direct_ = false;
  ForkGuard guard_;
  mutable std::mutex mutex_;  // of all below
  std::shared_ptr<const Volume> volume_;
  std::vector<std::string> notes_;
};

// Files on several drives as one. Calls may come from any thread.
class StripedFile {
 public:
  // As for Volume. The files stay their owner's, too.
  StripedFile(std::vector<std::shared_ptr<File>> files, const std::vector<int>& pattern, int64_t stripe_bytes);

  // Makes room for at least `bytes` logical bytes: each file reserves its share.
  void reserve(int64_t bytes);
  void sync();
  void close();

  // The files' paths, joined by commas.
  const std::string& path() const noexcept { return path_; }
  std::vector<std::string> notes() const;

  // Throws std::invalid_argument after close().
  std::shared_ptr<const Volume> volume() const;

 private:
  const std::vector<std::shared_ptr<File>> files_;
  const int64_t stripe_bytes_;
  std::string path_;
  mutable std::mutex mutex_;  // of volume_
  std::shared_ptr<const Volume> volume_;
};

// What the kernel wants of a direct transfer (bytes); both 0 where the file takes none.
struct DirectAlignment {
  int64_t memory = 0;
  int64_t offset = 0;  // and length
};

// The alignment for the regular file at `path`, or nothing where the kernel (before Linux 6.1), the file system or this
// build can't say. Throws IoFailure.
std::optional<DirectAlignment> direct_alignment(const std::string& path);

}  // namespace infinity::aio
