// Device: the two ports of one device, owned together. Whoever needs one of them takes that one.
//
//   Device device = host_device(&bell);
//   device.memory->claim(frame_count, page_bytes);
//   DeviceFrames frames(table, *device.memory, ...);
//   Transfers transfers(table, *device.copies, ...);
#pragma once

#include <memory>
#include <utility>

#include "memory/check.hpp"
#include "memory/copy_engine.hpp"
#include "memory/device_memory.hpp"

namespace strata {

// Memory goes ahead of its copy engine, which it asks to finish what touches it.
struct Device final {
  Device() = default;
  Device(std::unique_ptr<CopyEngine> copy_engine, std::unique_ptr<DeviceMemory> device_memory)
      : copies(std::move(copy_engine)), memory(std::move(device_memory)) {
    STRATA_ASSERT(copies != nullptr);
    STRATA_ASSERT(memory != nullptr);
  }
  Device(Device&&) = default;
  Device& operator=(Device&& other) noexcept {
    memory.reset();
    copies = std::move(other.copies);
    memory = std::move(other.memory);
    return *this;
  }
  explicit operator bool() const { return memory != nullptr; }

  std::unique_ptr<CopyEngine> copies;
  std::unique_ptr<DeviceMemory> memory;
};

}  // namespace strata
