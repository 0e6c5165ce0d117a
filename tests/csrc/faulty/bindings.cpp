// The functions that a test build adds to infinity._aio: make_worse, end_worse, fault_counts.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "faults.h"

namespace py = pybind11;

namespace infinity::aio {
namespace {

// Rates are given by fault_name(), the plan's other fields under their own names.
FaultPlan fault_plan_of(const std::map<std::string, py::object>& given) {
  FaultPlan plan;
  for (const auto& [key, value] : given) {
    auto kind = size_t{0};
    while (kind < kFaultKinds && key != fault_name(static_cast<Fault>(kind))) ++kind;
    if (kind < kFaultKinds) {
      plan.rates[kind] = value.cast<double>();
    } else if (key == "seed") {
      plan.seed = value.cast<uint64_t>();
    } else if (key == "delay_seconds_max") {
      plan.delay_seconds_max = value.cast<double>();
    } else if (key == "after_blocks") {
      plan.after_blocks = value.cast<int64_t>();
    } else {
      throw py::value_error("there is no fault named \"" + key + "\"");
    }
  }
  return plan;
}

py::dict counts_of(const WorseDrives& worse) {
  py::dict counts;
  for (size_t kind = 0; kind < kFaultKinds; ++kind) {
    auto fault = static_cast<Fault>(kind);
    counts[fault_name(fault)] = worse.count_of(fault);
  }
  return counts;
}

}  // namespace

// csrc/aio/bindings.cpp declares and calls it.
void bind_faults(py::module_& module, std::function<void(EngineOptions&)>& change_options) {
  using Limits = std::vector<std::tuple<double, double, std::string>>;  // the fields of DriveLimit
  static auto worse = std::make_shared<WorseDrives>(std::vector<DriveLimit>());
  module.def(
      "make_worse",
      [&change_options](const Limits& given, const std::map<std::string, py::object>& plan) {
        std::vector<DriveLimit> limits;
        for (const auto& [bytes_per_s, latency_seconds, path] : given) {
          limits.push_back({bytes_per_s, latency_seconds, path});
        }
        worse = std::make_shared<WorseDrives>(std::move(limits), fault_plan_of(plan));
        change_options = [](EngineOptions& options) { make_worse(options, worse); };
      },
      py::arg("limits"), py::arg("faults"), "Make drives worse for every engine that is made from now on.");
  module.def(
      "end_worse", [&change_options] { change_options = nullptr; },
      "Leave the drives of engines that are made from now on as they are.");
  module.def("fault_counts", [] { return counts_of(*worse); }, "Faults since the last `make_worse`, by name.");
}

}  // namespace infinity::aio
