// Why budgets cannot work: the tier, the moment and the unit, the bytes that are needed, those that
// there are and those that would do. Whoever plans fills it in; text() alone words it.
//
// Threads: plain values.
//
//   Refusal refusal{.lack = Lack::slots, .tier = Tier::ssd, .needed_bytes = needed, ...};
//   throw StrataError(to_error(refusal));
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory/result.hpp"
#include "memory/units.hpp"

namespace strata {

// What the tier has too little room for.
enum class Lack : std::uint8_t {
  step,              // what the step needs of the tier at `moment`, or `purpose`
  unit,              // device: the parameters of one unit
  nested,            // device: the parameters of units that are entered within each other
  everything,        // host memory without an SSD: all that rests
  staging,           // host memory: the staging area, and what is set aside
  slots,             // SSD: what does not rest elsewhere
  snapshots,         // SSD: what snapshots hold, beside what does not rest elsewhere
  activations,       // host memory: swapped activations beside the rest
  activation_slots,  // SSD: what does not rest elsewhere, and swapped activations
  activation_path,   // swapped activations shall go to an SSD, and there is none
};

struct Refusal {
  Lack lack = Lack::step;
  Tier tier = Tier::device;
  std::string moment = {};   // of the step: "at backward of layers.11"; empty: always
  std::string purpose = {};  // "for parameters, gradients and states"; where no moment is
  std::vector<std::string> units = {};  // those in use at the moment, in order; or the one unit
  std::uint64_t needed_bytes = 0;
  std::uint64_t budget_bytes = 0;
  std::uint64_t would_do_bytes = 0;  // the smallest budget of the tier that works; 0: none does
  std::uint64_t snapshot_bytes = 0;  // part of what is needed of the SSD
  // Of activations that shall leave the device.
  std::uint64_t activation_host_bytes = 0;
  std::uint64_t activation_ssd_bytes = 0;
  bool has_ssd = false;
  bool sets_aside = false;  // host memory that nothing may rest in is part of what is needed
  // Of gradients without pages, now and under update="in_backward"; 0: it would not help.
  std::uint64_t gradient_bytes = 0;
  std::uint64_t gradient_bytes_in_backward = 0;
  std::uint64_t gpu_page_bytes = 0;  // smaller pages would need less, and a GPU has none; 0: no
};

std::string text(const Refusal& refusal);
Error to_error(const Refusal& refusal);

// What a person reads of so many bytes in the advice of Lack::step, as a number again: no less.
std::uint64_t bytes_as_read(std::uint64_t bytes);

}  // namespace strata
