#include "engine/residence.hpp"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>

#include "engine/checks.hpp"
#include "engine/devices.hpp"
#include "engine/placing.hpp"
#include "memory/check.hpp"
#include "memory/result.hpp"

namespace strata {
namespace {

constexpr std::size_t kPageBytesDefault = 4 * kMiB;
// What a GPU maps at a time.
constexpr std::size_t kCudaPageBytesMin = 2 * kMiB;
constexpr std::uint32_t kFetchesMax = 16;
constexpr std::size_t kPagesMax = std::size_t{1} << 30;  // of activations in a tier
// Copies of activations finish by themselves and quickly: a few keep the disk and the device busy.
constexpr std::uint32_t kActivationFramesMax = 8;

struct Verdict {
  Residence residence;
  std::optional<Error> error;
  // Pages too many for host memory and the SSD: with so many on the device it would do.
  std::size_t excess = 0;
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
  std::size_t largest = 0, pages = 0;
  for (std::size_t u = 0; u < home.layout.units.size(); ++u) {
    if (home.on_device[u]) continue;
    pages += home.layout.units[u].pages.size();
    if (home.layout.units[u].pages.size() == home.device_frames_min) largest = u;
  }
  const std::size_t budget = config.device_bytes / page;
  const std::size_t left = budget - std::min<std::size_t>(budget, home.rest_frames);
  home.device_frames = static_cast<std::uint32_t>(std::min(left, pages));
  const std::size_t most = home.device_frames_min;
  if (budget < home.rest_frames + most) {
    infeasible(verdict, Tier::device,
               "infeasible: the device budget of " + bytes_text(config.device_bytes) +
                   " is less than the " + bytes_text(most * page) +
                   " that this unit's parameters need when it is entered; device=\"" +
                   std::to_string(ceil_div(most * page, kKiB)) + "KiB\" would do",
               config.units[largest]);
  }
}

std::string host_advice(std::size_t frames, std::size_t page) {
  return "host=\"" + std::to_string(ceil_div(frames * page, kKiB)) + "KiB\" would do";
}

// The host budget is less than `needed` frames.
void refuse_host(const Config& config, Verdict& verdict, std::size_t needed) {
  const Layout& layout = verdict.residence.layout;
  const std::size_t page = layout.page_bytes;
  const std::string budget = bytes_text(config.host_bytes);
  std::string what = "infeasible: ";
  if (config.ssd_paths.empty()) {
    what += "parameters, gradients and optimizer state take " + bytes_text(needed * page) +
            " of host memory and the budget is " + budget + "; " + host_advice(needed, page) +
            ", or give ssd_path=";
    verdict.excess = needed - config.host_bytes / page;
  } else {
    what += "the host budget of " + budget + " is less than the staging area for one chunk";
    if (set_aside(verdict.residence) != 0) what += " and what must always be in host memory";
    what += "; " + host_advice(needed, page);
  }
  if (config.update == UpdateMode::lock_free) {
    Config other = config;
    other.update = UpdateMode::in_backward;
    const std::size_t would = buffer_need(other, make_layout(other, page)).least;
    what += "; gradients need " + bytes_text(verdict.residence.buffer_frames * page) +
            " of host memory, update='in_backward' would need " + bytes_text(would * page);
  }
  infeasible(verdict, Tier::host, std::move(what));
}

void choose_host(const Config& config, Verdict& verdict) {
  Residence& home = verdict.residence;
  const std::size_t page = home.layout.page_bytes;
  const std::size_t frames = config.host_bytes / page;
  const std::size_t below = home.layout.page_count - home.rest_frames;
  const BufferNeed buffers = buffer_need(config, home.layout);
  home.chunk_frames_max = chunk_pages_max(home.layout);
  home.scale_frames = static_cast<std::uint32_t>(ceil_div(home.layout.scale_bytes, page));
  home.landing_frames = config.device == "host" ? 0 : kLandingFrames;
  home.buffer_frames = static_cast<std::uint32_t>(buffers.least);
  // 1. Everything that is not on the device in host memory. What is there passes through staging.
  const std::size_t beside = home.rest_frames == 0 ? 0 : staging_least(home);
  const std::size_t everything = below + set_aside(home) + beside;
  if (frames >= everything) {
    home.buffer_frames +=
        static_cast<std::uint32_t>(std::min(buffers.wanted - buffers.least, frames - everything));
    home.staging_frames = static_cast<std::uint32_t>(beside);
    home.host_frames = static_cast<std::uint32_t>(below + set_aside(home) + beside);
    place_pages(home, below);
    return;
  }
  const std::size_t least = staging_least(home) + set_aside(home);
  if (config.ssd_paths.empty()) return refuse_host(config, verdict, everything);
  if (frames < least) return refuse_host(config, verdict, std::min(least, everything));
  // 2. What is always there, but no more of it than what is short allows.
  home.buffer_frames = static_cast<std::uint32_t>(std::clamp(
      frames / 4, buffers.least, std::min(buffers.wanted, buffers.least + (frames - least))));
  // 3. The staging area, and as much as has room beside it.
  const std::size_t room = frames - set_aside(home);
  home.staging_frames = choose_staging(home, room);
  home.host_frames = static_cast<std::uint32_t>(frames);
  home.slots = static_cast<std::uint32_t>(place_pages(home, room - home.staging_frames));
  if (home.slots > config.ssd_bytes / page) {
    verdict.excess = home.slots - config.ssd_bytes / page;
    infeasible(verdict, Tier::ssd,
               "infeasible: " + bytes_text(std::size_t{home.slots} * page) +
                   " must rest on the SSD and the budget is " + bytes_text(config.ssd_bytes) +
                   "; ssd=\"" + std::to_string(ceil_div(home.slots * page, kMiB)) +
                   "MiB\" would do, or a larger host=");
  }
}

Verdict try_units(const Config& config, const Layout& layout, std::vector<bool> on_device) {
  Verdict verdict;
  verdict.residence.layout = layout;
  verdict.residence.on_device = std::move(on_device);
  count_device(verdict.residence);
  choose_device(config, verdict);
  if (!verdict.error) choose_host(config, verdict);
  return verdict;
}

Verdict try_page(const Config& config, std::size_t page_bytes) {
  const Layout layout = make_layout(config, page_bytes);
  Verdict first = try_units(config, layout, std::vector<bool>(layout.units.size(), false));
  // What has no room below the device rests there, from the last unit on. The refusal stays the
  // first one: larger budgets of the other tiers are the better advice.
  Verdict verdict = first;
  for (std::size_t left = layout.units.size(); verdict.error && verdict.excess != 0;) {
    std::vector<bool> on_device = verdict.residence.on_device;
    const std::size_t excess = verdict.excess;
    for (std::size_t pages = 0; pages < excess; pages += unit_pages(layout, left)) {
      if (left == 0) return first;
      on_device[--left] = true;
    }
    verdict = try_units(config, layout, std::move(on_device));
  }
  return verdict.error ? first : verdict;
}

// A page size is comfortable when it wastes little, and what depends on it in host memory is a
// small part of that: the staging area, and buffers beyond the gradients themselves.
bool comfortable(const Config& config, const Residence& home) {
  std::size_t elements = 0;
  for (const ParamSpec& spec : config.params) elements += spec.numel * size_of(spec.dtype);
  const std::size_t padded = home.layout.param_pages() * home.layout.page_bytes;
  const bool little_waste = padded <= elements + elements / 16 + kPageBytesMin;
  std::size_t moving = home.staging_frames;
  if (config.update == UpdateMode::lock_free) {
    moving += home.buffer_frames;
    for (const Chunk& chunk : home.layout.chunks) moving -= home.layout.grad_frames(chunk);
  }
  const bool small_staging = home.slots == 0 || (home.staging_frames >= staging_wanted(home) &&
                                                 moving * 4 <= home.host_frames);
  return little_waste && small_staging;
}

}  // namespace

Residence choose_residence(const Config& config) {
  check_config(config);
  if (config.page_bytes != 0) {
    Verdict verdict = try_page(config, config.page_bytes);
    if (verdict.error) throw StrataError(*verdict.error);
    return std::move(verdict.residence);
  }
  const bool cuda = cuda_ordinal(config.device).has_value();
  const std::size_t smallest = cuda ? kCudaPageBytesMin : kPageBytesMin;
  std::optional<Verdict> feasible;
  for (std::size_t page = kPageBytesDefault; page >= smallest; page /= 2) {
    Verdict verdict = try_page(config, page);
    if (!verdict.error) {
      if (comfortable(config, verdict.residence)) return std::move(verdict.residence);
      feasible = std::move(verdict);  // the smallest feasible page is the last resort
    } else if (page == smallest && !feasible) {
      if (cuda) verdict.error->what += "; pages of a GPU are " + bytes_text(smallest) + " at least";
      throw StrataError(*verdict.error);
    }
  }
  return std::move(feasible->residence);
}

namespace {

// Activations, with what rests, have no room in host memory or on the SSD.
Verdict refuse_room(const Config& config, const Residence& then, const Room& room,
                    std::size_t below) {
  Verdict verdict;
  const std::size_t page = then.layout.page_bytes;
  const std::string needs = "infeasible: activations need " + bytes_text(room.host_pages * page) +
                            " of host memory and " + bytes_text(room.ssd_pages * page) +
                            " of SSD, ";
  if (room.ssd_pages != 0 && config.ssd_paths.empty()) {
    infeasible(verdict, Tier::ssd, needs + "and there is no ssd_path=");
    return verdict;
  }
  // At best nothing else rests in host memory. A larger budget may set more aside.
  const std::size_t staging = std::max(then.staging_frames, staging_wanted(then));
  const std::size_t buffers =
      std::max<std::size_t>(then.buffer_frames, buffer_need(config, then.layout).wanted);
  const std::size_t beside = then.rest_frames == 0 ? 0 : staging;
  const std::size_t least = config.ssd_paths.empty() ? below + beside : staging;
  const std::size_t others = buffers + then.scale_frames + then.landing_frames;
  infeasible(verdict, Tier::host,
             needs + "and the host budget is " + bytes_text(config.host_bytes) + "; " +
                 host_advice(least + others + room.host_pages, page) +
                 (config.ssd_paths.empty() ? ", or give ssd_path=" : ""));
  return verdict;
}

}  // namespace

Residence rearrange(const Config& config, const Residence& home, const Room& room) {
  if (std::max(room.host_pages, room.ssd_pages) > kPagesMax) {
    refuse("infeasible: so many activations");
  }
  Residence then = home;
  then.on_device = room.on_device;
  count_device(then);
  const std::size_t page = home.layout.page_bytes;
  const std::size_t budget = config.host_bytes / page;
  const std::size_t below = home.layout.page_count - then.rest_frames;
  // 1. Host memory: what has no room there rests on the SSD.
  const auto taken = [&] { return then.staging_frames + set_aside(home) + room.host_pages; };
  const bool elsewhere = room.ssd_pages != 0 || then.rest_frames != 0;
  if (then.staging_frames == 0 && (elsewhere || below + taken() > budget)) {
    then.staging_frames = choose_staging(home, budget - set_aside(home));
  }
  const std::size_t left = budget - std::min(budget, taken());
  const bool no_ssd = config.ssd_paths.empty() && (room.ssd_pages != 0 || left < below);
  if (taken() > budget || no_ssd) throw StrataError(*refuse_room(config, then, room, below).error);
  const std::size_t on_ssd = place_pages(then, left);
  // 2. The SSD.
  const std::size_t slots = on_ssd + room.ssd_pages;
  if (slots > config.ssd_bytes / page) {
    Verdict verdict;
    infeasible(verdict, Tier::ssd,
               "infeasible: " + bytes_text(slots * page) +
                   " must rest on the SSD with activations, and the budget is " +
                   bytes_text(config.ssd_bytes) + "; ssd=\"" +
                   std::to_string(ceil_div(slots * page, kMiB)) + "MiB\" would do");
    throw StrataError(*verdict.error);
  }
  const std::size_t frames = below - on_ssd + taken();
  then.host_frames = std::max(home.host_frames, static_cast<std::uint32_t>(frames));
  then.slots = std::max(home.slots, static_cast<std::uint32_t>(slots));
  then.activation_frames = static_cast<std::uint32_t>(room.host_pages);
  then.activation_slots = static_cast<std::uint32_t>(room.ssd_pages);
  STRATA_ASSERT(then.host_frames <= budget);
  return then;
}

StagingShares share_staging(const Residence& home) {
  if (home.staging_frames == 0) return {.fetches = kFetchesMax};
  STRATA_ASSERT(home.staging_frames >= staging_least(home));
  // The session's own accesses hold two pages.
  const std::uint32_t beside_a_chunk = home.staging_frames - home.chunk_frames_max - 2;
  StagingShares shares;
  shares.fetches = std::clamp(beside_a_chunk / 2, 1U, kFetchesMax);
  shares.chunks = home.staging_frames - shares.fetches - 2;
  shares.activations = std::clamp(beside_a_chunk / 4, 1U, kActivationFramesMax);
  return shares;
}

}  // namespace strata
