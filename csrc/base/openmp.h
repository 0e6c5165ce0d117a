// The OpenMP runtime that is in this process already: torch's, where that is GNU's.
#pragma once

#include <thread>

#include "base/process.h"

namespace infinity {

// Calls `body(data)` on `threads` threads, the caller among them, and returns when all calls have. `body` must not
// throw.
using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// As many threads as torch's operations on this thread take, once it has made one.
constexpr unsigned kWholeTeam = 0;

// The runtime's `GOMP_parallel`. Null where torch isn't loaded yet, where its runtime isn't GNU's, and in a child that
// was forked after this was loaded, as its threads are gone.
//
// [Note: One team]
// torch's threads spin for some milliseconds after each operation, to be there for the next. A thread pool of our own
// has to share the cores with them, and a second thread gains nothing while they spin. The team that spins does the
// work instead. Nothing is linked and nothing is loaded for it, so there is never a second runtime.
//
// A job takes all threads that it may, also where fewer would do: the runtime ends those that a smaller team leaves
// out, and starts others for the next one.
//
// The team would spin, too, while the thread that computes waits for a drive. So it is taken along into the wait, where
// it sleeps at a gate that this thread opens when the bytes are there. None of it waits for a lock that the others
// want.
Parallel openmp_parallel();

// While one of these exists, the runtime's threads go to sleep almost at once where they wait. Does nothing where
// `openmp_parallel` is null, or the system has no threads to give.
//
// [Note: Early sleep]
// A thread of a team spins 300 000 times before it sleeps, but 100 times where the runtime has more threads than the
// process had processors when it was loaded (libgomp's manual, "GOMP_SPINCOUNT"). So some that only sleep send the
// others to sleep. Each operation wakes them, which takes longer than to find them spinning: good where something else
// takes longer still. Nobody has to take them along into a wait then.
//
// The runtime ends the process where it gets no thread. So as many are started, and ended, before it is asked for them.
class EarlySleep {
 public:
  // `threads`: how many to start, as many as processors and at least 2: with the caller's team that is more than
  // processors. They come in a while.
  explicit EarlySleep(int threads);
  // They end; the first is waited for.
  ~EarlySleep() = default;
  EarlySleep(const EarlySleep&) = delete;
  EarlySleep& operator=(const EarlySleep&) = delete;

  // Whether the threads of some have come.
  static bool any() noexcept;

 private:
  struct Sleepers {
    ~Sleepers();
    void run(Parallel parallel, int threads) noexcept;
    Gate over;
    std::thread first;  // the others are those of its team
    bool came = false;  // written by the first
  };
  OwnedByProcess<Sleepers> sleepers_{std::make_unique<Sleepers>()};
};

}  // namespace infinity
