// One step of Adam or AdamW on a sub-group, in one pass over its memory: from the gradient through both moments and the
// master weight to its 16-bit copy. Called from any thread; the work is shared with the threads of the crew.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace infinity::optim {

enum class Grad { kFloat32, kBfloat16, kFloat16 };

// How the master weight is kept. Split is a bf16 copy and a remainder, from which it is recovered: see [Note: Ties].
enum class Master { kSplit, kFull, kFullWithBfloat16, kFullWithFloat16 };

// The hyper-parameters, named as in torch.optim.AdamW; `step` counts from 1.
struct Settings {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled;
  bool maximize;
  double step;
  float grad_scale;
};

// The fields of a sub-group of `numel` elements; what its `Master` does not have is null.
struct Fields {
  int64_t numel;
  float* exp_avg;
  float* exp_avg_sq;
  float* master;
  uint16_t* copy;
  uint16_t* remainder;
};

// `numel` gradients for the elements of a sub-group from `offset` on, which are those of a shard of `shard_numel`
// elements from `start` on.
struct Piece {
  const void* grad;
  int64_t offset;
  int64_t numel;
  int64_t start;
  int64_t shard_numel;
};

// Ascending indices of elements in a sub-group.
struct Ties {
  const int32_t* begin;
  const int32_t* end;
};

// Who does the work, with which instructions.
struct Means {
  int threads;               // the caller's among them
  std::string instructions;  // one of instruction_sets()
};

// Those that this CPU has, the fastest first; the last is always "portable".
std::vector<std::string> instruction_sets();

// Updates the elements of `pieces`, which ascend and do not overlap, in place, and returns the ties of the sub-group
// anew. Throws std::invalid_argument for pieces that reach out of the sub-group or their shard.
std::vector<int32_t> update(const Settings& settings, Grad grad, Master kind, const Fields& fields,
                            const std::vector<Piece>& pieces, Ties ties, const Means& means);

// The master weights of which `split` made `copy` and `remainder`.
void join(const uint16_t* copy, const uint16_t* remainder, int64_t numel, Ties ties, float* master, const Means& means);

// Sets `copy` and `remainder`; returns the ties that were rounded up.
std::vector<int32_t> split(const float* master, int64_t numel, uint16_t* copy, uint16_t* remainder, const Means& means);

}  // namespace infinity::optim
