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
// left. One that has left and adds what others send must not wait for itself.
//
// Note [Looks]
// Ranks may look at the sums before the step ends, all of them, as often. A look is a window of its
// own: it begins a new range of windows, so that it is known of each rank how often it has looked,
// whatever the number of its backward passes. A rank that ends the step where others look, or looks
// where they end it, has taken another way, and all are told.
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

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "engine/gradient_place.hpp"
#include "engine/ranks/outbox.hpp"
#include "memory/crew.hpp"
#include "optimizers/exact_sum.hpp"

namespace strata {

class GradientExchange final {
 public:
  GradientExchange(Foundation& base, Updates& updates, bool threads);
  ~GradientExchange();
  GradientExchange(const GradientExchange&) = delete;
  GradientExchange& operator=(const GradientExchange&) = delete;

  // What lands from here on is of the next backward pass of the step.
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
  // What has landed of the parameter in this step is dropped: what lands next is added to nothing.
  void forget(std::uint32_t param);
  // The next step begins; its updates will be of step `updates`, perhaps the last one's again: one
  // whose gradients were dropped had none.
  void begin_step(std::int64_t updates);

  // Of the squares of the sum, in the chunks of the parameter that this rank owns.
  ExactSum squares(std::uint32_t param) const;

  // What others say. False: it cannot be, and the session should end.
  bool piece_came(std::uint32_t from, const PeerMessage& message);
  bool piece_taken(std::uint32_t from, std::uint64_t place);
  void window_began(std::uint32_t from, std::int64_t step, std::uint32_t window);
  void step_done(std::uint32_t from, std::int64_t step) {
    reached_[from] = std::max(reached_[from], key_of(step + 1, 0, 0));
  }
  // A rank, this one or another, has no more pieces, and ends no more steps.
  void rank_left(std::uint32_t rank) { reached_[rank] |= kLeft; }

  // Starts and ends additions. True when anything moved.
  bool turn();
  // The one that this rank computes, counted from 1.
  std::int64_t step() const { return step_; }
  // This rank has ended the step, or looks: until begin_step() or end_look().
  bool meets() const { return meets_; }
  // Then: the first rank that has not come there; none: all have.
  std::optional<std::uint32_t> awaited() const;
  bool awaits(std::uint32_t rank) const { return reached_[rank] < goal_; }
  // This rank cannot go on without that one: it awaits it, or has pieces that it has still to take.
  bool needs(std::uint32_t rank) const { return awaits(rank) || outbox_.holds_for(rank); }
  // Then: that rank has ended the step where this one looks, or the other way round.
  bool parted(std::uint32_t rank) const;
  bool any_parted() const {
    for (std::uint32_t rank = 0; rank < reached_.size(); ++rank) {
      if (parted(rank)) return true;
    }
    return false;
  }
  // A gradient of this rank has waited for others for long.
  bool is_stuck() const;
  // Another rank has ended the step or looks, and this one does not.
  bool is_awaited() const;
  // Pieces of this rank that their owners have still to take. Of other ranks, the one that has come
  // the least far: it is what they wait for.
  bool waits() const { return !outbox_.empty(); }
  std::uint32_t slowest() const;

 private:
  // Step, window and number, in this order.
  using Key = std::uint64_t;
  struct Arrived {
    std::uint32_t rank = 0;
    Key key = 0;
    const std::byte* bytes = nullptr;
    Dtype dtype = Dtype::bfloat16;
    bool lies_here = false;                  // in the outbox of this rank
    std::shared_ptr<std::byte[]> kept = {};  // a copy, where it lies in no outbox

    // See Note [The exchange cannot deadlock].
    void keep(std::size_t count) {
      kept = std::make_shared<std::byte[]>(count);
      std::memcpy(kept.get(), bytes, count);
      bytes = kept.get();
    }
  };
  // What a page of gradients holds of a parameter; the unit of exchange.
  struct Part {
    std::uint32_t param = 0;
    std::uint32_t chunk = 0;
    std::size_t first = 0;  // element, in the parameter
    std::size_t count = 0;
    // Of a part that this rank owns.
    std::vector<Arrived> waiting = {};  // of each rank in the order of their keys
    Key key = 0;                        // of what was added last, and whose it was, where ...
    std::uint32_t rank = 0;
    std::int64_t landed = 0;  // ... the last step in which anything was, is this one
    bool adding = false;
    ExactSum squares = {};  // of that step
  };
  struct Job {
    std::uint32_t part = 0;
    std::vector<Arrived> pieces;  // the first ones of those that wait
    std::vector<Piece> cut;       // of the part
    GradientPlace to;
    bool adds = false;  // to what is there
    ExactSum squares = {};
  };

  static Key key_of(std::int64_t step, std::uint32_t window, std::uint32_t number);
  // Beside what a rank has reached, whose number is 0, that it has left.
  static constexpr Key kLeft = 1;
  bool has_left(std::uint32_t rank) const { return (reached_[rank] & kLeft) != 0; }
  void meet(Lock& lock, Key at) STRATA_REQUIRES(core_lock);
  void make_parts();
  Part* part_of(const PeerMessage& message);
  std::byte* take_place(Lock& lock, std::uint32_t owner, std::size_t bytes, UnitId unit)
      STRATA_REQUIRES(core_lock);
  bool land_now(Lock& lock, std::uint32_t part, const Arrived& mine) STRATA_REQUIRES(core_lock);
  void await(std::uint32_t part, const Arrived& piece);
  std::vector<Arrived> addable(const Part& part) const;
  std::unique_ptr<Job> begin(std::uint32_t part, std::vector<Arrived> pieces);
  void add(Job& job) const;
  void end(std::unique_ptr<Job> job);

  Foundation& base_;
  Updates& updates_;
  Outbox outbox_;
  std::vector<Part> parts_;
  std::vector<std::uint32_t> first_part_;  // by parameter, and one more
  std::int64_t step_ = 1;                  // counts what all ranks have ended together
  std::int64_t updates_step_ = 1;
  std::uint32_t window_ = 0;
  std::vector<Key> reached_;  // by rank: it sends nothing below this any more
  Key goal_ = 0;              // where this rank waits for all others; 0: it does not
  bool meets_ = false;
  std::vector<std::uint32_t> numbers_;  // by parameter: its gradients in this window
  std::vector<std::uint32_t> pending_;  // parts with pieces that wait
  std::int64_t full_since_ns_ = 0;      // a gradient waits for a place in the outbox; 0: none does
  std::uint32_t adding_ = 0;            // parts that are being added to
  std::unique_ptr<Crew<Job*, Job*>> crew_;  // last: its thread reads what is above
};

}  // namespace strata
