// CodedValues: parameters that rest as codes, written and read whole: from values, which are
// quantised, or from codes that somebody else has made, which stay as they are. What the device
// shows of them is computed anew.
//
// Threads: one caller at a time (the core's lock).
//
//   coded.quantise(lock, param, {.values = w, .dtype = Dtype::bfloat16, .row_elements = 4096});
//   coded.read(lock, param, 0, {.codes = bytes, .scales = scales});   // as they rest
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/captures.hpp"
#include "engine/foundation.hpp"
#include "engine/updates.hpp"
#include "engine/values.hpp"
#include "offload/residency/prefetcher.hpp"

namespace strata {

class CodedValues final {
 public:
  CodedValues(Foundation& base, Updates& updates, Prefetcher& prefetcher, Captures& captures)
      : base_(base), updates_(updates), prefetcher_(prefetcher), captures_(captures) {}

  // Of all: throw StrataError (config) where the parameter does not rest as codes, or sizes do not
  // fit; those that write also where its unit is entered, or a value or scale is not finite: then
  // nothing has changed.
  void quantise(Lock& lock, std::uint32_t param, const PlainValues& from)
      STRATA_REQUIRES(core_lock);
  // Of elements from `first` on, which is a multiple of the form's grain.
  void write(Lock& lock, std::uint32_t param, std::size_t first,
             const Stored<const std::byte>& from) STRATA_REQUIRES(core_lock);
  void read(Lock& lock, std::uint32_t param, std::size_t first, const Stored<std::byte>& to)
      STRATA_REQUIRES(core_lock);

 private:
  const StoredForm& form_of(std::uint32_t param) const;
  // The elements that there are. Throws StrataError (config) where sizes do not fit.
  template <class Byte>
  std::size_t check_sizes(std::uint32_t param, std::size_t first, const Stored<Byte>& some) const;
  void check_left(std::uint32_t param) const;
  // The pages of codes of `count` elements, each open; `work` gets the piece and the page's bytes.
  template <class Work>
  void for_pieces(Lock& lock, std::uint32_t param, std::size_t first, std::size_t count,
                  Intent intent, const Work& work) STRATA_REQUIRES(core_lock);
  void forget_shown(Lock& lock, std::uint32_t param) STRATA_REQUIRES(core_lock);

  Foundation& base_;
  Updates& updates_;
  Prefetcher& prefetcher_;
  Captures& captures_;
};

}  // namespace strata
