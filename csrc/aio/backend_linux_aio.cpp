// The backend on Linux AIO, by raw system calls: asynchronous direct I/O for places that refuse io_uring, such as
// containers under their default seccomp profile. Only direct transfers are asynchronous; a buffered one runs within
// its submission.
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <optional>

#include "aio/backend.h"
#include "aio/kernel.h"

#ifndef IOCB_CMD_POLL  // in the kernel's header since 4.19
#define IOCB_CMD_POLL 5
#endif

namespace infinity::aio {
namespace {

constexpr uint64_t kWakeTag = UINT64_MAX;

std::string aio_limit() {
  std::ifstream file("/proc/sys/fs/aio-max-nr");
  std::string limit;
  return file >> limit ? limit : "unknown";
}

std::string refusal(int error_number) {
  std::string why = std::string(kLinuxAioName) + " is refused here (" + format_errno(error_number) + "): ";
  if (error_number == ENOSYS) return why + "this kernel or sandbox has none";
  if (error_number == EPERM || error_number == EACCES)
    return why + "seccomp; allow io_setup, io_submit and io_getevents";
  if (error_number == EAGAIN) {
    return why + "all events of the system are taken (fs.aio-max-nr is " + aio_limit() + "); raise it with sysctl";
  }
  return why + "the kernel can't make a context";
}

[[noreturn]] void throw_failure(int error_number, std::string reason) {
  throw IoFailure({error_number, "setup", {}, 0, 0, kLinuxAioName, std::move(reason)});
}

// A kernel context, destroyed with its owner; that waits for what is in flight.
class Context {
 public:
  explicit Context(unsigned events) {
    if (syscall(SYS_io_setup, events, &context_) != 0) throw_failure(errno, refusal(errno));
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() { syscall(SYS_io_destroy, context_); }

  // How many of the control blocks were taken in, from the first; or a negative errno value about the first.
  long submit(std::vector<iocb*>& blocks, size_t from) {
    long taken = syscall(SYS_io_submit, context_, blocks.size() - from, blocks.data() + from);
    return taken >= 0 ? taken : -errno;
  }

  // Waits for one event at least, or as long as `limit` if there is one, and returns how many there are; or a negative
  // errno value.
  long wait(std::vector<io_event>* events, std::optional<std::chrono::microseconds> limit) {
    timespec timeout{0, limit.has_value() ? static_cast<long>(limit->count()) * 1000 : 0};
    long count =
        syscall(SYS_io_getevents, context_, 1L, events->size(), events->data(), limit.has_value() ? &timeout : nullptr);
    return count >= 0 ? count : -errno;
  }

 private:
  aio_context_t context_ = 0;
};

class LinuxAioBackend final : public Backend {
 public:
  explicit LinuxAioBackend(const BackendOptions& options)
      : depth_(options.queue_depth),
        context_(static_cast<unsigned>(options.queue_depth) + 1),
        controls_(static_cast<size_t>(options.queue_depth)),
        events_(static_cast<size_t>(options.queue_depth) + 1) {
    arm_bell();
    send();
  }

  // The armed poll of the bell would keep the context from going away.
  ~LinuxAioBackend() override { bell_.ring(); }

  int depth() const override { return depth_; }

  void submit(const std::vector<Block*>& blocks) override {
    for (Block* block : blocks) {
      iocb& control = controls_[block->tag];
      control = {};
      control.aio_data = block->tag;
      control.aio_lio_opcode = block->operation == Operation::kRead ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
      control.aio_fildes = static_cast<uint32_t>(block->file->fd());
      control.aio_buf = reinterpret_cast<uintptr_t>(block->address);
      control.aio_nbytes = static_cast<uint64_t>(block->length);
      control.aio_offset = block->offset;
      unsent_.push_back(&control);
    }
    send();
  }

  void reap(std::vector<Completion>* completions) override {
    if (!unsent_.empty()) send();
    if (!refused_.empty()) {  // nothing to wait for
      completions->insert(completions->end(), refused_.begin(), refused_.end());
      refused_.clear();
      return;
    }
    long count = context_.wait(&events_, bell_armed_ ? std::nullopt : std::make_optional(bell_patience_.left()));
    if (count == -EINTR) return;
    if (count < 0)
      throw_failure(static_cast<int>(-count), "io_getevents gave " + format_errno(static_cast<int>(-count)));
    bool rung = false;
    for (long i = 0; i < count; ++i) {
      const io_event& event = events_[static_cast<size_t>(i)];
      if (event.data == kWakeTag) {
        rung = true;
      } else {
        completions->push_back({static_cast<uint32_t>(event.data), event.res});
      }
    }
    if (!rung) return;
    bell_armed_ = false;
    bell_.silence();
    arm_bell();
  }

  void wake() override { bell_.ring(); }

 private:
  // A poll fires once, so it is armed again after each ring. What rings in between is seen at once. While the kernel is
  // too short of something to arm it, reap() returns by itself every now and then.
  void arm_bell() {
    bell_control_ = {};
    bell_control_.aio_data = kWakeTag;
    bell_control_.aio_lio_opcode = IOCB_CMD_POLL;
    bell_control_.aio_fildes = static_cast<uint32_t>(bell_.fd());
    bell_control_.aio_buf = POLLIN;
    unsent_.insert(unsent_.begin(), &bell_control_);
  }

  // Submits what waits. What the kernel refuses by itself becomes a completion; what it has no room for now waits
  // for the next turn.
  void send() {
    size_t sent = 0;
    bool bell_waits = false;
    while (sent < unsent_.size()) {
      bool at_bell = unsent_[sent] == &bell_control_;
      if (at_bell && bell_patience_.left().count() > 0) {
        bell_waits = true;
        ++sent;
        continue;
      }
      long taken = context_.submit(unsent_, sent);
      if (taken > 0) {
        sent += static_cast<size_t>(taken);
        if (at_bell) on_bell_armed();
      } else if (taken == -EINTR) {
        continue;
      } else if (taken == 0 || (taken == -EAGAIN && sent > 0)) {
        break;
      } else if (at_bell) {
        if (!is_shortage(static_cast<int>(-taken)) || !bell_patience_.bears_refusal())
          refuse_bell(static_cast<int>(-taken));
        bell_waits = true;
        ++sent;
      } else {
        refused_.push_back({static_cast<uint32_t>(unsent_[sent]->aio_data), taken});
        ++sent;
      }
    }
    unsent_.erase(unsent_.begin(), unsent_.begin() + static_cast<std::ptrdiff_t>(sent));
    if (bell_waits) unsent_.insert(unsent_.begin(), &bell_control_);
  }

  void on_bell_armed() {
    bell_armed_ = true;
    bell_patience_.renew();
  }

  // Without it the ring could not be woken.
  [[noreturn]] static void refuse_bell(int error_number) {
    if (error_number == EINVAL) throw_failure(EINVAL, "linux_aio can't be woken here: Linux 4.19 is needed");
    throw_failure(error_number, "io_submit gave " + format_errno(error_number));
  }

  const int depth_;
  const Bell bell_{kLinuxAioName};  // outlives the context, which polls it
  Context context_;
  std::vector<iocb> controls_;  // by tag
  iocb bell_control_{};
  bool bell_armed_ = false;
  Patience bell_patience_;
  std::vector<iocb*> unsent_;
  std::vector<Completion> refused_;
  std::vector<io_event> events_;
};

}  // namespace

BackendProbe probe_linux_aio() {
  try {
    BackendOptions options;
    options.queue_depth = 1;
    LinuxAioBackend trial(options);
    return {kLinuxAioName, true, "Linux AIO works here"};
  } catch (const IoFailure& failure) {
    return {kLinuxAioName, false, failure.failure().reason};
  }
}

std::unique_ptr<Backend> make_linux_aio_backend(const BackendOptions& options) {
  return std::make_unique<LinuxAioBackend>(options);
}

}  // namespace infinity::aio
