// The loops for AVX2.
#if defined(__x86_64__)
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "base/lanes_avx2.h"
#include "optim/kernels.h"

namespace infinity::optim {
namespace {

#include "optim/kernels.inc"

}  // namespace

const Kernels Kernels::kAvx2 = kernels_of("avx2");

}  // namespace infinity::optim
#endif
