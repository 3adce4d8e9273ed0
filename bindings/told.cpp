#include "bindings/told.hpp"

#include <array>
#include <numeric>

namespace strata {
namespace {

// "host", "ssd", or "mixed"; "none" where the unit has no such pages.
std::string tier_text(const Residence& home, std::size_t unit, bool (*wanted)(Role)) {
  bool host = false, ssd = false;
  for (const std::uint32_t id : home.layout.units[unit].chunks) {
    for (std::size_t r = 0; r < kRoleCount; ++r) {
      if (!wanted(static_cast<Role>(r))) continue;
      const PageRun& run = home.layout.chunks[id].roles[r];
      for (std::uint32_t i = 0; i < run.count; ++i) {
        (home.tier[index(run.first) + i] == Tier::host ? host : ssd) = true;
      }
    }
  }
  return host && ssd ? "mixed" : host ? "host" : ssd ? "ssd" : "none";
}

}  // namespace

py::dict plan_dict(const Config& config, const Residence& home) {
  const std::size_t page = home.layout.page_bytes;
  py::list units;
  for (std::size_t u = 0; u < config.units.size(); ++u) {
    std::size_t elements = 0;
    for (const ParamSpec& spec : config.params) {
      if (index(spec.unit) == u) elements += spec.numel;
    }
    py::dict unit;
    unit["name"] = config.units[u];
    unit["params"] = elements;
    unit["param_bytes"] = home.layout.units[u].pages.size() * page;
    std::array<std::size_t, kRoleCount> pages{};
    for (const std::uint32_t id : home.layout.units[u].chunks) {
      for (std::size_t r = 0; r < kRoleCount; ++r)
        pages[r] += home.layout.chunks[id].roles[r].count;
    }
    const std::size_t grads = pages[static_cast<std::size_t>(Role::grad)];
    unit["grad_bytes"] = grads * page;
    unit["state_bytes"] =
        (std::accumulate(pages.begin(), pages.end(), std::size_t{0}) - grads) * page -
        home.layout.units[u].pages.size() * page;
    unit["chunks"] = home.layout.units[u].chunks.size();
    unit["param_tier"] = tier_text(home, u, [](Role role) { return role == Role::param; });
    unit["grad_tier"] = tier_text(home, u, [](Role role) { return role == Role::grad; });
    unit["state_tier"] =
        tier_text(home, u, [](Role role) { return role != Role::param && role != Role::grad; });
    units.append(unit);
  }
  py::dict plan;
  plan["page_bytes"] = page;
  plan["device_bytes"] = home.device_frames * page;
  plan["host_bytes"] = home.host_frames * page;
  plan["ssd_bytes"] = home.slots * page;
  plan["staging_bytes"] = home.staging_frames * page;
  plan["device_bytes_min"] = home.device_frames_min * page;
  plan["units"] = units;
  return plan;
}

py::dict stats_dict(const SessionStats& stats) {
  py::dict out;
  for (std::size_t link = 0; link < kLinkCount; ++link) {
    out[py::str(std::string(name(static_cast<Link>(link))) + " bytes")] = stats.link_bytes[link];
  }
  out["waited_s"] = stats.waited_s;
  out["device_bytes"] = stats.device_bytes;
  out["device_bytes_peak"] = stats.device_bytes_peak;
  out["device_bytes_budget"] = stats.device_bytes_budget;
  out["host_bytes"] = stats.host_bytes;
  out["staging_bytes"] = stats.staging_bytes;
  out["ssd_bytes"] = stats.ssd_bytes;
  out["activation_host_bytes"] = stats.activation_host_bytes;
  out["activation_ssd_bytes"] = stats.activation_ssd_bytes;
  out["activation_saved_bytes"] = stats.activation_saved_bytes;
  out["activation_fetched_bytes"] = stats.activation_fetched_bytes;
  out["steps"] = stats.steps;
  out["steps_skipped"] = stats.steps_skipped;
  out["chunks_updated"] = stats.chunks_updated;
  out["mappings"] = stats.mappings;
  out["plans"] = stats.plans;
  out["deviations"] = stats.deviations;
  out["lookahead"] = stats.lookahead;
  out["timeline_lost"] = stats.timeline_lost;
  out["io_retries"] = stats.io_retries;
  out["worker_busy_s"] = stats.worker_busy_s;
  out["host_locked"] = stats.host_locked;
  out["backend"] = stats.backend;
  out["io_engine"] = stats.io_engine;
  out["io_engine_why"] = stats.io_engine_why;
  out["isa"] = stats.isa;
  out["warnings"] = stats.warnings;
  return out;
}

py::list timeline_list(const std::vector<TimelineSpan>& spans) {
  py::list out;
  for (const TimelineSpan& span : spans) {
    py::dict entry;
    entry["track"] = name(span.track);
    entry["cause"] = name(span.cause);
    entry["lane"] = span.lane;
    entry["backward"] = span.backward;
    entry["unit"] = span.unit == kNoUnit ? -1 : static_cast<long>(index(span.unit));
    entry["begin_ns"] = span.begin_ns;
    entry["end_ns"] = span.end_ns;
    entry["bytes"] = span.bytes;
    out.append(entry);
  }
  return out;
}

}  // namespace strata
