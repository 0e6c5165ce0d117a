// The OpenMP runtime that is in this process already: torch's, where that is GNU's.
#pragma once

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

}  // namespace infinity
