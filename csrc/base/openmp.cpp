// Looking for the runtime among what is loaded.
#include "base/openmp.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstring>

#include "base/process.h"

namespace infinity {
namespace {

const ForkGuard loaded;

int note_runtime(dl_phdr_info* library, size_t, void* found) {
  const char* name = std::strrchr(library->dlpi_name, '/');
  if (name == nullptr || std::strncmp(name, "/libgomp", 8) != 0) return 0;
  void* handle = dlopen(library->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return 0;
  *static_cast<void**>(found) = dlsym(handle, "GOMP_parallel");  // the handle stays: so does the runtime
  return 1;
}

}  // namespace

Parallel openmp_parallel() {
  static std::atomic<void*> known{nullptr};
  if (loaded.in_child()) return nullptr;
  void* parallel = known.load(std::memory_order_acquire);
  if (parallel == nullptr) {
    dl_iterate_phdr(note_runtime, &parallel);
    known.store(parallel, std::memory_order_release);
  }
  return reinterpret_cast<Parallel>(parallel);
}

}  // namespace infinity
