// SessionParts: what a session is made of that its configuration does not say. The bindings give
// the user's own; tests replace what is real.
//
// Threads: handed over once, to the constructor; functions are called as Session says.
//
//   Session session(config, {.foreign = run_theirs});
#pragma once

#include <functional>
#include <memory>

#include "engine/gate.hpp"
#include "engine/ranks/column.hpp"
#include "engine/ranks/meeting.hpp"
#include "engine/tiers.hpp"
#include "memory/page_table.hpp"
#include "optimizers/foreign.hpp"

namespace strata {

// What is left empty, the session makes itself, or does without.
struct SessionParts : TierParts, GateOptions {
  // No pump: asked in every turn whether a worker may have finished; absent: always.
  std::function<bool()> worker_is_done;
  Foreign foreign;  // for groups of Rule::foreign
  // Of one of several ranks; absent: the one that the configuration names.
  std::unique_ptr<Meeting> meeting;
  // Called once when all is claimed, before this rank waits for the others; what it throws the
  // constructor does. Absent, or this rank is alone: nothing is.
  std::function<void()> claimed;
  // To the ranks of the same number on other machines; absent: there is one machine.
  std::unique_ptr<Column> column;
  // Called after every turn, for checks of what must always hold.
  std::function<void(const PageTable&, const Claims&)> turned;
};

}  // namespace strata
