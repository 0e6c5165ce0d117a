// The instruction sets that loops are written for: each has its `Lanes` in a header here, which a source file with such
// loops includes.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace infinity {

// Returns the names of those that this CPU has, the fastest first; the last is always "portable".
inline std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) names.emplace_back("avx512");
  if (avx2) names.emplace_back("avx2");
#endif
  names.emplace_back("portable");
  return names;
}

// Returns the loops of that name. Throws std::invalid_argument if this CPU lacks their instructions.
template <typename Kernels>
const Kernels& kernels_named(const std::string& name) {
  static constexpr const Kernels* kAll[] = {
#if defined(__x86_64__)
      &Kernels::kAvx512, &Kernels::kAvx2,
#endif
      &Kernels::kPortable};
  static const auto& here = *new const auto(instruction_sets());  // never destroyed: threads may outlive it
  for (const std::string& known : here) {
    for (const Kernels* kernels : kAll) {
      if (known == name && kernels->name == name) return *kernels;
    }
  }
  throw std::invalid_argument("there is no " + name + " on this CPU");
}

}  // namespace infinity
