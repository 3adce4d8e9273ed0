#include "engine/residence.hpp"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>

#include "memory/check.hpp"
#include "memory/result.hpp"

namespace strata {
namespace {

constexpr std::size_t kPageBytesDefault = 4 * kMiB;
// Staging for four chunks in flight (one loads, one updates, one is written, one is spare) and as
// many single pages: gradients that land and parameters on their way to the device.
constexpr std::uint32_t kChunksInFlight = 4;
constexpr std::uint32_t kSinglePages = 8;

std::uint32_t chunk_pages_max(const Layout& layout) {
  std::uint32_t most = 1;
  for (const Chunk& chunk : layout.chunks) {
    std::uint32_t pages = 0;
    for (const PageRun& run : chunk.roles) pages += run.count;
    most = std::max(most, pages);
  }
  return most;
}

// Pages in the order in which host memory serves them best.
std::vector<PageId> by_worth(const Layout& layout) {
  std::vector<PageId> order;
  const auto add = [&](const Chunk& chunk, Role role) {
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

struct Verdict {
  Residence residence;
  std::optional<Error> error;
};

void infeasible(Verdict& verdict, Tier tier, std::string what, std::string unit = {}) {
  Error error;
  error.fault = Fault::config;
  error.tier = tier;
  error.what = std::move(what);
  error.unit = std::move(unit);
  verdict.error = std::move(error);
}

void choose_device(const Config& config, Verdict& verdict) {
  Residence& home = verdict.residence;
  const std::size_t page = home.layout.page_bytes;
  std::size_t largest = 0;
  for (std::size_t u = 0; u < home.layout.units.size(); ++u) {
    if (home.layout.units[u].pages.size() > home.layout.units[largest].pages.size()) largest = u;
  }
  const std::size_t most = home.layout.units[largest].pages.size();
  const std::size_t frames = std::min(config.device_bytes / page, home.layout.param_pages());
  home.device_frames = static_cast<std::uint32_t>(frames);
  home.device_frames_min = static_cast<std::uint32_t>(most);
  if (frames < most) {
    infeasible(verdict, Tier::device,
               "infeasible: the device budget of " + bytes_text(config.device_bytes) +
                   " is less than the " + bytes_text(most * page) +
                   " that this unit's parameters need when it is entered; device=\"" +
                   std::to_string(ceil_div(most * page, kKiB)) + "KiB\" would do",
               config.units[largest]);
  }
}

void choose_host(const Config& config, Verdict& verdict) {
  Residence& home = verdict.residence;
  const std::size_t page = home.layout.page_bytes;
  const std::size_t frames = config.host_bytes / page;
  const std::uint32_t total = home.layout.page_count;
  home.chunk_frames_max = chunk_pages_max(home.layout);
  home.tier.assign(total, Tier::host);
  if (frames >= total) {
    home.host_frames = total;
    return;
  }
  if (config.ssd_paths.empty()) {
    infeasible(
        verdict, Tier::host,
        "infeasible: parameters, gradients and optimizer state take " + bytes_text(total * page) +
            " of host memory and the budget is " + bytes_text(config.host_bytes) + "; host=\"" +
            std::to_string(ceil_div(total * page, kKiB)) + "KiB\" would do, or give ssd_path=");
    return;
  }
  const std::uint32_t least = home.chunk_frames_max + 3;
  if (frames < least) {
    infeasible(verdict, Tier::host,
               "infeasible: the host budget of " + bytes_text(config.host_bytes) +
                   " is less than the staging area for one chunk; host=\"" +
                   std::to_string(ceil_div(std::min(least, total) * page, kKiB)) +
                   "KiB\" would do");
    return;
  }
  const std::uint32_t wanted = kChunksInFlight * home.chunk_frames_max + kSinglePages;
  home.staging_frames =
      std::clamp(static_cast<std::uint32_t>(frames / 2), least, std::max(least, wanted));
  home.host_frames = static_cast<std::uint32_t>(frames);
  const std::vector<PageId> order = by_worth(home.layout);
  STRATA_ASSERT(order.size() == total);
  for (std::size_t i = frames - home.staging_frames; i < total; ++i) {
    home.tier[index(order[i])] = Tier::ssd;
    ++home.slots;
  }
  if (home.slots > config.ssd_bytes / page) {
    infeasible(verdict, Tier::ssd,
               "infeasible: " + bytes_text(std::size_t{home.slots} * page) +
                   " must rest on the SSD and the budget is " + bytes_text(config.ssd_bytes) +
                   "; ssd=\"" + std::to_string(ceil_div(home.slots * page, kMiB)) +
                   "MiB\" would do, or a larger host=");
  }
}

Verdict try_page(const Config& config, std::size_t page_bytes) {
  Verdict verdict;
  verdict.residence.layout = make_layout(config, page_bytes);
  choose_device(config, verdict);
  if (!verdict.error) choose_host(config, verdict);
  return verdict;
}

// A page size is comfortable when it wastes little and the staging area is a small part of the
// host.
bool comfortable(const Config& config, const Residence& home) {
  std::size_t elements = 0;
  for (const ParamSpec& spec : config.params) elements += spec.numel * size_of(spec.dtype);
  const std::size_t padded = home.layout.param_pages() * home.layout.page_bytes;
  const bool little_waste = padded <= elements + elements / 16 + kPageBytesMin;
  const std::uint32_t wanted = kChunksInFlight * home.chunk_frames_max + kSinglePages;
  const bool small_staging = home.slots == 0 || (home.staging_frames >= wanted &&
                                                 home.staging_frames * 4 <= home.host_frames);
  return little_waste && small_staging;
}

}  // namespace

Residence choose_residence(const Config& config) {
  STRATA_ASSERT(!config.params.empty());
  STRATA_ASSERT(!config.groups.empty());
  if (config.page_bytes != 0) {
    Verdict verdict = try_page(config, config.page_bytes);
    if (verdict.error) throw StrataError(*verdict.error);
    return std::move(verdict.residence);
  }
  std::optional<Verdict> feasible;
  for (std::size_t page = kPageBytesDefault; page >= kPageBytesMin; page /= 2) {
    Verdict verdict = try_page(config, page);
    if (!verdict.error) {
      if (comfortable(config, verdict.residence)) return std::move(verdict.residence);
      feasible = std::move(verdict);  // the smallest feasible page is the last resort
    } else if (page == kPageBytesMin && !feasible) {
      throw StrataError(*verdict.error);
    }
  }
  return std::move(feasible->residence);
}

}  // namespace strata
