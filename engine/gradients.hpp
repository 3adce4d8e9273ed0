// Gradients: what has landed since the last step, and its norms. They stay where autograd left them
// (lent_gradients.hpp), or rest in pages, or, where they have none, in frames of host memory that
// are set aside (gradient_frames.hpp).
//
// Threads: one caller at a time (the core's lock), which is given up while bytes are moved.
//
//   gradients.land(lock, param, data, Dtype::bfloat16, stream);
//   double norm = gradients.norm();
//   gradients.end_step();
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/between_steps.hpp"
#include "engine/foundation.hpp"
#include "engine/gradient_copies.hpp"
#include "engine/landing.hpp"
#include "engine/ranks/early_units.hpp"
#include "engine/ranks/gradient_exchange.hpp"
#include "engine/ranks/gradient_sums.hpp"
#include "engine/updates.hpp"

namespace strata {

class Gradients final {
 public:
  // `threads`: something may run beside the caller.
  Gradients(Foundation& base, BetweenSteps& between, Updates& updates, bool threads,
            std::unique_ptr<Column> column);

  // Takes numel contiguous elements of the device's memory, which work submitted so far on `stream`
  // wrote. Where `from` owns them they are lent, and may be kept until they have been used; else
  // they may be reused on return.
  void land(Lock& lock, std::uint32_t param, std::shared_ptr<const std::byte> from, Dtype dtype,
            Stream stream) STRATA_REQUIRES(core_lock);
  // What lands from here on is of another backward pass: ranks add up theirs by passes. Throws
  // StrataError (config), as land() does, behind a step that was refused on all ranks.
  void begin_window();
  // Of several ranks: waits until the gradients of all have landed, for a step that is to do
  // `asked`; norms are those of the sums from here on. Throws StrataError (config) where another
  // rank's step is to do something else.
  void agree(Lock& lock, std::uint64_t asked) STRATA_REQUIRES(core_lock);
  // Of several ranks: waits until what has landed of all so far is added up, so that its norms are
  // known and it can be scaled. All ranks do so, as often in a step. False: nothing has landed here
  // since the last time, unless it is `wanted` all the same, or gradients may be used at any time.
  bool look(Lock& lock, bool wanted = false) STRATA_REQUIRES(core_lock);
  // Where those of other ranks meet, and what all know of them; null: this rank is alone.
  GradientExchange* exchange() { return exchange_ ? &*exchange_ : nullptr; }
  const GradientExchange* exchange() const { return exchange_ ? &*exchange_ : nullptr; }
  const GradientSums* sums() const { return sums_ ? &*sums_ : nullptr; }
  // Which units all ranks have completed; null: this rank is alone, or updates begin at step().
  EarlyUnits* early() { return early_ ? &*early_ : nullptr; }
  // The same in the place of what has landed of the parameter, to which nothing is added. Throws
  // StrataError (config) where gradients have no pages.
  void replace(Lock& lock, std::uint32_t param, const std::byte* from, Dtype dtype, Stream stream)
      STRATA_REQUIRES(core_lock);
  // Multiplies the parameter's gradient with a factor, or divides it, and rounds it to its dtype.
  // The first time no page moves: readers and updates do it. Another time what was asked before is
  // written. Returns false, with nothing done, if a GPU alone reaches what would be written. Throws
  // StrataError (config) where none has landed. REQUIRES: the factor is finite or NaN, no division
  // is by zero, and no finite element becomes infinite.
  bool scale(Lock& lock, std::uint32_t param, const GradScaling& scaling)
      STRATA_REQUIRES(core_lock);
  // Waits until there is room for the gradient. False: there is none, and no update will make any,
  // so that Steps::complete() has to be called for other units first.
  bool fits(Lock& lock, std::uint32_t param) STRATA_REQUIRES(core_lock);
  // Elements [offset, offset + values.size()) of a gradient that has landed.
  void read(Lock& lock, std::uint32_t param, std::size_t offset, std::span<float> values)
      STRATA_REQUIRES(core_lock);
  // Throws StrataError (config) where they were used already: by an update that began in the
  // backward, or added to older ones. Of several ranks all do so that have any; `wanted`: this one
  // does though it has none, like all of them.
  void drop(Lock& lock, bool wanted) STRATA_REQUIRES(core_lock);
  // Those of a step, behind agree().
  void drop_all(Lock& lock) STRATA_REQUIRES(core_lock);
  // Forgets the gradients of these parameters alone, those that have any: ranks meet once for all.
  // Throws where gradients have no pages.
  void drop(Lock& lock, std::span<const std::uint32_t> params) STRATA_REQUIRES(core_lock);
  // All of them, whatever was used. REQUIRES: none was added to one that waits for its update.
  void forget(Lock& lock) STRATA_REQUIRES(core_lock);

  // Gradients of the parameter that landed since the last step.
  std::uint32_t count(std::uint32_t param) const { return landed_[param]; }
  bool any() const { return landed_params_ != 0; }
  // Some are on their way to their place.
  bool any_landing() const { return landings_ != 0; }
  // Of the squares of the parameter's newest gradient, also where a step has used it: its pieces
  // are added exactly and rounded once, however pages, chunks and owners group them. Where it was
  // scaled, as if the last result had not been rounded, and none in float32.
  // Of ranks that take the mean of their gradients, it is that of the mean.
  // Throws StrataError (config) where ranks are still to add theirs.
  double sum_squares(std::uint32_t param) const;
  const GradScaling& scaling(std::uint32_t param) const { return scalings_[param]; }
  std::span<const GradScaling> scalings() const { return scalings_; }
  // Of all of them, and of each unit's: parameters in order, so that the sums do not depend on the
  // order of arrival.
  double norm() const;
  std::vector<double> unit_norms() const;
  // The step that the gradients that land now belong to; the first is 1.
  std::int64_t step() const { return step_; }
  // Every one of the unit is used: its update begins. False: there is none that was not.
  bool use(UnitId unit);
  // Whether use() has taken one of the parameter since the last step, or one of any.
  bool used(std::uint32_t param) const { return used_[param]; }
  bool any_used() const { return used_params_ != 0; }

  // Nothing counts as used from here on.
  void forget_used() {
    used_.assign(used_.size(), false);
    used_params_ = 0;
  }
  // The updates of what has landed are released: what lands next is of the next step.
  void end_step() {
    forget_landed();
    ++step_;
  }
  // The last step is over, whatever became of its gradients.
  void begin_step() {
    if (exchange_) exchange_->begin_step(step_);
  }
  // By parameter: a gradient has landed since the last step.
  std::vector<bool> landed() const;

  bool turn() { return copies_.turn(); }

 private:
  // What ranks can be asked for beside a step, as numbers that no step's is.
  static constexpr std::uint64_t kLook = 1, kDropAll = 2, kDropSome = 3;

  void land_now(Lock& lock, const IncomingGradient& gradient) STRATA_REQUIRES(core_lock);
  void drop_one(Lock& lock, std::uint32_t param) STRATA_REQUIRES(core_lock);
  void forget_landed();
  void refuse_merged(std::uint32_t chunk) const;
  void refuse_used() const;
  void refuse_shared(std::uint32_t param) const;
  void refuse_behind_end() const;
  void refuse_hidden(std::uint32_t param) const;
  GradientSums::Look meet_others(Lock& lock, std::uint64_t asked) STRATA_REQUIRES(core_lock);
  void take_sums();
  void refuse_without_pages(std::uint32_t param, const char* what) const;
  void refuse_where_none_landed(std::uint32_t param) const;
  bool write_scaled(Lock& lock, std::uint32_t param) STRATA_REQUIRES(core_lock);
  void discard_pages(Lock& lock, std::uint32_t chunk) STRATA_REQUIRES(core_lock);
  std::vector<bool> touched_chunks() const;
  void read_piece(Lock& lock, std::uint32_t param, const Piece& piece, float* values)
      STRATA_REQUIRES(core_lock);

  Foundation& base_;
  BetweenSteps& between_;
  Updates& updates_;
  GradientCopies copies_;
  Landing landing_;
  std::optional<GradientExchange> exchange_;  // none: this rank is alone
  std::optional<GradientSums> sums_;          // likewise
  std::optional<EarlyUnits> early_;           // none: as early() says
  std::vector<std::uint32_t> landed_;         // by parameter: since the last step
  std::vector<double> sum_squares_;           // by parameter: of what landed
  std::vector<GradScaling> scalings_;         // by parameter: of what rests
  std::vector<bool> used_;                    // by parameter
  std::size_t landed_params_ = 0;             // of which any has landed
  std::size_t used_params_ = 0;
  std::uint32_t landings_ = 0;  // under way
  std::int64_t step_ = 1;
};

}  // namespace strata
