// MachineSums: gradients of several machines that each hold all of the state. What the ranks of a
// machine have landed is added up by the owner of each chunk (gradient_exchange.hpp). Then the
// owners of a chunk, one on each machine, add up what their machines have, and all of them have the
// same sum: every machine updates everything, and no parameter crosses.
//
// Threads: one caller at a time (the core's lock), which is given up while bytes cross.
//
//   MachineSums sums(base, exchange, std::move(column));
//   landed = sums.add_up(lock, asked, landed);     // of this rank; then of its column
//
// Note [Order of machines]
// A part is cut into as many ranges as there are machines. Each machine gets its range of what all
// have, adds it in float32 in the order of machines, and sends the sum to all: as many bytes as a
// reduce-scatter and an all-gather, and the transport never adds. So the bits depend on the number
// of machines, and neither on the ranks of each nor on the transport.
//
// Note [Nothing used]
// Every call begins with what each machine has: a byte for each part, in the order of the layout.
// All ranks of the column then make the same calls. A part that no machine has is left out, and a
// machine that has none of a part adds nothing.
//
// Note [Looks of machines]
// After a look all machines have the sum of all. What lands then adds to it on the first machine,
// and takes its place on the others: the next sum is right, and counts nothing twice. The sum of a
// look stays one: bits depend on the backward passes before it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/ranks/column.hpp"
#include "engine/ranks/gradient_exchange.hpp"

namespace strata {

class MachineSums final {
 public:
  // REQUIRES: there are several machines.
  MachineSums(Foundation& base, GradientExchange& exchange, std::unique_ptr<Column> column);

  // Returns when the parts that this rank owns have the sums of all machines. All ranks call it,
  // and ask the same, or StrataError (config) is thrown. `landed`: by parameter, the gradients of
  // this rank. Returns those of its column. REQUIRES: nothing is added meanwhile.
  std::vector<std::uint32_t> add_up(Lock& lock, std::uint64_t asked,
                                    std::span<const std::uint32_t> landed)
      STRATA_REQUIRES(core_lock);

 private:
  // Of one call of add_up(): what every machine has, in the order of machines.
  struct Found {
    std::vector<std::byte> all;
    std::size_t bytes = 0;  // of each
  };
  // Parts that cross together, one after the other.
  struct Block {
    std::vector<std::uint32_t> parts;  // places in parts_
    std::vector<std::size_t> first;    // of each, its first element in the block
    std::size_t count = 0;             // of elements
  };

  Found gather(Lock& lock, std::uint64_t asked, std::span<const std::uint32_t> landed)
      STRATA_REQUIRES(core_lock);
  void check(const Found& found, std::uint64_t asked) const;
  GradientExchange::Has has(const Found& found, std::uint32_t machine, std::size_t part) const;
  bool crosses(const Found& found, std::size_t part) const;
  void send(Lock& lock, const Found& found, const Block& block) STRATA_REQUIRES(core_lock);
  void add(const Found& found, const Block& block, std::size_t range);
  void carry(Lock& lock, const std::function<void()>& call) STRATA_REQUIRES(core_lock);

  Foundation& base_;
  GradientExchange& exchange_;
  const std::unique_ptr<Column> column_;
  const std::vector<std::uint32_t> parts_;  // of the exchange, that this rank owns, in their order
  std::vector<float> mine_, theirs_;        // of a block: by machine, its ranges
};

}  // namespace strata
