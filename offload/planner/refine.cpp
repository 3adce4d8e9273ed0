#include "offload/planner/refine.hpp"

#include <algorithm>
#include <vector>

#include "memory/check.hpp"

namespace strata {
namespace {

bool same_mode(const UnitPlan& a, const UnitPlan& b) {
  return a.activation == b.activation && a.slices == b.slices;
}

bool holds(const Modes& modes, const UnitPlan& mode) {
  return std::ranges::any_of(modes, [&](const UnitPlan& one) { return same_mode(one, mode); });
}

// Modes that some unit may have, each once.
std::vector<UnitPlan> kinds_of(const Problem& problem) {
  std::vector<UnitPlan> kinds;
  for (std::size_t u = 0; u < problem.units(); ++u) {
    for (const UnitPlan& option : problem.options(u)) {
      if (!holds(kinds, option)) kinds.push_back(option);
    }
  }
  return kinds;
}

// Frames that the modes left over, or that they no longer find, follow the modes.
bool offer(const Choice& choice, Contest& contest) {
  if (contest.spent()) return false;
  bool better = contest.offer_filled(choice);
  Choice other = choice;
  STRATA_ASSERT(choice.lookahead <= 1);
  other.lookahead = 1 - choice.lookahead;
  if (!contest.spent()) better = contest.offer_filled(other) || better;
  return better;
}

// One kind for `count` units from `first` on.
bool offer_run(const Problem& problem, std::size_t first, std::size_t count, const UnitPlan& kind,
               Contest& contest) {
  STRATA_ASSERT(count > 0 && first < problem.units());
  Choice choice = contest.best();
  bool changed = false;
  for (std::size_t u = first; u < std::min(first + count, problem.units()); ++u) {
    UnitPlan& mode = choice.modes[u];
    if (same_mode(mode, kind) || !holds(problem.options(u), kind)) continue;
    mode = kind;
    changed = true;
  }
  return changed && offer(choice, contest);
}

bool runs_help(const Problem& problem, const std::vector<UnitPlan>& kinds, Contest& contest) {
  bool helped = false;
  for (std::size_t count = problem.units(); count > 0; count /= 2) {
    for (std::size_t first = 0; first < problem.units(); first += count) {
      for (const UnitPlan& kind : kinds) {
        helped = offer_run(problem, first, count, kind, contest) || helped;
      }
    }
  }
  return helped;
}

bool pair_helps(const Problem& problem, Contest& contest) {
  for (std::size_t a = 0; a < problem.units(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      for (const UnitPlan& kind_a : problem.options(a)) {
        for (const UnitPlan& kind_b : problem.options(b)) {
          Choice choice = contest.best();
          choice.modes[a] = kind_a;
          choice.modes[b] = kind_b;
          if (offer(choice, contest)) return true;
        }
      }
    }
  }
  return false;
}

bool frames_help(const Problem& problem, Contest& contest) {
  bool helped = false;
  for (const std::uint32_t frames : problem.frame_counts()) {
    Choice choice = contest.best();
    choice.frames = frames;
    if (!contest.spent()) helped = contest.offer(choice) || helped;
  }
  return helped;
}

}  // namespace

void refine(const Problem& problem, Contest& contest) {
  STRATA_ASSERT(contest.any());
  const std::vector<UnitPlan> kinds = kinds_of(problem);
  bool helped = true;
  while (helped && !contest.spent()) {
    helped = frames_help(problem, contest);
    helped = runs_help(problem, kinds, contest) || helped;
    if (!helped && problem.units() <= kPairsUnits) helped = pair_helps(problem, contest);
  }
}

}  // namespace strata
