// The Python name of the decoder: addresses and numbers cross. The GIL is released while memory is worked on;
// infinity/store/formats/coded.py has checked that what lies at an address is what is said.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "base/instructions.h"
#include "decode/decode.h"

namespace py = pybind11;

namespace infinity::decode {
namespace {

using Address = uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT: that is what an address is for
}

Dtype dtype_of(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBfloat16;
  if (name == "float16") return Dtype::kFloat16;
  if (name == "uint8") return Dtype::kByte;
  throw py::value_error("numbers must be float32, bfloat16, float16 or uint8, got " + name);
}

Code code_of(const std::string& name) {
  if (name == "table") return Code::kTable;
  if (name == "uint8") return Code::kUnsigned;
  if (name == "int8") return Code::kSigned;
  if (name == "float8_e4m3fn") return Code::kE4m3;
  if (name == "float8_e5m2") return Code::kE5m2;
  throw py::value_error("there are no codes of " + name);
}

Layout layout_of(const std::string& name) {
  if (name == "rows") return Layout::kRows;
  if (name == "words") return Layout::kWords;
  if (name == "nibbles") return Layout::kNibbles;
  throw py::value_error("there is no layout of " + name);
}

using FactorFields = std::tuple<Address, std::string, int64_t, int64_t, Address>;

Factors factors_of(const FactorFields& fields) {
  auto& [begin, dtype, row_stride, column_stride, numbers] = fields;
  return {at<const void>(begin), dtype_of(dtype), row_stride, column_stride, at<const float>(numbers)};
}

void decode_matrix(Address codes, int64_t line_bytes, const std::string& code, const std::string& layout,
                   Address numbers, bool high_first, Address order, int64_t row, int64_t column, int64_t rows,
                   int64_t columns, int64_t rows_in_group, int64_t row_in_group, int64_t columns_in_group,
                   Address group_of_column, int64_t groups, const FactorFields& scales, const FactorFields& zeros,
                   Address out, const std::string& dtype, const std::string& through, int threads,
                   const std::string& instructions) {
  Codes lines{at<const uint8_t>(codes), line_bytes, code_of(code), layout_of(layout), high_first,
              at<const int32_t>(order), {}};
  if (lines.code == Code::kTable) std::copy_n(at<const float>(numbers), 16, lines.numbers);
  Matrix matrix{lines,
                row,
                column,
                rows,
                columns,
                rows_in_group,
                row_in_group,
                columns_in_group,
                at<const int32_t>(group_of_column),
                groups,
                factors_of(scales),
                factors_of(zeros),
                at<void>(out),
                dtype_of(dtype),
                dtype_of(through)};
  py::gil_scoped_release release;
  decode(matrix, threads, instructions);
}

}  // namespace
}  // namespace infinity::decode

PYBIND11_MODULE(_decode, module) {
  namespace decode = infinity::decode;
  module.doc() = "Numbers from a matrix of codes. See csrc/decode/README.md.";
  module.def("instruction_sets", &infinity::instruction_sets);
  module.def("decode", &decode::decode_matrix, py::kw_only(), py::arg("codes"), py::arg("line_bytes"), py::arg("code"),
             py::arg("layout"), py::arg("numbers"), py::arg("high_first"), py::arg("order"), py::arg("row"),
             py::arg("column"), py::arg("rows"), py::arg("columns"), py::arg("rows_in_group"), py::arg("row_in_group"),
             py::arg("columns_in_group"), py::arg("group_of_column"), py::arg("groups"), py::arg("scales"),
             py::arg("zeros"), py::arg("out"), py::arg("dtype"), py::arg("through"), py::arg("threads"),
             py::arg("instructions"));
}
