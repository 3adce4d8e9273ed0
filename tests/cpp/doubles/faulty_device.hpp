// FaultyMemory and FaultyCopies: wrap the ports of a device and let the nth claim, map or copy
// fail, and copies be late. Each fault names the bug it exists for.
//
// Threads: one caller at a time. A late copy is late by polls, so it must be polled: it rings no
// bell.
//
//   Device device = faulty(host_device(&bell, CopyMode::polled),
//                          {.nth_copy = 3, .polls_late_max = 5, .seed = seed});
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "memory/check.hpp"
#include "memory/device.hpp"

namespace strata {

// What is the nth is counted from 1; 0: never.
struct DeviceFaults {
  // For a session that goes on without its device memory, or leaks what it claimed before.
  std::uint64_t nth_claim = 0;
  // For a session that moves pages before it knows whether the machine has the memory for it.
  std::size_t frames_max = SIZE_MAX;
  // For a session that stands still while memory is claimed or given back: called meanwhile.
  std::function<void()> claiming = {};
  // For a view whose pages are believed to be mapped when the kernel is out of mappings.
  std::uint64_t nth_map = 0;
  // For a mover that takes a ticket that is done for bytes that arrived. The copy's bytes stay
  // away, its ticket completes, wait() tells.
  std::uint64_t nth_copy = 0;
  // For code that worked because copies on the host are instant: a source that is reused, or a view
  // that is read, before done(). A late copy reads its source at the end, and done() says false up
  // to this many times (drawn from `seed` for each copy).
  std::uint32_t polls_late_max = 0;
  std::uint64_t seed = 0;
};

inline Error injected_fault(const char* what, Fault fault) {
  Error error;
  error.fault = fault;
  error.what = std::string("injected fault of a ") + what;
  error.tier = Tier::device;
  return error;
}

class FaultyMemory final : public DeviceMemory {
 public:
  FaultyMemory(std::unique_ptr<DeviceMemory> inner, const DeviceFaults& faults)
      : inner_(std::move(inner)), faults_(faults) {}

  const char* name() const override { return inner_->name(); }

  std::optional<Error> claim(std::size_t frame_count, std::size_t page_bytes) override {
    if (++claims_ == faults_.nth_claim) return injected_fault("claim", Fault::memory);
    return inner_->claim(frame_count, page_bytes);
  }
  std::optional<Error> claim_memory(std::size_t frame_count) override {
    if (faults_.claiming) faults_.claiming();
    if (++claims_ == faults_.nth_claim) return injected_fault("claim", Fault::memory);
    if (frame_count > faults_.frames_max) return injected_fault("claim", Fault::memory);
    return inner_->claim_memory(frame_count);
  }
  void set_frames(std::size_t frame_count) override { inner_->set_frames(frame_count); }
  void give_back_memory() override {
    if (faults_.claiming) faults_.claiming();
    inner_->give_back_memory();
  }
  std::byte* address(FrameId frame) const override { return inner_->address(frame); }
  std::byte* reserve(std::size_t bytes) override { return inner_->reserve(bytes); }
  void release(std::byte* view, std::size_t bytes) override { inner_->release(view, bytes); }

  std::optional<Error> map_pages(std::byte* view, std::span<const ViewPage> pages) override {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      if (++maps_ == faults_.nth_map) return injected_fault("map", Fault::memory);
    }
    return inner_->map_pages(view, pages);
  }

 private:
  std::unique_ptr<DeviceMemory> inner_;
  DeviceFaults faults_;
  std::uint64_t claims_ = 0;
  std::uint64_t maps_ = 0;
};

class FaultyCopies final : public CopyEngine {
 public:
  FaultyCopies(std::unique_ptr<CopyEngine> inner, const DeviceFaults& faults)
      : inner_(std::move(inner)), faults_(faults), random_(faults.seed) {}

  CopyTicket copy(const CopyRequest& request) override {
    STRATA_ASSERT(static_cast<std::uint64_t>(request.after) <= finished_);
    std::uniform_int_distribution<std::uint32_t> polls(0, faults_.polls_late_max);
    held_.push_back({request, polls(random_)});
    return CopyTicket{++copies_};
  }
  bool done(CopyTicket ticket) override {
    // Every poll brings the oldest copy nearer, whichever was asked for.
    if (!held_.empty() && held_.front().polls_left > 0) {
      --held_.front().polls_left;
    } else {
      while (!held_.empty() && held_.front().polls_left == 0) finish_oldest();
    }
    return finished_ >= static_cast<std::uint64_t>(ticket);
  }
  std::optional<Error> wait(CopyTicket ticket) override {
    const auto wanted = static_cast<std::uint64_t>(ticket);
    while (finished_ < wanted) finish_oldest();
    if (wanted == 0 || wanted != faults_.nth_copy) return std::nullopt;
    return injected_fault("copy", Fault::io);
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
  bool needs_polling() const override { return polled_ != finished_ || !held_.empty(); }
  bool poll() override {
    done(CopyTicket{0});
    return std::exchange(polled_, finished_) != finished_;
  }

 private:
  struct Held {
    CopyRequest request;
    std::uint32_t polls_left;
  };

  void finish_oldest() {
    STRATA_ASSERT(!held_.empty());
    CopyRequest request = held_.front().request;
    held_.pop_front();
    if (++finished_ == faults_.nth_copy) return;
    request.after = inner_->record(nullptr);
    inner_->wait(inner_->copy(request));
  }

  std::unique_ptr<CopyEngine> inner_;
  DeviceFaults faults_;
  std::mt19937_64 random_;
  std::deque<Held> held_;       // in the order of their tickets, the first is finished_ + 1
  std::uint64_t copies_ = 0;    // tickets given
  std::uint64_t finished_ = 0;  // the last ticket that is done
  std::uint64_t polled_ = 0;    // the last that a poll() told of
};

inline Device faulty(Device device, const DeviceFaults& faults) {
  return {std::make_unique<FaultyCopies>(std::move(device.copies), faults),
          std::make_unique<FaultyMemory>(std::move(device.memory), faults)};
}

}  // namespace strata
