// Cutting the work into tiles, and sharing it out.
#include "decode/decode.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "base/instructions.h"
#include "base/thread_pool.h"
#include "decode/kernels.h"

namespace infinity::decode {
namespace {

constexpr int64_t kTileNumel = 1 << 16;      // or so, in rows: as much as stays in the cache of a core
constexpr int64_t kStreamedNumel = 1 << 21;  // so many results do not stay in caches, and are stored past them

int64_t divided_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

void check(const Matrix& matrix) {
  if (matrix.columns_in_group > 0) return;
  const int32_t* of = matrix.group_of_column;
  bool inside = std::all_of(of, of + matrix.column + matrix.columns,
                            [&](int32_t group) { return group >= 0 && group < matrix.groups; });
  if (!inside) throw std::invalid_argument("a column is in a group that there is not");
}

}  // namespace

void decode(const Matrix& matrix, int threads, const std::string& instructions) {
  check(matrix);
  auto* kernel = kernels_named<Kernels>(instructions).decode;
  const bool whole_rows = matrix.codes.layout == Layout::kRows;
  // Even columns, so that tiles begin with a byte of the codes if rows do. Rows that end with a word, or nearly so.
  const int64_t columns = whole_rows ? std::min(matrix.columns, kTileNumel) : 2 * kTileColumns;
  const int64_t rows = whole_rows ? std::max<int64_t>(1, kTileNumel / std::max<int64_t>(1, columns)) : kTileRows;
  const bool streams = matrix.rows * matrix.columns >= kStreamedNumel;
  const int64_t before = whole_rows ? 0 : matrix.row % kTileRows;  // rows that the first tile lacks
  const int64_t across = divided_up(matrix.columns, std::max<int64_t>(1, columns));
  ThreadPool::here().run(threads, divided_up(before + matrix.rows, rows) * across, [&](int64_t number) {
    int64_t row = number / across * rows - before, column = number % across * columns;
    kernel(matrix,
           {std::max<int64_t>(0, row), std::min(row + rows, matrix.rows), column,
            std::min(column + columns, matrix.columns)},
           streams);
  });
}

}  // namespace infinity::decode
