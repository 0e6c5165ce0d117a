// The ring thread: takes blocks from its drive's queues, moves them through a backend, and reads every result.
#pragma once

#include "aio/backend.h"
#include "aio/options.h"
#include "aio/state.h"

namespace infinity::aio {

// The body of the thread. Makes the backend, says in `ring` whether there is one, and moves blocks until the engine
// closes and nothing is left. What is passed by reference outlives the thread.
void run_ring(EngineState& state, Drive& drive, Ring& ring, const EngineOptions& options, const BackendFactory& make,
              const BackendOptions& backend_options);

}  // namespace infinity::aio
