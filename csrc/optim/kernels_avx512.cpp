// The loops for AVX-512.
#if defined(__x86_64__)
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "base/lanes_avx512.h"
#include "optim/kernels.h"

namespace infinity::optim {
namespace {

#include "optim/kernels.inc"

}  // namespace

const Kernels Kernels::kAvx512 = kernels_of("avx512");

}  // namespace infinity::optim
#endif
