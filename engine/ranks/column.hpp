// Column: the ranks of one number, one on each machine, as one of them sees the others. Port: what
// goes from machine to machine goes through it, in calls that all ranks of the column make in the
// same order. The bindings give one over torch.distributed; tests have one within a process.
//
// Threads: one caller at a time, without the core's lock. Every call waits for the other machines,
// and throws std::runtime_error, which names the machine, if one is lost.
//
//   column.meet();                   // however long the others compute
//   column.gather(mine, all);        // what every machine has, in the order of machines
//   column.exchange(parts, mine);    // part m goes to machine m
#pragma once

#include <cstddef>
#include <span>

namespace strata {

class Column {
 public:
  virtual ~Column() = default;

  // Returns when all machines have called it. The other calls follow each other without a pause.
  virtual void meet() = 0;
  // REQUIRES: all.size() is mine.size() for each machine; the same sizes on all of them.
  virtual void gather(std::span<const std::byte> mine, std::span<std::byte> all) = 0;
  // `parts`: one for each machine, of equal sizes. `mine` gets the parts for this machine, by the
  // machine that sent them. REQUIRES: both have the same size, on all machines.
  virtual void exchange(std::span<const std::byte> parts, std::span<std::byte> mine) = 0;
};

}  // namespace strata
