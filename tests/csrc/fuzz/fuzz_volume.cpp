// Stripes, held against counting them one by one.
#include <fcntl.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

#include "aio/volume.h"
#include "programs.h"

namespace infinity::aio::testing {
namespace {

// Where the logical byte `at` lies, found by walking all stripes before it.
struct Place {
  int member;
  int64_t offset;
};

Place place_of(const std::vector<int>& pattern, int64_t stripe_bytes, int64_t at) {
  int64_t stripe = at / stripe_bytes;
  auto slot = [&](int64_t number) { return pattern[static_cast<size_t>(number) % pattern.size()]; };
  int member = slot(stripe);
  int64_t before = 0;
  for (int64_t earlier = 0; earlier < stripe; ++earlier) before += slot(earlier) == member;
  return {member, before * stripe_bytes + at % stripe_bytes};
}

}  // namespace

void fuzz_volume(const uint8_t* data, size_t size) {
  Source source(data, size);
  auto members = static_cast<int>(1 + source.below(5));
  std::vector<std::shared_ptr<const Descriptor>> files;
  for (int i = 0; i < members; ++i) {
    files.push_back(std::make_shared<const Descriptor>(::open("/dev/null", O_RDWR | O_CLOEXEC), "member", true, i));
  }
  std::vector<int> pattern(static_cast<size_t>(source.below(20)));
  for (int& slot : pattern) slot = static_cast<int>(source.below(members + 1));
  int64_t stripe_bytes = source.below(6) * 2048;
  bool complete = !pattern.empty() && *std::max_element(pattern.begin(), pattern.end()) < members;
  for (int i = 0; i < members; ++i) complete = complete && std::count(pattern.begin(), pattern.end(), i) > 0;
  bool possible = members > 1 && complete && stripe_bytes > 0 && stripe_bytes % 4096 == 0;
  std::unique_ptr<Volume> volume;
  try {
    volume = std::make_unique<Volume>(files, pattern, stripe_bytes);
  } catch (const std::invalid_argument&) {
    expect(!possible, "a pattern that names every drive is taken");
    return;
  }
  expect(possible, "a pattern that leaves a drive out, or cuts pages, is refused");
  int64_t begin = source.below(300) * 512;
  int64_t end = begin + source.below(200) * 512;
  std::vector<int64_t> counted(static_cast<size_t>(members));
  std::vector<int64_t> first(static_cast<size_t>(members), -1);
  for (int64_t at = begin; at < end; at += 512) {
    auto member = static_cast<size_t>(place_of(pattern, stripe_bytes, at).member);
    counted[member] += 512;
    if (first[member] < 0) first[member] = at;
  }
  for (int member = 0; member < members; ++member) {
    auto index = static_cast<size_t>(member);
    expect(volume->bytes_on(member, begin, end) == counted[index], "a drive's part of a range is what it holds of it");
    auto piece = volume->first_on(member, begin, end);
    expect(piece.has_value() == (first[index] >= 0), "there is a first piece where there are bytes");
    if (!piece.has_value()) continue;
    expect(piece->at == first[index] && piece->length > 0 && piece->at + piece->length <= end,
           "it begins with the first byte");
    for (int64_t at = piece->at; at < piece->at + piece->length; at += 512) {
      Place place = place_of(pattern, stripe_bytes, at);
      expect(place.member == member && place.offset == piece->offset + (at - piece->at),
             "its bytes lie one behind the other");
    }
  }
}

}  // namespace infinity::aio::testing
