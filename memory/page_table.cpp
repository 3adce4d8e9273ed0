#include "memory/page_table.hpp"

#include <limits>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

constexpr std::size_t index(Tier tier) {
  return static_cast<std::size_t>(tier);
}

// A copy whose bytes are all there.
constexpr bool readable(const Copy& copy) {
  return copy.state == CopyState::valid || copy.state == CopyState::draining;
}

}  // namespace

PageId PageTable::add(std::uint32_t count) {
  const std::uint32_t first = page_count();
  STRATA_ASSERT(count < strata::index(kNoPage) - first);
  pages_.resize(first + count);
  return PageId{first};
}

void PageTable::set_bytes(PageId page, std::uint32_t bytes) {
  STRATA_ASSERT(bytes != 0);
  entry(page).bytes = bytes;
}

void PageTable::place(PageId page, Placement rest) {
  const Copy& there = copy(page, rest.tier);
  STRATA_ASSERT(there.state == CopyState::none || there.place == rest.place);
  entry(page).rest = rest;
}

void PageTable::begin_fill(PageId page, Placement at, std::uint64_t version) {
  Entry& of = entry(page);
  Copy& copy = of.copies[index(at.tier)];
  STRATA_ASSERT(copy.state == CopyState::none);
  STRATA_ASSERT(at.somewhere());
  STRATA_ASSERT(of.rest.tier != at.tier || !of.rest.somewhere() || of.rest == at);
  const bool is_move = version > 0 && version <= newest(page);
  STRATA_ASSERT(!is_move || held_elsewhere(page, at.tier, version));
  STRATA_ASSERT(version <= newest(page) || !is_being_renewed(page));
  copy = {
      .state = CopyState::filling, .drains = 0, .pins = 0, .place = at.place, .version = version};
  ++copies_[index(at.tier)];
}

void PageTable::finish_fill(PageId page, Tier tier) {
  Entry& of = entry(page);
  Copy& copy = of.copies[index(tier)];
  STRATA_ASSERT(copy.state == CopyState::filling);
  copy.state = CopyState::valid;
  if (copy.version > of.newest) of.newest = copy.version;
}

Placement PageTable::abandon_fill(PageId page, Tier tier) {
  STRATA_ASSERT(copy(page, tier).state == CopyState::filling);
  return forget(page, tier);
}

void PageTable::begin_drain(PageId page, Tier tier) {
  Copy& copy = held(page, tier);
  STRATA_ASSERT(copy.drains < std::numeric_limits<decltype(copy.drains)>::max());
  ++copy.drains;
  copy.state = CopyState::draining;
}

void PageTable::finish_drain(PageId page, Tier tier) {
  Copy& copy = held(page, tier);
  STRATA_ASSERT(copy.drains > 0);
  --copy.drains;
  if (copy.drains == 0) copy.state = CopyState::valid;
}

Placement PageTable::drop(PageId page, Tier tier) {
  const Copy& copy = held(page, tier);
  STRATA_ASSERT(copy.state == CopyState::valid);
  STRATA_ASSERT(copy.pins == 0);
  STRATA_ASSERT(newest(page) == 0 || !is_current(page, tier) ||
                held_elsewhere(page, tier, newest(page)));
  return forget(page, tier);
}

Placement PageTable::drop(PageId page, Tier tier, Discard proof) {
  STRATA_ASSERT(proof.why != nullptr);
  const bool is_last_of_newest =
      is_current(page, tier) && !held_elsewhere(page, tier, newest(page));
  if (!is_last_of_newest) return drop(page, tier);

  Entry& of = entry(page);
  STRATA_ASSERT(of.copies[index(tier)].state == CopyState::valid);
  STRATA_ASSERT(of.copies[index(tier)].pins == 0);
  // An old copy left behind would come back as the truth.
  for (const Tier other : kTiers) {
    STRATA_ASSERT(other == tier || of.copies[index(other)].state == CopyState::none);
  }
  of.newest = 0;
  return forget(page, tier);
}

void PageTable::pin(PageId page, Tier tier) {
  Copy& copy = held(page, tier);
  STRATA_ASSERT(copy.pins < std::numeric_limits<decltype(copy.pins)>::max());
  ++copy.pins;
}

void PageTable::unpin(PageId page, Tier tier) {
  Copy& copy = held(page, tier);
  STRATA_ASSERT(copy.pins > 0);
  --copy.pins;
}

void PageTable::publish(PageId page, Tier tier, std::uint64_t version) {
  Entry& of = entry(page);
  Copy& copy = of.copies[index(tier)];
  STRATA_ASSERT(copy.state == CopyState::valid);
  STRATA_ASSERT(version > of.newest);
  STRATA_ASSERT(!is_being_renewed(page));
  copy.version = version;
  of.newest = version;
}

Placement PageTable::exchange(PageId page, Placement to) {
  Entry& of = entry(page);
  Copy& copy = of.copies[index(to.tier)];
  STRATA_ASSERT(copy.state == CopyState::valid);
  STRATA_ASSERT(copy.pins == 0);
  STRATA_ASSERT(to.somewhere());
  const Placement from{to.tier, std::exchange(copy.place, to.place)};
  if (of.rest == from) of.rest = to;
  return from;
}

Placement PageTable::at(PageId page, Tier tier) const {
  const Copy& of = copy(page, tier);
  STRATA_ASSERT(of.state != CopyState::none);
  return {tier, of.place};
}

bool PageTable::is_current(PageId page, Tier tier) const {
  const Copy& of = copy(page, tier);
  return readable(of) && of.version == newest(page);
}

std::optional<std::string> PageTable::check_invariants(
    const std::array<std::uint32_t, kTierCount>& capacity) const {
  std::array<std::vector<PageId>, kTierCount> holders;  // place → the page that holds it
  for (const Tier tier : kTiers) holders[index(tier)].assign(capacity[index(tier)], kNoPage);
  std::array<std::uint32_t, kTierCount> counted{};

  for (std::uint32_t i = 0; i < page_count(); ++i) {
    const Entry& of = pages_[i];
    const PageId page{i};
    bool newest_exists = of.newest == 0;
    for (const Tier tier : kTiers) {
      const Copy& copy = of.copies[index(tier)];
      if (auto broken = check_copy(page, tier, capacity[index(tier)])) return broken;
      if (copy.state == CopyState::none) continue;
      newest_exists = newest_exists || is_current(page, tier);
      ++counted[index(tier)];
      PageId& holder = holders[index(tier)][copy.place];
      if (holder != kNoPage) return broken_at(6, page, tier, "its place is held by another page");
      holder = page;
    }
    if (!newest_exists) return broken_at(5, page, Tier::device, "no tier holds the newest version");
  }
  for (const Tier tier : kTiers) {
    if (counted[index(tier)] == copies_[index(tier)]) continue;
    return "invariant 7: " + std::to_string(copies_[index(tier)]) + " copies counted on " +
           name(tier) + ", " + std::to_string(counted[index(tier)]) + " there";
  }
  return std::nullopt;
}

std::optional<std::string> PageTable::check_copy(PageId page, Tier tier,
                                                 std::uint32_t capacity) const {
  const Copy& of = copy(page, tier);
  const bool is_none = of.state == CopyState::none;
  if (is_none != (of.place == kNoPlace)) return broken_at(1, page, tier, "state and place differ");
  if (is_none && (of.pins > 0 || of.drains > 0 || of.version > 0)) {
    return broken_at(1, page, tier, "nothing is held, but something is left");
  }
  if ((of.state == CopyState::draining) != (of.drains > 0)) {
    return broken_at(2, page, tier, "state and number of drains differ");
  }
  if (of.pins > 0 && !readable(of)) return broken_at(3, page, tier, "pinned, but not there");
  if (of.version > newest(page) && of.state != CopyState::filling) {
    return broken_at(4, page, tier, "newer than the newest version");
  }
  const Placement& rest = placement(page);
  if (!is_none && rest.tier == tier && rest.somewhere() && rest.place != of.place) {
    return broken_at(8, page, tier, "it does not lie where it rests");
  }
  if (!is_none && of.place >= capacity) return broken_at(6, page, tier, "place beyond the tier");
  return std::nullopt;
}

std::string PageTable::broken_at(int invariant, PageId page, Tier tier, const char* what) const {
  const Copy& of = copy(page, tier);
  return "invariant " + std::to_string(invariant) + ": page " +
         std::to_string(strata::index(page)) + " (newest " + std::to_string(newest(page)) +
         ") on " + name(tier) + ": " + what + "; " + name(of.state) + ", place " +
         std::to_string(of.place) + ", version " + std::to_string(of.version) + ", pins " +
         std::to_string(of.pins) + ", drains " + std::to_string(of.drains);
}

Copy& PageTable::held(PageId page, Tier tier) {
  Copy& copy = entry(page).copies[index(tier)];
  STRATA_ASSERT(readable(copy));
  return copy;
}

bool PageTable::held_elsewhere(PageId page, Tier tier, std::uint64_t version) const {
  for (const Tier other : kTiers) {
    const Copy& of = copy(page, other);
    if (other != tier && readable(of) && of.version == version) return true;
  }
  return false;
}

bool PageTable::is_being_renewed(PageId page) const {
  for (const Tier tier : kTiers) {
    const Copy& of = copy(page, tier);
    if (of.state == CopyState::filling && of.version > newest(page)) return true;
  }
  return false;
}

Placement PageTable::forget(PageId page, Tier tier) {
  Copy& copy = entry(page).copies[index(tier)];
  STRATA_ASSERT(copies_[index(tier)] > 0);
  const Placement freed{tier, copy.place};
  copy = Copy{};
  --copies_[index(tier)];
  return freed;
}

}  // namespace strata
