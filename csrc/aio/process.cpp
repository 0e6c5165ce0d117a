// Threads, clock and fork.
#include "process.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <stdexcept>

namespace infinity::aio {

void ForkGuard::check(const char* what) const {
  if (in_child()) {
    throw std::runtime_error(std::string(what) +
                             " belongs to the process that made it and can't be used in a forked child: make a new one "
                             "there, or start the child with spawn");
  }
}

std::thread start_io_thread(const std::string& name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  struct Restore {
    sigset_t* mask;
    ~Restore() { pthread_sigmask(SIG_SETMASK, mask, nullptr); }
  } restore{&before};
  std::thread thread(std::move(body));
  pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  return thread;
}

double monotonic_seconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace infinity::aio
