// Numbers from a matrix of codes, in one pass over memory: (number of the code - zero) · scale. Called from any
// thread; the work is shared with the threads of the pool.
#pragma once

#include <cstdint>
#include <string>

namespace infinity::decode {

enum class Dtype { kFloat32, kBfloat16, kFloat16, kByte };

// The numbers that codes stand for: of 4 bits, those of a table; of 8 bits, integers or fp8.
enum class Code { kTable, kUnsigned, kSigned, kE4m3, kE5m2 };

// How codes lie in lines of memory.
enum class Layout {
  kRows,    // a line has the codes of a row
  kWords,   // the same codes in words of 32 bits, transposed: a line has one word of each row
  kNibbles  // all transposed: a line has the codes (of 4 bits) of a column
};

struct Codes {
  const uint8_t* begin;
  int64_t line_bytes;  // from one line to the next
  Code code;
  Layout layout;
  bool high_first;                // of kTable in kRows: the first code of a byte is in its high bits
  const int32_t* order;           // of kNibbles: for each code of a word, from its lowest bits on, its row among eight
  alignas(64) float numbers[16];  // of kTable
};

// A scale or zero for some rows and columns. That of row group r and column group c lies at r · row_stride +
// c · column_stride elements.
struct Factors {
  const void* begin;  // null where there is none
  Dtype dtype;
  int64_t row_stride;
  int64_t column_stride;
  const float* numbers;  // of kByte: 256
};

// Rows [0, rows) and columns [0, columns) are decoded. They lie from `row` and `column` on in the codes, and their
// first row is number `row_in_group` of the first row group. The first column group begins with the codes.
struct Matrix {
  Codes codes;
  int64_t row, column;
  int64_t rows, columns;
  int64_t rows_in_group, row_in_group;
  int64_t columns_in_group;        // 0: groups are those of `group_of_column`
  const int32_t* group_of_column;  // in the codes
  int64_t groups;                  // of columns
  Factors scales, zeros;           // dtype kFloat32 for zeros
  void* out;                       // rows · columns, one row behind the other
  Dtype dtype;                     // of out
  Dtype through;                   // what numbers are rounded to first; kFloat32: nothing
};

// Decodes on `threads` threads, the caller's among them, with one of instruction_sets(). Throws std::invalid_argument
// for a group of a column that there is not.
void decode(const Matrix& matrix, int threads, const std::string& instructions);

}  // namespace infinity::decode
