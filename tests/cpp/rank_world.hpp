// What the ranks of a simulated training share: a machine, whose turn it is, and what they should
// learn.
//
// Threads: those of the ranks, of which one runs at a time.
//
//   World world(seed, Trouble::late);
//   promise(norm == expected, "another norm");            // ends the run where it does not hold
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "doubles/loopback.hpp"
#include "doubles/turns.hpp"
#include "doubles/virtual_clock.hpp"
#include "promise.hpp"
#include "rank_oracle.hpp"
#include "rank_script.hpp"
#include "rank_simulator.hpp"

namespace strata {

// What the ranks share: a machine, whose turn it is, and what they should learn.
struct World {
  World(std::uint64_t seed, Trouble its_trouble)
      : random(seed),
        trouble(its_trouble),
        script(write_script(random, trouble)),
        oracle(script.model, script.initial),
        machine(script.ranks),
        turns(script.ranks, random()) {
    result.ranks.resize(script.ranks);
    result.culprit = script.culprit;
    doing.resize(script.ranks, "begin");
    applied.emplace_back(script.model.params.size(), 0);
  }

  std::size_t drawn(std::size_t end) { return below(random, end); }
  // In words: what each rank does.
  std::string hang() const {
    std::string all = "a hang:";
    for (const char* of : doing) all += std::string(" ") + of;
    return all;
  }

  std::mt19937_64 random;
  const Trouble trouble;
  const Script script;
  RankOracle oracle;
  Loopback machine;
  Turns turns;
  VirtualClock clock;
  RanksResult result;
  std::uint32_t filled = 0;
  std::vector<StepResult> expected;  // by step: what its first rank was told
  std::vector<bool> had_gradients;   // likewise: it had any
  // By steps that had gradients, and were made: how many each parameter has had by then.
  std::vector<std::vector<std::uint32_t>> applied;
  // By parameter: gradients, and the squares of their sum, when all last looked.
  std::vector<std::pair<std::uint32_t, double>> looked;
  std::uint64_t asked = 0;                // things that one rank did for all
  std::vector<const char*> doing;         // by rank: for who looks at a hang
  std::uint64_t last_call = 0;            // when a call of a session ended
  std::uint64_t trouble_in = UINT64_MAX;  // turns of the culprit until it dies, or a bit changes
};

}  // namespace strata
