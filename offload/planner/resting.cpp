#include "offload/planner/resting.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"
#include "offload/planner/swapped_size.hpp"
#include "offload/planner/use_spans.hpp"

namespace strata {
namespace {

std::uint64_t down_to_pages(std::uint64_t bytes, std::uint64_t page) {
  return bytes / page * page;
}

}  // namespace

Swapped swapped_peak(const Trace& trace, std::span<const UnitPlan> units,
                     std::uint64_t page_bytes) {
  STRATA_ASSERT(units.size() == trace.units.size());
  struct Stay {
    std::uint32_t born = UINT32_MAX;
    std::uint32_t last_used = 0;
    std::uint64_t pages = 0;       // in host memory, or on the SSD
    std::uint64_t heap_bytes = 0;  // beside them, in host memory
  };
  std::vector<Stay> stays(units.size());
  for (const SavedTensor& tensor : trace.tensors) {
    const Activation activation = units[index(tensor.unit)].activation;
    if (!leaves(activation, tensor.input)) continue;
    Stay& stay = stays[index(tensor.unit)];
    stay.born = std::min(stay.born, tensor.born);
    stay.last_used = std::max(stay.last_used, tensor.last_used);
    const Tier tier = swaps_to_ssd(activation) ? Tier::ssd : Tier::host;
    const SwappedSize size = swapped_size(tensor.bytes, page_bytes, tier);
    stay.pages += size.pages;
    // The heap rounds up to size classes, four for each doubling.
    stay.heap_bytes += size.heap_bytes + size.heap_bytes / 4;
  }
  UseSpans in_host(trace.uses.size()), on_ssd(trace.uses.size());
  for (std::size_t u = 0; u < units.size(); ++u) {
    const Stay& stay = stays[u];
    if (stay.born == UINT32_MAX) continue;
    const bool to_ssd = swaps_to_ssd(units[u].activation);
    in_host.add(stay.born, stay.last_used, round_up(stay.heap_bytes, page_bytes));
    (to_ssd ? on_ssd : in_host).add(stay.born, stay.last_used, stay.pages * page_bytes);
  }
  const std::vector<std::uint64_t> host = in_host.sums(), ssd = on_ssd.sums();
  Swapped peak;
  for (std::uint32_t i = 0; i < trace.uses.size(); ++i) {
    if (host[i] > peak.host_bytes) peak.host_bytes = host[i], peak.host_use = i;
    if (ssd[i] > peak.ssd_bytes) peak.ssd_bytes = ssd[i], peak.ssd_use = i;
  }
  return peak;
}

std::uint64_t resting_on_device(const TracedUnit& unit, const Budgets& budgets) {
  STRATA_ASSERT(unit.may_rest());
  return round_up(unit.param_bytes, budgets.page_bytes) +
         round_up(budgets.resting_grads(unit), budgets.page_bytes) +
         round_up(unit.state_bytes, budgets.page_bytes);
}

Resting::Resting(const Trace& trace, const Budgets& budgets, std::vector<bool> on_device)
    : budgets_(budgets), on_device_(std::move(on_device)) {
  STRATA_ASSERT(on_device_.size() == trace.units.size());
  budgets_.host_bytes = down_to_pages(budgets.host_bytes, budgets.page_bytes);
  budgets_.ssd_bytes = down_to_pages(budgets.ssd_bytes, budgets.page_bytes);
  budgets_.staging_bytes = round_up(budgets.staging_bytes, budgets.page_bytes);
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    const TracedUnit& unit = trace.units[u];
    (on_device_[u] ? device_bytes_ : total_) +=
        on_device_[u] ? resting_on_device(unit, budgets) : budgets.resting(unit);
    sizes_.push_back(
        {unit.held_param_bytes(), budgets.resting_grads(unit), unit.held_state_bytes()});
  }
}

bool Resting::all_in_host(const Swapped& swapped) const {
  return swapped.ssd_bytes == 0 && total_ + swapped.host_bytes <= budgets_.host_bytes;
}

std::optional<Shortage> Resting::shortage(const Swapped& swapped) const {
  if (all_in_host(swapped)) return std::nullopt;
  // Host memory that holds everything, or as much as leaves the SSD no more than it can take.
  const std::uint64_t everything = total_ + swapped.host_bytes;
  const std::uint64_t fixed = budgets_.staging_bytes + swapped.host_bytes;
  const bool ssd_holds = swapped.ssd_bytes <= budgets_.ssd_bytes;
  const std::uint64_t ssd_room = ssd_holds ? budgets_.ssd_bytes - swapped.ssd_bytes : 0;
  std::uint64_t host_enough = swapped.ssd_bytes == 0 ? everything : UINT64_MAX;
  if (ssd_holds && budgets_.ssd_bytes != 0) {
    host_enough = std::min(host_enough, fixed + (total_ > ssd_room ? total_ - ssd_room : 0));
  }
  if (budgets_.ssd_bytes == 0 || fixed > budgets_.host_bytes) {
    const std::uint64_t needed = host_enough == UINT64_MAX ? fixed : host_enough;
    return Shortage{Tier::host, needed, budgets_.host_bytes,
                    host_enough == UINT64_MAX ? 0 : host_enough};
  }
  const std::uint64_t rest = total_ - std::min(total_, budgets_.host_bytes - fixed);
  if (rest + swapped.ssd_bytes <= budgets_.ssd_bytes) return std::nullopt;
  return Shortage{Tier::ssd, rest + swapped.ssd_bytes, budgets_.ssd_bytes,
                  rest + swapped.ssd_bytes};
}

std::optional<std::uint64_t> Resting::excess(const Swapped& swapped) const {
  std::optional<std::uint64_t> least;
  if (swapped.ssd_bytes == 0 && swapped.host_bytes <= budgets_.host_bytes) {
    least = beyond(total_, budgets_.host_bytes - swapped.host_bytes);
  }
  const std::uint64_t fixed = budgets_.staging_bytes + swapped.host_bytes;
  const bool takes_ssd = budgets_.ssd_bytes != 0 && swapped.ssd_bytes <= budgets_.ssd_bytes;
  if (takes_ssd && fixed <= budgets_.host_bytes) {
    const std::uint64_t beyond_host = beyond(total_, budgets_.host_bytes - fixed);
    const std::uint64_t rest = beyond(beyond_host, budgets_.ssd_bytes - swapped.ssd_bytes);
    least = least ? std::min(*least, rest) : rest;
  }
  return least;
}

std::uint64_t Resting::place(const Swapped& swapped, std::span<UnitPlan> units) const {
  STRATA_ASSERT(!shortage(swapped));
  std::uint64_t room = total_;
  if (!all_in_host(swapped)) {
    STRATA_ASSERT(budgets_.host_bytes >= budgets_.staging_bytes + swapped.host_bytes);
    room = std::min(room, budgets_.host_bytes - budgets_.staging_bytes - swapped.host_bytes);
  }
  std::uint64_t on_ssd = 0;
  const std::vector<Sizes> there = spread(sizes_, on_device_, room);
  STRATA_ASSERT(units.size() == sizes_.size());
  for (std::size_t u = 0; u < units.size(); ++u) {
    units[u].on_device = on_device_[u];
    units[u].param_ssd_bytes = there[u].params;
    units[u].grad_ssd_bytes = there[u].grads;
    units[u].state_ssd_bytes = there[u].states;
    on_ssd += there[u].total();
  }
  STRATA_ASSERT(on_ssd == total_ - std::min(total_, room));
  return on_ssd;
}

}  // namespace strata
