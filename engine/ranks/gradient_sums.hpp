// GradientSums: what ranks together know of the gradients of a step, whenever all of them stop to
// add them up: at its end, to look at their norms, to drop some.
//
// Threads: one caller at a time (the core's lock).
//
//   sums.note_landed(param);                               // a gradient of this rank
//   sums.note_scaled(param, scaling);
//   const auto look = sums.look(lock, asked);              // or end_step(): waits for the others
//   sums.of(param).squares.value();
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/fingerprint.hpp"
#include "engine/ranks/agreement.hpp"
#include "engine/ranks/gradient_exchange.hpp"
#include "engine/ranks/machine_sums.hpp"

namespace strata {

class GradientSums final {
 public:
  // `column`: null where there is one machine.
  GradientSums(Foundation& base, GradientExchange& exchange, std::unique_ptr<Column> column)
      : base_(base),
        exchange_(exchange),
        agreement_(*base.peers, base.config.params.size()),
        landed_here_(base.config.params.size(), 0),
        scaled_(base.config.params.size()) {
    if (column) machines_.emplace(base, exchange, std::move(column));
  }

  // While this lives nothing is added to the sums: all ranks do with them what they asked for. It
  // ends the look also where that throws.
  struct EndLook {
    void operator()(GradientExchange* exchange) const { exchange->end_look(); }
  };
  using Look = std::unique_ptr<GradientExchange, EndLook>;

  // All ranks ask the same, as a number, and scale their gradients alike, or StrataError (config)
  // is thrown.
  [[nodiscard]] Look look(Lock& lock, std::uint64_t asked) STRATA_REQUIRES(core_lock);
  void end_step(Lock& lock, std::uint64_t asked) STRATA_REQUIRES(core_lock);
  // Nothing of this rank has landed since it looked.
  bool looked() const { return looked_; }
  // REQUIRES: this rank has looked.
  Agreement::Entry of(std::uint32_t param) const { return agreement_.merged(param); }
  // note_scaled() was called since it landed.
  bool is_scaled(std::uint32_t param) const {
    return scaled_[param].value() != Fingerprint().value();
  }
  // A rank that has come to where all meet, as all have, and has not said what it found.
  std::optional<std::uint32_t> late() const;

  // Of this rank's own gradients.
  void note_landed(std::uint32_t param) {
    ++landed_here_[param];
    looked_ = false;
  }
  void note_scaled(std::uint32_t param, const GradScaling& scaling) {
    scaled_[param].add(double{scaling.factor});
    scaled_[param].add(std::uint64_t{scaling.divides});
  }
  void forget(std::uint32_t param) {
    landed_here_[param] = 0;
    scaled_[param] = {};
  }
  void forget_all() {
    landed_here_.assign(landed_here_.size(), 0);
    scaled_.assign(scaled_.size(), {});
    looked_ = true;
  }

 private:
  void agree(Lock& lock, std::uint64_t asked) STRATA_REQUIRES(core_lock);

  Foundation& base_;
  GradientExchange& exchange_;
  Agreement agreement_;
  std::optional<MachineSums> machines_;     // none: there is one
  std::vector<std::uint32_t> landed_here_;  // by parameter
  std::vector<Fingerprint> scaled_;         // by parameter: all that was asked of it, in order
  bool looked_ = true;
};

}  // namespace strata
