#include "engine/placing.hpp"

#include <algorithm>
#include <vector>

namespace strata {
namespace {

// Staging for four chunks in flight (one loads, one updates, one is written, one is spare) and as
// many single pages: gradients that land and parameters on their way to the device.
constexpr std::uint32_t kChunksInFlight = 4;
constexpr std::uint32_t kSinglePages = 8;

bool on_device(const Residence& home, const Chunk& chunk) {
  return home.on_device[index(home.layout.segments[chunk.segment].unit)];
}

// Pages that do not rest on the device, in the order in which host memory serves them best.
std::vector<PageId> by_worth(const Residence& home) {
  const Layout& layout = home.layout;
  std::vector<PageId> order;
  const auto add = [&](const Chunk& chunk, Role role) {
    if (on_device(home, chunk)) return;
    const PageRun& run = chunk.run(role);
    for (std::uint32_t i = 0; i < run.count; ++i) order.push_back(PageId{index(run.first) + i});
  };
  for (const Chunk& chunk : layout.chunks) add(chunk, Role::param);
  for (const Chunk& chunk : layout.chunks) add(chunk, Role::grad);
  for (const Chunk& chunk : layout.chunks) {
    add(chunk, Role::master);
    add(chunk, Role::moment1);
    add(chunk, Role::moment2);
  }
  return order;
}

}  // namespace

std::uint32_t chunk_pages_max(const Layout& layout) {
  std::uint32_t most = 1;
  for (const Chunk& chunk : layout.chunks) {
    std::uint32_t pages = 0;
    for (const PageRun& run : chunk.roles) pages += run.count;
    most = std::max(most, pages);
  }
  return most;
}

std::size_t unit_pages(const Layout& layout, std::size_t unit) {
  std::size_t pages = 0;
  for (const std::uint32_t chunk : layout.units[unit].chunks) {
    for (const PageRun& run : layout.chunks[chunk].roles) pages += run.count;
  }
  return pages;
}

void count_device(Residence& home) {
  home.rest_frames = home.device_frames_min = 0;
  for (std::size_t u = 0; u < home.layout.units.size(); ++u) {
    const auto params = static_cast<std::uint32_t>(home.layout.units[u].pages.size());
    if (home.on_device[u])
      home.rest_frames += static_cast<std::uint32_t>(unit_pages(home.layout, u));
    else
      home.device_frames_min = std::max(home.device_frames_min, params);
  }
}

std::size_t place_pages(Residence& home, std::size_t host_frames) {
  home.tier.assign(home.layout.page_count, Tier::device);
  const std::vector<PageId> order = by_worth(home);
  const std::size_t here = std::min(host_frames, order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    home.tier[index(order[i])] = i < here ? Tier::host : Tier::ssd;
  }
  return order.size() - here;
}

BufferNeed buffer_need(const Config& config, const Layout& layout) {
  if (config.update == UpdateMode::on_step) return {};
  std::size_t all = 0, largest_chunk = 0;
  std::vector<std::size_t> by_unit(layout.units.size(), 0);
  for (const Chunk& chunk : layout.chunks) {
    const std::size_t frames = layout.grad_frames(chunk);
    all += frames;
    largest_chunk = std::max(largest_chunk, frames);
    by_unit[index(layout.segments[chunk.segment].unit)] += frames;
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

std::size_t set_aside(const Residence& home) {
  return std::size_t{home.buffer_frames} + home.scale_frames + home.landing_frames;
}

std::uint32_t staging_least(const Residence& home) {
  return home.chunk_frames_max + 3;
}

std::uint32_t staging_wanted(const Residence& home) {
  return kChunksInFlight * home.chunk_frames_max + kSinglePages;
}

std::uint32_t choose_staging(const Residence& home, std::size_t frames) {
  const std::uint32_t least = staging_least(home);
  return std::clamp(static_cast<std::uint32_t>(frames / 2), least,
                    std::max(least, staging_wanted(home)));
}

}  // namespace strata
