// ReleasedGroups: the hyperparameters of releases whose updates are not over. An update computes
// with those of the step that its gradient belongs to, however late it runs, so each release keeps
// one copy, shared by its updates, until the last of them lets go of it.
//
// Threads: one caller at a time (the core's lock). Workers read through `of()`: a copy stays where
// it is while anybody holds it.
//
//   const ReleaseId id = released.keep(groups);    // held once, by the caller
//   released.hold(id);                             // for an update that is queued
//   span.hyper = &released.of(id, group);
//   released.drop(id);                             // once for each hold
//
// There are never more copies than updates and one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "optimizers/rule.hpp"

namespace strata {

enum class ReleaseId : std::uint32_t {};
inline constexpr ReleaseId kNoRelease{UINT32_MAX};

class ReleasedGroups final {
 public:
  ReleaseId keep(std::span<const Hyper> groups);
  void hold(ReleaseId id);
  void drop(ReleaseId id);
  const Hyper& of(ReleaseId id, std::uint32_t group) const;

 private:
  struct Kept {
    std::vector<Hyper> groups;  // never resized while it is held
    std::uint32_t holders = 0;
  };
  Kept& held(ReleaseId id);

  std::vector<Kept> kept_;
  std::vector<ReleaseId> free_;
};

}  // namespace strata
