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

bool is_called(const char* path, const char* beginning) {
  const char* name = std::strrchr(path, '/');
  return name != nullptr && std::strncmp(name + 1, beginning, std::strlen(beginning)) == 0;
}

int note_torch(dl_phdr_info* library, size_t, void* path) {
  if (!is_called(library->dlpi_name, "libtorch_cpu.so")) return 0;
  *static_cast<std::string*>(path) = library->dlpi_name;  // no more than that: the loader holds a lock
  return 1;
}

// Through torch's library, in which its own runtime is found: others of that name may be loaded for other packages.
void* find_parallel() {
  std::string path;
  if (dl_iterate_phdr(note_torch, &path) == 0) return nullptr;
  void* torch = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);  // it stays: so does torch
  void* parallel = torch == nullptr ? nullptr : dlsym(torch, "GOMP_parallel");
  Dl_info runtime{};
  bool is_gnus = parallel != nullptr && dladdr(parallel, &runtime) != 0 && is_called(runtime.dli_fname, "libgomp");
  return is_gnus ? parallel : nullptr;
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
