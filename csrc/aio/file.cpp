// Opening, reserving and closing; the transfers themselves are the backends' matter.
#include "aio/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include "aio/checksums.h"
#include "base/error.h"

namespace infinity::aio {
namespace {

[[noreturn]] void fail(const char* operation, const std::string& path, int error_number, int64_t length = 0) {
  throw IoFailure({error_number, operation, path, 0, length, {}, {}});
}

// Calls it again for as long as a signal interrupts it.
template <typename Call>
int uninterrupted(const Call& call) {
  int result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

// What transfers with this file must be aligned to (bytes): 4096 unless the kernel names something finer for memory,
// offset and length alike.
int64_t finest_alignment(int fd) {
#ifdef STATX_DIOALIGN
  struct statx status{};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN) != 0 &&
      status.stx_dio_offset_align > 0) {
    int64_t finest = std::max(status.stx_dio_mem_align, status.stx_dio_offset_align);
    if (kPageBytes % finest == 0) return finest;
  }
#else
  static_cast<void>(fd);
#endif
  return kPageBytes;
}

void lock_alone(int fd, const std::string& path) {
  struct stat status{};
  if (fstat(fd, &status) != 0 || flock(fd, LOCK_EX | LOCK_NB) != 0) fail("lock", path, errno);
  if (!S_ISREG(status.st_mode)) fail("lock", path, EINVAL);
}

}  // namespace

File::File(const std::string& path, const FileOptions& options) : path_(path) {
  if (options.drive < 0) {
    throw std::invalid_argument("drive must not be negative, got " + std::to_string(options.drive));
  }
  int flags = (options.read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC | (options.create ? O_CREAT | O_EXCL : 0) |
              (options.exclusive ? O_NOFOLLOW | O_NONBLOCK : 0);
  auto open_with = [&](int more) {
    return uninterrupted(
        [&] { return open_kept_from_children([&] { return ::open(path.c_str(), flags | more, 0600); }); });
  };
  int fd = open_with(options.read_only ? O_NOATIME : 0);  // a read is to write nothing, not even when it was
  if (fd < 0 && errno == EPERM && options.read_only) fd = open_with(0);  // another user's file
  if (fd < 0) fail("open", path, errno);
  std::shared_ptr<const Descriptor> descriptor;
  try {
    if (options.exclusive) lock_alone(fd, path);
    // Asked for after opening: open(O_CREAT | O_DIRECT) may leave a new file behind when it is refused.
    direct_ = fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_DIRECT) == 0;
    if (!direct_) {
      notes_.push_back("the file system of " + path + " refuses O_DIRECT (" + format_errno(errno) +
                       "): going through the page cache; put the file on ext4 or xfs on a local drive to avoid that");
    }
    int64_t alignment = direct_ && options.fine_alignment ? finest_alignment(fd) : kPageBytes;
    auto unwritten = options.create      ? Checksums::Unwritten::kZeros
                     : options.read_only ? Checksums::Unwritten::kFirstRead
                                         : Checksums::Unwritten::kUnknown;
    auto checksums = options.checksums ? std::make_unique<Checksums>(unwritten) : nullptr;
    descriptor = std::make_shared<const Descriptor>(fd, path, direct_, options.drive, alignment, std::move(checksums));
  } catch (...) {  // it has no owner yet
    close_kept_from_children(fd, [fd] { ::close(fd); });
    throw;
  }
  volume_ = std::make_shared<const Volume>(std::move(descriptor));
}

void File::reserve(int64_t bytes) {
  if (bytes <= 0) throw std::invalid_argument("reserve needs a positive number of bytes, got " + std::to_string(bytes));
  auto file = descriptor();
  int error_number = uninterrupted([&] { return fallocate(file->fd(), 0, 0, bytes); }) == 0 ? 0 : errno;
  if (error_number == EOPNOTSUPP) {
    note("the file system of " + path_ + " can't reserve space (fallocate): a later write may run out of it");
    if (size_bytes() >= bytes) return;
    error_number = ftruncate(file->fd(), bytes) == 0 ? 0 : errno;
  }
  if (error_number != 0) fail("reserve", path_, error_number, bytes);
}

void File::sync() {
  auto file = descriptor();
  if (uninterrupted([&] { return fdatasync(file->fd()); }) != 0) fail("sync", path_, errno);
}

void File::close() {
  std::shared_ptr<const Volume> dropped;  // released after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(volume_);
}

int64_t File::size_bytes() const {
  struct stat status{};
  if (fstat(descriptor()->fd(), &status) != 0) fail("stat", path_, errno);
  return status.st_size;
}

std::vector<std::string> File::notes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return notes_;
}

std::shared_ptr<const Volume> File::volume() const {
  guard_.check("this file");
  std::lock_guard<std::mutex> lock(mutex_);
  if (volume_ == nullptr) throw std::invalid_argument(path_ + " is closed");
  return volume_;
}

void File::note(std::string line) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(notes_.begin(), notes_.end(), line) == notes_.end()) notes_.push_back(std::move(line));
}

StripedFile::StripedFile(std::vector<std::shared_ptr<File>> files, const std::vector<int>& pattern,
                         int64_t stripe_bytes)
    : files_(std::move(files)), stripe_bytes_(stripe_bytes) {
  std::vector<std::shared_ptr<const Descriptor>> descriptors;
  for (const auto& file : files_) descriptors.push_back(file->descriptor());
  volume_ = std::make_shared<const Volume>(std::move(descriptors), pattern, stripe_bytes);
  path_ = volume_->path();
}

void StripedFile::reserve(int64_t bytes) {
  if (bytes <= 0) throw std::invalid_argument("reserve needs a positive number of bytes, got " + std::to_string(bytes));
  auto volume = this->volume();
  int64_t end = (bytes + stripe_bytes_ - 1) / stripe_bytes_ * stripe_bytes_;  // whole stripes: no file ends inside one
  for (int member = 0; member < volume->members(); ++member) {
    int64_t share = volume->bytes_on(member, 0, end);
    if (share > 0) files_[static_cast<size_t>(member)]->reserve(share);
  }
}

void StripedFile::sync() {
  for (const auto& file : files_) file->sync();
}

void StripedFile::close() {
  std::shared_ptr<const Volume> dropped;  // released after the lock
  {
    std::lock_guard<std::mutex> lock(mutex_);
    dropped.swap(volume_);
  }
  for (const auto& file : files_) file->close();
}

std::vector<std::string> StripedFile::notes() const {
  std::vector<std::string> all;
  for (const auto& file : files_) {
    for (std::string& line : file->notes()) all.push_back(std::move(line));
  }
  return all;
}

std::shared_ptr<const Volume> StripedFile::volume() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (volume_ == nullptr) throw std::invalid_argument(path_ + " are closed");
  return volume_;
}

std::optional<DirectAlignment> direct_alignment(const std::string& path) {
#ifdef STATX_DIOALIGN
  struct statx status{};
  if (statx(AT_FDCWD, path.c_str(), 0, STATX_DIOALIGN, &status) == 0) {
    if ((status.stx_mask & STATX_DIOALIGN) == 0) return std::nullopt;
    return DirectAlignment{status.stx_dio_mem_align, status.stx_dio_offset_align};
  }
#else
  struct stat status{};
  if (stat(path.c_str(), &status) == 0) return std::nullopt;
#endif
  if (errno == ENOSYS) return std::nullopt;  // a sandbox without statx
  fail("stat", path, errno);
}

}  // namespace infinity::aio
