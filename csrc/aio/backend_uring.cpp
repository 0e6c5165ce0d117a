// The backend on io_uring: the kernel's own path to the drive's limit. Without liburing at build time only the refusal
// remains.
#include "aio/backend.h"
#include "aio/kernel.h"

#ifdef INFINITY_HAVE_LIBURING

#include <liburing.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

namespace infinity::aio {
namespace {

constexpr uint64_t kWakeTag = UINT64_MAX;
constexpr int64_t kPieceBytes = int64_t{1} << 30;  // the kernel's limit for one registered buffer
constexpr unsigned kFileSlots = 64;                // files beyond these go unregistered
constexpr unsigned kSqpollIdleMilliseconds = 100;

std::string refusal(int error_number) {
  std::string why = std::string(kUringName) + " is refused here (" + format_errno(error_number) + "): ";
  if (error_number == EPERM || error_number == EACCES) {
    return why +
           "seccomp or kernel.io_uring_disabled; allow io_uring_setup, io_uring_enter and io_uring_register to use it";
  }
  if (error_number == ENOSYS) return why + "this kernel or sandbox has none";
  if (error_number == ENOMEM) return why + "the memlock limit is too low for a ring; raise it with ulimit -l";
  if (error_number == EMFILE || error_number == ENFILE) return why + "no file descriptor is left; raise ulimit -n";
  return why + "the kernel can't make a ring";
}

[[noreturn]] void throw_failure(int error_number, std::string reason) {
  throw IoFailure({error_number, "setup", {}, 0, 0, kUringName, std::move(reason)});
}

// A ring that is closed with its owner.
class Ring {
 public:
  // SINGLE_ISSUER with DEFER_TASKRUN (Linux 6.1) runs completions only when the ring thread asks for them, so that it
  // is never interrupted; kernels that don't know them say EINVAL and get a plain ring. A kernel thread that polls for
  // submissions (SQPOLL) excludes them; it sleeps after a while without any.
  explicit Ring(unsigned entries, bool iopoll = false, bool sqpoll = false) {
    unsigned wanted = (iopoll ? IORING_SETUP_IOPOLL : 0) | (sqpoll ? IORING_SETUP_SQPOLL : 0);
    unsigned helpful = IORING_SETUP_SINGLE_ISSUER | (sqpoll ? 0 : IORING_SETUP_DEFER_TASKRUN);
    int status = set_up(entries, wanted | helpful);
    if (status == -EINVAL) status = set_up(entries, wanted);
    if (status < 0) throw_failure(-status, refusal(-status));
    io_uring_ring_dontfork(&ring_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    close_kept_from_children(ring_.ring_fd, [this] { io_uring_queue_exit(&ring_); });
  }

  io_uring* get() noexcept { return &ring_; }

 private:
  int set_up(unsigned entries, unsigned flags) {
    io_uring_params parameters{};
    parameters.flags = flags;
    parameters.sq_thread_idle = kSqpollIdleMilliseconds;
    int status = 0;
    open_kept_from_children([&] {
      status = io_uring_queue_init_params(entries, &ring_, &parameters);
      return status < 0 ? status : ring_.ring_fd;
    });
    return status;
  }

  io_uring ring_{};
};

// Files that were closed and must be taken out of the ring's table: the kernel keeps a registered file open, and its
// space on the drive, until then. Shared with the descriptors, which may outlive the ring.
struct ClosedFiles {
  Bell bell{kUringName};
  std::mutex mutex;
  std::vector<uint64_t> ids;  // Descriptor::id
};

class UringBackend final : public Backend {
 public:
  explicit UringBackend(const BackendOptions& options)
      : depth_(options.queue_depth),
        iopoll_(options.iopoll),
        sqpoll_(options.sqpoll),
        note_(options.note),
        closed_(std::make_shared<ClosedFiles>()),
        ring_(static_cast<unsigned>(options.queue_depth) + 1, iopoll_, sqpoll_) {
    expect_slab(options.slab);
    register_file_table();
    if (!iopoll_) arm_bell();
  }

  // The armed read of the bell must not be left to a ring that is going away: the kernel would write into freed memory.
  ~UringBackend() override {
    stopping_ = true;
    wake();
    std::vector<Completion> none;
    try {
      while (bell_armed_) reap(&none);
    } catch (const IoFailure&) {  // the ring is broken: closing it is all that is left
    }
    assert(none.empty());
  }

  int depth() const override { return depth_; }

  // Fills the submission queue; the system call is in reap(), or in send(). The queue has a place for every block in
  // flight and for the bell.
  void submit(const std::vector<Block*>& blocks) override {
    if (expected_ != nullptr && expected_->is_present()) register_slab();
    for (Block* block : blocks) {
      io_uring_sqe* sqe = next_entry();
      prepare(*block, sqe);
      io_uring_sqe_set_data64(sqe, block->tag);
    }
    in_flight_ += blocks.size();
  }

  void send() override { check(io_uring_submit(ring_.get())); }

  void reap(std::vector<Completion>* completions) override {
    if (iopoll_) {
      reap_polling(completions);
      return;
    }
    check(io_uring_submit_and_wait(ring_.get(), 1));
    std::optional<int> bell_status = take_completions(completions);
    if (!bell_status.has_value()) return;
    bell_armed_ = false;
    if (stopping_) return;
    check(*bell_status, "the read of its bell", &bell_patience_);
    arm_bell();
    unregister_closed_files();
  }

  void wake() override {
    woken_.store(true, std::memory_order_release);
    closed_->bell.ring();
  }

 private:
  // A status of io_uring_enter below zero: nothing was taken in. Some of these pass; the others, and those that don't,
  // mean that the ring itself is broken.
  void check(int status) { check(status, "io_uring_enter", &patience_); }

  static void check(int status, const char* what, Patience* patience) {
    if (status >= 0) patience->renew();
    if (status >= 0 || status == -EINTR) return;
    if (!is_shortage(-status) || !patience->bears_refusal()) {
      throw_failure(-status, std::string(what) + " gave " + format_errno(-status));
    }
    std::this_thread::sleep_for(patience->left());
  }

  // A ring that polls can't read the bell. It looks for completions without sleeping while any block is in flight, and
  // listens to the bell itself when none is.
  void reap_polling(std::vector<Completion>* completions) {
    if (in_flight_ == 0 && io_uring_sq_ready(ring_.get()) == 0) {
      closed_->bell.silence();
      woken_ = false;
      unregister_closed_files();
      return;
    }
    size_t before = completions->size();
    while (completions->size() == before && !woken_.exchange(false, std::memory_order_acq_rel)) {
      check(io_uring_submit_and_get_events(ring_.get()));
      take_completions(completions);
    }
    in_flight_ -= completions->size() - before;
  }

  // Appends those of blocks; returns the result of the bell's read if that is among them.
  std::optional<int> take_completions(std::vector<Completion>* completions) {
    std::optional<int> bell_status;
    unsigned head = 0;
    unsigned seen = 0;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(ring_.get(), head, cqe) {
      ++seen;
      if (io_uring_cqe_get_data64(cqe) == kWakeTag) {
        bell_status = cqe->res;
      } else {
        completions->push_back({static_cast<uint32_t>(io_uring_cqe_get_data64(cqe)), cqe->res});
      }
    }
    io_uring_cq_advance(ring_.get(), seen);
    return bell_status;
  }

  io_uring_sqe* next_entry() {
    io_uring_sqe* sqe = io_uring_get_sqe(ring_.get());
    while (sqe == nullptr) {  // the kernel has not taken in the last turn's yet
      check(sqpoll_ ? io_uring_sqring_wait(ring_.get()) : io_uring_submit(ring_.get()));
      sqe = io_uring_get_sqe(ring_.get());
    }
    return sqe;
  }

  void prepare(const Block& block, io_uring_sqe* sqe) {
    int slot = file_slot(block.file);
    int fd = slot >= 0 ? slot : block.file->fd();
    int piece = piece_of(block);
    auto length = static_cast<unsigned>(block.length);
    auto offset = static_cast<uint64_t>(block.offset);
    bool reads = block.operation == Operation::kRead;
    if (piece >= 0 && reads) {
      io_uring_prep_read_fixed(sqe, fd, block.address, length, offset, piece);
    } else if (piece >= 0) {
      io_uring_prep_write_fixed(sqe, fd, block.address, length, offset, piece);
    } else if (reads) {
      io_uring_prep_read(sqe, fd, block.address, length, offset);
    } else {
      io_uring_prep_write(sqe, fd, block.address, length, offset);
    }
    if (slot >= 0) sqe->flags |= IOSQE_FIXED_FILE;
  }

  void arm_bell() {
    io_uring_sqe* sqe = next_entry();
    io_uring_prep_read(sqe, closed_->bell.fd(), &rings_heard_, sizeof rings_heard_, 0);
    io_uring_sqe_set_data64(sqe, kWakeTag);
    bell_armed_ = true;
  }

  // ---- Registered memory ----
  //
  // [Note: Like pages]
  // Of a registered buffer the kernel knows that its pages are huge only if all of them are. With one small page in it,
  // every transfer with the buffer is a list of small pages, which the block layer cuts where the drive takes no longer
  // list: 4 MiB became five requests on a virtio drive, which cost it a tenth of its bandwidth. So what lies behind the
  // last huge page is a piece of its own, and a slab that got huge pages only here and there is not registered at all:
  // then only the transfers that meet its small pages are cut. A block that lies in two pieces goes unregistered, too.

  // Registers the slab now or, where the kernel can do that in a ring that is at work (Linux 5.19), when it is present.
  void expect_slab(std::shared_ptr<const PinnedSlab> slab) {
    if (slab == nullptr) return;
    for (int64_t at = 0; at < slab->bytes(); at = piece_ends_.back()) {
      piece_ends_.push_back(at < slab->tail() ? std::min(at + kPieceBytes, slab->tail()) : slab->bytes());
    }
    expected_ = std::move(slab);
    takes_pieces_later_ = io_uring_register_buffers_sparse(ring_.get(), static_cast<unsigned>(piece_ends_.size())) == 0;
    if (!takes_pieces_later_) expected_->wait_until_present();
    if (expected_->is_present()) register_slab();
  }

  void register_slab() {
    std::shared_ptr<const PinnedSlab> slab = std::move(expected_);
    if (slab->mixed()) {
      note_("the slab of " + format_bytes(slab->bytes()) +
            " is not registered with io_uring, as not all of it is in huge pages: a little more CPU per byte");
      return;
    }
    std::vector<iovec> pieces;
    int64_t begin = 0;
    for (int64_t end : piece_ends_) {
      pieces.push_back({slab->data() + begin, static_cast<size_t>(end - begin)});
      begin = end;
    }
    auto count = static_cast<unsigned>(pieces.size());
    std::vector<__u64> untagged(pieces.size(), 0);
    int status = takes_pieces_later_
                     ? io_uring_register_buffers_update_tag(ring_.get(), 0, pieces.data(), untagged.data(), count)
                     : io_uring_register_buffers(ring_.get(), pieces.data(), count);
    if (status >= 0 && (!takes_pieces_later_ || status == static_cast<int>(count))) {
      slab_ = std::move(slab);
      return;
    }
    std::string why = status < 0 ? format_errno(-status) : std::to_string(status) + " of its pieces";
    note_("io_uring can't register the slab of " + format_bytes(slab->bytes()) + " (" + why +
          "): going on without, at a little more CPU per byte; raise the memlock limit (ulimit -l) to allow it");
  }

  // The registered piece that holds the whole block, or -1.
  int piece_of(const Block& block) const {
    if (slab_ == nullptr) return -1;
    auto begin = reinterpret_cast<uintptr_t>(slab_->data());
    auto address = reinterpret_cast<uintptr_t>(block.address);
    if (address < begin || address - begin >= static_cast<uintptr_t>(slab_->bytes())) return -1;
    auto from = static_cast<int64_t>(address - begin);
    auto end = std::upper_bound(piece_ends_.begin(), piece_ends_.end(), from);
    return block.length <= *end - from ? static_cast<int>(end - piece_ends_.begin()) : -1;
  }

  // ---- Registered files ----

  void register_file_table() {
    int status = io_uring_register_files_sparse(ring_.get(), kFileSlots);
    if (status < 0) {
      refuse_files(-status);
      return;
    }
    for (unsigned slot = kFileSlots; slot > 0; --slot) free_slots_.push_back(slot - 1);
  }

  void refuse_files(int error_number) {
    free_slots_.clear();
    note_("io_uring can't register files (" + format_errno(error_number) + "): going on without, at a little more CPU");
  }

  // The file's place in the table, or -1 when it has none and gets none.
  int file_slot(const std::shared_ptr<const Descriptor>& file) {
    auto known = slots_.find(file->id());
    if (known != slots_.end()) return static_cast<int>(known->second);
    if (free_slots_.empty()) return -1;
    unsigned slot = free_slots_.back();
    int fd = file->fd();
    int status = io_uring_register_files_update(ring_.get(), slot, &fd, 1);
    if (status != 1) {
      refuse_files(status < 0 ? -status : EIO);
      return -1;
    }
    free_slots_.pop_back();
    slots_.emplace(file->id(), slot);
    file->on_close([closed = std::weak_ptr<ClosedFiles>(closed_), id = file->id()] {
      auto alive = closed.lock();
      if (alive == nullptr) return;
      {
        std::lock_guard<std::mutex> lock(alive->mutex);
        alive->ids.push_back(id);
      }
      alive->bell.ring();
    });
    return static_cast<int>(slot);
  }

  void unregister_closed_files() {
    std::vector<uint64_t> closed;
    {
      std::lock_guard<std::mutex> lock(closed_->mutex);
      closed.swap(closed_->ids);
    }
    for (uint64_t id : closed) {
      auto known = slots_.find(id);
      int none = -1;
      io_uring_register_files_update(ring_.get(), known->second, &none, 1);
      free_slots_.push_back(known->second);
      slots_.erase(known);
    }
  }

  const int depth_;
  const bool iopoll_;
  const bool sqpoll_;
  const std::function<void(std::string)> note_;
  const std::shared_ptr<ClosedFiles> closed_;
  std::atomic<bool> woken_{false};  // for a ring that polls
  size_t in_flight_ = 0;            // the same
  uint64_t rings_heard_ = 0;        // the kernel writes here while the bell is armed
  bool bell_armed_ = false;
  bool stopping_ = false;
  Patience patience_;
  Patience bell_patience_;
  Ring ring_;
  std::shared_ptr<const PinnedSlab> expected_;  // to be registered when it is present, or null
  std::shared_ptr<const PinnedSlab> slab_;      // null unless registered
  std::vector<int64_t> piece_ends_;             // of the pieces that it is registered in
  bool takes_pieces_later_ = false;
  std::vector<unsigned> free_slots_;
  std::unordered_map<uint64_t, unsigned> slots_;  // by Descriptor::id
};

}  // namespace

BackendProbe probe_uring() {
  try {
    Ring ring(2);
    io_uring_probe* operations = io_uring_get_probe_ring(ring.get());
    bool enough = operations != nullptr && io_uring_opcode_supported(operations, IORING_OP_READ) != 0;
    if (operations != nullptr) io_uring_free_probe(operations);
    if (!enough) return {kUringName, false, "io_uring of this kernel is too old: Linux 5.6 is needed"};
    return {kUringName, true, "io_uring works here"};
  } catch (const IoFailure& failure) {
    return {kUringName, false, failure.failure().reason};
  }
}

std::unique_ptr<Backend> make_uring_backend(const BackendOptions& options) {
  return std::make_unique<UringBackend>(options);
}

}  // namespace infinity::aio

#else

#include <cerrno>

namespace infinity::aio {

BackendProbe probe_uring() {
  return {kUringName, false, "io_uring was left out of this build: install liburing-dev and build again to use it"};
}

std::unique_ptr<Backend> make_uring_backend(const BackendOptions&) {
  throw IoFailure({ENOSYS, "setup", {}, 0, 0, kUringName, probe_uring().reason});
}

}  // namespace infinity::aio

#endif
