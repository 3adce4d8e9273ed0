// Pieces of a gradient, from several ranks, that land as one: added in their order, rounded once,
// with the same bits on every instruction set. A failure prints the seed that replays it.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "device_fixtures.hpp"
#include "landed_values.hpp"
#include "optimizers/half.hpp"
#include "optimizers/rule.hpp"

namespace strata::land_pieces_test {
namespace {

constexpr std::size_t kRanks[] = {1, 2, 3, 4, 5, 8, 64};

struct Pieces {
  Dtype to, from;
  GradMode mode;
  GradScaling of_older;
  std::size_t count;
  std::size_t to_at;  // in the bytes
  std::vector<std::size_t> pieces_at;

  double land(Isa isa, Bytes& bytes) const {
    std::vector<const void*> pieces;
    for (const std::size_t at : pieces_at) pieces.push_back(bytes.at<void>(at));
    return kernels(isa).land_pieces(bytes.at<void>(to_at), to, pieces, from, count, mode, of_older);
  }
  // Rank by rank, each rounded to where it lands.
  double land_one_by_one(Isa isa, Bytes& bytes) const {
    double sum = 0.0;
    for (std::size_t i = 0; i < pieces_at.size(); ++i) {
      const bool copies = i == 0 && mode == GradMode::copy;
      sum = kernels(isa).land_gradient(bytes.at<void>(to_at), to, bytes.at<void>(pieces_at[i]),
                                       from, count, copies ? GradMode::copy : GradMode::add,
                                       i == 0 ? of_older : GradScaling{});
    }
    return sum;
  }
  std::string text() const {
    return std::string(" to ") + name(to) + " from " + name(from) + " ranks " +
           std::to_string(pieces_at.size()) + " count " + std::to_string(count) +
           (mode == GradMode::add ? " added" : " copied") + " scaled by " +
           std::to_string(of_older.factor);
  }
};

// Any bits: numbers of all sizes, and NaNs with and without a payload.
void fill(Dtype dtype, std::size_t count, bool wild, std::byte* to, std::mt19937_64& random) {
  const std::vector<float> values = any_floats(count, wild, random);
  put(values, dtype, to);
  for (std::size_t i = 0; wild && i < count; ++i) {
    if (dtype == Dtype::float32) {
      std::memcpy(to + i * 4, &values[i], 4);
    } else if (random() % 8 == 0) {
      const auto half = static_cast<std::uint16_t>(random());
      std::memcpy(to + i * 2, &half, 2);
    }
  }
}

Pieces any_pieces(Bytes& bytes, std::mt19937_64& random) {
  Pieces any;
  any.from = kDtypes[random() % 3];
  any.to = random() % 2 == 0 ? Dtype::float32 : any.from;
  any.mode = random() % 2 == 0 ? GradMode::copy : GradMode::add;
  if (any.mode == GradMode::add && random() % 2 == 0) any.of_older = any_scaling(random);
  any.count = any_count(random);
  const bool wild = random() % 2 == 0;
  any.to_at = bytes.take(any.count * size_of(any.to), size_of(any.to));
  fill(any.to, any.count, wild, bytes.at<std::byte>(any.to_at), random);
  for (std::size_t left = kRanks[random() % std::size(kRanks)]; left > 0; --left) {
    const std::size_t at = bytes.take(any.count * size_of(any.from), size_of(any.from));
    fill(any.from, any.count, wild, bytes.at<std::byte>(at), random);
    any.pieces_at.push_back(at);
  }
  return any;
}

bool same_sum(double a, double b) {
  return std::isnan(a) ? std::isnan(b)
                       : std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

// NaNs as the one quiet NaN.
void store(float value, Dtype dtype, std::byte* to) {
  const bool nan = std::isnan(value);
  const std::uint32_t bits = nan ? 0x7fc00000 : std::bit_cast<std::uint32_t>(value);
  const std::uint16_t half = dtype == Dtype::bfloat16 ? static_cast<std::uint16_t>(bits >> 16)
                             : nan                    ? std::uint16_t{0x7e00}
                                                      : float16_bits(value);
  if (dtype == Dtype::float32)
    std::memcpy(to, &bits, 4);
  else
    std::memcpy(to, &half, 2);
}

// The slow way, element by element. Returns what the destination then holds.
std::vector<float> land_slowly(const Pieces& pieces, Bytes& bytes) {
  const auto read = [&](std::size_t at, Dtype dtype) {
    return as_floats(bytes.at<std::byte>(at), dtype, pieces.count);
  };
  std::vector<float> sums = read(pieces.to_at, pieces.to);
  const auto [factor, divides] = pieces.of_older;
  for (float& sum : sums) sum = rounded(divides ? sum / factor : sum * factor, pieces.to);
  for (std::size_t rank = 0; rank < pieces.pieces_at.size(); ++rank) {
    const std::vector<float> piece = read(pieces.pieces_at[rank], pieces.from);
    const bool copies = rank == 0 && pieces.mode == GradMode::copy;
    for (std::size_t i = 0; i < pieces.count; ++i) sums[i] = copies ? piece[i] : sums[i] + piece[i];
  }
  for (std::size_t i = 0; i < pieces.count; ++i) {
    sums[i] = rounded(sums[i], pieces.to);
    store(sums[i], pieces.to, bytes.at<std::byte>(pieces.to_at + i * size_of(pieces.to)));
  }
  return sums;
}

// Every instruction set leaves the bytes and the norm of landing one element after the other.
void expect_same_everywhere(const Pieces& pieces, const Bytes& bytes) {
  Bytes expected = bytes;
  const double sum = norm_in_order(land_slowly(pieces, expected));
  for (const Isa isa : isas()) {
    Bytes actual = bytes;
    EXPECT_TRUE(same_sum(pieces.land(isa, actual), sum)) << name(isa);
    ASSERT_TRUE(actual == expected) << name(isa);
  }
}

TEST(LandPieces, AreAddedInTheirOrderAndRoundedOnceEverywhere) {
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    std::mt19937_64 random(seed);
    Bytes bytes;
    const Pieces pieces = any_pieces(bytes, random);
    if (pieces.mode == GradMode::copy && pieces.pieces_at.size() == 1) continue;
    SCOPED_TRACE("seed " + std::to_string(seed) + pieces.text());
    ASSERT_NO_FATAL_FAILURE(expect_same_everywhere(pieces, bytes));
  }
}

// A copy keeps every bit, a NaN's and the sign of a zero among them.
TEST(LandPieces, OnePieceLandsAsAGradient) {
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    std::mt19937_64 random(seed);
    Bytes bytes;
    Pieces pieces = any_pieces(bytes, random);
    pieces.pieces_at.resize(1);
    SCOPED_TRACE("seed " + std::to_string(seed) + pieces.text());
    Bytes expected = bytes;
    const double sum = pieces.land_one_by_one(Isa::scalar, expected);
    for (const Isa isa : isas()) {
      Bytes actual = bytes;
      EXPECT_TRUE(same_sum(pieces.land(isa, actual), sum)) << name(isa);
      ASSERT_TRUE(actual == expected) << name(isa);
    }
  }
}

TEST(LandPieces, InFloat32LandAsTheyDoOneByOne) {
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    std::mt19937_64 random(seed);
    Bytes bytes;
    const Pieces pieces = any_pieces(bytes, random);
    if (pieces.to != Dtype::float32) continue;
    SCOPED_TRACE("seed " + std::to_string(seed) + pieces.text());
    for (const Isa isa : isas()) {
      Bytes expected = bytes, actual = bytes;
      const double sum = pieces.land_one_by_one(isa, expected);
      EXPECT_TRUE(same_sum(pieces.land(isa, actual), sum)) << name(isa);
      ASSERT_TRUE(actual == expected) << name(isa);
    }
  }
}

// The owner's own piece may lie where the sum goes.
TEST(LandPieces, APieceMayBeTheDestination) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    Bytes bytes;
    Pieces beside = any_pieces(bytes, random);
    beside.mode = GradMode::copy;
    beside.of_older = {};
    if (beside.to != beside.from) continue;
    SCOPED_TRACE("seed " + std::to_string(seed) + beside.text());
    Pieces in_place = beside;
    std::size_t& place = in_place.pieces_at[random() % in_place.pieces_at.size()];
    const std::size_t own = place;
    const std::size_t size = beside.count * size_of(beside.to);
    if (size > 0) std::memcpy(bytes.at<void>(beside.to_at), bytes.at<void>(own), size);
    place = beside.to_at;
    for (const Isa isa : isas()) {
      Bytes expected = bytes, actual = bytes;
      const double sum = beside.land(isa, expected);
      EXPECT_TRUE(same_sum(in_place.land(isa, actual), sum)) << name(isa);
      ASSERT_TRUE(actual == expected) << name(isa);
    }
  }
}

TEST(LandPieces, WithoutPiecesWhatIsThereIsScaled) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    Bytes bytes;
    Pieces none = any_pieces(bytes, random);
    none.mode = GradMode::add;
    none.from = none.to;
    none.of_older = any_scaling(random);
    none.pieces_at.clear();
    SCOPED_TRACE("seed " + std::to_string(seed) + none.text());
    ASSERT_NO_FATAL_FAILURE(expect_same_everywhere(none, bytes));
  }
}

TEST(LandPieces, HalfBitsOfSeveralRanksAreNotLost) {
  const std::uint16_t one = 0x3f80, half_bit = 0x3b80;  // 1 and 2^-8: half of one's last bit
  const std::vector<const void*> pieces = {&one, &half_bit, &half_bit};
  for (const Isa isa : isas()) {
    std::uint16_t sum = 0;
    kernels(isa).land_pieces(&sum, Dtype::bfloat16, pieces, Dtype::bfloat16, 1, GradMode::copy, {});
    EXPECT_EQ(sum, 0x3f81) << name(isa);
  }
}

TEST(LandPieces, EmptySpansTouchNothing) {
  const std::vector<const void*> pieces(3);
  for (const Isa isa : isas()) {
    for (const GradMode mode : {GradMode::copy, GradMode::add}) {
      EXPECT_EQ(
          kernels(isa).land_pieces(nullptr, Dtype::float32, pieces, Dtype::bfloat16, 0, mode, {}),
          0.0);
    }
  }
}

TEST(LandPieces, WhatMeansNothingIsRefused) {
  const std::vector<float> piece(4, 1.0f);
  const std::vector<const void*> pieces(2, piece.data());
  std::vector<float> to(4);
  const GradScaling scaling{.factor = 2.0f};
  const auto land = [&](std::span<const void* const> from, Dtype to_dtype, GradMode mode,
                        const GradScaling& of_older) {
    kernels(best_isa())
        .land_pieces(to.data(), to_dtype, from, Dtype::float32, to.size(), mode, of_older);
  };
  EXPECT_DEATH(land({}, Dtype::float32, GradMode::copy, {}), "empty");
  EXPECT_DEATH(land(pieces, Dtype::float32, GradMode::stay, {}), "stay");
  EXPECT_DEATH(land(pieces, Dtype::float32, GradMode::copy, scaling), "of_older");
  EXPECT_DEATH(land(pieces, Dtype::bfloat16, GradMode::copy, {}), "float32");
}

}  // namespace
}  // namespace strata::land_pieces_test
