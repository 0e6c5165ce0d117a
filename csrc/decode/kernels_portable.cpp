// The loops for any CPU.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/halves.h"
#include "base/lanes_portable.h"
#include "decode/kernels.h"

namespace infinity::decode {
namespace {

#include "decode/kernels.inc"

}  // namespace

const Kernels Kernels::kPortable = {"portable", decode_tile};

}  // namespace infinity::decode
