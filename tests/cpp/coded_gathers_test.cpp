// Ranks of several machines that compute with int8 codes of each other's parameters: what they are
// shown is what codes stand for, and whatever is read from outside is exact.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/ranks/relays.hpp"
#include "memory/page_table.hpp"
#include "offload/residency/remote_pages.hpp"
#include "rank_training.hpp"
#include "sent_codes.hpp"

namespace strata::coded_gathers_test {
namespace {

Config coded(Config config = roomy()) {
  config.coded_gathers = true;
  return config;
}

// A float32 unit, and a frozen one, beside the others.
Config mixed() {
  Config config = coded();
  for (ParamSpec& param : config.params) {
    if (param.unit == UnitId{1}) param.dtype = Dtype::float32;
    if (param.unit == UnitId{2}) param.trainable = false;
  }
  return config;
}

// In the dtype of computation, as its owner has it.
std::vector<std::byte> computed(Session& session, std::uint32_t param) {
  const ParamSpec& spec = session.config().params[param];
  std::vector<float> values(spec.numel), rest(spec.numel);
  session.read(param, Kind::master, 0, values.data(), values.size());
  std::vector<std::byte> bytes(spec.numel * size_of(spec.dtype));
  kernels(best_isa()).split(values.data(), values.size(), spec.dtype, bytes.data(), rest.data());
  return bytes;
}

// Enters a unit, and compares what it shows with what the owners have.
void expect_shown(Session& session, std::uint32_t unit, bool exactly) {
  const Config& config = session.config();
  const Layout layout = session.residence().layout;
  const Ownership owns = ownership_of(config, layout);
  const auto is_here = [&](std::uint32_t chunk) {
    return config.machine(owns.owner(chunk)) == config.machine(config.rank);
  };
  for (std::uint32_t p = 0; p < config.params.size(); ++p) {
    if (config.params[p].unit != UnitId{unit}) continue;
    const Dtype dtype = config.params[p].dtype;
    const std::vector<std::byte> values = computed(session, p);
    session.enter(UnitId{unit}, false, !exactly, nullptr, 0, exactly);
    const auto* const shown = static_cast<const std::byte*>(session.device_address(p));
    for (const Piece& piece : layout.pieces(p)) {
      const auto of_piece = [&](const std::byte* from) {
        return std::span(from + piece.in_param * size_of(dtype), piece.count * size_of(dtype));
      };
      const auto exact = of_piece(values.data());
      const bool coded = config.params[p].trainable && !is_here(piece.chunk) && !exactly;
      const auto expected =
          coded ? rounded(exact, dtype) : std::vector<std::byte>(exact.begin(), exact.end());
      EXPECT_TRUE(std::ranges::equal(of_piece(shown), expected))
          << config.params[p].name << ", element " << piece.in_param << ", rank " << config.rank;
      EXPECT_EQ(std::ranges::equal(of_piece(shown), exact), !coded)
          << config.params[p].name << ", element " << piece.in_param << ", rank " << config.rank;
    }
    session.leave(UnitId{unit});
  }
}

TEST(CodedGathers, ShowWhatCodesStandForAndReadsAreExact) {
  for (const auto& [ranks, hosts] : {std::pair(2U, Hosts::one_each), std::pair(4U, Hosts::pairs)}) {
    Cluster machines(ranks, hosts);
    std::barrier all(static_cast<std::ptrdiff_t>(ranks));
    std::vector<std::vector<float>> found(ranks);
    std::vector<float> expected;
    on_ranks(ranks, [&](std::uint32_t rank) {
      const auto session = machines.open(rank, mixed());
      fill_all(*session);
      all.arrive_and_wait();
      for (const bool exactly : {false, true, false, true}) {
        for (std::uint32_t u = 0; u < kUnits; ++u) expect_shown(*session, u, exactly);
      }
      found[rank] = all_of(*session, Kind::master);
      all.arrive_and_wait();
    });
    const auto alone = open_rank(*std::make_unique<Loopback>(1), 0, mixed(), 1);
    fill_all(*alone);
    expect_bits(all_of(*alone, Kind::master), found);
  }
}

// Every page of trained parameters once for a machine, as codes, and none as it is.
TEST(CodedGathers, SendCodes) {
  for (const auto& [ranks, hosts] : {std::pair(2U, Hosts::one_each), std::pair(4U, Hosts::pairs)}) {
    Cluster machines(ranks, hosts);
    std::barrier all(static_cast<std::ptrdiff_t>(ranks));
    std::atomic<std::uint64_t> pages = 0;
    on_ranks(ranks, [&](std::uint32_t rank) {
      const auto session = machines.open(rank, coded());
      fill_all(*session);
      all.arrive_and_wait();
      for (std::uint32_t u = 0; u < kUnits; ++u) visit_unit(*session, u, false, 0);
      const Layout layout = session->residence().layout;
      pages = static_cast<std::uint64_t>(std::ranges::count(layout.role_of, Role::param));
      all.arrive_and_wait();
    });
    EXPECT_EQ(machines.wires().pieces(sent_bytes(kPage / 2)), pages.load());
    EXPECT_EQ(machines.wires().pieces(kPage), 0U);
  }
}

// Nothing crosses, so nothing is rounded.
TEST(CodedGathers, AreNotOfMachinesThatAreOne) {
  const std::vector<float> expected = trained(1, 3, roomy(), {.grad_divisor = 12.0}, {})[0];
  expect_bits(expected, trained(2, 3, coded(), {.grad_divisor = 12.0}, {}));
}

// In every mode: all ranks read the same, which is what no exact run has, and is the same again.
// Also where they read everything, exactly, while pages come as codes.
TEST(CodedGathers, TrainTheSameForAllWhoeverReads) {
  const Between reads = [](Session& session, int) {
    session.enter(UnitId{0}, false);  // what comes next is on its way
    all_of(session, Kind::master);
    session.leave(UnitId{0});
    for (std::uint32_t u = 0; u < kUnits; u += 2) {
      session.enter(UnitId{u}, false, false, nullptr, 0, true);
      session.leave(UnitId{u});
    }
  };
  for (const Hosts hosts : {Hosts::one_each, Hosts::pairs}) {
    for (const UpdateMode update :
         {UpdateMode::on_step, UpdateMode::in_backward, UpdateMode::lock_free}) {
      Config config = coded();
      config.update = update;
      const std::uint32_t ranks = hosts == Hosts::pairs ? 4 : 2;
      SCOPED_TRACE(testing::Message() << ranks << " ranks, mode " << static_cast<int>(update));
      const auto run = [&](const Config& of, const Between& between) {
        return trained(ranks, 3, of, {}, between, ranks, hosts);
      };
      const auto found = run(config, {});
      expect_bits(found[0], found);
      expect_bits(found[0], run(config, reads));
      config.coded_gathers = false;
      EXPECT_NE(found[0], run(config, {})[0]);
    }
  }
}

// Pages go to the SSD, and come again for each use.
TEST(CodedGathers, AreTheSameWhereMachinesHaveLittleMemory) {
  const TempFolder folder;
  const auto run = [](const Config& config) {
    return trained(2, 3, coded(config), {.grad_divisor = 12.0}, {}, kBatches, Hosts::one_each);
  };
  expect_bits(run(roomy())[0], run(tight(folder)));
}

// Two ranks, and one page of the second that comes as codes.
struct OnePage {
  OnePage() : inboxes{std::make_unique<MessageRing[]>(2), std::make_unique<MessageRing[]>(2)} {
    std::vector<Seat> seats(2);
    for (std::uint32_t rank = 0; rank < 2; ++rank)
      seats[rank] = {.inbox = inboxes[rank].get(), .board = {}, .memory = memory};
    mine.emplace(0, seats);
    theirs.emplace(1, seats);
    table.add(1);
    table.set_unit(page, UnitId{0});
    table.place(page, {Tier::remote, 0});
    remote.emplace(table, *mine, pages);
  }

  // What the holder hears next; none: nothing.
  std::optional<PeerMessage> heard() {
    const auto got = theirs->receive();
    return got ? std::optional(got->message) : std::nullopt;
  }
  bool granted(std::uint32_t dtype) {
    return remote->answered(
        1, {.kind = PeerMessage::Kind::grant, .what = 0, .dtype = dtype, .bytes = 64}, 64);
  }
  std::byte* read() {
    const RemotePages::AtHolders at_holders(*remote);
    return remote->open(page);
  }

  const PageId page{0};
  const PageRanks pages{.rank = 0, .holders = {1}, .sources = {1}, .coded = {true}};
  std::vector<std::byte> memory{64};
  std::unique_ptr<MessageRing[]> inboxes[2];
  std::optional<Peers> mine, theirs;
  PageTable table;
  std::optional<RemotePages> remote;
};

TEST(CodedGathers, WhatCameAsCodesIsNotReadNorComputedWithWhatDidNot) {
  OnePage it;
  const std::uint32_t as_codes = coded_as(Dtype::bfloat16);
  // 1. Computation asks for codes, and nothing else is an answer.
  ASSERT_EQ(it.remote->open(it.page), nullptr);
  ASSERT_NE(it.heard()->dtype, 0U);
  ASSERT_FALSE(it.granted(0));
  ASSERT_TRUE(it.granted(as_codes));
  // 2. Who reads does not get them: now, while they are open, and behind that.
  ASSERT_NE(it.remote->open(it.page), nullptr);
  ASSERT_EQ(it.read(), nullptr);
  ASSERT_FALSE(it.heard()) << "while somebody computes with it";
  it.remote->close(it.page);
  ASSERT_EQ(it.heard()->kind, PeerMessage::Kind::give_back);
  ASSERT_EQ(it.read(), nullptr);
  const auto ask = it.heard();
  ASSERT_TRUE(ask && ask->kind == PeerMessage::Kind::ask);
  EXPECT_EQ(ask->dtype, 0U);
  ASSERT_FALSE(it.granted(as_codes));
  ASSERT_TRUE(it.granted(0));
  // 3. Nor is what was read computed with.
  ASSERT_NE(it.read(), nullptr);
  ASSERT_EQ(it.remote->open(it.page), nullptr);
  ASSERT_FALSE(it.heard());
  it.remote->close(it.page);
  ASSERT_EQ(it.heard()->kind, PeerMessage::Kind::give_back);
  ASSERT_EQ(it.remote->open(it.page), nullptr);
  ASSERT_NE(it.heard()->dtype, 0U);
  // 4. Codes that came, and nobody opened, are given back for who reads.
  ASSERT_TRUE(it.granted(as_codes));
  ASSERT_EQ(it.read(), nullptr);
  ASSERT_EQ(it.heard()->kind, PeerMessage::Kind::give_back);
  EXPECT_EQ(it.heard()->dtype, 0U);
}

}  // namespace
}  // namespace strata::coded_gathers_test
