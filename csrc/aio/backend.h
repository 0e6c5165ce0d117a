// Backend: the way blocks reach the kernel. submit(blocks), reap(completions), wake().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "aio/buffer.h"
#include "aio/transfer.h"

namespace infinity::aio {

struct BackendOptions {
  int queue_depth = 32;                    // blocks in flight, at most
  std::shared_ptr<const PinnedSlab> slab;  // to be registered with the kernel where that helps, or null
  bool iopoll = false;                     // io_uring only; see EngineOptions
  bool sqpoll = false;
  std::function<void(std::string)>
      note;  // takes a line about what was optional and refused; not under a lock of wake()
};

struct Completion {
  uint32_t tag = 0;    // of the block
  int64_t result = 0;  // bytes moved, or a negative errno value
};

// One instance serves one ring thread: it is made, used and destroyed on that thread. Only wake() may be called from
// others. It moves bytes and reports; retries, priorities and failures are the engine's matter.
class Backend {
 public:
  virtual ~Backend() = default;

  // Blocks that it really works on at once: the engine gives it no more, so that what waits, waits in priority order.
  virtual int depth() const = 0;

  // Takes blocks over. They stay where they are until their completion was reaped; I/O may start as late as in reap().
  virtual void submit(const std::vector<Block*>& blocks) = 0;

  // Starts the I/O of all that was submitted, for a caller who has something else to do before reap().
  virtual void send() {}

  // Waits for a completion or a wake(), and appends every completion there is. A wake() that came before counts.
  virtual void reap(std::vector<Completion>* completions) = 0;

  // Makes the present or the next reap() return.
  virtual void wake() = 0;
};

using BackendFactory = std::function<std::unique_ptr<Backend>(const BackendOptions&)>;

inline constexpr const char* kUringName = "io_uring";
inline constexpr const char* kLinuxAioName = "linux_aio";
inline constexpr const char* kThreadsName = "threads";

struct BackendProbe {
  std::string name;
  bool available = false;
  std::string reason;  // what it offers here, or why it is refused and what would help
};

// What could be used in this process, best first.
std::vector<BackendProbe> probe_backends();

// The factory behind a name that probe_backends() lists.
BackendFactory backend_factory(const std::string& name);

// One of each per backend, in the source file of its name. Making one throws IoFailure when it is refused.
BackendProbe probe_uring();
BackendProbe probe_linux_aio();
BackendProbe probe_threads();
std::unique_ptr<Backend> make_uring_backend(const BackendOptions& options);
std::unique_ptr<Backend> make_linux_aio_backend(const BackendOptions& options);
std::unique_ptr<Backend> make_threads_backend(const BackendOptions& options);

}  // namespace infinity::aio
