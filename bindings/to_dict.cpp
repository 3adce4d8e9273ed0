#include "bindings/to_dict.hpp"

#include <algorithm>

#include "engine/ranks/ownership.hpp"

namespace strata {
namespace {

// "host", "ssd", "device", or "mixed", of what this rank holds; "remote": others hold all of it;
// "none" where the unit has no such pages.
std::string tier_text(const Residence& home, std::size_t unit, bool (*wanted)(Role)) {
  if (home.on_device[unit]) return "device";
  bool host = false, ssd = false, remote = false;
  for (const std::uint32_t id : home.layout.units[unit].chunks) {
    for (std::size_t r = 0; r < kRoleCount; ++r) {
      if (!wanted(static_cast<Role>(r))) continue;
      const PageRun& run = home.layout.chunks[id].roles[r];
      for (std::uint32_t i = 0; i < run.count; ++i) {
        const Tier tier = home.tier[index(run.first) + i];
        (tier == Tier::host ? host : tier == Tier::remote ? remote : ssd) = true;
      }
    }
  }
  return host && ssd ? "mixed" : host ? "host" : ssd ? "ssd" : remote ? "remote" : "none";
}

// Of some of a unit's chunks.
struct UnitPages {
  std::size_t params = 0, grads = 0, states = 0;

  void add(const Layout& layout, std::uint32_t id) {
    const Chunk& chunk = layout.chunks[id];
    params += chunk.run(Role::param).count;
    grads += layout.grad_frames(chunk);
    for (const Role role : {Role::master, Role::moment1, Role::moment2}) {
      states += chunk.run(role).count;
    }
  }
};

py::dict unit_dict(const Config& config, const Residence& home, const Ownership& owns,
                   std::size_t u) {
  const std::size_t page = home.layout.page_bytes;
  std::size_t elements = 0, remote_elements = 0;
  for (std::uint32_t param = 0; param < config.params.size(); ++param) {
    if (index(config.params[param].unit) != u) continue;
    elements += config.params[param].numel;
    if (owns.alone()) continue;
    for (const Piece& piece : home.layout.pieces(param)) {
      remote_elements += owns.mine(piece.chunk) ? 0 : piece.count;
    }
  }
  UnitPages all, remote;
  for (const std::uint32_t id : home.layout.units[u].chunks) {
    all.add(home.layout, id);
    if (!owns.mine(id)) remote.add(home.layout, id);
  }
  const std::size_t grads = all.grads, states = all.states;
  // Gradients that pass through a few buffers on their way to an update rest nowhere.
  const bool passing = config.update == UpdateMode::in_backward && !home.layout.grad_pages;
  const bool grads_rest = !passing && grads != 0;
  py::dict unit;
  unit["name"] = config.units[u];
  unit["params"] = elements;
  unit["param_bytes"] = home.layout.units[u].pages.size() * page;
  unit["resting_param_bytes"] = all.params * page;
  unit["codes"] = home.layout.has_codes(UnitId{static_cast<std::uint32_t>(u)});
  unit["landing_bytes"] = grads * page;
  unit["grad_bytes"] = grads_rest ? grads * page : 0;
  unit["state_bytes"] = states * page;
  unit["remote_params"] = remote_elements;
  unit["remote_param_bytes"] = remote.params * page;
  unit["remote_landing_bytes"] = remote.grads * page;
  unit["remote_state_bytes"] = remote.states * page;
  unit["on_device"] = static_cast<bool>(home.on_device[u]);
  unit["chunks"] = home.layout.units[u].chunks.size();
  unit["param_tier"] = tier_text(home, u, [](Role role) { return role == Role::param; });
  unit["grad_tier"] = home.layout.grad_pages
                          ? tier_text(home, u, [](Role role) { return role == Role::grad; })
                          : (grads_rest ? "host" : "none");
  unit["state_tier"] =
      tier_text(home, u, [](Role role) { return role != Role::param && role != Role::grad; });
  return unit;
}

// Pages of what is trained, whether this rank owns it or not.
std::size_t trained_pages(const Layout& layout) {
  std::size_t pages = 0;
  for (const Chunk& chunk : layout.chunks) {
    if (layout.trains(chunk)) pages += chunk.pages();
  }
  return pages;
}

// The part of them that elements fill.
std::size_t trained_bytes(const Layout& layout) {
  std::size_t bytes = 0;
  for (std::uint32_t param = 0; param < layout.numel.size(); ++param) {
    const Segment& segment = layout.segment_of(param);
    if (!segment.trainable || layout.numel[param] == 0) continue;
    const Chunk& chunk = layout.chunks[segment.first_chunk];
    for (std::size_t r = 0; r < kRoleCount; ++r) {
      const auto role = static_cast<Role>(r);
      if (layout.spot(chunk, role, 0).page == kNoPage) continue;
      bytes += layout.numel[param] * layout.element_bytes(chunk, role);
    }
  }
  return bytes;
}

}  // namespace

py::dict plan_dict(const Config& config, const Residence& home) {
  const std::size_t page = home.layout.page_bytes;
  py::list units;
  const Ownership owns = ownership_of(config, home.layout);
  for (std::size_t u = 0; u < config.units.size(); ++u) {
    units.append(unit_dict(config, home, owns, u));
  }
  py::dict plan;
  plan["page_bytes"] = page;
  plan["device_bytes"] = home.device_frames * page;
  plan["host_bytes"] = home.host_frames * page;
  plan["ssd_bytes"] = (home.slots + home.kept_slots) * page;
  plan["snapshot_bytes"] = home.kept_slots * page;
  plan["staging_bytes"] = home.staging_frames * page;
  plan["buffer_bytes"] = set_aside(home) * page;
  plan["device_bytes_min"] = std::max(home.device_frames_min, home.nested_frames) * page;
  plan["nested_bytes"] = home.nested_frames * page;
  plan["trained_page_bytes"] = trained_pages(home.layout) * page;
  plan["trained_bytes"] = trained_bytes(home.layout);
  plan["units"] = units;
  return plan;
}

namespace {

py::dict driver_dict(const std::optional<DriverCounts>& counts) {
  py::dict out;
  if (!counts) return out;
  out["stream_wait"] = counts->stream_wait;
  out["event_query"] = counts->event_query;
  out["event_not_ready"] = counts->event_not_ready;
  out["event_synchronize"] = counts->event_synchronize;
  out["stream_synchronize"] = counts->stream_synchronize;
  out["map"] = counts->map;
  out["unmap"] = counts->unmap;
  out["set_access"] = counts->set_access;
  return out;
}

}  // namespace

py::dict stats_dict(const SessionStats& stats) {
  py::dict out;
  for (const LinkRow& row : kLinks) {
    const std::uint64_t bytes = stats.link_bytes[static_cast<std::size_t>(row.link)];
    // Few sessions have such a tier.
    const bool rare = std::max(row.from, row.to) == Tier::remote;
    if (bytes != 0 || !rare) out[py::str(std::string(row.name) + " bytes")] = bytes;
  }
  out["waited_s"] = stats.waited_s;
  out["device_bytes"] = stats.device_bytes;
  out["device_bytes_peak"] = stats.device_bytes_peak;
  out["device_rest_bytes"] = stats.device_rest_bytes;
  out["device_bytes_budget"] = stats.device_bytes_budget;
  out["host_bytes"] = stats.host_bytes;
  out["pinned_bytes"] = stats.pinned_bytes;
  out["staging_bytes"] = stats.staging_bytes;
  out["ssd_bytes"] = stats.ssd_bytes;
  out["activation_host_bytes"] = stats.activation_host_bytes;
  out["activation_ssd_bytes"] = stats.activation_ssd_bytes;
  out["activation_saved_bytes"] = stats.activation_saved_bytes;
  out["activation_fetched_bytes"] = stats.activation_fetched_bytes;
  out["snapshot_bytes"] = stats.snapshot_bytes;
  out["gradients_kept_bytes"] = stats.gradients_kept_bytes;
  out["steps"] = stats.steps;
  out["steps_skipped"] = stats.steps_skipped;
  out["chunks_updated"] = stats.chunks_updated;
  out["mappings"] = stats.mappings;
  out["driver"] = driver_dict(stats.driver);
  out["plans"] = stats.plans;
  out["deviations"] = stats.deviations;
  out["lookahead"] = stats.lookahead;
  out["timeline_lost"] = stats.timeline_lost;
  out["io_retries"] = stats.io_retries;
  out["io_errors"] = stats.io_errors;
  out["slots_acquired"] = stats.slots_acquired;
  out["slots_kept"] = stats.slots_kept;
  out["worker_busy_s"] = stats.worker_busy_s;
  out["workers_where"] = stats.workers_where;
  out["host_locked"] = stats.host_locked;
  out["backend"] = stats.backend;
  out["device"] = stats.device;
  out["io_engine"] = stats.io_engine;
  out["io_engine_why"] = stats.io_engine_why;
  out["isa"] = stats.isa;
  out["staleness"] = stats.staleness.seen;
  out["merged gradients"] = stats.staleness.merged;
  out["update waits"] = stats.update_waits;
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
