// MachineSums: gradients that are added up inside a machine before anything of them goes to another
// one. One rank collects the pieces of a part (collectors.hpp). When all are there that will be, of
// one key, they are added in float32, in the order of the ranks, and the sum goes on as one piece,
// in this rank's outbox. One that is alone goes on as it is.
//
// Threads: one caller at a time (the core's lock). Added up is by a thread of its own.
//
//   MachineSums sums(base, departures, progress, collectors, false, send);
//   sums.await({.number = 7, .owner = 2, .count = 4096}, piece);  // of a rank of this machine
//   sums.turn();
//   sums.reached();                            // no sum of a smaller key will come from here
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "engine/ranks/collectors.hpp"
#include "engine/ranks/departures.hpp"
#include "engine/ranks/gradient_piece.hpp"
#include "engine/ranks/jams.hpp"
#include "engine/ranks/progress.hpp"
#include "memory/crew.hpp"

namespace strata {

class MachineSums final {
 public:
  struct Part {
    std::uint32_t number = 0;
    std::uint32_t owner = 0;
    std::size_t count = 0;  // elements
  };
  // A sum that lies in this rank's outbox, taken for the owner.
  using Send = std::function<void(const Part&, const GradientPiece& sum)>;

  MachineSums(Foundation& base, Departures& departures, const Progress& progress,
              const Collectors& collectors, bool threads, Send send);
  ~MachineSums();
  MachineSums(const MachineSums&) = delete;
  MachineSums& operator=(const MachineSums&) = delete;

  void await(const Part& part, GradientPiece piece);
  // Starts and ends additions. True when anything moved.
  bool turn();
  // No sum of a smaller key will be sent on from here: of any part, or of that one.
  GradientKey reached() const;
  GradientKey reached(std::uint32_t part) const;
  // Of what lies at that place in the outbox of a rank and waits here: for which outboxes. None: it
  // is not here, or is being added. See jams.hpp.
  std::vector<std::uint32_t> awaited(std::uint32_t rank, const std::byte* place) const;
  // That is copied, unless it waits for a place.
  void make_room(std::uint32_t rank, const std::byte* place);

 private:
  struct Collected {
    Part part;
    std::vector<GradientPiece> waiting = {};  // of each rank in the order of their keys
    bool adding = false;                      // the first ones of them
  };
  struct Job {
    Part part;
    std::vector<GradientPiece> pieces;
    Dtype dtype = Dtype::float32;
    std::byte* to = nullptr;
  };

  GradientKey members_reached() const;
  std::vector<GradientPiece> complete(const Collected& collected) const;
  std::vector<std::uint32_t> missing(const Collected& collected) const;
  const Collected* find(std::uint32_t rank, const std::byte* place) const;
  void add(const Job& job) const;
  void end(std::unique_ptr<Job> job);

  Foundation& base_;
  Departures& departures_;
  const Progress& progress_;
  const Collectors& collectors_;
  const Send send_;
  std::map<std::uint32_t, Collected> collected_;  // by part: what is still to be sent on
  std::vector<std::uint32_t> order_;              // parts, in the order in which they came
  std::uint32_t adding_ = 0;
  std::unique_ptr<Crew<Job*, Job*>> crew_;  // last: its thread reads what is above
};

}  // namespace strata
