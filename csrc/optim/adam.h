// One step of Adam or AdamW on a sub-group, in one pass over its memory: from the gradient through both moments and the
// master weight to its 16-bit compute parameter. Called from any thread; the work is shared with the threads of the
// pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace infinity::optim {

enum class Grad { kFloat32, kBfloat16, kFloat16 };

// How the master weight is kept. Split is a bf16 compute parameter and a remainder, which together give it back: see
// [Note: Ties].
enum class Master { kSplit, kFull, kFullWithBfloat16, kFullWithFloat16 };

// How the moments are kept. As bfloat16 they are rounded by chance: see [Note: Rounded by chance] in kernels.inc. Coded
// ones have 8 bits each, and a scale for every block of `kCodedNumel`: see [Note: Codes of eight bits] in codes.inc.
enum class Moments { kFloat32, kBfloat16, kCoded };

constexpr int64_t kCodedNumel = 256;

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
  void* exp_avg;
  void* exp_avg_sq;
  float* master;
  uint16_t* compute_param;
  uint16_t* remainder;
  Moments moments = Moments::kFloat32;
  float* scales = nullptr;     // of coded moments: all of the first's blocks, then all of the second's
  uint16_t* staged = nullptr;  // where the old compute parameters are, and the new ones are to be, too; else null
};

// `numel` gradients for the elements of a sub-group from `offset` on, which are those of a shard of `shard_numel`
// elements from `start` on. The first one is number `place` of a parameter whose random numbers are those of `key`.
// Where moments are coded, a block is of one piece alone: `offset` is the first element of one, and what lies between a
// piece's last element and the end of its block is padding.
struct Piece {
  const void* grad;
  int64_t offset;
  int64_t numel;
  int64_t start;
  int64_t shard_numel;
  uint64_t key = 0;
  int64_t place = 0;
};

// Ascending indices of elements in a sub-group.
struct Ties {
  const int32_t* begin;
  const int32_t* end;
};

// [Note: Sums on the way]
// The bytes of the fields lie on a drive, and each page of 4096 of them has a checksum (csrc/aio/checksums.h). To
// verify and to sum them apart from the update is two more passes over memory, whose bandwidth a virtual drive needs,
// too. So the update may do both where it has the bytes in a cache: it takes as many elements at a time as fill whole
// pages of each field, verifies these pages, updates the elements, and sums the pages. What holds a page that is not as
// it was written is not updated; what is updated by then is in memory alone.
struct Pages {
  const std::byte* begin;  // of the first one; other fields are neither verified nor summed
  int64_t count;
  const uint32_t* expected;  // one for each page; kUnknownPage verifies nothing
  uint32_t* sums;            // one for each page: set for those of the fields
  int64_t wrong;             // set to the number of the first page that was found to be wrong, or -1
};

// Who does the work, with which instructions.
struct Means {
  int threads;               // the caller's among them
  std::string instructions;  // one of instruction_sets()
};

// Updates the elements of `pieces`, which ascend and do not overlap, in place, and returns the sub-group's new
// ties. Throws std::invalid_argument for pieces that reach out of the sub-group or their shard. `pages`: where not
// null, those of the fields are verified and summed on the way; then `numel` fills whole pages, and so do the places of
// the fields. Where one is wrong, the fields are torn and what is returned means nothing.
std::vector<int32_t> update(const Settings& settings, Grad grad, Master kind, const Fields& fields,
                            const std::vector<Piece>& pieces, Ties ties, const Means& means, Pages* pages = nullptr);

// The master weights of which `split` made `compute_param` and `remainder`.
void join(const uint16_t* compute_param, const uint16_t* remainder, int64_t numel, Ties ties, float* master,
          const Means& means);

// Sets `compute_param` and `remainder`; returns the ties that were rounded up.
std::vector<int32_t> split(const float* master, int64_t numel, uint16_t* compute_param, uint16_t* remainder,
                           const Means& means);

// Adds `numel` gradients to `sums`.
void accumulate(Grad grad, const void* grads, int64_t numel, float* sums, const Means& means);

// The gradient of one parameter.
struct Whole {
  Grad grad;
  const void* grads;
  int64_t numel;
};

// Sets `norms` to the 2-norm of each in turn, as torch adds up its squares on a CPU with AVX2: see [Note: Norms].
void norms(const std::vector<Whole>& wholes, float* norms, const Means& means);

}  // namespace infinity::optim
