// Looking at the rings, and waking the one that is given up, which ends itself.
#include "aio/watchdog.h"

#include <chrono>
#include <mutex>

namespace infinity::aio {
namespace {

constexpr int kLooks = 4;  // at a silent ring, per silence_seconds_max

void look_at(Ring& ring) {
  bool silent = ring.in_flight > 0 && ring.reaped == ring.reaped_before;
  ring.reaped_before = ring.reaped;
  ring.silent_looks = silent ? ring.silent_looks + 1 : 0;
  if (ring.silent_looks < kLooks || ring.backend == nullptr) return;
  ring.given_up = true;
  ring.backend->wake();
}

}  // namespace

void watch_rings(EngineState& state, double silence_seconds_max) {
  std::chrono::duration<double> pause(silence_seconds_max / kLooks);
  std::unique_lock<std::mutex> lock(state.mutex);
  while (!state.watchdog_ends.wait_for(lock, pause, [&state] { return state.joined; })) {
    for (auto& drive : state.drives) {
      for (auto& ring : drive->rings) look_at(*ring);
    }
  }
}

}  // namespace infinity::aio
