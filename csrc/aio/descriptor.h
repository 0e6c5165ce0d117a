// Descriptor: the open file, shared by its handle, by volumes and by the transfers that use it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "aio/checksums.h"
#include "base/page.h"
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

  // What its pages must hold, or null where nobody keeps that: see [Note: integrity] in checksums.h.
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

}  // namespace infinity::aio
