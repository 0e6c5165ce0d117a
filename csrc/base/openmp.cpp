// Looking for the runtime among what is loaded.
#include "base/openmp.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstring>
#include <string>

#include "base/process.h"

namespace infinity {
namespace {

const ForkGuard loaded;

int note_runtime(dl_phdr_info* library, size_t, void* path) {
  const char* name = std::strrchr(library->dlpi_name, '/');
  if (name == nullptr || std::strncmp(name, "/libgomp", 8) != 0) return 0;
  *static_cast<std::string*>(path) = library->dlpi_name;  // no more than that: the loader holds a lock
  return 1;
}

void* find_parallel() {
  std::string path;
  if (dl_iterate_phdr(note_runtime, &path) == 0) return nullptr;
  void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);  // it stays: so does the runtime
  return handle == nullptr ? nullptr : dlsym(handle, "GOMP_parallel");
}

}  // namespace

Parallel openmp_parallel() {
  static std::atomic<void*> known{nullptr};
  if (loaded.in_child()) return nullptr;
  void* parallel = known.load(std::memory_order_acquire);
  if (parallel == nullptr) {
    parallel = find_parallel();
    known.store(parallel, std::memory_order_release);
  }
  return reinterpret_cast<Parallel>(parallel);
}

}  // namespace infinity
