#include "engine/ranks/machine.hpp"

#include <array>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "engine/checks.hpp"
#include "engine/fingerprint.hpp"
#include "memory/check.hpp"
#include "memory/rendezvous.hpp"

namespace strata {
namespace {

// What a rank says of itself. Ranks train together where all but the last two are the same.
struct Hello {
  static constexpr std::size_t kFacts = 6;
  std::array<std::uint64_t, kFacts> facts{};
  std::uint64_t memory_bytes = 0;
  std::uint64_t area_bytes = 0;
};

constexpr std::array<const char*, Hello::kFacts> kFactNames = {
    "another version of strata",
    "a model with other parameters (names, sizes, dtypes, or which are trained)",
    "another number of parameters or units",
    "other optimizers",
    "other pages or another way to store moments: budgets and page_size must be the same",
    "another way to update",
};
constexpr std::uint64_t kFormat = 3;

std::uint64_t model_of(const Config& config) {
  Fingerprint of;
  for (const ParamSpec& param : config.params) {
    of.add(param.name);
    of.add(std::uint64_t{param.numel});
    of.add(static_cast<std::uint64_t>(param.dtype) << 1 | std::uint64_t{param.trainable});
    of.add(std::uint64_t{index(param.unit)} << 32 | param.group);
  }
  return of.value();
}

std::uint64_t rules_of(const Config& config) {
  Fingerprint of;
  for (const Hyper& group : config.groups) of.add(static_cast<std::uint64_t>(group.rule));
  return of.value();
}

Hello hello_of(const Config& config, const SeatOffer& offer, std::size_t area_bytes) {
  return {
      .facts = {kFormat, model_of(config),
                std::uint64_t{config.params.size()} << 32 | config.units.size(), rules_of(config),
                std::uint64_t{offer.page_bytes} << 8 |
                    static_cast<std::uint64_t>(config.moment_dtype),
                std::uint64_t{config.max_staleness} << 8 |
                    static_cast<std::uint64_t>(config.update) << 1 |
                    std::uint64_t{config.sums_ranks}},
      .memory_bytes = offer.memory.size(),
      .area_bytes = area_bytes};
}

// Throws StrataError (config) where the other rank trains something else.
Hello checked(const Peer& peer, const Hello& mine, std::uint32_t rank) {
  Hello theirs;
  if (peer.hello.size() != sizeof theirs || peer.descriptors.size() != 3) {
    refuse("rank " + std::to_string(peer.rank) + " runs another version of strata");
  }
  std::memcpy(&theirs, peer.hello.data(), sizeof theirs);
  for (std::size_t i = 0; i < Hello::kFacts; ++i) {
    if (theirs.facts[i] == mine.facts[i]) continue;
    refuse("rank " + std::to_string(peer.rank) + " and rank " + std::to_string(rank) +
           " cannot train together: one has " + kFactNames[i]);
  }
  return theirs;
}

std::size_t rings_bytes(std::uint32_t ranks) {
  return round_up(ranks * sizeof(MessageRing), kKernelPageBytes);
}

Seat seat_of(std::span<std::byte> area, std::uint32_t ranks, std::span<const std::byte> memory) {
  return {.inbox = std::launder(reinterpret_cast<MessageRing*>(area.data())),
          .board = area.subspan(rings_bytes(ranks)),
          .memory = memory};
}

}  // namespace

std::vector<Seat> Machine::meet(const SeatOffer& offer) {
  STRATA_ASSERT(!own_ && offer.memory_file >= 0);
  // 1. What this rank shows.
  const std::size_t bytes =
      rings_bytes(config_.ranks) + round_up(offer.board_bytes, kKernelPageBytes);
  own_.emplace("strata-board", bytes);
  own_->populate();
  const Hello hello = hello_of(config_, offer, bytes);
  const Descriptor bell = offer.bell->duplicate();
  const std::array offered = {own_->descriptor(), offer.memory_file, bell.get()};
  // 2. All ranks come.
  std::vector<Peer> peers =
      strata::meet({.folder = config_.ranks_folder,
                    .rank = config_.rank,
                    .count = config_.ranks,
                    .timeout = std::chrono::milliseconds(
                        static_cast<std::int64_t>(config_.ranks_timeout_s * 1e3)),
                    .hello = std::as_bytes(std::span(&hello, 1)),
                    .descriptors = offered,
                    .pids = config_.ranks_pids});
  // 3. What they show.
  std::vector<Seat> seats(config_.ranks);
  seats[config_.rank] = seat_of(own_->bytes(), config_.ranks, offer.memory);
  areas_.reserve(peers.size());
  memories_.reserve(peers.size());
  for (Peer& peer : peers) {
    const Hello theirs = checked(peer, hello, config_.rank);
    if (theirs.area_bytes != bytes) refuse("rank " + std::to_string(peer.rank) + " is damaged");
    areas_.emplace_back(peer.descriptors[0].get(), bytes, Access::read_write);
    memories_.emplace_back(peer.descriptors[1].get(), theirs.memory_bytes, Access::read_only);
    bells_.push_back(std::make_unique<PeerBell>(std::move(peer.descriptors[2])));
    Seat& seat = seats[peer.rank];
    seat = seat_of(areas_.back().writable(), config_.ranks, memories_.back().bytes());
    seat.ring = [bell_of = bells_.back().get()] { bell_of->ring(); };
    watch_.add(peer.rank, std::move(peer.pidfd));
  }
  return seats;
}

}  // namespace strata
