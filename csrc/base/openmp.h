// The OpenMP runtime that is in this process already: torch's, where that is GNU's.
#pragma once

namespace infinity {

// Calls `body(data)` on `threads` threads, the caller among them, and returns when all calls have. `body` must not
// throw.
using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// As many threads as torch's operations on this thread take.
constexpr unsigned kWholeTeam = 0;

// That of the runtime; null where there is none yet, or in a forked child, where its threads are gone.
//
// [Note: One team]
// torch's threads spin for some milliseconds after each operation, to be there for the next. A thread pool of our own
// has to share the cores with them, and a second thread gains nothing while they spin. The team that spins does the
// work instead. Nothing is linked and nothing is loaded for it, so there is never a second runtime.
//
// The team would spin, too, while the thread that computes waits for a drive: a fifth of the CPU time of a step that
// the drive bounds. So all of the team waits for the transfer, asleep, and spins again when the bytes are there.
Parallel openmp_parallel();

}  // namespace infinity
