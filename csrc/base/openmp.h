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
// torch's threads spin for some milliseconds after each operation. Another thread pool would share the cores with them
// and gain nothing, so the spinning team does the work instead. Nothing is linked or loaded: there is no second
// runtime.
//
// A job takes all threads that it may, even if fewer would do: the runtime ends the threads that a smaller team leaves
// out, and starts others for the next one.
//
// The team would also spin while the computing thread waits for a drive. So it joins the wait, and sleeps at a gate
// that this thread opens when the bytes are there. No member waits for a lock that the others want.
Parallel openmp_parallel();

}  // namespace infinity
