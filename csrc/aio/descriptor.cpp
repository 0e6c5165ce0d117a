// Closing what the last owner lets go.
#include "aio/descriptor.h"

#include <unistd.h>

#include <atomic>
#include <utility>

namespace infinity::aio {
namespace {

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

Descriptor::Descriptor(int fd, std::string path, bool direct, int drive, int64_t alignment,
                       std::unique_ptr<Checksums> checksums)
    : fd_(fd),
      id_(next_id()),
      path_(std::move(path)),
      direct_(direct),
      drive_(drive),
      alignment_(alignment),
      checksums_(std::move(checksums)) {}

Descriptor::~Descriptor() {
  if (!guard_.in_child()) {
    for (const auto& body : closers_) body();
  }
  close_kept_from_children(fd_, [this] { ::close(fd_); });
}

int64_t Descriptor::alignment() const noexcept {
  if (checksums_ != nullptr) return kPageBytes;
  return direct_ ? alignment_ : 1;
}

void Descriptor::on_close(std::function<void()> body) const {
  std::lock_guard<std::mutex> lock(mutex_);
  closers_.push_back(std::move(body));
}

}  // namespace infinity::aio
