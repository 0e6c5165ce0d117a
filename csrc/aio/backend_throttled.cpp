// A drive made slower: wraps any backend and keeps its completions back until a slower drive would have given them.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "aio/backend.h"
#include "base/process.h"

namespace infinity::aio {
namespace {

class ThrottledBackend final : public Backend {
 public:
  ThrottledBackend(std::unique_ptr<Backend> inner, DriveLimit limit) : inner_(std::move(inner)), limit_(limit) {
    due_.resize(static_cast<size_t>(inner_->depth()));
  }

  const char* name() const override { return inner_->name(); }

  int depth() const override { return inner_->depth(); }

  // A block is served when those before it have been, at the limited rate, and not before its latency is over.
  void submit(const std::vector<Block*>& blocks) override {
    double now = monotonic_seconds();
    for (Block* block : blocks) {
      double service = limit_.bytes_per_s > 0 ? static_cast<double>(block->length) / limit_.bytes_per_s : 0.0;
      free_at_ = std::max(free_at_, now) + service;
      due_[block->tag] = std::max(free_at_, now + limit_.latency_seconds);
    }
    inside_ += blocks.size();
    inner_->submit(blocks);
  }

  void send() override { inner_->send(); }

  void reap(std::vector<Completion>* completions) override {
    if (inside_ > 0 || kept_.empty()) {
      arrived_.clear();
      inner_->reap(&arrived_);
      inside_ -= arrived_.size();
      for (const Completion& one : arrived_) keep(one);
    } else {
      sleep_until_due();
    }
    double now = monotonic_seconds();
    while (!kept_.empty() && due_[kept_.front().tag] <= now) {
      completions->push_back(kept_.front());
      kept_.pop_front();
    }
  }

  void wake() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    news_.notify_one();
    inner_->wake();
  }

 private:
  // In the order in which they are due.
  void keep(const Completion& one) {
    auto is_later = [this, due = due_[one.tag]](const Completion& other) { return due_[other.tag] > due; };
    kept_.insert(std::find_if(kept_.begin(), kept_.end(), is_later), one);
  }

  void sleep_until_due() {
    double seconds = due_[kept_.front().tag] - monotonic_seconds();
    std::unique_lock<std::mutex> lock(mutex_);
    if (seconds > 0) news_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return woken_; });
    woken_ = false;
  }

  const std::unique_ptr<Backend> inner_;
  const DriveLimit limit_;
  double free_at_ = 0.0;     // when everything submitted so far will have been served
  std::vector<double> due_;  // by tag
  size_t inside_ = 0;        // blocks that the inner backend still has
  std::deque<Completion> kept_;
  std::vector<Completion> arrived_;

  std::mutex mutex_;  // of woken_
  std::condition_variable news_;
  bool woken_ = false;
};

}  // namespace

BackendFactory throttled(BackendFactory factory, DriveLimit limit) {
  if (limit.bytes_per_s <= 0 && limit.latency_seconds <= 0) return factory;
  return [factory = std::move(factory), limit](const BackendOptions& options) {
    return std::make_unique<ThrottledBackend>(factory(options), limit);
  };
}

}  // namespace infinity::aio
