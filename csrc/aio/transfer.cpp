// Checking a request, and a transfer's way through its states.
#include "aio/transfer.h"

#include <algorithm>
#include <cassert>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/openmp.h"
#include "base/process.h"

namespace infinity::aio {
namespace {

// A wait that is over sooner is not worth waking a team for.
constexpr std::chrono::microseconds kWaitAlone{200};

[[noreturn]] void refuse_numbers(const Request& request, const std::string& why) {
  const Range& range = request.range;
  throw std::invalid_argument(std::string(operation_name(request.operation)) + " of " + std::to_string(range.length) +
                              " bytes at offset " + std::to_string(range.offset) + " of " + request.volume->path() +
                              " and slab offset " + std::to_string(range.slab_offset) + ": " + why);
}

}  // namespace

const char* operation_name(Operation operation) {
  return operation == Operation::kRead ? "read" : "write";
}

void Request::check() const {
  if (volume == nullptr || slab == nullptr) throw std::invalid_argument("a transfer needs a file and a slab");
  if (range.length <= 0) refuse_numbers(*this, "the length must be positive");
  if (range.offset < 0 || range.offset > INT64_MAX - range.length) {
    refuse_numbers(*this, "the offset is out of range");
  }
  if (range.slab_offset < 0 || range.length > slab->bytes() || range.slab_offset > slab->bytes() - range.length) {
    refuse_numbers(*this, "the range isn't inside the slab of " + std::to_string(slab->bytes()) + " bytes");
  }
  int64_t alignment = volume->alignment();
  if (range.offset % alignment != 0 || range.length % alignment != 0 || range.slab_offset % alignment != 0) {
    refuse_numbers(*this,
                   "this file needs offset, length and slab offset in multiples of " + std::to_string(alignment));
  }
}

void Block::advance(int64_t bytes) {
  assert(bytes >= 0 && bytes <= length);
  address += bytes;
  offset += bytes;
  length -= bytes;
}

void Block::rewind() {
  int64_t moved = taken_bytes - length;
  address -= moved;
  offset -= moved;
  length = taken_bytes;
}

Transfer::Transfer(Request request, std::string backend)
    : operation_(request.operation),
      priority_(request.priority),
      path_(request.volume->path()),
      range_(request.range),
      sums_by_caller_(request.sums_by_caller),
      backend_(std::move(backend)),
      queued_at_(monotonic_seconds()),
      monitor_(std::make_unique<Monitor>()),
      volume_(std::move(request.volume)),
      slab_(std::move(request.slab)) {}

void Transfer::wait() {
  while (!wait_for(std::chrono::milliseconds(1000))) {
  }
  throw_if_failed();
}

bool Transfer::wait_for(std::chrono::microseconds limit) {
  if (done()) return true;
  monitor_.guard().check("a transfer that isn't done");
  std::unique_lock<std::mutex> lock(monitor_->mutex);
  return monitor_->done.wait_for(lock, limit, [this] { return done(); });
}

bool Transfer::wait_with_team_for(std::chrono::microseconds limit) {
  auto alone = std::min(limit, kWaitAlone);
  if (wait_for(alone)) return true;
  limit -= alone;
  Parallel parallel = openmp_parallel();
  if (parallel == nullptr) return wait_for(limit);
  struct Wait {
    Transfer& transfer;
    std::chrono::microseconds limit;
    std::thread::id waiter = std::this_thread::get_id();
    Gate over{};
    void run() noexcept {
      if (std::this_thread::get_id() != waiter) return over.wait();
      transfer.wait_for(limit);
      over.open();
    }
  } wait{*this, limit};
  parallel([](void* one) { static_cast<Wait*>(one)->run(); }, &wait, kWholeTeam, 0);
  return done();
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

bool Transfer::begin_block(int64_t bytes) {
  std::lock_guard<std::mutex> lock(monitor_->mutex);
  if (failure_.has_value()) return false;
  if (taken_bytes_ == 0) {
    submitted_at_ = monotonic_seconds();
    state_.store(TransferState::kInFlight, std::memory_order_release);
  }
  taken_bytes_ += bytes;
  ++blocks_in_flight_;
  assert(taken_bytes_ <= range_.length);
  return true;
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
  if (failure_.has_value() || taken_bytes_ == range_.length) return false;  // its last block out will finish it, or has
  failure_ = std::move(failure);
  return last_one_out();
}

std::shared_ptr<const PinnedSlab> Transfer::slab() const {
  std::lock_guard<std::mutex> lock(monitor_->mutex);
  return slab_;
}

DriveShare& Transfer::share_of(int drive, double now) {
  auto share = std::find_if(shares.begin(), shares.end(), [&](const DriveShare& one) { return one.drive == drive; });
  if (share != shares.end()) return *share;
  shares.push_back({drive, now});
  return shares.back();
}

bool Transfer::has_failed() const {
  std::lock_guard<std::mutex> lock(monitor_->mutex);
  return failure_.has_value();
}

Transfer::Held Transfer::finish() {
  Held held;
  {
    std::lock_guard<std::mutex> lock(monitor_->mutex);
    assert(last_one_out() && !done());
    held.volume.swap(volume_);
    held.slab.swap(slab_);
    done_at_ = monotonic_seconds();
    state_.store(failure_.has_value() ? TransferState::kFailed : TransferState::kDone, std::memory_order_release);
  }
  monitor_->done.notify_all();
  return held;
}

Failure Transfer::describe(const Block& block, int error_number, std::string reason) const {
  // Of a file that is not striped, the whole range says more than one block of it.
  if (block.file->path() == path_) return describe(error_number, std::move(reason));
  return {error_number, operation_name(operation_), block.file->path(), block.offset, block.length,
          backend_,     std::move(reason)};
}

Failure Transfer::describe(int error_number, std::string reason) const {
  return {error_number, operation_name(operation_), path_, range_.offset, range_.length, backend_, std::move(reason)};
}

Lane::Lane(std::shared_ptr<Transfer> transfer, std::shared_ptr<const Volume> volume,
           std::shared_ptr<const PinnedSlab> slab, int member)
    : transfer_(std::move(transfer)),
      volume_(std::move(volume)),
      slab_(std::move(slab)),
      member_(member),
      position_(transfer_->range().offset) {
  left_bytes_ = volume_->bytes_on(member_, position_, position_ + transfer_->range().length);
}

std::optional<Block> Lane::take_block(int64_t block_bytes) {
  if (left_bytes_ == 0) return std::nullopt;
  const Range& range = transfer_->range();
  std::optional<Volume::Piece> piece = volume_->first_on(member_, position_, range.offset + range.length);
  assert(piece.has_value());
  int64_t length = std::min(block_bytes, piece->length);
  if (!transfer_->begin_block(length)) return std::nullopt;
  Block block;
  block.transfer = transfer_;
  block.operation = transfer_->operation();
  block.file = volume_->file(member_);
  block.address = slab_->data() + range.slab_offset + (piece->at - range.offset);
  block.offset = piece->offset;
  block.length = block.taken_bytes = length;
  position_ = piece->at + length;
  left_bytes_ -= length;
  return block;
}

}  // namespace infinity::aio
