// Jams: which ranks wait for each other in a circle, for room in their outboxes.
//
// Threads: one caller at a time (the core's lock).
//
//   const std::uint32_t outbox = Jams::gradients_of(2);
//   jams.set(outbox, {.is = true, .number = 7, .front = place});   // rank 2 said so
//   jams.wait(outbox, 7, awaited);            // who has what lies in front: it waits for those
//   jams.in_circle(outbox)                    // it waits, by way of others, for itself
//
// Note [Jams]
// Gradients that wait for those of other ranks lie in outboxes, sums lie in others and wait for
// those of other machines, and ranks that come to units in different orders can fill them with what
// waits for each other. A rank that finds no place in one for a while, in which nothing that lies
// there is taken either, says to all that it is jammed, and what lies in front: no place is free
// again before that one. Who has that says for which outboxes it waits: for that of a rank whose
// gradient has not come, for that of a sum which has not, or for one in which the sum is to lie.
// Where it waits for itself by way of outboxes that are jammed, too, and not for a place, it is
// copied away, to memory beside the budget. Where ranks wait for one that computes, or for the
// network, nothing is copied: they wait.
//
// So nothing waits for ever. Whose gradient or sum has not come computes, and it will come, or
// finds no place itself. So from each full outbox the way leads to another one, and in the end
// round a circle of which all are jammed. What waits for a place waits for an outbox of sums, and
// they wait for other sums, and not for places: so on each circle something can be copied. A sum
// that waits for the page where it will rest waits for no outbox.
//
// What is said of a jam has its number: it may come ahead of the jam, or behind its end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace strata {

// Of all outboxes, some: a bit for each.
class OutboxSet final {
 public:
  explicit OutboxSet(std::uint32_t outboxes) : words_((outboxes + kBits - 1) / kBits, 0) {}

  void add(std::uint32_t one) { words_[one / kBits] |= std::uint64_t{1} << one % kBits; }
  bool has(std::uint32_t one) const { return (words_[one / kBits] >> one % kBits & 1) != 0; }
  // Of 64 each; what goes into a message.
  std::size_t words() const { return words_.size(); }
  std::uint64_t word(std::size_t number) const { return words_[number]; }
  void set_word(std::size_t number, std::uint64_t bits) { words_[number] = bits; }
  bool operator==(const OutboxSet&) const = default;

 private:
  static constexpr std::uint32_t kBits = 64;
  std::vector<std::uint64_t> words_;
};

class Jams final {
 public:
  // Of an outbox.
  struct Jam {
    bool is = false;
    std::uint32_t number = 0;  // counted by its rank, from 1
    std::uint64_t front = 0;   // where that lies: from the beginning of the rank's memory
  };

  explicit Jams(std::uint32_t ranks)
      : jams_(std::size_t{2} * ranks),
        waits_(jams_.size(), Waits{.awaited = OutboxSet(2 * ranks)}) {}

  // Every rank has two.
  static std::uint32_t gradients_of(std::uint32_t rank) { return 2 * rank; }
  static std::uint32_t sums_of(std::uint32_t rank) { return 2 * rank + 1; }
  static std::uint32_t rank_of(std::uint32_t outbox) { return outbox / 2; }
  std::uint32_t outboxes() const { return static_cast<std::uint32_t>(jams_.size()); }

  const Jam& of(std::uint32_t outbox) const { return jams_[outbox]; }
  bool any() const { return std::ranges::any_of(jams_, &Jam::is); }
  void set(std::uint32_t outbox, const Jam& jam) { jams_[outbox] = jam; }

  // For what that waits which lay in front in that jam, as was said last; none: nothing was.
  OutboxSet awaited(std::uint32_t outbox, std::uint32_t number) const {
    const Waits& waits = waits_[outbox];
    return waits.number == number ? waits.awaited : OutboxSet(outboxes());
  }
  // What is said of an older jam than was said of before comes too late.
  void wait(std::uint32_t outbox, std::uint32_t number, OutboxSet awaited) {
    if (number < waits_[outbox].number) return;
    waits_[outbox] = {.number = number, .awaited = std::move(awaited)};
  }
  bool in_circle(std::uint32_t outbox) const {
    OutboxSet seen(outboxes());
    std::vector<std::uint32_t> next = {outbox};
    while (!next.empty()) {
      const std::uint32_t at = next.back();
      next.pop_back();
      if (!jams_[at].is) continue;  // its rank goes on
      const OutboxSet awaited = this->awaited(at, jams_[at].number);
      if (awaited.has(outbox)) return true;
      for (std::uint32_t of = 0; of < outboxes(); ++of) {
        if (!awaited.has(of) || seen.has(of)) continue;
        seen.add(of);
        next.push_back(of);
      }
    }
    return false;
  }

 private:
  struct Waits {
    std::uint32_t number = 0;
    OutboxSet awaited;
  };

  std::vector<Jam> jams_;     // by outbox
  std::vector<Waits> waits_;  // likewise
};

}  // namespace strata
