// The loops for any CPU.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "base/lanes_portable.h"
#include "optim/kernels.h"

namespace infinity::optim {
namespace {

#include "optim/kernels.inc"

}  // namespace

const Kernels Kernels::kPortable = kernels_of("portable");

}  // namespace infinity::optim
