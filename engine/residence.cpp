#include "engine/residence.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "engine/checks.hpp"
#include "engine/devices.hpp"
#include "engine/ranks/collectors.hpp"
#include "engine/ranks/ownership.hpp"
#include "engine/ranks/relays.hpp"
#include "memory/check.hpp"
#include "memory/result.hpp"

namespace strata {
namespace {

constexpr std::size_t kPageBytesDefault = 4 * kMiB;
// What a GPU maps at a time.
constexpr std::size_t kCudaPageBytesMin = 2 * kMiB;

constexpr std::array kStates = {Role::master, Role::moment1, Role::moment2};

std::uint32_t unit_of(const Layout& layout, const Chunk& chunk) {
  return index(layout.segments[chunk.segment].unit);
}

// Frames for gradients without pages: see Note [Buffers].
struct BufferNeed {
  std::size_t least = 0;
  std::size_t wanted = 0;
};

BufferNeed buffer_need(const Config& config, const Layout& layout) {
  if (layout.grad_pages) return {};
  const Ownership owns = ownership_of(config, layout);
  std::size_t all = 0, largest_chunk = 0;
  std::vector<std::size_t> by_unit(layout.units.size(), 0);
  for (std::uint32_t id = 0; id < layout.chunks.size(); ++id) {
    const Chunk& chunk = layout.chunks[id];
    const std::size_t frames = owns.mine(id) ? layout.grad_frames(chunk) : 0;
    all += frames;
    largest_chunk = std::max(largest_chunk, frames);
    by_unit[unit_of(layout, chunk)] += frames;
  }
  if (config.update == UpdateMode::in_backward) {
    std::size_t largest = 0, apart = 0;
    for (std::size_t u = 0; u < by_unit.size(); ++u) {
      if (!config.apart.empty() && config.apart[u])
        apart += by_unit[u];
      else
        largest = std::max(largest, by_unit[u]);
    }
    return {apart + largest, std::min(apart + 2 * largest, all)};
  }
  if (all == 0) return {};
  const std::size_t slots = update_slots(std::max(1, config.workers));
  const std::size_t frames = all + slots * (largest_chunk + (config.max_staleness > 0 ? 1 : 0));
  return {frames, frames};
}

TierBudgets budgets_of(const Config& config) {
  return {.device_bytes = config.device_bytes,
          .host_bytes = config.host_bytes,
          .ssd_bytes = config.ssd_bytes,
          .has_ssd = !config.ssd_paths.empty()};
}

// Gives pages the tiers of their units: of each kind it is the last ones that rest on the SSD.
Residence spread_pages(const Config& config, Layout layout, Allotment allotment) {
  Residence home{std::move(allotment), std::move(layout), {}};
  const Ownership owns = ownership_of(config, home.layout);
  home.tier.assign(home.layout.page_count, owns.alone() ? Tier::device : Tier::remote);
  const auto place = [&](const Chunk& chunk, Role role, std::uint64_t& on_ssd) {
    const PageRun& run = chunk.run(role);
    for (std::uint32_t i = run.count; i-- > 0;) {
      home.tier[index(run.first) + i] = on_ssd == 0 ? Tier::host : Tier::ssd;
      on_ssd -= on_ssd == 0 ? 0 : 1;
    }
  };
  for (std::size_t u = 0; u < home.layout.units.size(); ++u) {
    if (home.on_device[u]) continue;
    Sizes on_ssd = home.on_ssd[u];
    const std::vector<std::uint32_t>& chunks = home.layout.units[u].chunks;
    for (auto id = chunks.rbegin(); id != chunks.rend(); ++id) {
      if (!owns.mine(*id)) continue;
      const Chunk& chunk = home.layout.chunks[*id];
      place(chunk, Role::param, on_ssd.params);
      place(chunk, Role::grad, on_ssd.grads);
      for (auto role = kStates.rbegin(); role != kStates.rend(); ++role) {
        place(chunk, *role, on_ssd.states);
      }
    }
    STRATA_ASSERT(on_ssd.total() == 0);
  }
  return home;
}

[[noreturn]] void refuse_budgets(const Config& config, const Layout& layout, Refusal refusal) {
  if (refusal.gradient_bytes != 0) {
    Config other = config;
    other.update = UpdateMode::in_backward;
    const std::size_t frames = buffer_need(other, make_layout(other, layout.page_bytes)).least;
    refusal.gradient_bytes_in_backward = frames * layout.page_bytes;
  }
  throw StrataError(to_error(refusal));
}

}  // namespace

Holding holding_of(const Config& config, const Layout& layout) {
  Holding holding;
  holding.page_bytes = layout.page_bytes;
  holding.names = config.units;
  holding.together = config.together;
  holding.units.resize(layout.units.size());
  holding.shown.resize(layout.units.size());
  const Ownership owns = ownership_of(config, layout);
  holding.may_rest = owns.alone() && layout.computed_count == 0;
  for (std::size_t u = 0; u < layout.units.size(); ++u) {
    holding.shown[u] = layout.units[u].pages.size();
  }
  std::size_t grad_frames = 0;
  for (std::uint32_t id = 0; id < layout.chunks.size(); ++id) {
    const Chunk& chunk = layout.chunks[id];
    if (!owns.mine(id)) continue;
    Sizes& unit = holding.units[unit_of(layout, chunk)];
    unit.params += chunk.run(Role::param).count;
    unit.grads += chunk.run(Role::grad).count;
    for (const Role role : kStates) unit.states += chunk.run(role).count;
    holding.chunk_pages_max = std::max(holding.chunk_pages_max, chunk.pages());
    grad_frames += layout.grad_frames(chunk);
  }
  const BufferNeed buffers = buffer_need(config, layout);
  holding.buffers_least = buffers.least;
  holding.buffers_wanted = buffers.wanted;
  holding.counts_buffers = config.update == UpdateMode::lock_free;
  holding.late_grad_frames = holding.counts_buffers ? grad_frames : 0;
  holding.scale_frames = static_cast<std::uint32_t>(ceil_div(owns.scale_bytes, layout.page_bytes));
  const bool on_host = config.device == "host";
  holding.landing_frames = on_host || !owns.alone() ? 0 : kLandingFrames;
  holding.outbox_frames = owns.alone() ? 0 : on_host ? kOutboxFrames : kOutboxFramesGpu;
  if (Collectors(config).adds_up_here()) holding.outbox_frames *= 2;  // as many for sums
  holding.relay_wanted = relay_frames_wanted(config, layout, owns);
  if (config.snapshots != 0) {
    holding.kept_slots = snapshot_slots(layout, owns).beside(config.snapshots);
  }
  for (const ParamSpec& spec : config.params) {
    holding.parameter_bytes += spec.numel * size_of(spec.dtype);
  }
  return holding;
}

Residence choose_residence(const Config& config) {
  check_config(config);
  const bool cuda = cuda_ordinal(config.device).has_value();
  std::size_t smallest = config.page_bytes, largest = config.page_bytes;
  if (config.page_bytes == 0) {
    smallest = cuda ? kCudaPageBytesMin : kPageBytesMin;
    largest = kPageBytesDefault;
  }
  PageSizeChosen chosen = choose_page_size(
      [&](std::size_t page) { return holding_of(config, make_layout(config, page)); }, smallest,
      largest, budgets_of(config));
  Layout layout = make_layout(config, chosen.page_bytes);
  if (std::optional<Refusal>& refusal = chosen.allotted.refusal) {
    if (cuda && config.page_bytes == 0) refusal->gpu_page_bytes = smallest;
    refuse_budgets(config, layout, std::move(*refusal));
  }
  return spread_pages(config, std::move(layout), std::move(chosen.allotted.allotment));
}

Residence rearrange(const Config& config, const Layout& layout, const Claims& before,
                    const Room& room) {
  Allotted allotted = rearrange(holding_of(config, layout), budgets_of(config), before, room);
  if (allotted.refusal) throw StrataError(to_error(*allotted.refusal));
  return spread_pages(config, layout, std::move(allotted.allotment));
}

Budgets step_budgets(const Config& config, const Residence& home, std::size_t device_bytes) {
  const std::size_t page = home.layout.page_bytes;
  return {.page_bytes = page,
          .device_bytes = device_bytes,
          .host_bytes = config.host_bytes - set_aside(home) * page,
          .ssd_bytes = config.ssd_bytes - home.kept_slots * page,
          .staging_bytes = home.staging_frames * page,
          .grads_rest = home.layout.grad_pages};
}

}  // namespace strata
