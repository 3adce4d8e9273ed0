// Collectors: to whom the pieces of a part of a gradient go. As they are, to the owner, from every
// rank. Or, where machines add up what is theirs first, to one rank of each machine: the owner, or
// where that is of another machine a deputy, which sends the sum on. Pure functions of the
// configuration, so that all ranks know the same.
//
// Threads: constant once it is made.
//
//   const Collectors collectors(config);
//   collectors.of(part, owner);               // this rank's piece goes there
//   collectors.members();                     // whose pieces the owner adds, in their order
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/config.hpp"

namespace strata {

class Collectors final {
 public:
  explicit Collectors(const Config& config)
      : rank_(config.rank), by_machine_(config.machine_sums && !config.machines.empty()) {
    std::map<std::string, std::uint32_t> known;
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) {
      const std::string name =
          by_machine_ ? config.machine(rank) : std::to_string(rank);  // else each by itself
      const auto found = known.emplace(name, members()).first;
      if (found->second == members_.size()) members_.emplace_back();
      members_[found->second].push_back(rank);
      member_of_.push_back(found->second);
    }
  }

  bool by_machine() const { return by_machine_; }
  // Machines, in the order of their first ranks, or ranks.
  std::uint32_t members() const { return static_cast<std::uint32_t>(members_.size()); }
  std::uint32_t member_of(std::uint32_t rank) const { return member_of_[rank]; }
  const std::vector<std::uint32_t>& ranks(std::uint32_t member) const { return members_[member]; }
  // It has something to add up: what it sends owners are sums. And that of this rank.
  bool adds_up(std::uint32_t member) const { return members_[member].size() > 1; }
  bool adds_up_here() const { return adds_up(member_of_[rank_]); }
  // Of the machine of this rank; of this one alone where it sends to owners itself.
  const std::vector<std::uint32_t>& here() const { return members_[member_of_[rank_]]; }
  // Who sends the owner what the member adds to a part: its ranks in turn.
  std::uint32_t sender(std::uint32_t part, std::uint32_t member) const {
    return members_[member][part % members_[member].size()];
  }
  // Where this rank's piece goes.
  std::uint32_t of(std::uint32_t part, std::uint32_t owner) const {
    const std::uint32_t mine = member_of_[rank_];
    if (!adds_up_here() || member_of_[owner] == mine) return owner;
    return sender(part, mine);
  }

 private:
  std::uint32_t rank_;
  bool by_machine_;
  std::vector<std::vector<std::uint32_t>> members_;
  std::vector<std::uint32_t> member_of_;
};

}  // namespace strata
