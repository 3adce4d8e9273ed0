// One thing of what a session has taken over from a plan is changed, and the rest stays.
//
//   rest_on_device(session, {true, false}, 5 * kPage);
#pragma once

#include <utility>
#include <vector>

#include "engine/session.hpp"

namespace strata {

inline void limit_device(Session& session, std::size_t param_bytes) {
  Adoption wanted;
  wanted.param_bytes = param_bytes;
  session.adopt(wanted);
}

inline void rest_on_device(Session& session, std::vector<bool> units, std::size_t param_bytes) {
  Adoption wanted;
  wanted.on_device = std::move(units);
  wanted.param_bytes = param_bytes;
  session.adopt(wanted);
}

inline void reserve_activations(Session& session, std::size_t host_bytes, std::size_t ssd_bytes) {
  Adoption wanted;
  wanted.activation_host_bytes = host_bytes;
  wanted.activation_ssd_bytes = ssd_bytes;
  session.adopt(wanted);
}

}  // namespace strata
