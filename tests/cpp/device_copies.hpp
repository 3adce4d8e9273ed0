// Copies between host memory and a device as the core asks for them, said shortly: of frames by
// their number, and of the caller's memory behind work that was recorded.
//
//   CopyTicket t = copy_in(device, FrameId{3}, page.data(), page.size());
//   t = copy_from(*device.copies, host, tensor, bytes, device.copies->record(stream));
#pragma once

#include <cstddef>

#include "memory/device.hpp"

namespace strata {

inline CopyTicket copy_in(const Device& device, FrameId to, const std::byte* from,
                          std::size_t bytes) {
  return device.copies->copy({.to = device.memory->address(to),
                              .from = from,
                              .bytes = bytes,
                              .stream = CopyStream::pages_in});
}

inline CopyTicket copy_out(const Device& device, std::byte* to, FrameId from, std::size_t bytes) {
  return device.copies->copy(
      {.to = to, .from = device.memory->address(from), .bytes = bytes, .stream = CopyStream::out});
}

inline CopyTicket copy_to(CopyEngine& copies, std::byte* device, const std::byte* from,
                          std::size_t bytes, CopyTicket after) {
  return copies.copy(
      {.to = device, .from = from, .bytes = bytes, .stream = CopyStream::bytes_in, .after = after});
}

inline CopyTicket copy_from(CopyEngine& copies, std::byte* to, const std::byte* device,
                            std::size_t bytes, CopyTicket after) {
  return copies.copy(
      {.to = to, .from = device, .bytes = bytes, .stream = CopyStream::out, .after = after});
}

}  // namespace strata
