// Couriers: what ranks of two machines say to each other arrives as it was said, with the bytes
// that it is about, or both hear that the other one is lost.
#include "engine/ranks/courier.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "configs.hpp"
#include "doubles/wire_loopback.hpp"
#include "memory/mapping.hpp"
#include "memory/shared_area.hpp"

namespace strata {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kMemory = 64 * kKernelPageBytes;
constexpr std::size_t kBoard = 1024;

// One of two ranks, each on a machine of its own.
struct End {
  End(WireLoopback& wires, std::uint32_t rank, std::chrono::milliseconds patience = 5s)
      : wire(wires.wire(rank)),
        memory("test-memory", kMemory),
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
                kMemory, {.beat = 20ms, .patience = patience}) {
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

TEST(Courier, MessagesComeInOrderWithTheirBytes) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    std::mt19937_64 random(seed);
    WireLoopback wires(2, {.latency = std::chrono::microseconds(50 * (seed % 3)), .bytes_s = 0.0});
    End one(wires, 0), two(wires, 1);
    one.courier.start();
    two.courier.start();
    for (std::byte& byte : one.memory.bytes()) byte = static_cast<std::byte>(random());
    constexpr std::uint32_t kSent = 1'500;  // more than a ring has room for
    constexpr std::size_t kBytesMax = kMemory / kSent;
    for (std::uint32_t i = 0; i < kSent; ++i) {
      const std::size_t bytes = below(random, 3) == 0 ? 1 + below(random, kBytesMax) : 0;
      const std::size_t at = i * kBytesMax;  // a place has new bytes only when it was read
      one.peers->send(1, {.kind = PeerMessage::Kind::piece, .what = i, .at = at, .bytes = bytes});
    }
    for (std::uint32_t i = 0; i < kSent; ++i) {
      one.peers->flush();
      const auto message = two.hear();
      ASSERT_TRUE(message) << "message " << i;
      ASSERT_EQ(message->what, i);
      const std::byte* const come = two.peers->bytes(0, message->at, message->bytes);
      ASSERT_NE(come, nullptr);
      ASSERT_TRUE(std::equal(come, come + message->bytes, one.memory.bytes().data() + message->at));
    }
    EXPECT_FALSE(one.courier.lost() || two.courier.lost());
  }
}

TEST(Courier, ABoardIsSeenWhenItsMessageIsTaken) {
  WireLoopback wires(2);
  End one(wires, 0), two(wires, 1);
  one.courier.start();
  two.courier.start();
  one.board.bytes()[100] = std::byte{7};
  one.peers->show_board(64, 128);
  const auto message = two.hear();
  ASSERT_TRUE(message && message->kind == PeerMessage::Kind::board);
  EXPECT_EQ(two.peers->board(0)[100], std::byte{0});
  EXPECT_TRUE(two.peers->take_board(0, message->at, message->bytes));
  EXPECT_EQ(two.peers->board(0)[100], std::byte{7});
  EXPECT_FALSE(two.peers->take_board(0, kBoard - 1, 2));
}

TEST(Courier, APageThatIsGivenBackTakesNoMemory) {
  WireLoopback wires(2);
  End one(wires, 0), two(wires, 1);
  one.courier.start();
  two.courier.start();
  one.memory.bytes()[2 * kKernelPageBytes] = std::byte{9};
  one.peers->send(
      1, {.kind = PeerMessage::Kind::grant, .at = 2 * kKernelPageBytes, .bytes = kKernelPageBytes});
  ASSERT_TRUE(two.hear());
  const std::byte* const page = two.peers->bytes(0, 2 * kKernelPageBytes, kKernelPageBytes);
  EXPECT_EQ(page[0], std::byte{9});
  two.peers->send(0, {.kind = PeerMessage::Kind::give_back, .at = 2 * kKernelPageBytes});
  ASSERT_TRUE(one.hear());
  EXPECT_EQ(page[0], std::byte{0});
}

TEST(Courier, APageThatIsRelayedComesToTheFrameThatItWasAskedFor) {
  WireLoopback wires(2);
  End one(wires, 0), two(wires, 1);
  one.courier.start();
  two.courier.start();
  const std::size_t at = 5 * kKernelPageBytes;
  one.memory.bytes()[at] = std::byte{9};
  PeerMessage grant{
      .kind = PeerMessage::Kind::grant, .window = 2, .at = at, .bytes = kKernelPageBytes};
  one.peers->send(1, grant);
  ASSERT_TRUE(two.hear());
  EXPECT_EQ(two.relayed.bytes()[kKernelPageBytes], std::byte{9});
  EXPECT_EQ(*two.peers->bytes(0, at, 1), std::byte{0});
  grant.window = 3;
  one.peers->send(1, grant);
  EXPECT_EQ(two.await_loss(), "what it sent is damaged");
}

TEST(Courier, WhatWasSaidGoesAheadOfTheEnd) {
  WireLoopback wires(2, {.latency = std::chrono::microseconds(200), .bytes_s = 0.0});
  End one(wires, 0), two(wires, 1);
  one.courier.start();
  two.courier.start();
  for (std::uint32_t i = 0; i < 100; ++i) one.peers->send(1, {.what = i});
  one.courier.part();
  for (std::uint32_t i = 0; i < 100; ++i) {
    const auto message = two.hear();
    ASSERT_TRUE(message);
    ASSERT_EQ(message->what, i);
  }
  EXPECT_EQ(two.await_loss(), "");
  EXPECT_FALSE(two.courier.lost()) << "once";
}

// Each has more to say than the way has room for: who stopped to listen would keep the other one.
TEST(Courier, BothMayPartAtOnce) {
  for (int i = 0; i < 20; ++i) {
    WireLoopback wires(2, {.latency = std::chrono::microseconds(200), .bytes_s = 0.0});
    End one(wires, 0), two(wires, 1);
    one.courier.start();
    two.courier.start();
    for (std::uint32_t m = 0; m < 200; ++m) {
      one.peers->send(1, {.what = m});
      two.peers->send(0, {.what = m});
    }
    const auto began = std::chrono::steady_clock::now();
    {
      const std::jthread other([&] { two.courier.part(); });
      one.courier.part();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - began, 2s);
    EXPECT_EQ(one.courier.lost(), "");
    EXPECT_EQ(two.courier.lost(), "");
  }
}

TEST(Courier, WhoIsSilentIsLost) {
  WireLoopback wires(2);
  End one(wires, 0, 200ms), two(wires, 1);
  one.courier.start();
  EXPECT_EQ(one.await_loss(), "nothing has come");
}

TEST(Courier, WhoseWayBreaksIsLostBehindWhatItSaid) {
  WireLoopback wires(2);
  End one(wires, 0), two(wires, 1);
  one.courier.start();
  two.courier.start();
  one.peers->send(1, {.what = 3});
  ASSERT_TRUE(two.hear());
  wires.cut(0);
  EXPECT_EQ(two.await_loss(), "the other end is gone");
  EXPECT_EQ(one.await_loss(), "the other end is gone");
}

// Of a head, whatever byte: a count, a message, its number.
TEST(Courier, AChangedHeadIsNoticed) {
  for (std::size_t byte = 0; byte < 72; ++byte) {
    WireLoopback wires(2);
    End one(wires, 0, 1s), two(wires, 1, 1s);
    wires.change_bit(0, byte);
    one.peers->send(1, {.kind = PeerMessage::Kind::bye, .what = 5, .step = 3});
    one.courier.start();
    two.courier.start();
    bool noticed = false;
    for (int i = 0; i < 3'000 && !noticed; ++i) {
      // A head that lost its message is noticed when the next one comes.
      if (i == 100) one.peers->send(1, {.kind = PeerMessage::Kind::bye, .what = 5, .step = 3});
      const auto received = two.peers->receive();
      if (received) {
        ASSERT_EQ(received->message.what, 5U) << byte;
        ASSERT_EQ(received->message.step, 3) << byte;
      }
      noticed = two.courier.lost() || two.peers->damaged();
      if (!noticed) two.bell.wait(1ms);
    }
    EXPECT_TRUE(noticed) << "byte " << byte;
  }
}

}  // namespace
}  // namespace strata
