// Parameters that rest as codes: where their elements lie, and that every device shows the values
// of their codes whatever the budgets, page sizes and forms, and whatever fails on the way.
#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "adoptions.hpp"
#include "coded_fixtures.hpp"
#include "doubles/faulty_device.hpp"
#include "doubles/gpu.hpp"
#include "engine/decoder.hpp"
#include "engine/session.hpp"
#include "memory/host_device.hpp"
#include "seeds.hpp"
#include "temp_folder.hpp"

namespace strata::coded_test {
namespace {

TEST(Coded, EveryElementIsInOnePageAndComputedOnce) {
  for_seeds(200, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const std::size_t page = kPageBytesMin << random() % 3;
    Config config;
    config.units = {"a", "b"};
    config.groups = {Hyper{}};
    for (std::uint32_t p = 0; p < 6; ++p) {
      ParamSpec spec{.name = "p" + std::to_string(p),
                     .numel = kCodeBlock * (1 + random() % 3'000),
                     .dtype = random() % 2 == 0 ? Dtype::bfloat16 : Dtype::float32,
                     .trainable = random() % 3 == 0,
                     .unit = UnitId{static_cast<std::uint32_t>(random() % 2)}};
      if (!spec.trainable) spec.stored = StoredForm{.codes = kForms[random() % 3]};
      config.params.push_back(spec);
    }
    const Layout layout = make_layout(config, page);
    const Decoder decoder(layout, nullptr);
    std::uint32_t computed = layout.page_count;
    for (const Segment& segment : layout.segments) {
      if (!segment.stored) continue;
      ASSERT_EQ(index(segment.computed.first), computed);
      std::size_t element = 0;
      for (std::uint32_t i = 0; i < segment.computed.count; ++i, ++computed) {
        const PageId shown{computed};
        ASSERT_EQ(layout.units[index(segment.unit)].pages[segment.view_page + i], shown);
        std::size_t byte = 0;
        for (const ComputedPart& part : decoder.pages().parts(shown)) {
          const Chunk& chunk = layout.chunks[layout.chunk_of[index(part.source)]];
          ASSERT_EQ(&layout.segments[chunk.segment], &segment);
          ASSERT_GE(element, chunk.first);
          ASSERT_EQ(part.to_byte, byte);
          element += part.bytes / size_of(segment.dtype);
          ASSERT_LE(element, chunk.first + chunk.elements);
          byte += part.bytes;
        }
        ASSERT_TRUE(byte == page || i + 1 == segment.computed.count);
      }
      ASSERT_EQ(element, segment.elements);
    }
    ASSERT_EQ(computed, layout.page_count + layout.computed_count);
    for (std::uint32_t p = 0; p < config.params.size(); ++p) {
      const Segment& segment = layout.segment_of(p);
      std::size_t next = 0;
      for (const Piece& piece : layout.pieces(p)) {
        const Chunk& chunk = layout.chunks[piece.chunk];
        ASSERT_EQ(piece.in_param, next);
        ASSERT_EQ(chunk.first + piece.in_chunk, layout.places[p].first + next);
        ASSERT_LE(piece.in_chunk + piece.count, chunk.elements);
        const std::size_t grain = segment.stored ? grain_of(segment.stored->codes) : 1;
        ASSERT_EQ(piece.in_chunk % grain, 0U);
        next += piece.count;
      }
      ASSERT_EQ(next, config.params[p].numel);
    }
  });
}

class CodedOn : public OverDevices {};

TEST_P(CodedOn, TheDeviceShowsTheValuesOfTheCodes) {
  for (const Codes codes : kForms) {
    std::vector<float> plain;
    {
      Session roomy(coded_config(codes, ""));
      fill_coded(roomy);
      train(roomy, codes, 2);
      plain = trained(roomy);
    }
    for (const std::size_t size : {page(), 4 * page()}) {
      TempFolder folder;
      const Config config = fit(coded_config(codes, folder.path(), size));
      Session small(config, device().parts());
      fill_coded(small);
      train(small, codes, 2, &device());
      EXPECT_EQ(trained(small), plain) << name(codes) << ", pages of " << size;
      train(small, codes, 1, &device());
      EXPECT_LE(small.stats().device_bytes_peak, config.device_bytes);
    }
  }
  EXPECT_TRUE(GetParam() != TestedOn::gpu_double || KernelsOfDouble::decodings > 0);
}
INSTANTIATE_TEST_SUITE_P(Devices, CodedOn, testing::ValuesIn(kTestDevices), device_name);

// A step reads a page of codes from the SSD about once for each time that its unit comes.
TEST(Coded, OnlyCodesCrossTheLinks) {
  TempFolder folder;
  Session session(coded_config(Codes::nf4, folder.path()));
  fill_coded(session);
  train(session, Codes::nf4, 2);
  const auto moved = [&](Link link) {
    return session.stats().link_bytes[static_cast<std::size_t>(link)];
  };
  const std::uint64_t uploaded = moved(Link::upload), read = moved(Link::read);
  train(session, Codes::nf4, 1);
  std::uint64_t elements = 0, codes = 0;
  for (const std::size_t numel : kWeights) {
    elements += kCodedUnits * numel;
    codes += kCodedUnits * (code_bytes(Codes::nf4, numel) + scale_bytes(Codes::nf4, numel));
  }
  const std::uint64_t slivers = kCodedUnits * kPageBytesMin;
  EXPECT_GE(moved(Link::upload) - uploaded, codes);
  EXPECT_LE(moved(Link::upload) - uploaded, 2 * (codes + slivers));
  EXPECT_LT(moved(Link::upload) - uploaded, elements * 2);
  EXPECT_GT(moved(Link::read) - read, 0U);
}

TEST(Coded, ReadsGiveValuesAndCodesAsTheyRest) {
  for (const Codes codes : kForms) {
    TempFolder folder;
    Session session(coded_config(codes, folder.path()));
    fill_coded(session);
    Session copy(coded_config(codes, ""));
    for (std::uint32_t p = 0; p < session.config().params.size(); ++p) {
      if (!coded(session, p)) continue;
      const std::size_t numel = session.config().params[p].numel;
      // 1. Values, from the middle of a block on.
      const std::vector<std::uint16_t> plain = expected_values(codes, p, numel);
      std::vector<float> values(numel - 100);
      session.read(p, Kind::master, 37, values.data(), values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint32_t bits = std::uint32_t{plain[i + 37]} << 16;
        ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]), bits) << i;
      }
      // 2. Codes, into a session that never saw the values.
      const std::size_t groups = codes == Codes::nf4_double ? ceil_div(numel, grain_of(codes)) : 0;
      std::vector<std::byte> all(code_bytes(codes, numel));
      std::vector<std::byte> scales(scale_bytes(codes, numel));
      std::vector<std::byte> groups_of_scales(groups * sizeof(ScaleGroup));
      session.read_codes(p, 0, {all, scales, groups_of_scales});
      copy.write_codes(p, 0, {all, scales, groups_of_scales});
      copy.enter(UnitId{p / kEach}, false);
      EXPECT_EQ(shown(copy, p), plain) << name(codes);
      copy.leave(UnitId{p / kEach});
    }
  }
}

TEST(Coded, NewCodesReachTheDevice) {
  TempFolder folder;
  for (const std::string& path : {std::string(), folder.path()}) {
    Session session(coded_config(Codes::nf4, path));
    fill_coded(session);
    train(session, Codes::nf4, 1);
    const std::vector<float> others = weight_values(99, kWeights[0]);
    session.quantise(1, {.values = others.data(), .dtype = Dtype::float32, .row_elements = kRow});
    session.enter(UnitId{0}, false);
    EXPECT_EQ(shown(session, 1), expected_values(Codes::nf4, 99, kWeights[0]));
    EXPECT_EQ(shown(session, 2), expected_values(Codes::nf4, 2, kWeights[1]));
    session.leave(UnitId{0});
  }
}

TEST(Coded, LateCopiesAreWaitedFor) {
  TempFolder folder;
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    SessionParts parts;
    parts.device =
        faulty(host_device(nullptr, CopyMode::polled), {.polls_late_max = 9, .seed = seed});
    Session session(coded_config(Codes::nf4_double, folder.path()), std::move(parts));
    fill_coded(session);
    train(session, Codes::nf4_double, 2);
  }
}

// Whichever copy fails, and be it the first of the two that make a page: one error, and no hang.
TEST(Coded, AFailedCopyEndsTheSession) {
  TempFolder folder;
  for (std::uint64_t nth = 1; nth <= 40; nth += 3) {
    SessionParts parts;
    parts.device = faulty(host_device(nullptr, CopyMode::polled), {.nth_copy = nth});
    Session session(coded_config(Codes::nf4, folder.path()), std::move(parts));
    fill_coded(session);
    const std::string said = refusal_of([&] {
      for (std::uint32_t u = 0; u < 100 * kCodedUnits; ++u) {
        session.enter(UnitId{u % kCodedUnits}, false);
        session.leave(UnitId{u % kCodedUnits});
      }
    });
    EXPECT_NE(said.find("injected fault of a copy"), std::string::npos) << nth << ": " << said;
    EXPECT_NE(said.find("block"), std::string::npos) << said;
  }
}

TEST(Coded, WhatCannotBeStoredIsRefused) {
  const auto with = [](auto change) {
    Config config = coded_config(Codes::nf4, "");
    change(config);
    return refusal_of([&] { const Session session(config); });
  };
  EXPECT_NE(with([](Config& c) { c.params[1].trainable = true; }).find("is trained"),
            std::string::npos);
  EXPECT_NE(with([](Config& c) { c.params[1].numel = 100; }).find("no multiple of 64"),
            std::string::npos);

  Session session(coded_config(Codes::int8, ""));
  fill_coded(session);
  const auto says = [&](const std::function<void()>& call, const char* words) {
    const std::string said = refusal_of(call);
    EXPECT_NE(said.find(words), std::string::npos) << said;
  };
  std::vector<float> values = weight_values(1, kWeights[0]);
  const auto quantise = [&](std::uint32_t param, std::size_t row) {
    session.quantise(param,
                     {.values = values.data(), .dtype = Dtype::float32, .row_elements = row});
  };
  says([&] { quantise(0, kRow); }, "does not rest as codes");
  says([&] { quantise(1, 100); }, "whole blocks");
  says([&] { session.write(1, Kind::master, 0, values.data(), 1); }, "rests as int8");
  values[7] = std::numeric_limits<float>::infinity();
  says([&] { quantise(1, kRow); }, "infinite or not a number");
  std::vector<std::byte> codes(code_bytes(Codes::int8, kWeights[0])), scales(8);
  says([&] { session.write_codes(1, 0, {codes, scales, {}}); }, "bytes of scales");
  says([&] { session.write_codes(1, 32, {codes, scales, {}}); }, "in blocks of 64");
  scales.assign(scale_bytes(Codes::int8, kWeights[0]), std::byte{0xff});
  says([&] { session.write_codes(1, 0, {codes, scales, {}}); }, "the scale of its block 0");
  session.enter(UnitId{0}, false);
  values[7] = 0.0f;
  says([&] { quantise(1, kRow); }, "is entered");
  says([&] { session.device_written(1); }, "was changed in place");
  session.leave(UnitId{0});
  std::vector<bool> resting(session.config().units.size(), true);
  says([&] { rest_on_device(session, resting, session.config().device_bytes); }, "rest as codes");
  // Nothing of all that has changed anything.
  session.enter(UnitId{0}, false);
  EXPECT_EQ(shown(session, 1), expected_values(Codes::int8, 1, kWeights[0]));
  session.leave(UnitId{0});
}

}  // namespace
}  // namespace strata::coded_test
