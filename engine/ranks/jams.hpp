// Jams: which ranks wait for each other in a circle, for room in their outboxes.
//
// Threads: one caller at a time (the core's lock).
//
//   jams.set(Jams::gradients_of(2), true);    // rank 2 said so: that outbox is full, and stays it
//   jams.wait(0, Jams::gradients_of(2), awaited);  // at rank 0 lies what is in it: it waits for
//   those jams.in_circle(Jams::gradients_of(2))     // it waits, by way of others, for itself
//
// Note [Jams]
// Gradients that wait for those of other ranks lie in outboxes, sums lie in others and wait for
// those of other machines, and ranks that come to units in different orders can fill them with what
// waits for each other. A rank that finds no place in one for a while, in which nothing that lies
// there is taken either, says to all that it is jammed. Then all say for which outboxes what lies
// in it waits: for that of a rank whose gradient has not come, for that of a sum which has not, or
// for one in which the sum is to lie. Where it waits for itself by way of outboxes that are jammed,
// too, what waits in it for a gradient or a sum is copied away, to memory beside the budget. Where
// ranks wait for one that computes, or for the network, nothing is copied: they wait.
//
// So nothing waits for ever. Whose gradient or sum has not come computes, and it will come, or
// finds no place itself. So from each full outbox the way leads to another one, and in the end
// round a circle of which all are jammed. What waits for a place waits for an outbox of sums, and
// they wait for other sums, and not for places: so on each circle something can be copied. A sum
// that waits for the page where it will rest waits for no outbox.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace strata {

// Of all outboxes, some: a bit for each.
class OutboxSet final {
 public:
  explicit OutboxSet(std::uint32_t outboxes) : words_((outboxes + kBits - 1) / kBits, 0) {}

  void add(std::uint32_t one) { words_[one / kBits] |= std::uint64_t{1} << one % kBits; }
  void add(const OutboxSet& others) {
    for (std::size_t i = 0; i < words_.size(); ++i) words_[i] |= others.words_[i];
  }
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
  explicit Jams(std::uint32_t ranks) : jammed_(std::size_t{2} * ranks, false) {}

  // Every rank has two.
  static std::uint32_t gradients_of(std::uint32_t rank) { return 2 * rank; }
  static std::uint32_t sums_of(std::uint32_t rank) { return 2 * rank + 1; }
  std::uint32_t outboxes() const { return static_cast<std::uint32_t>(jammed_.size()); }

  bool is(std::uint32_t outbox) const { return jammed_[outbox]; }
  bool any() const { return std::ranges::find(jammed_, true) != jammed_.end(); }
  // For what it waits is to be said again.
  void set(std::uint32_t outbox, bool is) {
    jammed_[outbox] = is;
    std::erase_if(awaited_, [outbox](const auto& entry) { return entry.first.second == outbox; });
    circles_.clear();
  }
  // What lies in it and is awaited at that rank waits for those.
  void wait(std::uint32_t host, std::uint32_t outbox, OutboxSet awaited) {
    awaited_.insert_or_assign({host, outbox}, std::move(awaited));
    circles_.clear();
  }
  // As the rank said last; none: it has not.
  OutboxSet awaited(std::uint32_t host, std::uint32_t outbox) const {
    const auto found = awaited_.find({host, outbox});
    return found == awaited_.end() ? OutboxSet(outboxes()) : found->second;
  }
  bool in_circle(std::uint32_t outbox) {
    if (circles_.empty()) {
      for (std::uint32_t of = 0; of < outboxes(); ++of) circles_.push_back(awaits_itself(of));
    }
    return circles_[outbox];
  }

 private:
  bool awaits_itself(std::uint32_t outbox) const {
    std::vector<bool> seen(outboxes(), false);
    std::vector<std::uint32_t> next = {outbox};
    while (!next.empty()) {
      const std::uint32_t at = next.back();
      next.pop_back();
      if (!jammed_[at]) continue;  // its rank goes on
      OutboxSet awaited(outboxes());
      for (const auto& [way, by_host] : awaited_) {
        if (way.second == at) awaited.add(by_host);
      }
      if (awaited.has(outbox)) return true;
      for (std::uint32_t of = 0; of < outboxes(); ++of) {
        if (!awaited.has(of) || seen[of]) continue;
        seen[of] = true;
        next.push_back(of);
      }
    }
    return false;
  }

  std::vector<bool> jammed_;                                              // by outbox
  std::map<std::pair<std::uint32_t, std::uint32_t>, OutboxSet> awaited_;  // by host, and outbox
  std::vector<bool> circles_;  // by outbox; empty: to be found again
};

}  // namespace strata
