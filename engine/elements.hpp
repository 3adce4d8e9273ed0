// Elements: parameters and moments read and written from outside, in float32, through host pages.
// Every access waits until the chunk's update is published. Moments with scales are read and
// written in whole blocks, because the elements of a block share a scale. (Gradients are read where
// they land: gradients.hpp.)
//
// Threads: one caller at a time (the core's lock).
//
//   elements.write(lock, param, Kind::master, 0, values);
//   elements.read(lock, param, Kind::moment1, 0, values);
#pragma once

#include <cstdint>
#include <span>

#include "engine/foundation.hpp"
#include "engine/in_place_writes.hpp"
#include "engine/updates.hpp"
#include "engine/values.hpp"

namespace strata {

class Elements final {
 public:
  Elements(Foundation& base, Updates& updates, InPlaceWrites& writes)
      : base_(base), updates_(updates), writes_(writes) {}

  // Elements [offset, offset + values.size()) of the parameter. REQUIRES of both: checked.
  void write(Lock& lock, std::uint32_t param, Kind kind, std::size_t offset,
             std::span<const float> values) STRATA_REQUIRES(core_lock);
  void read(Lock& lock, std::uint32_t param, Kind kind, std::size_t offset, std::span<float> values)
      STRATA_REQUIRES(core_lock);
  // Of several ranks: all of them have written everything that they own.
  void renew_others(Lock& lock) STRATA_REQUIRES(core_lock);
  // Throws StrataError (config) for what the parameter does not have.
  void check(std::uint32_t param, Kind kind, std::size_t offset, const void* values,
             std::size_t count) const;
  // Sets the parameter's count of updates, which bias correction uses.
  void set_step(Lock& lock, std::uint32_t param, std::int64_t step) STRATA_REQUIRES(core_lock);

 private:
  // Those behind a piece, in the whole blocks that it lies in.
  struct Moments {
    Piece whole{};
    MomentKind stored{};
    std::uint16_t* scales = nullptr;  // null: they have none
    Pin pin;
    std::byte* bytes = nullptr;
  };

  void write_master(Lock& lock, const Piece& piece, const float* values) STRATA_REQUIRES(core_lock);
  void read_master(Lock& lock, const Piece& piece, float* values) STRATA_REQUIRES(core_lock);
  void read_codes(Lock& lock, std::uint32_t param, const Piece& piece, float* values)
      STRATA_REQUIRES(core_lock);
  Moments open_moments(Lock& lock, std::uint32_t param, Kind kind, const Piece& piece,
                       Intent intent) STRATA_REQUIRES(core_lock);
  std::uint16_t* remote_scales(std::uint32_t chunk, Role moment, const Piece& whole) const;
  void load(const Moments& from, float* values) const;
  void store(const Moments& to, const float* values) const;
  void write_moments(Lock& lock, std::uint32_t param, Kind kind, const Piece& piece,
                     const float* values) STRATA_REQUIRES(core_lock);
  void read_moments(Lock& lock, std::uint32_t param, Kind kind, const Piece& piece, float* values)
      STRATA_REQUIRES(core_lock);

  Foundation& base_;
  Updates& updates_;
  InPlaceWrites& writes_;
};

}  // namespace strata
