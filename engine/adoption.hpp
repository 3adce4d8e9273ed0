// Adoption: what a session takes over from a plan, between two steps (rearranger.hpp).
//
// Threads: values.
//
//   session.adopt({.on_device = rests, .uses = plan.uses});
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "offload/planner/trace.hpp"

namespace strata {

// What is left out stays as it is.
struct Adoption {
  std::optional<std::vector<bool>> on_device;  // by unit: rests there
  std::optional<std::size_t> param_bytes;      // of the device, for parameters that come and go
  std::optional<std::size_t> activation_host_bytes;  // in whole pages
  std::optional<std::size_t> activation_ssd_bytes;   // likewise
  // Of a whole step, in order of enter: parameters are fetched in this order, until steps differ.
  std::optional<std::vector<Use>> uses;

  bool moves_nothing() const {
    return !on_device && !param_bytes && !activation_host_bytes && !activation_ssd_bytes;
  }
};

}  // namespace strata
