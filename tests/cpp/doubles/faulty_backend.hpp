// FaultyBackend: wraps a Backend and lets the nth claim, map or copy fail, and copies be late. Each
// fault names the bug it exists for.
//
// Threads: one caller at a time. A late copy is late by polls, so it must be polled: it rings no
// bell.
//
//   FaultyBackend device(std::make_unique<HostBackend>(&bell, CopyEngine::polled),
//                        {.nth_copy = 3, .polls_late_max = 5, .seed = seed});
//   ... run; device.fired() says whether the nth operation was reached.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "memory/backend.hpp"
#include "memory/check.hpp"

namespace strata {

// What is the nth is counted from 1; 0: never.
struct BackendFaults {
  // For a session that goes on without its device memory, or leaks what it claimed before.
  std::uint64_t nth_claim = 0;
  // For a session that moves pages before it knows whether the machine has the memory for it.
  std::size_t frames_max = SIZE_MAX;
  // For a view whose pages are believed to be mapped when the kernel is out of mappings.
  std::uint64_t nth_map = 0;
  // For a mover that takes a ticket that is done for bytes that arrived. The copy's bytes stay
  // away, its ticket completes, take_error() tells.
  std::uint64_t nth_copy = 0;
  // For code that worked because copies on the host are instant: a source that is reused, or a view
  // that is read, before done(). A late copy reads its source at the end, and done() says false up
  // to this many times (drawn from `seed` for each copy).
  std::uint32_t polls_late_max = 0;
  std::uint64_t seed = 0;
};

class FaultyBackend final : public Backend {
 public:
  FaultyBackend(std::unique_ptr<Backend> inner, BackendFaults faults)
      : inner_(std::move(inner)), faults_(faults), random_(faults.seed) {}

  // The nth claim, map or copy was reached, and failed.
  bool fired() const { return fired_; }

  const char* name() const override { return inner_->name(); }

  std::optional<Error> claim(std::size_t frame_count, std::size_t page_bytes) override {
    if (strikes(++claims_, faults_.nth_claim)) return injected("claim", Fault::memory);
    return inner_->claim(frame_count, page_bytes);
  }

  std::optional<Error> resize(std::size_t frame_count) override {
    if (strikes(++claims_, faults_.nth_claim)) return injected("resize", Fault::memory);
    if (frame_count > faults_.frames_max) return injected("resize", Fault::memory);
    return inner_->resize(frame_count);
  }
  std::byte* address(FrameId frame) const override { return inner_->address(frame); }

  std::byte* reserve(std::size_t bytes) override { return inner_->reserve(bytes); }
  void release(std::byte* view, std::size_t bytes) override { inner_->release(view, bytes); }

  std::optional<Error> map_pages(std::byte* view, std::span<const ViewPage> pages) override {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      if (strikes(++maps_, faults_.nth_map)) return injected("map", Fault::memory);
    }
    return inner_->map_pages(view, pages);
  }

  CopyTicket copy_in(FrameId to, const std::byte* from, std::size_t bytes) override {
    return hold({.how = How::in, .frame = to, .from = from, .bytes = bytes});
  }
  CopyTicket copy_out(std::byte* to, FrameId from, std::size_t bytes) override {
    return hold({.how = How::out, .frame = from, .to = to, .bytes = bytes});
  }
  CopyTicket copy_to(std::byte* device, const std::byte* from, std::size_t bytes,
                     CopyTicket after) override {
    STRATA_ASSERT(static_cast<std::uint64_t>(after) <= finished_);
    return hold({.how = How::to, .to = device, .from = from, .bytes = bytes});
  }
  CopyTicket copy_from(std::byte* to, const std::byte* device, std::size_t bytes,
                       CopyTicket after) override {
    STRATA_ASSERT(static_cast<std::uint64_t>(after) <= finished_);
    return hold({.how = How::from, .to = to, .from = device, .bytes = bytes});
  }

  bool done(CopyTicket ticket) override {
    // Every poll brings the oldest copy nearer, whichever was asked for.
    if (!held_.empty() && held_.front().polls_left > 0) {
      --held_.front().polls_left;
    } else {
      finish_due();
    }
    return finished_ >= static_cast<std::uint64_t>(ticket);
  }
  void wait(CopyTicket ticket) override {
    while (finished_ < static_cast<std::uint64_t>(ticket)) finish_oldest();
  }
  std::optional<Error> take_error(CopyTicket ticket) override {
    STRATA_ASSERT(finished_ >= static_cast<std::uint64_t>(ticket));
    if (failed_ != static_cast<std::uint64_t>(ticket)) return std::nullopt;
    failed_ = 0;
    return injected("copy", Fault::io);
  }

  bool needs_polling() const override { return polled_ != finished_ || !held_.empty(); }
  bool poll() override {
    done(CopyTicket{0});
    return std::exchange(polled_, finished_) != finished_;
  }

  void stream_waits(Stream stream, CopyTicket ticket) override {
    wait(ticket);
    inner_->stream_waits(stream, CopyTicket{0});
  }
  // Work on the host is finished when its call returns: ticket 0 always is.
  CopyTicket record(Stream stream) override {
    inner_->wait(inner_->record(stream));
    return CopyTicket{0};
  }

 private:
  enum class How : std::uint8_t { in, out, to, from };
  struct Held {
    How how;
    FrameId frame = kNoFrame;
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::size_t bytes = 0;
    std::uint32_t polls_left = 0;
    bool fails = false;
  };

  bool strikes(std::uint64_t count, std::uint64_t nth) {
    if (nth == 0 || count != nth) return false;
    fired_ = true;
    return true;
  }

  static Error injected(const char* what, Fault fault) {
    Error error;
    error.fault = fault;
    error.what = std::string("injected fault of a ") + what;
    error.tier = Tier::device;
    return error;
  }

  CopyTicket hold(Held copy) {
    copy.fails = strikes(++copies_, faults_.nth_copy);
    std::uniform_int_distribution<std::uint32_t> polls(0, faults_.polls_late_max);
    copy.polls_left = polls(random_);
    held_.push_back(copy);
    return CopyTicket{copies_};
  }

  void finish_due() {
    while (!held_.empty() && held_.front().polls_left == 0) finish_oldest();
  }

  void finish_oldest() {
    STRATA_ASSERT(!held_.empty());
    const Held copy = held_.front();
    held_.pop_front();
    ++finished_;
    if (copy.fails) {
      failed_ = finished_;
    } else {
      inner_->wait(submit(copy));
    }
  }

  CopyTicket submit(const Held& copy) {
    switch (copy.how) {
      case How::in:
        return inner_->copy_in(copy.frame, copy.from, copy.bytes);
      case How::out:
        return inner_->copy_out(copy.to, copy.frame, copy.bytes);
      case How::to:
        return inner_->copy_to(copy.to, copy.from, copy.bytes, inner_->record(nullptr));
      case How::from:
        return inner_->copy_from(copy.to, copy.from, copy.bytes, inner_->record(nullptr));
    }
    return {};
  }

  std::unique_ptr<Backend> inner_;
  BackendFaults faults_;
  std::mt19937_64 random_;
  std::deque<Held> held_;  // in the order of their tickets, the first is finished_ + 1
  std::uint64_t claims_ = 0;
  std::uint64_t maps_ = 0;
  std::uint64_t copies_ = 0;    // tickets given
  std::uint64_t finished_ = 0;  // the last ticket that is done
  std::uint64_t polled_ = 0;    // the last that a poll() told of
  std::uint64_t failed_ = 0;    // the ticket of the copy that failed; 0: none, or told
  bool fired_ = false;
};

}  // namespace strata
