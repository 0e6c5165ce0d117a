// The Python names of the kernels: addresses, lengths and numbers cross, and ties as arrays. The GIL is released while
// memory is worked on; infinity/optim/kernel.py has checked that what lies at an address is what is said.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/instructions.h"
#include "optim/adam.h"

namespace py = pybind11;

namespace infinity::optim {
namespace {

using Address = uintptr_t;
using TiesArray = py::array_t<int32_t, py::array::c_style>;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT: that is what an address is for
}

Ties ties_of(const TiesArray& array) {
  if (array.ndim() != 1) throw py::value_error("ties must be one-dimensional");
  return {array.data(), array.data() + array.size()};
}

// An array that owns the vector's memory.
TiesArray array_of(std::vector<int32_t> ties) {
  auto* owned = new std::vector<int32_t>(std::move(ties));
  py::capsule owner(owned, [](void* pointer) { delete static_cast<std::vector<int32_t>*>(pointer); });
  return TiesArray(static_cast<py::ssize_t>(owned->size()), owned->data(), owner);
}

Grad grad_of(const std::string& dtype) {
  if (dtype == "float32") return Grad::kFloat32;
  if (dtype == "bfloat16") return Grad::kBfloat16;
  if (dtype == "float16") return Grad::kFloat16;
  throw py::value_error("gradients must be float32, bfloat16 or float16, got " + dtype);
}

Moments moments_of(const std::string& dtype) {
  if (dtype == "float32") return Moments::kFloat32;
  if (dtype == "bfloat16") return Moments::kBfloat16;
  if (dtype == "uint8") return Moments::kCoded;
  throw py::value_error("moments must be float32, bfloat16 or uint8, got " + dtype);
}

Master master_of(const Fields& fields, const std::string& compute_dtype) {
  if (fields.remainder != nullptr) return Master::kSplit;
  if (fields.compute_param == nullptr) return Master::kFull;
  return compute_dtype == "float16" ? Master::kFullWithFloat16 : Master::kFullWithBfloat16;
}

Means means_of(int threads, const std::string& instructions) {
  if (threads < 1) throw py::value_error("threads must be positive");
  return {threads, instructions};
}

using PieceFields = std::tuple<Address, int64_t, int64_t, int64_t, int64_t, uint64_t, int64_t>;

std::vector<Piece> pieces_of(const std::vector<PieceFields>& rows) {
  std::vector<Piece> pieces;
  pieces.reserve(rows.size());
  for (const auto& [grad, offset, numel, start, shard_numel, key, place] : rows) {
    pieces.push_back({at<const void>(grad), offset, numel, start, shard_numel, key, place});
  }
  return pieces;
}

using SumsArray = py::array_t<uint32_t, py::array::c_style>;

// The ties; where pages were to be verified and summed, their sums, and the number of the first wrong one or -1.
py::tuple update_fields(double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
                        bool maximize, double step, double grad_scale, const std::string& grad_dtype,
                        const std::string& compute_dtype, const std::string& moments_dtype,
                        const std::vector<PieceFields>& rows, int64_t numel, Address exp_avg, Address exp_avg_sq,
                        Address scales, Address master, Address compute_param, Address remainder, Address staged,
                        const TiesArray& ties, Address pages, const SumsArray& expected, int threads,
                        const std::string& instructions) {
  Settings settings{lr, beta1, beta2, eps, weight_decay, decoupled, maximize, step, static_cast<float>(grad_scale)};
  Fields fields{numel,
                at<void>(exp_avg),
                at<void>(exp_avg_sq),
                at<float>(master),
                at<uint16_t>(compute_param),
                at<uint16_t>(remainder),
                moments_of(moments_dtype),
                at<float>(scales),
                at<uint16_t>(staged)};
  Grad grad = grad_of(grad_dtype);
  Master kind = master_of(fields, compute_dtype);
  Means means = means_of(threads, instructions);
  std::vector<Piece> pieces = pieces_of(rows);
  Ties old = ties_of(ties);
  SumsArray sums(expected.size());
  std::fill_n(sums.mutable_data(), expected.size(), kUnknownPage);
  Pages summed{at<const std::byte>(pages), expected.size(), expected.data(), sums.mutable_data(), -1};
  std::vector<int32_t> rounded_up;
  {
    py::gil_scoped_release release;
    rounded_up = update(settings, grad, kind, fields, pieces, old, means, pages == 0 ? nullptr : &summed);
  }
  return py::make_tuple(array_of(std::move(rounded_up)), sums, summed.wrong);
}

void join_fields(Address compute_param, Address remainder, int64_t numel, const TiesArray& ties, Address master,
                 int threads, const std::string& instructions) {
  Means means = means_of(threads, instructions);
  Ties old = ties_of(ties);
  py::gil_scoped_release release;
  join(at<uint16_t>(compute_param), at<uint16_t>(remainder), numel, old, at<float>(master), means);
}

TiesArray split_fields(Address master, int64_t numel, Address compute_param, Address remainder, int threads,
                       const std::string& instructions) {
  Means means = means_of(threads, instructions);
  std::vector<int32_t> rounded_up;
  {
    py::gil_scoped_release release;
    rounded_up = split(at<float>(master), numel, at<uint16_t>(compute_param), at<uint16_t>(remainder), means);
  }
  return array_of(std::move(rounded_up));
}

void accumulate_grads(const std::string& grad_dtype, Address grads, int64_t numel, Address sums, int threads,
                      const std::string& instructions) {
  Means means = means_of(threads, instructions);
  Grad grad = grad_of(grad_dtype);
  py::gil_scoped_release release;
  accumulate(grad, at<const void>(grads), numel, at<float>(sums), means);
}

py::array_t<float> norms_of(const std::vector<std::tuple<std::string, Address, int64_t>>& rows, int threads,
                            const std::string& instructions) {
  Means means = means_of(threads, instructions);
  std::vector<Whole> wholes;
  wholes.reserve(rows.size());
  for (const auto& [dtype, address, numel] : rows) wholes.push_back({grad_of(dtype), at<const void>(address), numel});
  py::array_t<float> computed(static_cast<py::ssize_t>(wholes.size()));
  float* into = computed.mutable_data();
  {
    py::gil_scoped_release release;
    norms(wholes, into, means);
  }
  return computed;
}

}  // namespace
}  // namespace infinity::optim

PYBIND11_MODULE(_optim, module) {
  namespace optim = infinity::optim;
  module.doc() = "Adam in one pass over memory. See csrc/optim/README.md.";
  module.def("instruction_sets", &infinity::instruction_sets);
  module.def("update", &optim::update_fields, py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
             py::arg("eps"), py::arg("weight_decay"), py::arg("decoupled"), py::arg("maximize"), py::arg("step"),
             py::arg("grad_scale"), py::arg("grad_dtype"), py::arg("compute_dtype"), py::arg("moments_dtype"),
             py::arg("pieces"), py::arg("numel"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("scales"),
             py::arg("master"), py::arg("copy"), py::arg("remainder"), py::arg("staged"), py::arg("ties"),
             py::arg("pages"), py::arg("expected"), py::arg("threads"), py::arg("instructions"));
  module.def("join", &optim::join_fields, py::kw_only(), py::arg("copy"), py::arg("remainder"), py::arg("numel"),
             py::arg("ties"), py::arg("master"), py::arg("threads"), py::arg("instructions"));
  module.def("split", &optim::split_fields, py::kw_only(), py::arg("master"), py::arg("numel"), py::arg("copy"),
             py::arg("remainder"), py::arg("threads"), py::arg("instructions"));
  module.def("accumulate", &optim::accumulate_grads, py::kw_only(), py::arg("grad_dtype"), py::arg("grads"),
             py::arg("numel"), py::arg("sums"), py::arg("threads"), py::arg("instructions"));
  module.def("norms", &optim::norms_of, py::kw_only(), py::arg("gradients"), py::arg("threads"),
             py::arg("instructions"));
}
