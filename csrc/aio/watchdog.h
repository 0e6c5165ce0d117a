// The thread that gives up a ring whose drive doesn't answer.
#pragma once

#include "aio/state.h"

namespace infinity::aio {

// [Note: silence]
// A drive, or the network behind one, can stop answering without an error: a block never comes back, and whoever waits
// for it waits for ever. A thread of the engine looks at each ring four times per silence_seconds_max; a ring that has
// blocks in flight and has read no completion at four looks in a row is given up as one that broke: its transfers fail,
// and the memory and the files that the kernel may still use are kept for good. Looks are counted, not seconds, so that
// a process which was stopped and goes on gives up nothing.

// The body of the thread. Returns once the rings have been joined.
void watch_rings(EngineState& state, double silence_seconds_max);

}  // namespace infinity::aio
