// LendingMemory: wraps the memory of a device, and shares what other devices copy from, as a GPU
// does, in memory of the host. It exists for the rules of lending, which then run wherever ranks
// do: under a virtual clock, and where ranks get into trouble.
//
// Threads: as DeviceMemory says.
//
//   parts.device = lending_host(nullptr, CopyMode::polled);
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "memory/device.hpp"
#include "memory/host_device.hpp"
#include "memory/shared_area.hpp"

namespace strata {

class LendingMemory final : public DeviceMemory {
 public:
  explicit LendingMemory(std::unique_ptr<DeviceMemory> inner) : inner_(std::move(inner)) {}

  const char* name() const override { return inner_->name(); }
  std::optional<Error> claim(std::size_t frame_count, std::size_t page_bytes) override {
    return inner_->claim(frame_count, page_bytes);
  }
  std::optional<Error> claim_memory(std::size_t frame_count) override {
    return inner_->claim_memory(frame_count);
  }
  void set_frames(std::size_t frame_count) override { inner_->set_frames(frame_count); }
  void give_back_memory() override { inner_->give_back_memory(); }
  std::byte* address(FrameId frame) const override { return inner_->address(frame); }
  std::byte* reserve(std::size_t bytes) override { return inner_->reserve(bytes); }
  void release(std::byte* view, std::size_t bytes) override { inner_->release(view, bytes); }
  std::optional<Error> map_pages(std::byte* view, std::span<const ViewPage> pages) override {
    return inner_->map_pages(view, pages);
  }
  SharedMemory share(std::size_t bytes) override {
    shared_.emplace("strata-lent", bytes);
    return {.bytes = shared_->bytes(), .file = shared_->descriptor()};
  }
  std::span<const std::byte> see(int file, std::size_t bytes) override {
    return seen_.emplace_back(file, bytes, Access::read_only).bytes();
  }

 private:
  std::optional<SharedArea> shared_;
  std::vector<MappedArea> seen_;
  std::unique_ptr<DeviceMemory> inner_;  // last: what it has in flight ends first
};

inline Device lending_host(Doorbell* bell, CopyMode mode) {
  Device device = host_device(bell, mode);
  return {std::move(device.copies), std::make_unique<LendingMemory>(std::move(device.memory))};
}

}  // namespace strata
