// A kernel that is short of something for a while: refusals of its calls, which are interposed here.
#include <dlfcn.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdarg>

#include "support.h"

using infinity::Failure;
using namespace infinity::aio;
using namespace infinity::aio::testing;

namespace {

// How many of the next calls are refused, and how.
std::atomic<int> refusals{0};
std::atomic<int> refusal{0};
std::atomic<int> refused{0};  // so far

bool is_refused() {
  int left = refusals.load();
  while (left > 0) {
    if (refusals.compare_exchange_weak(left, left - 1)) return ++refused > 0;
  }
  return false;
}

template <typename Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// Those of Linux AIO: the poll of the bell is refused. It passes six arguments on, as their number is unknown;
// the sanitizer would find those that aren't.
extern "C" __attribute__((no_sanitize("address"))) long syscall(long number, ...) noexcept {
  static auto* const next = real<long(long, ...)>("syscall");
  va_list list;
  va_start(list, number);
  long given[6];
  for (long& one : given) one = va_arg(list, long);
  va_end(list);
  if (number == SYS_io_submit) {
    const iocb* first = *reinterpret_cast<iocb**>(given[2]);
    if (first->aio_lio_opcode == IOCB_CMD_POLL && is_refused()) {
      errno = refusal;
      return -1;
    }
  }
  return next(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

#ifdef INFINITY_HAVE_LIBURING

#include <liburing.h>

extern "C" int io_uring_submit_and_wait(io_uring* ring, unsigned count) {
  static auto* const next = real<int(io_uring*, unsigned)>("io_uring_submit_and_wait");
  return is_refused() ? -refusal : next(ring, count);
}

#endif

namespace {

struct Bench {
  explicit Bench(const std::string& backend) : file(path.get(), {true}) {
    file.reserve(kMiB);
    EngineOptions options;
    options.backend = backend;
    options.queue_depth = 4;
    options.block_bytes = 16 * kKiB;
    engine = std::make_unique<Engine>(options);
  }

  std::shared_ptr<Transfer> start(Operation operation) {
    return engine->start({operation, file.volume(), slab, {0, 0, 256 * kKiB}});
  }

  TemporaryPath path;
  std::shared_ptr<const PinnedSlab> slab = std::make_shared<const PinnedSlab>(kMiB);
  File file;
  std::unique_ptr<Engine> engine;
};

void refuse(int count, int error_number) {
  refusal = error_number;
  refusals = count;
}

bool is_there(const std::string& backend) {
  auto names = available_backends();
  return std::find(names.begin(), names.end(), backend) != names.end();
}

}  // namespace

TEST_CASE("a kernel that is short of something for a while harms no transfer") {
  for (const std::string backend : {kUringName, kLinuxAioName}) {
    if (!is_there(backend)) continue;
    for (int error_number : {EAGAIN, ENOMEM}) {
      CAPTURE(backend);
      CAPTURE(error_number);
      Bench bench(backend);
      int before = refused;
      for (int round = 0; round < 3; ++round) {  // the ring sleeps in between, and is woken by its bell
        fill(*bench.slab, 0, 256 * kKiB, 0, round);
        refuse(10, error_number);
        bench.start(Operation::kWrite)->wait();
        fill(*bench.slab, 0, 256 * kKiB, 0, 9);
        bench.start(Operation::kRead)->wait();
        CHECK(holds(*bench.slab, 0, 256 * kKiB, 0, round));
        bench.engine->drain();
      }
      CHECK(refused > before);
      bench.engine->close();
    }
  }
  refuse(0, 0);
}

TEST_CASE("a kernel that stays short of something is an error in words, and nothing hangs") {
  for (const std::string backend : {kUringName, kLinuxAioName}) {
    if (!is_there(backend)) continue;
    CAPTURE(backend);
    Bench bench(backend);
    bench.start(Operation::kWrite)->wait();
    refuse(INT_MAX, ENOMEM);
    std::optional<Failure> failure;
    while (!failure.has_value()) failure = failure_of([&] { bench.start(Operation::kRead)->wait(); });
    CHECK(std::string(failure->reason).find("ENOMEM") != std::string::npos);
    refuse(0, 0);
    bench.engine->close();
  }
}
