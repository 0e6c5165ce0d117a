// The decoder under the sanitizers: no byte outside the codes, factors and results is touched, threads share the work
// without a race, and every instruction set gives the same bits.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/instructions.h"
#include "decode/decode.h"

namespace infinity::decode {
namespace {

const int32_t kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// Vectors of exactly the length, so that ASan sees the first byte behind them.
struct Coded {
  Coded(Code code, Layout layout, int64_t rows, int64_t columns, int64_t in_group, Dtype of_scales)
      : rows(rows), columns(columns) {
    const int64_t in_byte = code == Code::kTable ? 2 : 1;
    int64_t lines = rows, line_bytes = (columns + in_byte - 1) / in_byte;
    if (layout == Layout::kWords) lines = (columns + 4 * in_byte - 1) / (4 * in_byte), line_bytes = 4 * rows;
    if (layout == Layout::kNibbles) lines = columns, line_bytes = (rows + 7) / 8 * 4;
    std::mt19937 random(1);
    bytes.resize(static_cast<size_t>(lines * line_bytes));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    const int64_t groups = (columns + in_group - 1) / in_group;
    const size_t itemsize = of_scales == Dtype::kFloat32 ? 4 : of_scales == Dtype::kByte ? 1 : 2;
    scales.resize(static_cast<size_t>(rows * groups) * itemsize);
    for (uint8_t& byte : scales) byte = static_cast<uint8_t>(random() % 64);
    for (int i = 0; i < 256; ++i) numbers.push_back(static_cast<float>(i) / 7);
    matrix = {{bytes.data(), line_bytes, code, layout, false, kOrder, {}},
              0,
              0,
              rows,
              columns,
              1,
              0,
              in_group,
              nullptr,
              groups,
              {scales.data(), of_scales, groups, 1, numbers.data()},
              {nullptr, Dtype::kFloat32, 0, 0, nullptr},
              nullptr,
              Dtype::kBfloat16,
              Dtype::kFloat32};
    for (int i = 0; i < 16; ++i) matrix.codes.numbers[i] = static_cast<float>(i - 8);
  }

  std::vector<uint8_t> decoded(Dtype dtype, Dtype through, int threads, const std::string& instructions) {
    std::vector<uint8_t> out(static_cast<size_t>(rows * columns * (dtype == Dtype::kFloat32 ? 4 : 2)));
    matrix.out = out.data();
    matrix.dtype = dtype;
    matrix.through = through;
    decode(matrix, threads, instructions);
    return out;
  }

  int64_t rows, columns;
  std::vector<uint8_t> bytes, scales;
  std::vector<float> numbers;
  Matrix matrix{};
};

TEST_CASE("every instruction set gives the same bits, and touches no other byte") {
  for (Code code : {Code::kTable, Code::kUnsigned, Code::kSigned, Code::kE4m3, Code::kE5m2}) {
    for (Layout layout : {Layout::kRows, Layout::kWords, Layout::kNibbles}) {
      if (layout == Layout::kNibbles && code != Code::kTable) continue;
      for (int64_t in_group : {1, 5, 24, 32, 1000}) {
        for (Dtype of_scales : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16, Dtype::kByte}) {
          for (auto [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {3, 37}, {131, 290}}) {
            Coded coded(code, layout, rows, columns, in_group, of_scales);
            for (Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
              std::vector<uint8_t> expected = coded.decoded(dtype, Dtype::kBfloat16, 1, "portable");
              for (const std::string& instructions : instruction_sets()) {
                CHECK(coded.decoded(dtype, Dtype::kBfloat16, 3, instructions) == expected);
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("any rows and columns are those of the whole") {
  for (Layout layout : {Layout::kRows, Layout::kWords, Layout::kNibbles}) {
    const int64_t row = 5, column = layout == Layout::kRows ? 3 : 0;
    Coded coded(Code::kTable, layout, 40, 64, 16, Dtype::kFloat32);
    std::vector<uint8_t> whole = coded.decoded(Dtype::kBfloat16, Dtype::kFloat32, 1, instruction_sets().front());
    coded.matrix.row = coded.matrix.row_in_group = row;
    coded.matrix.column = column;
    coded.matrix.rows = coded.rows = 40 - row;
    coded.matrix.columns = coded.columns = 64 - column;
    std::vector<uint8_t> part = coded.decoded(Dtype::kBfloat16, Dtype::kFloat32, 2, instruction_sets().front());
    for (int64_t i = 0; i < 40 - row; ++i) {
      const uint8_t* expected = whole.data() + ((row + i) * 64 + column) * 2;
      CHECK(std::memcmp(part.data() + i * (64 - column) * 2, expected, static_cast<size_t>(64 - column) * 2) == 0);
    }
  }
}

TEST_CASE("factors of rows that lie side by side give the same as those that do not") {
  for (auto [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {15, 37}, {150, 290}}) {
    constexpr int64_t kGroups = 5;
    Coded coded(Code::kTable, Layout::kWords, rows, columns, columns / kGroups + 1, Dtype::kFloat16);
    std::vector<int32_t> of_column(static_cast<size_t>(columns));
    std::vector<uint16_t> scales[2];
    std::vector<float> zeros[2];
    std::mt19937 random(2);
    for (int32_t& group : of_column) group = static_cast<int32_t>(random() % kGroups);
    for (int i = 0; i < 2; ++i) {
      scales[i].resize(static_cast<size_t>(rows * kGroups));
      zeros[i].resize(static_cast<size_t>(rows * kGroups));
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t group = 0; group < kGroups; ++group) {
        auto apart = static_cast<size_t>(row * kGroups + group), adjacent = static_cast<size_t>(group * rows + row);
        scales[0][apart] = scales[1][adjacent] = static_cast<uint16_t>(random() % 0x7C00);
        zeros[0][apart] = zeros[1][adjacent] = static_cast<float>(random() % 16);
      }
    }
    coded.matrix.columns_in_group = 0;
    coded.matrix.group_of_column = of_column.data();
    coded.matrix.groups = kGroups;
    std::vector<uint8_t> decoded[2];
    for (const std::string& instructions : instruction_sets()) {
      for (int i = 0; i < 2; ++i) {
        const int64_t row_stride = i == 0 ? kGroups : 1, column_stride = i == 0 ? 1 : rows;
        coded.matrix.scales = {scales[i].data(), Dtype::kFloat16, row_stride, column_stride, nullptr};
        coded.matrix.zeros = {zeros[i].data(), Dtype::kFloat32, row_stride, column_stride, nullptr};
        decoded[i] = coded.decoded(Dtype::kBfloat16, Dtype::kFloat16, 2, instructions);
      }
      CHECK(decoded[0] == decoded[1]);
    }
  }
}

TEST_CASE("a column in a group that there is not is refused") {
  Coded coded(Code::kTable, Layout::kRows, 2, 32, 8, Dtype::kFloat32);
  for (int32_t group : {-1, 4}) {
    std::vector<int32_t> of_column(32, 0);
    of_column[31] = group;
    coded.matrix.columns_in_group = 0;
    coded.matrix.group_of_column = of_column.data();
    CHECK_THROWS_AS(coded.decoded(Dtype::kBfloat16, Dtype::kFloat32, 1, "portable"), std::invalid_argument);
  }
}

}  // namespace
}  // namespace infinity::decode
