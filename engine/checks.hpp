// What a session refuses of what it is asked: configurations and hyperparameters that contradict
// themselves or what was laid out. An assertion is for strata's own mistakes, never for a caller's.
//
// Threads: pure functions. All throw StrataError (config), and name what is wrong.
//
//   check_config(config);                        // before anything is laid out
//   check_groups(config.groups, groups);         // those of a step
#pragma once

#include <span>

#include "engine/config.hpp"

namespace strata {

void check_config(const Config& config);

// `laid_out`: with what the session was made, which decides about the moments that have room.
void check_groups(std::span<const Hyper> laid_out, std::span<const Hyper> now);

}  // namespace strata
