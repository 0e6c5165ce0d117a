// The update kernel under the sanitizers: no byte outside the fields is touched, and threads share the work without a
// race.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/crc32c.h"
#include "base/instructions.h"
#include "base/thread_pool.h"
#include "optim/adam.h"

namespace infinity::optim {
namespace {

const Settings kSettings{1e-2, 0.9, 0.999, 1e-8, 0.1, true, false, 1, 0.5f};

// Vectors of exactly the length, so that ASan sees the first byte behind them.
struct State {
  explicit State(int64_t numel, unsigned seed = 1)
      : numel(numel),
        grad(size()),
        exp_avg(size()),
        exp_avg_sq(size()),
        master(size()),
        compute_param(size()),
        remainder(size()) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (auto* field : {&grad, &exp_avg, &exp_avg_sq, &master}) {
      for (float& value : *field) value = normal(random);
    }
    for (float& value : exp_avg_sq) value = std::fabs(value);
    for (size_t i = 0; i < master.size(); i += 3) master[i] = 1.0f + 3.0f / 256;  // ties that are rounded up
  }

  size_t size() const { return static_cast<size_t>(numel); }
  Ties known() const { return {ties.data(), ties.data() + ties.size()}; }

  void split_master(const Means& means) {
    ties = split(master.data(), numel, compute_param.data(), remainder.data(), means);
  }
  void step_full(const std::vector<Piece>& pieces, const Means& means) {
    Fields fields{numel, exp_avg.data(), exp_avg_sq.data(), master.data(), nullptr, nullptr};
    update(kSettings, Grad::kFloat32, Master::kFull, fields, pieces, {nullptr, nullptr}, means);
  }
  void step_split(const std::vector<Piece>& pieces, const Means& means) {
    Fields fields{numel, exp_avg.data(), exp_avg_sq.data(), nullptr, compute_param.data(), remainder.data()};
    ties = update(kSettings, Grad::kFloat32, Master::kSplit, fields, pieces, known(), means);
  }
  std::vector<float> joined(const Means& means) const {
    std::vector<float> value(size());
    join(compute_param.data(), remainder.data(), numel, known(), value.data(), means);
    return value;
  }
  Piece piece(int64_t begin, int64_t end) const { return {grad.data() + begin, begin, end - begin, begin, numel}; }

  int64_t numel;
  std::vector<float> grad, exp_avg, exp_avg_sq, master;
  std::vector<uint16_t> compute_param, remainder;
  std::vector<int32_t> ties;
};

bool equal_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

constexpr int64_t kPage = 4096;

// Fields one after the other on whole pages, and the sums of these.
struct Extent {
  explicit Extent(const State& state)
      : numel(state.numel),
        bytes(static_cast<size_t>(numel) * 12 + kPage),
        sums(static_cast<size_t>(numel) * 12 / kPage) {
    auto address = reinterpret_cast<uintptr_t>(bytes.data());
    begin = bytes.data() + (kPage - address % kPage) % kPage;
    fields = {numel, at<float>(4), at<float>(8), nullptr, at<uint16_t>(0), at<uint16_t>(2)};
    std::memcpy(fields.compute_param, state.compute_param.data(), state.compute_param.size() * 2);
    std::memcpy(fields.remainder, state.remainder.data(), state.remainder.size() * 2);
    std::memcpy(fields.exp_avg, state.exp_avg.data(), state.exp_avg.size() * 4);
    std::memcpy(fields.exp_avg_sq, state.exp_avg_sq.data(), state.exp_avg_sq.size() * 4);
    sum_pages(begin, sums.size(), sums.data());
  }

  template <typename T>
  T* at(int64_t bytes_before_each) {
    return reinterpret_cast<T*>(begin + numel * bytes_before_each);
  }

  int64_t numel;
  std::vector<std::byte> bytes;
  std::vector<PageSum> sums;
  std::byte* begin;
  Fields fields;
};

}  // namespace

TEST_CASE("pages are verified and summed by the threads that update them") {
  constexpr int64_t kNumel = 2048 * 77;  // four blocks and a part of one
  for (int threads : {1, 3}) {
    Means means{threads, instruction_sets().front()};
    State state(kNumel);
    state.split_master(means);
    Extent extent(state);
    std::vector<Piece> pieces{state.piece(5, 70'001), state.piece(70'001, kNumel - 3)};
    std::vector<PageSum> sums(extent.sums.size());
    Pages pages{extent.begin, static_cast<int64_t>(sums.size()), extent.sums.data(), sums.data(), 0};
    auto ties = update(kSettings, Grad::kFloat32, Master::kSplit, extent.fields, pieces, state.known(), means, &pages);
    CHECK(pages.wrong == -1);
    state.step_split(pieces, means);
    CHECK(ties == state.ties);
    Extent expected(state);
    CHECK(sums == expected.sums);
    CHECK(std::memcmp(extent.begin, expected.begin, sums.size() * kPage) == 0);

    extent.begin[kPage * 100 + 17] ^= std::byte{4};
    extent.begin[kPage * 300] ^= std::byte{4};
    pages.expected = expected.sums.data();
    update(kSettings, Grad::kFloat32, Master::kSplit, extent.fields, pieces, state.known(), means, &pages);
    CHECK(pages.wrong == 100);
  }
}

TEST_CASE("a split master takes the steps of a full one, for every length and instruction set") {
  for (const std::string& instructions : instruction_sets()) {
    Means means{1, instructions};
    for (int64_t numel = 1; numel < 70; ++numel) {
      State full(numel);
      State halves(numel);
      halves.split_master(means);
      full.step_full({full.piece(0, numel)}, means);
      halves.step_split({halves.piece(0, numel)}, means);
      CHECK(equal_bits(full.master, halves.joined(means)));
      CHECK(equal_bits(full.exp_avg, halves.exp_avg));
      CHECK(equal_bits(full.exp_avg_sq, halves.exp_avg_sq));
    }
  }
}

TEST_CASE("instruction sets, threads and cuts change no bit") {
  constexpr int64_t kNumel = 200'003;
  State one(kNumel);
  one.step_full({one.piece(0, kNumel)}, {1, "portable"});
  for (const std::string& instructions : instruction_sets()) {
    State cut(kNumel);
    Means means{3, instructions};
    cut.split_master(means);
    cut.step_split({cut.piece(0, 77), cut.piece(77, 100'001), cut.piece(100'001, kNumel)}, means);
    CHECK(equal_bits(one.master, cut.joined(means)));
    CHECK(equal_bits(one.exp_avg_sq, cut.exp_avg_sq));
  }
}

TEST_CASE("coded moments end with the last block, whatever a shard's length") {
  for (int64_t numel : {1, 255, 256, 257, 32768 + 300}) {
    std::vector<uint8_t> expected;
    for (const std::string& instructions : instruction_sets()) {
      State state(numel);
      int64_t blocks = (numel + kCodedNumel - 1) / kCodedNumel;
      auto coded = static_cast<size_t>(blocks * kCodedNumel);
      std::vector<uint8_t> codes(2 * coded, 127);
      std::vector<float> scales(static_cast<size_t>(2 * blocks), 0.5f);
      state.master.resize(coded);
      Fields fields{blocks * kCodedNumel, codes.data(), codes.data() + coded, state.master.data(), nullptr, nullptr,
                    Moments::kCoded,      scales.data()};
      for (int step = 0; step < 2; ++step) {
        update(kSettings, Grad::kFloat32, Master::kFull, fields, {state.piece(0, numel)}, {nullptr, nullptr},
               {2, instructions});
      }
      if (expected.empty()) expected = codes;
      CHECK(codes == expected);
    }
  }
}

TEST_CASE("gradients are summed with the same bits by every instruction set") {
  constexpr int64_t kNumel = 100'003;
  std::vector<float> grads(kNumel), sums(kNumel, 1.5f);
  for (int64_t i = 0; i < kNumel; ++i) grads[static_cast<size_t>(i)] = 1.0f / static_cast<float>(i + 1);
  std::vector<uint16_t> halves(kNumel);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(0x3F80 + i % 100);  // around 1
  std::vector<std::vector<float>> found;
  for (const std::string& instructions : instruction_sets()) {
    Means means{3, instructions};
    found.push_back(sums);
    accumulate(Grad::kFloat32, grads.data(), kNumel, found.back().data(), means);
    accumulate(Grad::kBfloat16, halves.data(), kNumel, found.back().data(), means);
    CHECK(equal_bits(found.front(), found.back()));
  }
  CHECK(found.front()[0] == 1.5f + 1.0f + 1.0f);
}

TEST_CASE("norms have the same bits by every instruction set") {
  constexpr int64_t kNumel = 100'003;
  std::vector<float> grads(kNumel);
  for (int64_t i = 0; i < kNumel; ++i) grads[static_cast<size_t>(i)] = 1.0f / static_cast<float>(i + 1);
  std::vector<Whole> wholes{{Grad::kFloat32, grads.data(), kNumel}, {Grad::kFloat32, nullptr, 0}};
  for (int64_t numel = 1; numel < 40; ++numel) wholes.push_back({Grad::kFloat32, grads.data() + kNumel - numel, numel});
  std::vector<std::vector<float>> found;
  for (const std::string& instructions : instruction_sets()) {
    found.emplace_back(wholes.size());
    norms(wholes, found.back().data(), {3, instructions});
    CHECK(equal_bits(found.front(), found.back()));
  }
  CHECK(found.front()[1] == 0);
  CHECK(found.front()[2] == grads.back());
}

TEST_CASE("several threads may update at once") {
  std::vector<std::thread> callers;
  for (unsigned seed = 0; seed < 4; ++seed) {
    callers.emplace_back([seed] {
      State state(150'001, seed);
      Means means{3, instruction_sets().front()};
      state.split_master(means);
      for (int step = 0; step < 3; ++step) state.step_split({state.piece(0, state.numel)}, means);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST_CASE("a job that fails throws where it was brought, and the next one runs") {
  for (int round = 0; round < 20; ++round) {
    CHECK_THROWS_AS(ThreadPool::here().run(3, 100,
                                           [](int64_t i) {
                                             if (i == 50) throw std::runtime_error("out of something");
                                           }),
                    std::runtime_error);
    std::vector<int> done(100);
    ThreadPool::here().run(3, 100, [&done](int64_t i) { done[static_cast<size_t>(i)] = 1; });
    CHECK(done == std::vector<int>(100, 1));
  }
}

}  // namespace infinity::optim
