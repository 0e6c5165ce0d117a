// Cutting the work into spans, sharing it out, and merging the ties.
#include "optim/adam.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/crc32c.h"
#include "base/instructions.h"
#include "base/thread_pool.h"
#include "optim/kernels.h"

namespace infinity::optim {
namespace {

constexpr int64_t kBlockNumel = 1 << 15;        // what a thread takes at a time: half a MiB of state or so
constexpr int64_t kPageNumel = kPageBytes / 2;  // fills whole pages of every field

// [Note: Tails]
// torch's kernel takes a tensor eight elements at a time and, at its end, those that are left one by one; these few are
// rounded differently (see [Note: Rounding]). To be equal to torch bit for bit on a shard of any length, and to any
// number of cuts through a shard, the same elements are rounded that way here: the last of the shard, not those of a
// piece. Compiled for ARM, it takes four at a time.
constexpr int64_t kTorchLanes = kOnArm ? 4 : 8;

int64_t tail_of(int64_t numel) {
  return numel - numel % kTorchLanes;
}

void check(const std::vector<Piece>& pieces, const Fields& fields) {
  const int64_t numel = fields.numel;
  const bool coded = fields.moments == Moments::kCoded;
  if (coded && fields.scales == nullptr) throw std::invalid_argument("coded moments have scales");
  if (coded && numel % kCodedNumel != 0) throw std::invalid_argument("only whole blocks can be coded");
  int64_t behind = 0;
  for (const Piece& piece : pieces) {
    bool fits = piece.numel >= 0 && piece.offset >= behind && piece.offset + piece.numel <= numel;
    if (!fits) throw std::invalid_argument("pieces must ascend without overlap, and end within their sub-group");
    if (piece.place < 0) throw std::invalid_argument("a piece begins in front of its parameter");
    if (piece.start < 0 || piece.start + piece.numel > piece.shard_numel) {
      throw std::invalid_argument("a piece reaches out of its shard");
    }
    if (coded && piece.offset % kCodedNumel != 0) {
      throw std::invalid_argument("a piece must begin with a block of coded moments");
    }
    behind = piece.offset + piece.numel;
  }
}

int64_t itemsize(Grad grad) {
  return grad == Grad::kFloat32 ? 4 : 2;
}

int64_t itemsize(Moments moments) {
  if (moments == Moments::kCoded) return 1;
  return moments == Moments::kFloat32 ? 4 : 2;
}

// Steele, Lea and Flood's mixing function ("Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
uint64_t mixed(uint64_t bits) {
  bits += 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

constexpr int64_t kNumbers = int64_t{1} << 32;  // elements with one seed: see [Note: Rounded by chance]

uint32_t seed_of(uint64_t key, double step, int64_t place) {
  uint64_t of_step = mixed(key ^ mixed(static_cast<uint64_t>(step)));
  return static_cast<uint32_t>(mixed(of_step ^ static_cast<uint64_t>(place / kNumbers)));
}

// The spans of all pieces, in order, each within one block: kBlockNumel elements from a multiple of that on.
std::vector<Span> spans_of(const std::vector<Piece>& pieces, const Fields& fields, Grad grad, double step) {
  std::vector<Span> spans;
  auto moment_at = [&](void* field, int64_t index) {
    return static_cast<void*>(static_cast<std::byte*>(field) + index * itemsize(fields.moments));
  };
  auto at = [](auto* field, int64_t index) { return field == nullptr ? nullptr : field + index; };
  const int64_t scales = fields.numel / kCodedNumel;
  for (const Piece& piece : pieces) {
    int64_t tail = std::clamp<int64_t>(tail_of(piece.shard_numel) - piece.start, 0, piece.numel);
    for (int64_t begin = 0, numel; begin < piece.numel; begin += numel) {
      int64_t index = piece.offset + begin;
      int64_t place = piece.place + begin;
      numel = std::min(kBlockNumel - index % kBlockNumel, piece.numel - begin);
      if (fields.moments == Moments::kBfloat16) numel = std::min(numel, kNumbers - place % kNumbers);
      spans.push_back({static_cast<const char*>(piece.grad) + begin * itemsize(grad), moment_at(fields.exp_avg, index),
                       moment_at(fields.exp_avg_sq, index), at(fields.scales, index / kCodedNumel),
                       at(fields.scales, scales + index / kCodedNumel), at(fields.master, index),
                       at(fields.compute_param, index), at(fields.remainder, index), index, numel,
                       std::clamp<int64_t>(tail - begin, 0, numel), seed_of(piece.key, step, place),
                       static_cast<uint32_t>(place % kNumbers)});
    }
  }
  return spans;
}

// The pages of the fields: see [Note: Sums on the way]. Those of the scales, of which a page belongs to several blocks,
// are verified before all blocks and summed after.
class PagesOfBlocks {
 public:
  PagesOfBlocks(Pages& pages, const Fields& fields) : pages_(pages), numel_(fields.numel) {
    pages_.wrong = -1;
    add(fields.exp_avg, itemsize(fields.moments));
    add(fields.exp_avg_sq, itemsize(fields.moments));
    add(fields.master, sizeof(float));
    add(fields.compute_param, sizeof(uint16_t));
    add(fields.remainder, sizeof(uint16_t));
    int64_t scale_bytes = 2 * numel_ / kCodedNumel * static_cast<int64_t>(sizeof(float));
    if (auto offset = offset_of(fields.scales, scale_bytes)) scales_ = pages_of(*offset, scale_bytes);
    if (numel_ % kPageNumel != 0) throw std::invalid_argument("only whole pages can be verified and summed");
  }

  // Whether the pages of the elements of the block that begins with number `begin` are as they must be.
  bool verify(int64_t begin) {
    bool whole = true;
    for (Place place : places_) whole = verify(pages_of(place, begin)) && whole;
    return whole;
  }

  void sum(int64_t begin) {
    for (Place place : places_) sum(pages_of(place, begin));
  }

  bool verify_scales() { return verify(scales_); }
  void sum_scales() { sum(scales_); }

  // To be called once, when all blocks are done.
  void tell() { pages_.wrong = wrong_ == kNone ? -1 : wrong_.load(); }

 private:
  static constexpr int64_t kNone = INT64_MAX;
  static constexpr size_t kAtATime = kBlockNumel * 4 / kPageBytes;

  struct Place {
    int64_t offset;  // from the first page on, in bytes
    int64_t itemsize;
  };

  struct Range {
    size_t first = 0;
    size_t count = 0;
  };

  // Nothing for a field that is not among the pages.
  std::optional<int64_t> offset_of(const void* field, int64_t nbytes) const {
    auto at = reinterpret_cast<uintptr_t>(field), begin = reinterpret_cast<uintptr_t>(pages_.begin);
    auto bytes = static_cast<uintptr_t>(pages_.count * kPageBytes);
    if (field == nullptr || at < begin || at >= begin + bytes) return std::nullopt;
    auto offset = static_cast<int64_t>(at - begin);
    if (offset % kPageBytes != 0 || offset + nbytes > pages_.count * kPageBytes) {
      throw std::invalid_argument("a field must begin with a page and end with one of those that are summed");
    }
    return offset;
  }

  void add(const void* field, int64_t itemsize) {
    if (auto offset = offset_of(field, numel_ * itemsize)) places_.push_back({*offset, itemsize});
  }

  static Range pages_of(int64_t offset, int64_t nbytes) {
    return {static_cast<size_t>(offset / kPageBytes), static_cast<size_t>((nbytes + kPageBytes - 1) / kPageBytes)};
  }

  Range pages_of(Place place, int64_t begin) const {
    int64_t numel = std::min(kBlockNumel, numel_ - begin);
    return pages_of(place.offset + begin * place.itemsize, numel * place.itemsize);
  }

  bool verify(Range range) {
    std::array<PageSum, kAtATime> sums;
    for (size_t end = range.first + range.count; range.first < end; range.first += kAtATime) {
      size_t count = std::min(kAtATime, end - range.first);
      sum_pages(pages_.begin + range.first * kPageBytes, count, sums.data());
      for (size_t i = 0; i < count; ++i) {
        PageSum expected = pages_.expected[range.first + i];
        if (expected == sums[i] || expected == kUnknownPage) continue;
        note_wrong(static_cast<int64_t>(range.first + i));
        return false;
      }
    }
    return true;
  }

  void sum(Range range) { sum_pages(pages_.begin + range.first * kPageBytes, range.count, pages_.sums + range.first); }

  void note_wrong(int64_t page) {
    int64_t first = wrong_;
    while (page < first && !wrong_.compare_exchange_weak(first, page)) {
    }
  }

  Pages& pages_;
  const int64_t numel_;
  std::vector<Place> places_;
  Range scales_;
  std::atomic<int64_t> wrong_{kNone};
};

// Products of two floats are exact in double.
void set_inverse(Scalars& of) {
  const double divisor = of.sqrt_correction2;
  of.inverse = of.inverse_below = 1 / of.sqrt_correction2;
  if (divisor * of.inverse > 1) of.inverse_below = std::nextafter(of.inverse, 0.0f);
  auto lacks = static_cast<float>((1 - divisor * of.inverse_below) / divisor);
  of.inverse_below_lacks = std::max(lacks, std::numeric_limits<float>::min());
}

// In double until the last, as torch does it, and contracted where its compiler does: see [Note: Rounding].
Scalars scalars_of(const Settings& from) {
  Scalars to{};
  to.grad_scale = from.maximize ? -from.grad_scale : from.grad_scale;
  if (from.weight_decay != 0) {
    to.decay = from.decoupled ? Decay::kOfWeight : Decay::kOfGradient;
    to.decay_by = static_cast<float>(from.decoupled ? std::fma(-from.lr, from.weight_decay, 1.0) : from.weight_decay);
  }
  auto one_minus_beta1 = static_cast<float>(1 - from.beta1);
  to.near_exp_avg = std::fabs(one_minus_beta1) < 0.5f;
  to.lerp_weight = to.near_exp_avg ? one_minus_beta1 : one_minus_beta1 - 1.0f;
  to.tail_lerp_weight = to.near_exp_avg ? one_minus_beta1 : -(1.0f - one_minus_beta1);
  to.beta2 = static_cast<float>(from.beta2);
  to.one_minus_beta2 = static_cast<float>(1 - from.beta2);
  to.sqrt_correction2 = static_cast<float>(std::sqrt(1 - std::pow(from.beta2, from.step)));
  set_inverse(to);
  to.eps = static_cast<float>(from.eps);
  to.minus_step_size = static_cast<float>(-(from.lr / (1 - std::pow(from.beta1, from.step))));
  return to;
}

void check(Ties ties, int64_t numel) {
  bool ascend = std::adjacent_find(ties.begin, ties.end, std::greater_equal<int32_t>()) == ties.end;
  bool inside = ties.begin == ties.end || (*ties.begin >= 0 && *(ties.end - 1) < numel);
  if (!ascend || !inside) throw std::invalid_argument("ties must be ascending indices of elements");
}

const int32_t* first_from(Ties ties, int64_t index) {
  return std::lower_bound(ties.begin, ties.end, index);
}

// Runs `body(begin, end, ties)` for the elements of every block, and returns the ties that each rounded up.
template <typename Body>
std::vector<std::vector<int32_t>> run_blocks(int64_t numel, Ties ties, int threads, const Body& body) {
  int64_t blocks = (numel + kBlockNumel - 1) / kBlockNumel;
  std::vector<std::vector<int32_t>> rounded_up(static_cast<size_t>(blocks));
  ThreadPool::here().run(threads, blocks, [&](int64_t block) {
    int64_t begin = block * kBlockNumel;
    TiesOnTheWay on_the_way{first_from(ties, begin), ties.end, &rounded_up[static_cast<size_t>(block)]};
    body(begin, std::min(begin + kBlockNumel, numel), on_the_way);
  });
  return rounded_up;
}

std::vector<int32_t> joined(const std::vector<std::vector<int32_t>>& parts) {
  std::vector<int32_t> whole;
  for (const auto& part : parts) whole.insert(whole.end(), part.begin(), part.end());
  return whole;
}

// The old ties where no piece lies, and those that the update rounded up.
std::vector<int32_t> renewed(Ties old, const std::vector<Piece>& pieces, const std::vector<int32_t>& rounded_up) {
  std::vector<int32_t> unchanged;
  const int32_t* from = old.begin;
  for (const Piece& piece : pieces) {
    unchanged.insert(unchanged.end(), from, first_from({from, old.end}, piece.offset));
    from = first_from({from, old.end}, piece.offset + piece.numel);
  }
  unchanged.insert(unchanged.end(), from, old.end);
  std::vector<int32_t> whole(unchanged.size() + rounded_up.size());
  std::merge(unchanged.begin(), unchanged.end(), rounded_up.begin(), rounded_up.end(), whole.begin());
  return whole;
}

}  // namespace

std::vector<int32_t> update(const Settings& settings, Grad grad, Master kind, const Fields& fields,
                            const std::vector<Piece>& pieces, Ties ties, const Means& means, Pages* pages) {
  check(ties, fields.numel);
  check(pieces, fields);
  const Scalars scalars = scalars_of(settings);
  const std::vector<Span> spans = spans_of(pieces, fields, grad, settings.step);
  std::optional<PagesOfBlocks> guarded;
  if (pages != nullptr) guarded.emplace(*pages, fields);
  auto& of_grad = kernels_named<Kernels>(means.instructions).update[static_cast<size_t>(grad)];
  auto* kernel = of_grad[static_cast<size_t>(kind)][static_cast<size_t>(fields.moments)];
  if (guarded.has_value() && !guarded->verify_scales()) {
    guarded->tell();
    return {};
  }
  auto rounded_up = run_blocks(fields.numel, ties, means.threads, [&](int64_t begin, int64_t end, TiesOnTheWay& way) {
    if (fields.staged != nullptr) std::copy(fields.staged + begin, fields.staged + end, fields.compute_param + begin);
    if (guarded.has_value() && !guarded->verify(begin)) return;
    auto lies_before = [begin](const Span& span) { return span.index < begin; };
    auto span = std::partition_point(spans.begin(), spans.end(), lies_before);
    for (; span != spans.end() && span->index < end; ++span) kernel(scalars, *span, way);
    if (guarded.has_value()) guarded->sum(begin);
    if (fields.staged != nullptr) {
      std::copy(fields.compute_param + begin, fields.compute_param + end, fields.staged + begin);
    }
  });
  if (guarded.has_value()) {
    guarded->sum_scales();
    guarded->tell();
  }
  return kind == Master::kSplit ? renewed(ties, pieces, joined(rounded_up)) : std::vector<int32_t>{};
}

void join(const uint16_t* compute_param, const uint16_t* remainder, int64_t numel, Ties ties, float* master,
          const Means& means) {
  check(ties, numel);
  auto* kernel = kernels_named<Kernels>(means.instructions).join;
  run_blocks(numel, ties, means.threads, [&](int64_t begin, int64_t end, TiesOnTheWay& way) {
    kernel(compute_param + begin, remainder + begin, begin, end - begin, way, master + begin);
  });
}

std::vector<int32_t> split(const float* master, int64_t numel, uint16_t* compute_param, uint16_t* remainder,
                           const Means& means) {
  auto* kernel = kernels_named<Kernels>(means.instructions).split;
  Ties none{nullptr, nullptr};
  return joined(run_blocks(numel, none, means.threads, [&](int64_t begin, int64_t end, TiesOnTheWay& way) {
    kernel(master + begin, begin, end - begin, compute_param + begin, remainder + begin, way);
  }));
}

void accumulate(Grad grad, const void* grads, int64_t numel, float* sums, const Means& means) {
  auto* kernel = kernels_named<Kernels>(means.instructions).accumulate[static_cast<size_t>(grad)];
  Ties none{nullptr, nullptr};
  run_blocks(numel, none, means.threads, [&](int64_t begin, int64_t end, TiesOnTheWay&) {
    kernel(static_cast<const std::byte*>(grads) + begin * itemsize(grad), end - begin, sums + begin);
  });
}

void norms(const std::vector<Whole>& wholes, float* norms, const Means& means) {
  const auto& kernels = kernels_named<Kernels>(means.instructions).norm;
  std::vector<size_t> order(wholes.size());
  std::iota(order.begin(), order.end(), 0);
  auto takes_longer = [&](size_t a, size_t b) { return wholes[a].numel > wholes[b].numel; };
  std::stable_sort(order.begin(), order.end(), takes_longer);  // so that no thread is left with a long one
  ThreadPool::here().run(means.threads, static_cast<int64_t>(order.size()), [&](int64_t i) {
    size_t number = order[static_cast<size_t>(i)];
    const Whole& whole = wholes[number];
    norms[number] = kernels[static_cast<size_t>(whole.grad)](whole.grads, whole.numel);
  });
}

}  // namespace infinity::optim
