// GradientExchange: gradients of all ranks meet at the owners of their chunks. Each rank puts its
// piece into memory that the others read, and says so; the owner adds the pieces in float32, in an
// order that is always the same, to the page where the sum rests.
//
// Threads: one caller at a time (the core's lock), which is given up while bytes are moved. Added
// up is by a thread of its own.
//
//   exchange.begin_window();                           // another backward begins
//   exchange.land(lock, gradient);                     // this rank's, of a whole parameter
//   exchange.end_step(lock);                           // waits until all ranks' are added
//   exchange.squares(param)                            // of what this rank owns of the sum
//   exchange.begin_step(step);
//   exchange.look(lock); ... exchange.end_look();      // likewise, ahead of more backward passes
//
// Note [Order of the sum]
// A piece has a key: the window (the backward pass of a step, counted by each rank) and the number
// of the gradient that its parameter got in that window (there is more than one where a checkpoint
// runs a backward of its own). Pieces are added by key, and within a key by rank. So with W ranks
// the global micro-batches window * W + rank are added in their order, as one rank would add them,
// and the bits are the same for every W. A rank that has nothing to add is passed over as soon as
// that is known: a later piece of it has come, or it has begun a later window, ended its step, or
// left. One that has left and adds what others send must not wait for itself. The first gradient
// of a step is told of as well: calls that all ranks make behind a step see who made none.
//
// Note [Looks]
// Ranks may look at the sums before the step ends, all of them, as often. A look is a window of its
// own: it begins a new range of windows, so that it is known of each rank how often it has looked,
// whatever the number of its backward passes. A rank that ends the step where others look, or looks
// where they end it, has taken another way, and all are told.
//
// Note [Late updates]
// With a staleness, a gradient is added to an older one whose update has not begun, and that waits
// for the end of this step. Others may have asked for the newest parameters meanwhile: see
// remote_pages.hpp, Note [Pages that lag]. So that is done only when all ranks have a gradient of
// this step; until then pieces wait.
//
// Note [The exchange cannot deadlock]
// A piece waits for pieces with a smaller key, and for those of lower ranks with the same key; a
// rank waits where its outbox is full. Pieces of number 0 alone stay in outboxes: a rank may send
// the second gradient of one parameter before the first of another, which others may wait for.
// Later numbers are copied as soon as they come, to memory beside the budget (see above: they are
// rare). Each rank sends the others in the order of their windows. Of all that are still to come,
// that of the smallest window, of the lowest rank, waits for nobody, nor does anything that its
// rank sends before it: rank by rank, each outbox empties. Sums rest in float32, so that each piece
// can be added as it comes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/gradient_place.hpp"
#include "engine/ranks/departures.hpp"
#include "engine/ranks/gradient_piece.hpp"
#include "engine/ranks/progress.hpp"
#include "memory/crew.hpp"
#include "optimizers/exact_sum.hpp"

namespace strata {

class GradientExchange final {
 public:
  GradientExchange(Foundation& base, Updates& updates, GradientCopies& copies, bool threads);
  ~GradientExchange();
  GradientExchange(const GradientExchange&) = delete;
  GradientExchange& operator=(const GradientExchange&) = delete;

  // What lands from here on is of the next backward pass of the step. Throws StrataError (config)
  // where there are too many.
  void begin_window();
  // Hands over this rank's gradient, all elements of a parameter. Its memory may be reused on
  // return.
  void land(Lock& lock, const IncomingGradient& gradient) STRATA_REQUIRES(core_lock);
  // Tells the others that this rank has no more of the step, and waits until everything is added
  // that they have, of what this one owns.
  void end_step(Lock& lock) STRATA_REQUIRES(core_lock);
  // Likewise, of what has landed so far. The step goes on behind end_look(): nothing is added ahead
  // of it. False: this rank cannot look so often in a step.
  bool look(Lock& lock) STRATA_REQUIRES(core_lock);
  void end_look();
  // Rewrites what rests of the parameter in the chunks that this rank owns. REQUIRES: all of it
  // has landed, as behind a look.
  void scale(Lock& lock, std::uint32_t param, const GradScaling& scaling)
      STRATA_REQUIRES(core_lock);
  // What has landed of the parameter in this step is dropped: what lands next is added to nothing.
  void forget(std::uint32_t param);
  // The next step begins; its updates will be of step `updates`, perhaps the last one's again: one
  // whose gradients were dropped had none.
  void begin_step(std::int64_t updates);

  // Of the squares of the sum, in the chunks of the parameter that this rank owns.
  ExactSum squares(std::uint32_t param) const;

  // Of several machines (machine_sums.hpp): parts that this rank owns, in an order that the layout
  // fixes, units from the last to the first; and how many elements each has.
  std::vector<std::uint32_t> owned_parts() const;
  std::size_t count_of(std::uint32_t part) const { return parts_[part].count; }
  // What there is of one in this step: something that other machines do not have, or the sum of all
  // machines and no more.
  enum class Has : std::uint8_t { none, fresh, total };
  Has has(std::uint32_t part) const {
    if (parts_[part].landed != step_) return Has::none;
    return parts_[part].total ? Has::total : Has::fresh;
  }
  // Copies what there is. REQUIRES: has(part) is not none; nothing is being added.
  void read(Lock& lock, std::uint32_t part, float* to) STRATA_REQUIRES(core_lock);
  // The sum of all machines takes its place. REQUIRES: nothing is being added.
  void replace(Lock& lock, std::uint32_t part, const float* from) STRATA_REQUIRES(core_lock);

  // Of updates that begin in the backward. The step that lands now, by a count of all ranks; sums
  // that anything was added to, since the start; whether all that ranks have of the chunk is in its
  // sums, as far as is known. REQUIRES of the last: all have completed its unit.
  std::int64_t step() const { return step_; }
  std::uint64_t added() const { return added_; }
  bool is_whole(std::uint32_t chunk) const;
  // Updates get what has landed of the chunk in this step. False: they have.
  bool hand_over(std::uint32_t chunk);

  // What others say. False: it cannot be, and the session should end.
  bool piece_came(std::uint32_t from, const PeerMessage& message);
  bool piece_taken(std::uint32_t from, std::uint64_t place);
  bool window_began(std::uint32_t from, const PeerMessage& message);
  bool step_done(std::uint32_t from, const PeerMessage& message);
  // A rank, this one or another, has no more pieces, and ends no more steps.
  void rank_left(std::uint32_t rank) { progress_.leave(rank); }
  bool has_left(std::uint32_t rank) const { return progress_.has_left(rank); }
  // How far it has come, as far as is known here: twice the step that it is in, and one more where
  // it has begun a backward pass of it. No rank is two steps ahead of another.
  std::int64_t place_of(std::uint32_t rank) const {
    const Key reached = rank == base_.peers->rank() ? here() : progress_.reached(rank);
    const std::int64_t step = step_ + (reached >= key_of(step_ + 1, 0, 0) ? 1 : 0);
    const bool begun = reached >= key_of(step, 1, 0) || progress_.has_landed(rank, step);
    return 2 * step + (begun ? 1 : 0);
  }

  // Starts and ends additions. True when anything moved.
  bool turn();
  // This rank has ended the step, or looks: until begin_step() or end_look().
  bool meets() const { return meets_; }
  // Then: the first rank that has not come there; none: all have.
  std::optional<std::uint32_t> awaited() const { return progress_.awaited(); }
  // That one has not come there.
  bool awaits(std::uint32_t rank) const { return progress_.awaits(rank); }
  // This rank cannot go on without that one: it awaits it, or has pieces that it has still to take.
  bool needs(std::uint32_t rank) const { return awaits(rank) || departures_.holds_for(rank); }
  // It has a gradient of this step, as far as is known here.
  bool has_gradient(std::uint32_t rank) const { return progress_.has_landed(rank, step_); }
  // Then: that rank has ended the step where this one looks, or the other way round.
  bool parted(std::uint32_t rank) const { return progress_.parted(rank, here()); }
  // A gradient of this rank has waited for others for long.
  bool is_stuck() const { return departures_.is_stuck(); }
  // Another rank has ended the step or looks, and this one does not.
  bool is_awaited() const { return progress_.is_awaited(); }
  // Pieces of this rank that their owners have still to take. Of other ranks, the one that has come
  // the least far: it is what they wait for.
  bool waits() const { return !departures_.empty(); }
  std::uint32_t slowest() const { return progress_.slowest(); }
  // Gradients that were copied beside the budget, since the start: see Note [The exchange cannot
  // deadlock].
  std::uint64_t kept_bytes() const { return departures_.kept_bytes(); }

 private:
  using Key = GradientKey;
  // What a page of gradients holds of a parameter; the unit of exchange.
  struct Part {
    std::uint32_t param = 0;
    std::uint32_t chunk = 0;
    std::size_t first = 0;  // element, in the parameter
    std::size_t count = 0;
    // Of a part that this rank owns.
    std::vector<GradientPiece> waiting = {};  // of each rank in the order of their keys
    Key key = 0;                              // of what was added last, and whose it was, where ...
    std::uint32_t rank = 0;
    std::int64_t landed = 0;       // ... the last step in which anything was, is this one
    std::uint32_t gradients = 0;   // so many were, in that step
    std::int64_t handed_over = 0;  // the last step in which updates got it
    bool adding = false;
    bool total = false;     // it is the sum of all machines: see Note [Looks of machines]
    ExactSum squares = {};  // of that step
  };
  struct Job {
    std::uint32_t part = 0;
    std::vector<GradientPiece> pieces;  // the first ones of those that wait
    std::vector<Piece> cut;             // of the part
    GradientPlace to;
    bool adds = false;  // to what is there
    ExactSum squares = {};
  };

  // How far this rank has come, but for where it meets the others.
  Key here() const { return key_of(step_, window_, 0); }
  void meet(Lock& lock, Key at) STRATA_REQUIRES(core_lock);
  void begin_landing(Lock& lock) STRATA_REQUIRES(core_lock);
  void make_parts();
  bool is_place(const PeerMessage& message) const;
  std::optional<std::uint32_t> part_of(const PeerMessage& message) const;
  GradientPlace open_place(Lock& lock, const Part& part, std::span<const Piece> cut, bool adds)
      STRATA_REQUIRES(core_lock);
  bool land_now(Lock& lock, std::uint32_t part, const GradientPiece& mine)
      STRATA_REQUIRES(core_lock);
  void tell(std::uint32_t to, std::uint32_t part, const GradientPiece& piece);
  void await(std::uint32_t part, const GradientPiece& piece);
  std::vector<GradientPiece> addable(std::uint32_t part) const;
  std::unique_ptr<Job> begin(std::uint32_t part, std::vector<GradientPiece> pieces);
  void add(Job& job) const;
  void end(std::unique_ptr<Job> job);

  Foundation& base_;
  Updates& updates_;
  const bool early_;  // updates begin in the backward: they get what is whole
  Departures departures_;
  std::vector<Part> parts_;
  std::vector<std::uint32_t> first_part_;             // by parameter, and one more
  std::vector<std::vector<std::uint32_t>> parts_of_;  // by chunk
  std::int64_t step_ = 1;                             // counts what all ranks have ended together
  std::int64_t updates_step_ = 1;
  std::uint32_t window_ = 0;
  Progress progress_;
  bool meets_ = false;
  std::vector<std::uint32_t> numbers_;      // by parameter: its gradients in this window
  std::vector<std::uint32_t> pending_;      // parts with pieces that wait
  std::uint32_t adding_ = 0;                // parts that are being added to
  std::uint64_t added_ = 0;                 // ... were
  std::unique_ptr<Crew<Job*, Job*>> crew_;  // last: its thread reads what is above
};

}  // namespace strata
