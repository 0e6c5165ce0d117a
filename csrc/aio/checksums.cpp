// The table in chunks, and a few pages at a time between it and memory.
#include "aio/checksums.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

namespace infinity::aio {
namespace {

constexpr auto kPage = static_cast<size_t>(kPageBytes);
constexpr size_t kPagesAtOnce = 64;
constexpr int64_t kBytesAtOnce = kPagesAtOnce * kPageBytes;

size_t pages_at_once(int64_t bytes_left) {
  return std::min(kPagesAtOnce, static_cast<size_t>(bytes_left) / kPage);
}

PageSum sum_of_zeros() {
  std::array<std::byte, kPage> zeros{};
  PageSum sum;
  sum_pages(zeros.data(), 1, &sum);
  return sum;
}

}  // namespace

Checksums::Checksums(Unwritten unwritten)
    : unwritten_(unwritten), never_written_(unwritten == Unwritten::kZeros ? sum_of_zeros() : kUnknownPage) {}

void Checksums::set_from(const std::byte* bytes, int64_t offset, int64_t length) {
  std::array<PageSum, kPagesAtOnce> sums;
  for (int64_t done = 0; done < length; done += kBytesAtOnce) {
    size_t count = pages_at_once(length - done);
    sum_pages(bytes + done, count, sums.data());
    set(offset + done, count, sums.data());
  }
}

void Checksums::forget(int64_t offset, int64_t length) {
  std::array<PageSum, kPagesAtOnce> unknown{};
  for (int64_t done = 0; done < length; done += kBytesAtOnce) {
    set(offset + done, pages_at_once(length - done), unknown.data());
  }
}

std::optional<Checksums::Mismatch> Checksums::first_wrong(const std::byte* bytes, int64_t offset, int64_t length) {
  std::array<PageSum, kPagesAtOnce> expected;
  std::array<PageSum, kPagesAtOnce> actual;
  for (int64_t done = 0; done < length; done += kBytesAtOnce) {
    size_t count = pages_at_once(length - done);
    get(offset + done, count, expected.data());
    sum_pages(bytes + done, count, actual.data());
    bool is_first_read = false;
    for (size_t i = 0; i < count; ++i) {
      is_first_read |= expected[i] == kUnknownPage;
      if (expected[i] == actual[i] || expected[i] == kUnknownPage) continue;
      return Mismatch{offset + done + static_cast<int64_t>(i * kPage), expected[i], actual[i], unwritten_};
    }
    if (is_first_read && unwritten_ == Unwritten::kFirstRead) set(offset + done, count, actual.data());
  }
  return std::nullopt;
}

std::string Checksums::Mismatch::in_words() const {
  bool by_others = unwritten == Unwritten::kFirstRead;
  std::array<char, 256> text;
  std::snprintf(text.data(), text.size(),
                "the page at offset %" PRId64 " of the file doesn't hold what %s there (CRC-32C %08" PRIx32
                " instead of %08" PRIx32 "): %s",
                offset, by_others ? "its first read found" : "was written", actual, expected,
                by_others ? "it was changed meanwhile; restart with the final file"
                          : "see to the health of the drive (smartctl -a, dmesg) before using it again");
  return text.data();
}

void Checksums::get(int64_t offset, size_t count, PageSum* sums) const {
  size_t page = static_cast<size_t>(offset) / kPage;
  while (count > 0) {
    size_t within = page % kChunkPages;
    size_t here = std::min(count, kChunkPages - within);
    if (const Chunk* chunk = find(page)) {
      for (size_t i = 0; i < here; ++i) sums[i] = (*chunk)[within + i].load(std::memory_order_relaxed);
    } else {
      std::fill_n(sums, here, never_written_);
    }
    page += here, count -= here, sums += here;
  }
}

void Checksums::set(int64_t offset, size_t count, const PageSum* sums) {
  size_t page = static_cast<size_t>(offset) / kPage;
  while (count > 0) {
    size_t within = page % kChunkPages;
    size_t here = std::min(count, kChunkPages - within);
    Chunk& chunk = make(page);
    for (size_t i = 0; i < here; ++i) chunk[within + i].store(sums[i], std::memory_order_relaxed);
    page += here, count -= here, sums += here;
  }
}

Checksums::Chunk* Checksums::find(size_t page) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto chunk = chunks_.find(page / kChunkPages);
  return chunk == chunks_.end() ? nullptr : chunk->second.get();
}

Checksums::Chunk& Checksums::make(size_t page) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Chunk>& chunk = chunks_[page / kChunkPages];
  if (chunk == nullptr) {
    auto made = std::make_unique<Chunk>();
    for (std::atomic<PageSum>& one : *made) one.store(never_written_, std::memory_order_relaxed);
    chunk = std::move(made);
  }
  return *chunk;
}

}  // namespace infinity::aio
