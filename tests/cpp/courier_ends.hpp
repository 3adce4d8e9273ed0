// Two ranks, each on a machine of its own, and the couriers between them.
//
// Threads: those of the couriers, and the test's.
//
//   WireLoopback wires(2);
//   End one(wires, 0), two(wires, 1);
//   one.courier.start(), two.courier.start();
//   say_page(one, 7), expect_page(two, 7);
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "doubles/wire_loopback.hpp"
#include "engine/ranks/courier.hpp"
#include "memory/shared_area.hpp"

namespace strata::courier_test {

using namespace std::chrono_literals;

inline constexpr std::size_t kMemory = 64 * kKernelPageBytes;
inline constexpr std::size_t kBoard = 1024;

// One of two ranks, each on a machine of its own.
struct End {
  End(WireLoopback& wires, std::uint32_t rank, std::chrono::milliseconds patience = 5s,
      std::size_t memory_bytes = kMemory)
      : wire(wires.wire(rank)),
        memory("test-memory", memory_bytes),
        board("test-board", kKernelPageBytes),
        relayed("test-relayed", 2 * kKernelPageBytes),
        inboxes(std::make_unique<MessageRing[]>(2)),
        courier(*wire, 1 - rank,
                {.board = board.bytes().first(kBoard),
                 .memory = memory.bytes(),
                 .page_bytes = kKernelPageBytes,
                 .relayed = relayed.bytes(),
                 .inbox = &inboxes[1 - rank],
                 .bell = &bell},
                memory_bytes, {.beat = 20ms, .patience = patience}) {
    std::vector<Seat> seats(2);
    seats[rank] = {
        .inbox = inboxes.get(), .board = board.bytes().first(kBoard), .memory = memory.bytes()};
    seats[1 - rank] = courier.seat();
    peers = std::make_unique<Peers>(rank, seats);
  }

  // Waits for the next one.
  std::optional<PeerMessage> hear() {
    for (const auto end = std::chrono::steady_clock::now() + 5s;;) {
      peers->flush();
      if (const auto received = peers->receive()) return received->message;
      if (std::chrono::steady_clock::now() > end) return std::nullopt;
      bell.wait(1ms);
    }
  }
  std::optional<std::string> await_loss() {
    for (const auto end = std::chrono::steady_clock::now() + 5s;;) {
      if (auto how = courier.lost()) return how;
      if (std::chrono::steady_clock::now() > end) return std::nullopt;
      bell.wait(1ms);
    }
  }

  std::unique_ptr<Wire> wire;
  SharedArea memory, board, relayed;
  std::unique_ptr<MessageRing[]> inboxes;
  Doorbell bell;
  Courier courier;
  std::unique_ptr<Peers> peers;
};

// Page `i` of its memory, which begins with that number; `bytes` of it go along.
inline void say_page(End& end, std::uint32_t i, std::size_t bytes = kKernelPageBytes) {
  const std::size_t at = i * kKernelPageBytes;
  end.memory.bytes()[at] = static_cast<std::byte>(i);
  end.peers->send(1, {.kind = PeerMessage::Kind::piece, .what = i, .at = at, .bytes = bytes});
}

inline void expect_page(End& end, std::uint32_t i) {
  const auto message = end.hear();
  ASSERT_TRUE(message && message->what == i) << "message " << i;
  if (message->bytes == 0) return;
  EXPECT_EQ(*end.peers->bytes(0, message->at, 1), static_cast<std::byte>(i));
}

}  // namespace strata::courier_test
