// The loops for AVX2.
#if defined(__x86_64__)
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/halves.h"
#include "base/lanes_avx2.h"
#include "decode/kernels.h"

namespace infinity::decode {
namespace {

#include "decode/kernels.inc"

}  // namespace

const Kernels Kernels::kAvx2 = {"avx2", decode_tile};

}  // namespace infinity::decode
#endif
