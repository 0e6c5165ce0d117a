// The loops for AVX-512.
#if defined(__x86_64__)
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/halves.h"
#include "base/lanes_avx512.h"
#include "decode/kernels.h"

namespace infinity::decode {
namespace {

#include "decode/kernels.inc"

}  // namespace

const Kernels Kernels::kAvx512 = {"avx512", decode_tile};

}  // namespace infinity::decode
#endif
