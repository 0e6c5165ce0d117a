// The loops over codes, one set of them for each instruction set. What they compute is in kernels.inc.
#pragma once

#include <cstdint>

#include "decode/decode.h"

namespace infinity::decode {

// The part of a matrix that one thread takes at a time. Of transposed codes: rows of at most kTileRows, which begin
// with a word of the codes.
struct Tile {
  int64_t row, row_end;
  int64_t column, column_end;
};

constexpr int64_t kTileRows = 128;
constexpr int64_t kTileColumns = 256;

struct Kernels {
  static const Kernels kAvx512, kAvx2, kPortable;

  const char* name;
  void (*decode)(const Matrix&, const Tile&, bool streams);
};

}  // namespace infinity::decode
