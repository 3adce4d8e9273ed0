#include "offload/planner/placement.hpp"

#include <algorithm>

#include "memory/check.hpp"
#include "offload/planner/staging.hpp"

namespace strata {
namespace {

constexpr std::size_t kPagesMax = std::size_t{1} << 30;  // of activations in a tier
constexpr std::size_t kUnbounded = std::size_t{1} << 50;

std::size_t pages_of(std::span<const Sizes> units) {
  std::size_t pages = 0;
  for (const Sizes& unit : units) pages += unit.total();
  return pages;
}

// Of those of the units that come and go.
std::uint64_t param_pages(const Holding& holding, const Allotment& allotment,
                          const EnteredTogether& entered) {
  std::uint64_t pages = 0;
  for (const std::uint32_t u : entered.units) {
    if (!allotment.on_device[u]) pages += holding.shown[u];
  }
  return pages;
}

// All pages of the units that rest on the device, and of the others the largest and the most that
// is entered at a time.
void count_device(const Holding& holding, Allotment& allotment) {
  allotment.rest_frames = allotment.device_frames_min = allotment.nested_frames = 0;
  for (std::size_t u = 0; u < holding.units.size(); ++u) {
    const Sizes& unit = holding.units[u];
    if (allotment.on_device[u])
      allotment.rest_frames += static_cast<std::uint32_t>(unit.total());
    else
      allotment.device_frames_min =
          std::max(allotment.device_frames_min, static_cast<std::uint32_t>(holding.shown[u]));
  }
  for (const EnteredTogether& entered : holding.together) {
    const auto pages = static_cast<std::uint32_t>(param_pages(holding, allotment, entered));
    allotment.nested_frames = std::max(allotment.nested_frames, pages);
  }
}

// Gives what does not rest on the device its tiers. Returns the pages that rest on the SSD.
std::size_t place_pages(const Holding& holding, Allotment& allotment, std::size_t host_frames) {
  allotment.on_ssd = spread(holding.units, allotment.on_device, host_frames);
  return pages_of(allotment.on_ssd);
}

// An allotment that is being made, or why it cannot be.
struct Attempt {
  const Holding& holding;
  const TierBudgets& budgets;
  Allotment allotment{};
  std::optional<Refusal> refusal{};
  // Pages too many for host memory and the SSD: with so many on the device it would do.
  std::size_t excess = 0;

  std::size_t page() const { return holding.page_bytes; }
  void refuse_tier(Lack lack, Tier tier, std::size_t needed, std::size_t budget) {
    refusal = Refusal{.lack = lack,
                      .tier = tier,
                      .needed_bytes = needed * page(),
                      .budget_bytes = budget,
                      .would_do_bytes = needed * page(),
                      .has_ssd = budgets.has_ssd,
                      .sets_aside = set_aside(allotment) != 0};
  }
  void choose_device();
  void choose_host();
  void refuse_host(std::size_t needed);
  void check_slots();
};

void Attempt::choose_device() {
  std::size_t largest = 0, pages = 0;
  for (std::size_t u = 0; u < holding.units.size(); ++u) {
    if (allotment.on_device[u]) continue;
    pages += holding.shown[u];
    if (holding.shown[u] == allotment.device_frames_min) largest = u;
  }
  const std::size_t budget = budgets.device_bytes / page();
  const std::size_t left = budget - std::min<std::size_t>(budget, allotment.rest_frames);
  allotment.device_frames = static_cast<std::uint32_t>(std::min(left, pages));
  if (budget >= allotment.rest_frames + allotment.device_frames_min) return;
  refuse_tier(Lack::unit, Tier::device, allotment.device_frames_min, budgets.device_bytes);
  refusal->units = {holding.names[largest]};
}

// The host budget is less than `needed` frames.
void Attempt::refuse_host(std::size_t needed) {
  STRATA_ASSERT(needed > budgets.host_bytes / page());
  refuse_tier(budgets.has_ssd ? Lack::staging : Lack::everything, Tier::host, needed,
              budgets.host_bytes);
  if (!budgets.has_ssd) excess = needed - budgets.host_bytes / page();
  if (holding.counts_buffers) {
    refusal->gradient_bytes = std::uint64_t{allotment.buffer_frames} * page();
  }
}

void Attempt::choose_host() {
  const std::size_t frames = budgets.host_bytes / page();
  const std::size_t below = pages_of(holding.units) - allotment.rest_frames;
  const std::size_t buffers_more = holding.buffers_wanted - holding.buffers_least;
  const std::uint32_t chunk = holding.chunk_pages_max;
  allotment.chunk_frames_max = chunk;
  allotment.scale_frames = holding.scale_frames;
  allotment.landing_frames = holding.landing_frames;
  allotment.outbox_frames = holding.outbox_frames;
  allotment.kept_slots = static_cast<std::uint32_t>(holding.kept_slots);
  allotment.buffer_frames = static_cast<std::uint32_t>(holding.buffers_least);
  // 1. Everything that is not on the device in host memory. What is there passes through staging.
  const std::size_t beside = allotment.rest_frames == 0 ? 0 : staging_least(chunk);
  const std::size_t everything = below + set_aside(allotment) + beside;
  if (frames >= everything) {
    allotment.buffer_frames +=
        static_cast<std::uint32_t>(std::min(buffers_more, frames - everything));
    allotment.staging_frames = static_cast<std::uint32_t>(beside);
    allotment.host_frames = static_cast<std::uint32_t>(below + set_aside(allotment) + beside);
    place_pages(holding, allotment, below);
    return check_slots();
  }
  const std::size_t least = staging_least(chunk) + set_aside(allotment);
  if (!budgets.has_ssd) return refuse_host(everything);
  if (frames < least) return refuse_host(std::min(least, everything));
  // 2. What is always there, but no more of it than what is short allows.
  allotment.buffer_frames = static_cast<std::uint32_t>(
      std::clamp(frames / 4, holding.buffers_least,
                 std::min(holding.buffers_wanted, holding.buffers_least + (frames - least))));
  // 3. The staging area, and as much as has room beside it.
  const std::size_t room = frames - set_aside(allotment);
  allotment.staging_frames = choose_staging(chunk, room);
  allotment.host_frames = static_cast<std::uint32_t>(frames);
  allotment.slots =
      static_cast<std::uint32_t>(place_pages(holding, allotment, room - allotment.staging_frames));
  check_slots();
}

void Attempt::check_slots() {
  const std::size_t kept = holding.kept_slots, needed = allotment.slots + kept;
  const std::size_t most = budgets.has_ssd ? budgets.ssd_bytes / page() : 0;
  if (needed <= most) return;
  excess = kept > most ? 0 : needed - most;  // what rests on the device is kept, too
  refuse_tier(kept == 0 ? Lack::slots : Lack::snapshots, Tier::ssd, needed, budgets.ssd_bytes);
  refusal->snapshot_bytes = kept * page();
}

// The invariants of an Allotment: see placement.hpp.
void check(const Holding& holding, const Allotment& made) {
  std::size_t on_device = 0, below = 0;
  for (std::size_t u = 0; u < holding.units.size(); ++u) {
    (made.on_device[u] ? on_device : below) += holding.units[u].total();
  }
  const std::size_t on_ssd = pages_of(made.on_ssd);
  STRATA_ASSERT(on_ssd <= below);
  STRATA_ASSERT(below - on_ssd + made.staging_frames + made.activation_frames + set_aside(made) <=
                made.host_frames);
  STRATA_ASSERT(on_ssd + made.activation_slots <= made.slots);
  STRATA_ASSERT(made.rest_frames == on_device);
  STRATA_ASSERT(made.staging_frames != 0 || (made.rest_frames == 0 && made.slots == 0));
}

Attempt attempt(const Holding& holding, const TierBudgets& budgets, std::vector<bool> on_device) {
  Attempt attempt{.holding = holding, .budgets = budgets};
  attempt.allotment.on_device = std::move(on_device);
  count_device(holding, attempt.allotment);
  attempt.choose_device();
  if (!attempt.refusal) attempt.choose_host();
  if (!attempt.refusal) check(holding, attempt.allotment);
  return attempt;
}

// A page size is comfortable when it wastes little, and what depends on it in host memory is a
// small part of that: the staging area, and buffers beyond the gradients themselves.
bool comfortable(const Holding& holding, const Allotment& allotment) {
  std::size_t params = 0;
  for (const std::uint64_t pages : holding.shown) params += pages;
  const bool little_waste = params * holding.page_bytes <=
                            holding.parameter_bytes + holding.parameter_bytes / 16 + kPageBytesMin;
  std::size_t moving = allotment.staging_frames;
  if (holding.counts_buffers) moving += allotment.buffer_frames - holding.late_grad_frames;
  const bool small_staging = allotment.slots == 0 ||
                             (allotment.staging_frames >= staging_wanted(holding.chunk_pages_max) &&
                              moving * 4 <= allotment.host_frames);
  return little_waste && small_staging;
}

bool nested_fit(const Allotment& allotment) {
  return allotment.nested_frames <= allotment.device_frames;
}

// The units that are entered together need more of the device than there is, at any page size.
Allotted refuse_nested(const Holding& holding, const TierBudgets& budgets) {
  // Not if it is only what rests there, for want of room below, that leaves too little.
  const Attempt below = attempt(holding, budgets, std::vector<bool>(holding.units.size(), false));
  if (below.excess != 0 && nested_fit(below.allotment)) return {below.allotment, below.refusal};
  TierBudgets wide = budgets;
  wide.device_bytes = kUnbounded;
  Allotted allotted = choose_allotment(holding, wide);
  if (allotted.refusal) return allotted;
  const auto pages = [&](const EnteredTogether& entered) {
    return param_pages(holding, allotted.allotment, entered);
  };
  const auto most = std::ranges::max_element(holding.together, {}, pages);
  const std::uint64_t bytes = pages(*most) * holding.page_bytes;
  // Units that nothing else holds take their part of the device.
  const std::uint64_t resting = std::uint64_t{allotted.allotment.rest_frames} * holding.page_bytes;
  allotted.refusal = Refusal{.lack = Lack::nested,
                             .tier = Tier::device,
                             .moment = "forward of " + most->module,
                             .needed_bytes = bytes,
                             .budget_bytes = budgets.device_bytes,
                             .would_do_bytes = bytes + resting,
                             .has_ssd = budgets.has_ssd};
  for (const std::uint32_t u : most->units) allotted.refusal->units.push_back(holding.names[u]);
  return allotted;
}

// Activations, with what rests, have no room in host memory or on the SSD.
Refusal refuse_room(const Holding& holding, const TierBudgets& budgets, const Allotment& then,
                    const Room& room, std::size_t below) {
  const std::size_t page = holding.page_bytes;
  Refusal refusal{.lack = Lack::activations,
                  .tier = Tier::host,
                  .budget_bytes = budgets.host_bytes,
                  .activation_host_bytes = room.host_pages * page,
                  .activation_ssd_bytes = room.ssd_pages * page,
                  .has_ssd = budgets.has_ssd};
  if (room.ssd_pages != 0 && !budgets.has_ssd) {
    refusal.lack = Lack::activation_path;
    refusal.tier = Tier::ssd;
    refusal.needed_bytes = refusal.activation_ssd_bytes;
    refusal.budget_bytes = 0;
    return refusal;
  }
  // At best nothing else rests in host memory. A larger budget may set more aside.
  const std::size_t staging =
      std::max(then.staging_frames, staging_wanted(holding.chunk_pages_max));
  const std::size_t buffers = std::max<std::size_t>(then.buffer_frames, holding.buffers_wanted);
  const std::size_t beside = then.rest_frames == 0 ? 0 : staging;
  const std::size_t least = budgets.has_ssd ? staging : below + beside;
  const std::size_t others = buffers + then.scale_frames + then.landing_frames + then.outbox_frames;
  refusal.needed_bytes = refusal.would_do_bytes = (least + others + room.host_pages) * page;
  return refusal;
}

}  // namespace

std::vector<Sizes> spread(std::span<const Sizes> units, const std::vector<bool>& on_device,
                          std::uint64_t host_room) {
  STRATA_ASSERT(on_device.size() == units.size());
  std::vector<Sizes> on_ssd(units.size());
  for (std::uint64_t Sizes::*kind : {&Sizes::params, &Sizes::grads, &Sizes::states}) {
    for (std::size_t u = 0; u < units.size(); ++u) {
      if (on_device[u]) continue;
      const std::uint64_t in_host = std::min(units[u].*kind, host_room);
      host_room -= in_host;
      on_ssd[u].*kind = units[u].*kind - in_host;
    }
  }
  return on_ssd;
}

Allotted choose_allotment(const Holding& holding, const TierBudgets& budgets) {
  const std::size_t units = holding.units.size();
  STRATA_ASSERT(holding.page_bytes > 0 && holding.names.size() == units);
  STRATA_ASSERT(holding.shown.size() == units);
  const Attempt first = attempt(holding, budgets, std::vector<bool>(units, false));
  if (!holding.may_rest || !first.refusal) return {first.allotment, first.refusal};
  // What has no room below the device rests there, from the last unit on. The refusal stays the
  // first one: larger budgets of the other tiers are the better advice.
  std::vector<bool> on_device = first.allotment.on_device;
  std::size_t excess = first.excess;
  for (std::size_t left = units; excess != 0;) {
    for (std::size_t pages = 0; pages < excess; pages += holding.units[left].total()) {
      if (left == 0) return {first.allotment, first.refusal};
      on_device[--left] = true;
    }
    const Attempt next = attempt(holding, budgets, on_device);
    if (!next.refusal) return {next.allotment, std::nullopt};
    excess = next.excess;
  }
  return {first.allotment, first.refusal};
}

PageSizeChosen choose_page_size(const std::function<Holding(std::size_t)>& holding_of,
                                std::size_t smallest, std::size_t largest,
                                const TierBudgets& budgets) {
  STRATA_ASSERT(smallest > 0 && smallest <= largest);
  // 1. The largest comfortable one; the smallest that works at all is the last resort.
  PageSizeChosen best;
  best.allotted.refusal.emplace();
  for (std::size_t page = largest; page >= smallest; page /= 2) {
    const Holding holding = holding_of(page);
    Allotted allotted = choose_allotment(holding, budgets);
    const bool enough = !allotted.refusal && comfortable(holding, allotted.allotment);
    if (!allotted.refusal || best.allotted.refusal) best = {page, std::move(allotted)};
    if (enough) break;
  }
  const bool nests = !holding_of(smallest).together.empty();
  const bool refused = best.allotted.refusal.has_value();
  if (!nests || (refused && best.allotted.refusal->tier != Tier::device)) return best;
  // 2. Smaller ones until what is entered at a time has room.
  while (!refused && !nested_fit(best.allotted.allotment) && best.page_bytes > smallest) {
    best.page_bytes /= 2;
    best.allotted = choose_allotment(holding_of(best.page_bytes), budgets);
    if (best.allotted.refusal) return best;
  }
  if (!refused && nested_fit(best.allotted.allotment)) return best;
  return {smallest, refuse_nested(holding_of(smallest), budgets)};
}

Allotted rearrange(const Holding& holding, const TierBudgets& budgets, const Claims& before,
                   const Room& room) {
  Allotted allotted;
  Allotment& then = allotted.allotment;
  static_cast<Claims&>(then) = before;
  STRATA_ASSERT(room.on_device.size() == holding.units.size());
  if (std::max(room.host_pages, room.ssd_pages) > kPagesMax)
    refuse("infeasible: room for activations of more pages than a tier can have");
  then.on_device = room.on_device;
  count_device(holding, then);
  const std::size_t page = holding.page_bytes;
  const std::size_t budget = budgets.host_bytes / page;
  const std::size_t below = pages_of(holding.units) - then.rest_frames;
  // 1. Host memory: what has no room there rests on the SSD.
  const auto taken = [&] { return then.staging_frames + set_aside(before) + room.host_pages; };
  const bool elsewhere = room.ssd_pages != 0 || then.rest_frames != 0;
  if (then.staging_frames == 0 && (elsewhere || below + taken() > budget)) {
    then.staging_frames = choose_staging(holding.chunk_pages_max, budget - set_aside(before));
  }
  const std::size_t left = budget - std::min(budget, taken());
  const bool no_ssd = !budgets.has_ssd && (room.ssd_pages != 0 || left < below);
  if (taken() > budget || no_ssd) {
    allotted.refusal = refuse_room(holding, budgets, then, room, below);
    return allotted;
  }
  const std::size_t on_ssd = place_pages(holding, then, left);
  // 2. The SSD.
  const std::size_t slots = on_ssd + room.ssd_pages;
  const std::size_t with_kept = slots + before.kept_slots;
  if (with_kept > budgets.ssd_bytes / page) {
    allotted.refusal = Refusal{.lack = Lack::activation_slots,
                               .tier = Tier::ssd,
                               .needed_bytes = with_kept * page,
                               .budget_bytes = budgets.ssd_bytes,
                               .would_do_bytes = with_kept * page,
                               .has_ssd = budgets.has_ssd};
    return allotted;
  }
  const std::size_t frames = below - on_ssd + taken();
  then.host_frames = std::max(before.host_frames, static_cast<std::uint32_t>(frames));
  then.slots = std::max(before.slots, static_cast<std::uint32_t>(slots));
  then.activation_frames = static_cast<std::uint32_t>(room.host_pages);
  then.activation_slots = static_cast<std::uint32_t>(room.ssd_pages);
  STRATA_ASSERT(then.host_frames <= budget);
  check(holding, then);
  return allotted;
}

std::size_t set_aside(const Claims& claims) {
  return std::size_t{claims.buffer_frames} + claims.scale_frames + claims.landing_frames +
         claims.outbox_frames;
}

}  // namespace strata
