// Closing what the last owner lets go, and the arithmetic of stripes.
#include "aio/volume.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <stdexcept>
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

Volume::Volume(std::shared_ptr<const Descriptor> file) : files_{std::move(file)}, stripe_bytes_(0) {
  alignment_ = files_.front()->alignment();
}

Volume::Volume(std::vector<std::shared_ptr<const Descriptor>> files, std::vector<int> pattern, int64_t stripe_bytes)
    : files_(std::move(files)), pattern_(std::move(pattern)), stripe_bytes_(stripe_bytes) {
  if (files_.size() < 2) throw std::invalid_argument("stripes need at least two files");
  if (stripe_bytes_ <= 0 || stripe_bytes_ % kPageBytes != 0) {
    throw std::invalid_argument("stripe_bytes must be a positive multiple of 4096, got " +
                                std::to_string(stripe_bytes_));
  }
  stripes_per_cycle_.assign(files_.size(), 0);
  for (int member : pattern_) {
    if (member < 0 || member >= members()) {
      throw std::invalid_argument("the pattern names file " + std::to_string(member) + " of " +
                                  std::to_string(members()));
    }
    rank_.push_back(stripes_per_cycle_[static_cast<size_t>(member)]++);
  }
  for (int member = 0; member < members(); ++member) {
    if (stripes_per_cycle_[static_cast<size_t>(member)] == 0) {
      throw std::invalid_argument("the pattern leaves out file " + std::to_string(member));
    }
    alignment_ = std::max(alignment_, file(member)->alignment());
    std::vector<int64_t> skips(pattern_.size());
    for (size_t slot = 0; slot < pattern_.size(); ++slot) {
      while (pattern_[(slot + static_cast<size_t>(skips[slot])) % pattern_.size()] != member) ++skips[slot];
    }
    skips_.push_back(std::move(skips));
  }
}

std::optional<Volume::Piece> Volume::first_on(int member, int64_t begin, int64_t end) const {
  if (begin >= end) return std::nullopt;
  if (!striped()) return Piece{begin, begin, end - begin};
  auto slots = static_cast<int64_t>(pattern_.size());
  int64_t stripe = begin / stripe_bytes_;
  int64_t skip = skips_[static_cast<size_t>(member)][static_cast<size_t>(stripe % slots)];
  stripe += skip;
  int64_t at = std::max(begin, stripe * stripe_bytes_);
  if (at >= end) return std::nullopt;
  int64_t in_file = stripe / slots * stripes_per_cycle_[static_cast<size_t>(member)] +
                    rank_[static_cast<size_t>(stripe % slots)];  // this member's stripes before it
  int64_t within = at - stripe * stripe_bytes_;
  return Piece{at, in_file * stripe_bytes_ + within, std::min(end - at, stripe_bytes_ - within)};
}

int64_t Volume::bytes_on(int member, int64_t begin, int64_t end) const {
  int64_t total = 0;
  while (std::optional<Piece> piece = first_on(member, begin, end)) {
    total += piece->length;
    begin = piece->at + piece->length;
  }
  return total;
}

template <typename Body>
void Volume::for_each_piece(int64_t begin, int64_t length, Body body) const {
  if (!checked()) throw std::invalid_argument(path() + ": no checksums are kept of it");
  if (begin < 0 || length < 0 || begin > INT64_MAX - length || begin % kPageBytes != 0 || length % kPageBytes != 0) {
    throw std::invalid_argument("checksums are of whole pages of 4096 bytes, not of " + std::to_string(length) +
                                " bytes at offset " + std::to_string(begin));
  }
  int64_t end = begin + length;
  while (begin < end) {
    for (int member = 0; member < members(); ++member) {
      std::optional<Piece> piece = first_on(member, begin, end);
      if (!piece.has_value() || piece->at != begin) continue;
      body(*file(member), piece->offset, static_cast<size_t>(piece->length / kPageBytes));
      begin += piece->length;
      break;
    }
  }
}

std::vector<PageSum> Volume::checksums(int64_t begin, int64_t length) const {
  std::vector<PageSum> sums;
  for_each_piece(begin, length, [&sums](const Descriptor& file, int64_t offset, size_t count) {
    sums.resize(sums.size() + count);
    file.checksums()->get(offset, count, sums.data() + sums.size() - count);
  });
  return sums;
}

void Volume::set_checksums(int64_t begin, const std::vector<PageSum>& sums) const {
  const PageSum* next = sums.data();
  for_each_piece(begin, static_cast<int64_t>(sums.size()) * kPageBytes,
                 [&next](const Descriptor& file, int64_t offset, size_t count) {
                   file.checksums()->set(offset, count, next);
                   next += count;
                 });
}

std::optional<Failure> Volume::first_wrong(const std::byte* bytes, int64_t begin, int64_t length,
                                           const std::string& backend) const {
  std::optional<Failure> failure;
  for_each_piece(begin, length, [&](const Descriptor& file, int64_t offset, size_t count) {
    auto here = static_cast<int64_t>(count) * kPageBytes;
    const std::byte* from = std::exchange(bytes, bytes + here);
    if (failure.has_value()) return;
    std::optional<Checksums::Mismatch> wrong = file.checksums()->first_wrong(from, offset, here);
    if (!wrong.has_value()) return;
    if (!striped()) offset = begin, here = length;  // the whole range says more than a piece of it
    failure = Failure{EBADMSG, "read", file.path(), offset, here, backend, wrong->in_words(), wrong->offset};
  });
  return failure;
}

bool Volume::checked() const {
  return std::all_of(files_.begin(), files_.end(), [](const auto& file) { return file->checksums() != nullptr; });
}

std::string Volume::path() const {
  std::string joined;
  for (const auto& file : files_) joined += (joined.empty() ? "" : ", ") + file->path();
  return joined;
}

}  // namespace infinity::aio
