// The list of backends.
#include "aio/backend.h"

#include <stdexcept>

namespace infinity::aio {

std::vector<BackendProbe> probe_backends() {
  return {probe_uring(), probe_linux_aio(), probe_threads()};
}

BackendFactory backend_factory(const std::string& name) {
  if (name == kUringName) return make_uring_backend;
  if (name == kLinuxAioName) return make_linux_aio_backend;
  if (name == kThreadsName) return make_threads_backend;
  throw std::invalid_argument("there is no backend \"" + name + "\": choose auto, " + kUringName + ", " +
                              kLinuxAioName + " or " + kThreadsName);
}

}  // namespace infinity::aio
