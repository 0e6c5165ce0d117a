// The loops over elements, one set of them for each instruction set. What they compute is in kernels.inc.
#pragma once

#include <cstdint>
#include <vector>

#include "optim/adam.h"

namespace infinity::optim {

enum class Decay { kNone, kOfGradient, kOfWeight };

// Compiled for ARM, torch's kernel rounds differently: [Note: Rounding], [Note: Tails].
#if defined(__aarch64__)
constexpr bool kOnArm = true;
#else
constexpr bool kOnArm = false;
#endif

// The hyper-parameters as the loops use them, rounded where torch's kernel rounds them.
struct Scalars {
  float grad_scale;  // negative to maximize
  Decay decay;
  float decay_by;          // of the gradient: weight_decay; of the weight: what it is multiplied by
  bool near_exp_avg;       // whether the lerp starts from exp_avg or from the gradient
  float lerp_weight;       // from there
  float tail_lerp_weight;  // the same but for the sign of zero: [Note: Tails]
  float beta2;
  float one_minus_beta2;
  float sqrt_correction2;
  float inverse;  // of sqrt_correction2: [Note: Division by a constant]
  float inverse_below;
  float inverse_below_lacks;  // above 0, as infinite roots are multiplied by it
  float eps;
  float minus_step_size;
};

// Consecutive elements, the first of which is number `index` of the sub-group.
struct Span {
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  float* exp_avg_scales;  // of the blocks of coded moments, from that of the first element on
  float* exp_avg_sq_scales;
  float* master;
  uint16_t* compute_param;
  uint16_t* remainder;
  int64_t index;
  int64_t numel;
  int64_t tail;     // [Note: Tails] from this element on
  uint32_t seed;    // of the random numbers: [Note: Rounded by chance]
  uint32_t number;  // of the first element among these
};

// [Note: Ties]
// The remainder is the lower half of a master's bits, the compute parameter the upper half rounded to nearest even. So
// that was rounded up where the remainder is above 0x8000, and not where it is below. At 0x8000 exactly, a tie, it was
// rounded to the even neighbour, which says nothing of where it came from: the elements whose ties were rounded up
// stand in a list, about one in 131072 of them. With it every master comes back bit for bit, whatever rounds up to
// infinity included. A NaN is kept as 0x7FC0 with nothing remaining, so that no NaN is ever taken for a tie.
//
// Both lists ascend, as the loops do.
struct TiesOnTheWay {
  const int32_t* next;  // those of the elements to come, and perhaps of some already passed
  const int32_t* end;
  std::vector<int32_t>* rounded_up;
};

struct Kernels {
  static const Kernels kAvx512, kAvx2, kPortable;

  const char* name;
  void (*update[3][4][3])(const Scalars&, const Span&, TiesOnTheWay&);  // by Grad, Master and Moments
  void (*join)(const uint16_t* compute_param, const uint16_t* remainder, int64_t index, int64_t numel, TiesOnTheWay&,
               float* master);
  void (*split)(const float* master, int64_t index, int64_t numel, uint16_t* compute_param, uint16_t* remainder,
                TiesOnTheWay&);
  void (*accumulate[3])(const void* grads, int64_t numel, float* sums);  // by Grad
  float (*norm[3])(const void* grads, int64_t numel);                    // by Grad
};

}  // namespace infinity::optim
