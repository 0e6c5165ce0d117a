// Cutting a transfer into blocks, and its way through its states.
#include "transfer.h"

#include <algorithm>
#include <cassert>
#include <stdexcept>
#include <utility>

namespace infinity::aio {
namespace {

[[noreturn]] void refuse_numbers(const Request& request, const std::string& why) {
  throw std::invalid_argument(std::string(operation_name(request.operation)) + " of " + std::to_string(request.length) +
                              " bytes at offset " + std::to_string(request.offset) + " of " + request.file->path() +
                              " and slab offset " + std::to_string(request.slab_offset) + ": " + why);
}

}  // namespace

const char* operation_name(Operation operation) {
  return operation == Operation::kRead ? "read" : "write";
}

void Request::check() const {
  if (file == nullptr || slab == nullptr) throw std::invalid_argument("a transfer needs a file and a slab");
  if (length <= 0) refuse_numbers(*this, "the length must be positive");
  if (offset < 0 || offset > INT64_MAX - length) refuse_numbers(*this, "the offset is out of range");
  if (slab_offset < 0 || length > slab->bytes() || slab_offset > slab->bytes() - length) {
    refuse_numbers(*this, "the range isn't inside the slab of " + std::to_string(slab->bytes()) + " bytes");
  }
  if (file->direct() && (offset % kPageBytes != 0 || length % kPageBytes != 0 || slab_offset % kPageBytes != 0)) {
    refuse_numbers(*this, "a direct transfer needs offset, length and slab offset in multiples of 4096");
  }
}

void Block::advance(int64_t bytes) {
  assert(bytes >= 0 && bytes <= length);
  address += bytes;
  offset += bytes;
  length -= bytes;
}

Transfer::Transfer(Request request, int64_t block_bytes, std::string backend)
    : operation_(request.operation),
      priority_(request.priority),
      path_(request.file->path()),
      offset_(request.offset),
      length_(request.length),
      block_bytes_(block_bytes),
      backend_(std::move(backend)),
      queued_at_(monotonic_seconds()),
      monitor_(std::make_unique<Monitor>()),
      file_(std::move(request.file)),
      slab_(std::move(request.slab)),
      address_(slab_->data() + request.slab_offset) {}

void Transfer::wait() {
  while (!wait_for(std::chrono::milliseconds(1000))) {
  }
  throw_if_failed();
}

bool Transfer::wait_for(std::chrono::milliseconds limit) {
  if (done()) return true;
  monitor_.guard().check("a transfer that isn't done");
  std::unique_lock<std::mutex> lock(monitor_->mutex);
  return monitor_->done.wait_for(lock, limit, [this] { return done(); });
}

void Transfer::throw_if_failed() {
  if (state() != TransferState::kFailed) return;
  failure_seen_ = true;
  throw IoFailure(*failure_);  // unchanging since the state was published
}

TransferTimes Transfer::times() const noexcept {
  return {queued_at_, submitted_at_, done_at_};
}

std::optional<Failure> Transfer::unseen_failure() const {
  if (state() != TransferState::kFailed || failure_seen_) return std::nullopt;
  return failure_;
}

std::optional<Block> Transfer::take_block() {
  std::lock_guard<std::mutex> lock(monitor_->mutex);
  if (failure_.has_value() || taken_bytes_ == length_) return std::nullopt;
  if (taken_bytes_ == 0) {
    submitted_at_ = monotonic_seconds();
    state_.store(TransferState::kInFlight, std::memory_order_release);
  }
  Block block;
  block.transfer = shared_from_this();
  block.operation = operation_;
  block.file = file_;
  block.address = address_ + taken_bytes_;
  block.offset = offset_ + taken_bytes_;
  block.length = std::min(block_bytes_, length_ - taken_bytes_);
  taken_bytes_ += block.length;
  ++blocks_in_flight_;
  return block;
}

int64_t Transfer::blocks_left() const {
  std::lock_guard<std::mutex> lock(monitor_->mutex);
  return (length_ - taken_bytes_ + block_bytes_ - 1) / block_bytes_;
}

bool Transfer::end_block(std::optional<Failure> failure) {
  std::lock_guard<std::mutex> lock(monitor_->mutex);
  assert(blocks_in_flight_ > 0);
  --blocks_in_flight_;
  if (failure.has_value() && !failure_.has_value()) failure_ = std::move(failure);
  return last_one_out();
}

bool Transfer::refuse(Failure failure) {
  std::lock_guard<std::mutex> lock(monitor_->mutex);
  if (failure_.has_value() || taken_bytes_ == length_) return false;  // its last block out will finish it, or has
  failure_ = std::move(failure);
  return last_one_out();
}

std::shared_ptr<const PinnedSlab> Transfer::slab() const {
  std::lock_guard<std::mutex> lock(monitor_->mutex);
  return slab_;
}

bool Transfer::has_failed() const {
  std::lock_guard<std::mutex> lock(monitor_->mutex);
  return failure_.has_value();
}

void Transfer::finish() {
  std::shared_ptr<const Descriptor> file;  // let go after the lock: it may close the file and unmap the slab
  std::shared_ptr<const PinnedSlab> slab;
  {
    std::lock_guard<std::mutex> lock(monitor_->mutex);
    assert(last_one_out() && !done());
    file.swap(file_);
    slab.swap(slab_);
    done_at_ = monotonic_seconds();
    state_.store(failure_.has_value() ? TransferState::kFailed : TransferState::kDone, std::memory_order_release);
  }
  monitor_->done.notify_all();
}

Failure Transfer::describe(int error_number, std::string reason) const {
  return {error_number, operation_name(operation_), path_, offset_, length_, backend_, std::move(reason)};
}

}  // namespace infinity::aio
