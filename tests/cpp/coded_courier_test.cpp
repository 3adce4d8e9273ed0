// Couriers: pages that cross as codes of their values.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <span>
#include <vector>

#include "configs.hpp"
#include "courier_ends.hpp"
#include "memory/mapping.hpp"
#include "sent_codes.hpp"

namespace strata::courier_test {
namespace {

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
TEST(CodedCourier, GrantsCrossAsCodesWhereTheySaySo) {
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
TEST(CodedCourier, AChangedHeadOfCodesIsNoticed) {
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

TEST(CodedCourier, CodesThatCannotBeAreNoticed) {
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
    Courier::Head head{.count = 1};  // which rank 0 would not send
    head.messages[0] = message;
    two.courier.start();
    const std::array<std::span<const std::byte>, 1> piece = {std::as_bytes(std::span(&head, 1))};
    one.wire->send(1, piece, 1s);
    EXPECT_EQ(two.await_loss(), "what it sent is damaged");
  }
}

}  // namespace
}  // namespace strata::courier_test
