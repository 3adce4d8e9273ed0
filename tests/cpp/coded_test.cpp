// Parameters that rest as codes: where their elements lie, and that the device shows the values of
// their codes whatever the budgets, page sizes and forms, and whatever fails on the way.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "doubles/faulty_device.hpp"
#include "engine/session.hpp"
#include "memory/host_device.hpp"
#include "seeds.hpp"
#include "temp_folder.hpp"

namespace strata {
namespace {

constexpr std::size_t kPage = kPageBytesMin;
constexpr std::uint32_t kUnits = 3;
constexpr Codes kForms[] = {Codes::int8, Codes::nf4, Codes::nf4_double};
// Of each unit: a trained sliver, and two frozen weights, of which the first begins and ends in the
// middle of pages.
constexpr std::size_t kSliver = 3'000;
constexpr std::size_t kRow = 192;
constexpr std::size_t kWeights[] = {kRow * 900, kRow * 128};
constexpr std::uint32_t kEach = 3;

Config coded_config(Codes codes, const std::string& folder, std::size_t page = kPage) {
  Config config;
  for (std::uint32_t u = 0; u < kUnits; ++u) {
    config.units.push_back("block" + std::to_string(u));
    config.params.push_back(
        {.name = "sliver" + std::to_string(u), .numel = kSliver, .unit = UnitId{u}});
    for (const std::size_t numel : kWeights) {
      config.params.push_back({.name = "weight" + std::to_string(config.params.size()),
                               .numel = numel,
                               .trainable = false,
                               .unit = UnitId{u},
                               .stored = StoredForm{.codes = codes}});
    }
  }
  config.groups = {Hyper{}};
  config.page_bytes = page;
  config.device_bytes = 512 * page;
  config.host_bytes = 512 * page;
  if (!folder.empty()) {
    const Layout layout = make_layout(config, page);
    config.device_bytes = (layout.units[0].pages.size() + 2) * page;  // one unit, and a little
    config.host_bytes = 16 * page;
    config.ssd_bytes = kGiB;
    config.ssd_paths = {folder};
  }
  config.workers = 2;
  return config;
}

std::vector<float> weight_values(std::uint32_t param, std::size_t numel) {
  std::mt19937 random(param);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<float> values(numel);
  for (float& value : values) value = normal(random);
  return values;
}

// A page that holds all of a parameter, as nobody else would.
struct WholePage {
  explicit WholePage(Codes codes, std::size_t numel) {
    while (packing_of(codes, bytes).elements < round_up(numel, grain_of(codes))) bytes *= 2;
    memory.resize(bytes / sizeof(Line));
  }
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::size_t bytes = kPage;
  std::vector<Line> memory;
};

// What the device is to show: computed here, in one piece.
std::vector<std::uint16_t> expected_values(Codes codes, std::uint32_t param, std::size_t numel) {
  const std::vector<float> values = weight_values(param, numel);
  const CodeKernels& kernels = code_kernels(Isa::scalar);
  WholePage page(codes, numel);
  const CodeSpan span{
      .form = {.codes = codes}, .page_bytes = page.bytes, .first = 0, .count = numel};
  std::vector<float> absmax(numel / kCodeBlock);
  EXPECT_TRUE(kernels.absmax(values.data(), Dtype::float32, numel, absmax.data()));
  if (codes == Codes::int8) share_in_rows(absmax, kRow);
  kernels.quantise(span, values.data(), Dtype::float32, absmax.data(), mean_of(absmax),
                   page.memory.data());
  std::vector<std::uint16_t> shown(numel);
  kernels.dequantise(span, page.memory.data(), shown.data(), Dtype::bfloat16);
  return shown;
}

bool coded(const Session& session, std::uint32_t param) {
  return session.config().params[param].stored.has_value();
}

void fill(Session& session) {
  for (std::uint32_t p = 0; p < session.config().params.size(); ++p) {
    const std::size_t numel = session.config().params[p].numel;
    const std::vector<float> values = weight_values(p, numel);
    if (coded(session, p))
      session.quantise(p, {.values = values.data(), .dtype = Dtype::float32, .row_elements = kRow});
    else
      session.write(p, Kind::master, 0, values.data(), numel);
  }
}

std::vector<std::uint16_t> shown(Session& session, std::uint32_t param) {
  std::vector<std::uint16_t> values(session.config().params[param].numel);
  std::memcpy(values.data(), session.device_address(param), values.size() * 2);
  return values;
}

// A step that looks at all that the device shows; what is trained follows from what it shows.
void train(Session& session, Codes codes, int steps) {
  const auto visit = [&](std::uint32_t unit, bool backward) {
    session.enter(UnitId{unit}, backward);
    for (std::uint32_t p = unit * kEach; p < (unit + 1) * kEach; ++p) {
      if (!coded(session, p)) continue;
      ASSERT_EQ(shown(session, p), expected_values(codes, p, session.config().params[p].numel))
          << session.config().params[p].name;
    }
    const std::uint32_t sliver = unit * kEach;
    if (backward) {
      session.land_gradient(sliver, session.device_address(sliver + 1), Dtype::bfloat16);
    }
    session.leave(UnitId{unit});
  };
  for (int step = 0; step < steps; ++step) {
    for (std::uint32_t u = 0; u < kUnits; ++u) visit(u, false);
    for (std::uint32_t u = kUnits; u-- > 0;) visit(u, true);
    session.step(session.config().groups, {});
  }
}

std::vector<float> trained(Session& session) {
  std::vector<float> all(kUnits * kSliver);
  for (std::uint32_t u = 0; u < kUnits; ++u) {
    session.read(u * kEach, Kind::master, 0, all.data() + u * kSliver, kSliver);
  }
  return all;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const StrataError& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(Coded, EveryElementIsInOnePageAndComputedOnce) {
  for_seeds(200, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const std::size_t page = kPage << random() % 3;
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
    const Decoder decoder(layout);
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

TEST(Coded, TheDeviceShowsTheValuesOfTheCodes) {
  for (const Codes codes : kForms) {
    Session roomy(coded_config(codes, ""));
    fill(roomy);
    train(roomy, codes, 2);
    const std::vector<float> plain = trained(roomy);
    for (const std::size_t page : {kPage, 4 * kPage}) {
      TempFolder folder;
      const Config config = coded_config(codes, folder.path(), page);
      Session small(config);
      fill(small);
      train(small, codes, 3);
      EXPECT_LE(small.stats().device_bytes_peak, config.device_bytes);
      Session other(coded_config(codes, folder.path(), page));
      fill(other);
      train(other, codes, 2);
      EXPECT_EQ(trained(other), plain) << name(codes) << ", pages of " << page;
    }
  }
}

// A step reads a page of codes from the SSD about once for each time that its unit comes.
TEST(Coded, OnlyCodesCrossTheLinks) {
  TempFolder folder;
  Session session(coded_config(Codes::nf4, folder.path()));
  fill(session);
  train(session, Codes::nf4, 2);
  const auto moved = [&](Link link) {
    return session.stats().link_bytes[static_cast<std::size_t>(link)];
  };
  const std::uint64_t uploaded = moved(Link::upload), read = moved(Link::read);
  train(session, Codes::nf4, 1);
  std::uint64_t elements = 0, codes = 0;
  for (const std::size_t numel : kWeights) {
    elements += kUnits * numel;
    codes += kUnits * (code_bytes(Codes::nf4, numel) + scale_bytes(Codes::nf4, numel));
  }
  const std::uint64_t slivers = kUnits * kPage;
  EXPECT_GE(moved(Link::upload) - uploaded, codes);
  EXPECT_LE(moved(Link::upload) - uploaded, 2 * (codes + slivers));
  EXPECT_LT(moved(Link::upload) - uploaded, elements * 2);
  EXPECT_GT(moved(Link::read) - read, 0U);
}

TEST(Coded, ReadsGiveValuesAndCodesAsTheyRest) {
  for (const Codes codes : kForms) {
    TempFolder folder;
    Session session(coded_config(codes, folder.path()));
    fill(session);
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
    fill(session);
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
    fill(session);
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
    fill(session);
    const std::string said = refusal([&] {
      for (std::uint32_t u = 0; u < 100 * kUnits; ++u) {
        session.enter(UnitId{u % kUnits}, false);
        session.leave(UnitId{u % kUnits});
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
    return refusal([&] { const Session session(config); });
  };
  EXPECT_NE(with([](Config& c) { c.params[1].trainable = true; }).find("is trained"),
            std::string::npos);
  EXPECT_NE(with([](Config& c) { c.params[1].numel = 100; }).find("no multiple of 64"),
            std::string::npos);
  EXPECT_NE(with([](Config& c) { c.device = "cuda:0"; }).find("rests as codes"), std::string::npos);

  Session session(coded_config(Codes::int8, ""));
  fill(session);
  const auto says = [&](const std::function<void()>& call, const char* words) {
    const std::string said = refusal(call);
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
  // Nothing of all that has changed anything.
  session.enter(UnitId{0}, false);
  EXPECT_EQ(shown(session, 1), expected_values(Codes::int8, 1, kWeights[0]));
  session.leave(UnitId{0});
}

}  // namespace
}  // namespace strata
