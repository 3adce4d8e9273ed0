// Couriers: what ranks of two machines say to each other arrives as it was said, with the bytes
// that it is about, or both hear that the other one is lost.
#include "engine/ranks/courier.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "configs.hpp"
#include "doubles/wire_loopback.hpp"
#include "memory/mapping.hpp"
#include "memory/shared_area.hpp"
#include "sent_codes.hpp"

namespace strata::courier_test {
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

// Page `i` of its memory, which begins with that number; `bytes` of it go along.
void say_page(End& end, std::uint32_t i, std::size_t bytes = kKernelPageBytes) {
  const std::size_t at = i * kKernelPageBytes;
  end.memory.bytes()[at] = static_cast<std::byte>(i);
  end.peers->send(1, {.kind = PeerMessage::Kind::piece, .what = i, .at = at, .bytes = bytes});
}

void expect_page(End& end, std::uint32_t i) {
  const auto message = end.hear();
  ASSERT_TRUE(message && message->what == i) << "message " << i;
  if (message->bytes == 0) return;
  EXPECT_EQ(*end.peers->bytes(0, message->at, 1), static_cast<std::byte>(i));
}

// What is asked for late leaves the network idle meanwhile.
TEST(Courier, BytesOfTheNextFrameAreExpectedBeforeAnyAreWaitedFor) {
  constexpr std::size_t kSent = 60, kOfFrame = 4, kHeadBytes = 240;
  WireLoopback wires(2);
  End one(wires, 0), two(wires, 1);
  for (std::uint32_t i = 0; i < kSent; ++i) say_page(one, i);
  one.courier.start();
  two.courier.start();
  for (std::uint32_t i = 0; i < kSent; ++i) expect_page(two, i);
  std::size_t left = kSent;
  for (const auto& [bytes, behind] : wires.awaits(0, 1)) {
    if (bytes == kHeadBytes) continue;
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

bool same(std::span<const std::byte> one, std::span<const std::byte> other) {
  return std::ranges::equal(one, other);
}

void fill_with(std::mt19937& random, Dtype dtype, std::span<std::byte> page) {
  std::normal_distribution<float> normal;
  std::vector<float> values(page.size() / size_of(dtype)), rest(values.size());
  for (float& value : values) value = normal(random);
  kernels(best_isa())
      .split(values.data(), values.size(), dtype, page.data(),
             reinterpret_cast<std::byte*>(rest.data()));
}

// Among others that come as they are; to the mirror, and to a frame that was asked for. Of every
// dtype, and also where the last block is a part of one.
TEST(Courier, GrantsCrossAsCodesWhereTheySaySo) {
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    WireLoopback wires(2);
    End one(wires, 0), two(wires, 1);
    std::mt19937 random(1);
    fill_with(random, dtype, one.memory.bytes());
    constexpr std::uint32_t kSent = 60;
    const auto bytes_of = [&](std::uint32_t i) {
      return kKernelPageBytes - (i % 7) * size_of(dtype);
    };
    const auto is_coded = [](std::uint32_t i) { return i % 3 != 1; };
    for (std::uint32_t i = 0; i < kSent; ++i) {
      one.peers->send(1, {.kind = PeerMessage::Kind::grant,
                          .what = i,
                          .window = i % 10 == 9 ? 2U : 0U,
                          .dtype = is_coded(i) ? coded_as(dtype) : 0,
                          .at = i * kKernelPageBytes,
                          .bytes = bytes_of(i)});
    }
    one.courier.start();
    two.courier.start();
    for (std::uint32_t i = 0; i < kSent; ++i) {
      const auto message = two.hear();
      ASSERT_TRUE(message && message->what == i) << "message " << i;
      if (i % 10 == 9 && i + 10 < kSent) continue;  // the next one has its frame already
      const auto sent = one.memory.bytes().subspan(i * kKernelPageBytes, bytes_of(i));
      const std::byte* const come = message->window != 0
                                        ? two.relayed.bytes().data() + kKernelPageBytes
                                        : two.peers->bytes(0, message->at, message->bytes);
      const std::span page(come, bytes_of(i));
      EXPECT_TRUE(same(page, is_coded(i) ? rounded(sent, dtype)
                                         : std::vector<std::byte>(sent.begin(), sent.end())))
          << name(dtype) << ", message " << i;
      EXPECT_EQ(same(page, sent), !is_coded(i)) << name(dtype) << ", message " << i;
    }
    EXPECT_EQ(wires.pieces(kKernelPageBytes), 3U) << "of those that are whole";
    EXPECT_GT(wires.pieces(sent_bytes(kKernelPageBytes / size_of(dtype))), 0U);
    EXPECT_FALSE(one.courier.lost() || two.courier.lost());
  }
}

// Of a head with a grant of codes, whatever byte: its dtype, size and place among them.
TEST(Courier, AChangedHeadOfCodesIsNoticed) {
  for (std::size_t byte = 0; byte < 72; ++byte) {
    WireLoopback wires(2);
    End one(wires, 0, 1s), two(wires, 1, 1s);
    std::mt19937 random(1);
    fill_with(random, Dtype::bfloat16, one.memory.bytes());
    wires.change_bit(0, byte);
    const PeerMessage grant{.kind = PeerMessage::Kind::grant,
                            .what = 5,
                            .dtype = coded_as(Dtype::bfloat16),
                            .at = 2 * kKernelPageBytes,
                            .bytes = kKernelPageBytes};
    one.peers->send(1, grant);
    one.courier.start();
    two.courier.start();
    bool noticed = false;
    for (int i = 0; i < 3'000 && !noticed; ++i) {
      if (i == 100) one.peers->send(1, grant);
      if (const auto received = two.peers->receive()) {
        ASSERT_EQ(received->message.what, 5U) << byte;
        ASSERT_EQ(received->message.dtype, coded_as(Dtype::bfloat16)) << byte;
      }
      noticed = two.courier.lost() || two.peers->damaged();
      if (!noticed) two.bell.wait(1ms);
    }
    EXPECT_TRUE(noticed) << "byte " << byte;
  }
}

TEST(Courier, CodesThatCannotBeAreNoticed) {
  const PeerMessage grant{.kind = PeerMessage::Kind::grant,
                          .dtype = coded_as(Dtype::bfloat16),
                          .at = kKernelPageBytes,
                          .bytes = kKernelPageBytes};
  PeerMessage other = grant, odd = grant, within = grant;
  other.dtype = coded_as(Dtype::bfloat16) + 1;
  odd.bytes = 63;
  within.at = 2;
  for (const PeerMessage& message : {other, odd, within}) {
    WireLoopback wires(2);
    End one(wires, 0), two(wires, 1);
    // What rank 0 would not send: its head is written by hand.
    struct {
      std::uint64_t number = 0;
      std::uint32_t count = 1, ends = 0;
      std::array<PeerMessage, 4> messages{};
    } head;
    head.messages[0] = message;
    two.courier.start();
    const std::array<std::span<const std::byte>, 1> piece = {std::as_bytes(std::span(&head, 1))};
    one.wire->send(1, piece, 1s);
    EXPECT_EQ(two.await_loss(), "what it sent is damaged");
  }
}

}  // namespace
}  // namespace strata::courier_test
