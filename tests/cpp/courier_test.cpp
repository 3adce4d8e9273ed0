// Couriers: what ranks of two machines say to each other arrives as it was said, with the bytes
// that it is about, or both hear that the other one is lost.
#include "engine/ranks/courier.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>
#include <utility>

#include "configs.hpp"
#include "courier_ends.hpp"

namespace strata::courier_test {
namespace {

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

// What is asked for late leaves the network idle meanwhile.
TEST(Courier, BytesOfTheNextFrameAreExpectedBeforeAnyAreWaitedFor) {
  constexpr std::size_t kSent = 60, kOfFrame = Courier::kMessagesMax;
  WireLoopback wires(2);
  End one(wires, 0), two(wires, 1);
  for (std::uint32_t i = 0; i < kSent; ++i) say_page(one, i);
  one.courier.start();
  two.courier.start();
  for (std::uint32_t i = 0; i < kSent; ++i) expect_page(two, i);
  std::size_t left = kSent;
  for (const auto& [bytes, behind] : wires.awaits(0, 1)) {
    if (bytes == sizeof(Courier::Head)) continue;
    --left;
    const std::size_t whole = std::min(left, left % kOfFrame + kOfFrame);
    EXPECT_GE(behind, whole * kKernelPageBytes) << left << " pages are still to come";
  }
  EXPECT_EQ(left, 0U);
}

TEST(Courier, BytesThatGoBehindTheirHeadsGoAheadOfTheEnd) {
  for (std::uint32_t sent = 1; sent < 20; ++sent) {
    WireLoopback wires(2, {.latency = std::chrono::microseconds(100), .bytes_s = 0.0});
    End one(wires, 0), two(wires, 1);
    for (std::uint32_t i = 0; i < sent; ++i) {
      say_page(one, i, (sent + i / 3) % 3 == 0 ? 0 : kKernelPageBytes);
    }
    one.courier.start();
    two.courier.start();
    one.courier.part();
    for (std::uint32_t i = 0; i < sent; ++i) expect_page(two, i);
    EXPECT_EQ(two.await_loss(), "");
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

// All of it takes longer than anybody waits for what is silent, and no part of it does.
TEST(Courier, WhoSendsALargePageOverASlowNetworkIsNotLost) {
  constexpr std::size_t kBytes = 24 * kMiB;
  WireLoopback wires(2, {.bytes_s = 16e6});
  End one(wires, 0, 1s, kBytes), two(wires, 1, 1s, kBytes);
  one.courier.start();
  two.courier.start();
  one.memory.bytes().back() = std::byte{9};
  one.peers->send(1, {.kind = PeerMessage::Kind::piece, .bytes = kBytes});
  const auto message = two.hear();
  ASSERT_TRUE(message);
  EXPECT_EQ(two.peers->bytes(0, 0, kBytes)[kBytes - 1], std::byte{9});
  EXPECT_FALSE(one.courier.lost() || two.courier.lost());
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

// A head with one message, which goes ahead of the bytes of four others. Each of these may have
// come, as it was.
TEST(Courier, AChangedHeadThatGoesAheadOfBytesIsNoticed) {
  constexpr std::size_t kUsed =
      sizeof(Courier::Head) - (Courier::kMessagesMax - 1) * sizeof(PeerMessage);
  for (std::size_t byte = 0; byte < kUsed; ++byte) {
    SCOPED_TRACE(byte);
    WireLoopback wires(2);
    End one(wires, 0, 1s), two(wires, 1, 1s);
    wires.change_bit(0, byte, 1);
    for (std::uint32_t i = 0; i <= Courier::kMessagesMax; ++i) say_page(one, i);
    one.courier.start();
    two.courier.start();
    std::uint32_t come = 0;
    bool noticed = false;
    for (int i = 0; i < 3'000 && !noticed; ++i) {
      // A head that lost its message is noticed when the next one comes.
      if (i == 100) say_page(one, Courier::kMessagesMax + 1);
      one.peers->flush();
      if (const auto received = two.peers->receive()) {
        ASSERT_EQ(received->message.what, come++);
        const auto& [at, bytes] = std::pair(received->message.at, received->message.bytes);
        EXPECT_EQ(*two.peers->bytes(0, at, bytes), static_cast<std::byte>(come - 1));
      }
      noticed = two.courier.lost() || two.peers->damaged();
      if (!noticed) two.bell.wait(1ms);
    }
    EXPECT_TRUE(noticed);
    EXPECT_LE(come, Courier::kMessagesMax);
  }
}

// Also between a head and the bytes that it goes ahead of: what was said before comes whole, and
// nothing else.
TEST(Courier, AWayThatBreaksAnywhereBringsWholeFramesOrNothing) {
  constexpr std::uint32_t kSent = 11;
  bool all_came = false;
  for (std::uint64_t nth = 1; !all_came; ++nth) {
    SCOPED_TRACE(nth);
    ASSERT_LT(nth, 500U);
    WireLoopback wires(2);
    End one(wires, 0, 1s), two(wires, 1, 1s);
    for (std::uint32_t i = 0; i < kSent; ++i) say_page(one, i);
    wires.fail_at(nth);
    one.courier.start();
    two.courier.start();
    std::uint32_t come = 0;
    for (bool gone = false; !gone && come < kSent;) {
      gone = two.courier.lost().has_value();  // ahead of what came before it
      while (const auto received = two.peers->receive()) {
        ASSERT_EQ(received->message.what, come);
        EXPECT_EQ(*two.peers->bytes(0, received->message.at, kKernelPageBytes),
                  static_cast<std::byte>(come++));
      }
      if (!gone) two.bell.wait(1ms);
    }
    EXPECT_TRUE(come % Courier::kMessagesMax == 0 || come == kSent) << come;
    all_came = come == kSent;
  }
}

}  // namespace
}  // namespace strata::courier_test
