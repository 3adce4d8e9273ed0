#include "engine/in_place_writes.hpp"

#include <algorithm>
#include <cstring>
#include <deque>

#include "memory/check.hpp"

namespace strata {

// Chunks of a parameter that the user wrote; no update of them begins.
class InPlaceWrites::WrittenChunks final {
 public:
  WrittenChunks(InPlaceWrites& writes, Lock& lock, std::uint32_t param) STRATA_REQUIRES(core_lock) {
    for (const Piece& piece : writes.base_.layout.pieces(param)) {
      if (!writes.base_.owns.mine(piece.chunk)) continue;
      if (!chunks_.empty() && chunks_.back() == piece.chunk) continue;
      writes.base_.gate.wait(lock, [&] {
        return !writes.updates_.is_open(piece.chunk) && writes.may_change(piece.chunk);
      });
      deferrals_.emplace_back(writes.updates_, piece.chunk);
      chunks_.push_back(piece.chunk);
    }
  }
  WrittenChunks(const WrittenChunks&) = delete;
  WrittenChunks& operator=(const WrittenChunks&) = delete;

  const std::vector<std::uint32_t>& chunks() const { return chunks_; }

 private:
  std::deque<Updates::Deferral> deferrals_;  // they stay where they are
  std::vector<std::uint32_t> chunks_;
};

void InPlaceWrites::take(Lock& lock, std::uint32_t param, Stream stream) {
  base_.check_param(param);
  const UnitId unit = base_.config.params[param].unit;
  if (!prefetcher_.in_use(unit)) refuse(base_.names.of(unit) + " was written and is not entered");
  base_.wait_for(lock, base_.tiers.copies().record(stream), unit);
  if (const ParamSpec& spec = base_.config.params[param]; spec.stored) {
    prefetcher_.spoil(unit);
    refuse(spec.name + " was changed in place, and rests as " +
           std::string(name(spec.stored->codes)) +
           ": the change is undone. Write all of it at once, by copy_(); adapters are merged by "
           "merge_and_unload(safe_merge=True) or strata.export_safetensors(merge=True)");
  }
  written_[index(unit)] = true;
  updates_.keep_exact(unit);
  if (base_.remote) base_.remote->keep_exact(unit);
  const WrittenChunks written(*this, lock, param);
  for (const std::uint32_t chunk : written.chunks()) check_newest(param, chunk);
  const std::vector<Piece> pieces = base_.layout.pieces(param);
  for (const std::uint32_t chunk : written.chunks()) {
    const auto begin = std::ranges::lower_bound(pieces, chunk, {}, &Piece::chunk);
    const auto end = std::ranges::upper_bound(pieces, chunk, {}, &Piece::chunk);
    take_chunk(lock, chunk, {begin, end});
  }
  // Of what others hold the device shows here what it shows there.
  if (base_.remote) base_.note_write();
}

// Throws StrataError (config) where the device shows older parameters.
void InPlaceWrites::check_newest(std::uint32_t param, std::uint32_t chunk) const {
  const PageId page = base_.layout.chunks[chunk].run(Role::param).first;
  const auto last = taken_version_.find(page);
  const bool ours = last != taken_version_.end() && last->second == base_.table.newest(page);
  if (ours || base_.table.is_current(page, Tier::device)) return;
  refuse("parameter " + base_.config.params[param].name +
         " was changed in place in a forward that saw it " +
         "before its last update, which the change would undo; it keeps the update and loses the " +
         "change. Forwards of " + base_.names.of(base_.config.params[param].unit) +
         " wait for updates from the next step on; update=\"on_step\" lets all of them wait");
}

// The chunk's page of parameters, as the device shows it, into host memory. Its other parameters
// are the same on both sides.
void InPlaceWrites::take_chunk(Lock& lock, std::uint32_t id, std::span<const Piece> pieces) {
  const Chunk& chunk = base_.layout.chunks[id];
  const PageId page = chunk.run(Role::param).first;
  // 1. The old bytes, and the new ones. Where the page rests on the device, what comes is a copy.
  std::vector<std::byte> before;
  Pin pin;
  if (base_.on_device(chunk)) {
    Pin there;
    base_.gate.wait(lock,
                    [&] { return static_cast<bool>(there = base_.cache.open_on_device(page)); });
    there.close();
    pin = base_.open(lock, page, Intent::read);
    if (const auto kept = before_.find(page); kept != before_.end()) {
      const Unlocked unlocked(lock);  // it stays: the unit is entered
      before = kept->second;
      std::memcpy(kept->second.data(), pin.bytes(), before.size());
    }
  } else {
    pin = base_.open(lock, page, Intent::modify);
    {
      const Unlocked unlocked(lock);
      before.assign(pin.bytes(), pin.bytes() + base_.layout.page_bytes);
    }
    base_.copy_out(lock, pin.bytes(), prefetcher_.frame_of(page), page);
  }
  // 2. What the master holds beyond them.
  for (const Piece& piece : pieces) keep_masters(lock, piece, pin.bytes(), before);
  pin.close();
  taken_version_[page] = base_.table.newest(page);
  note_if_frozen(page);
}

void InPlaceWrites::note_if_frozen(PageId page) {
  const Chunk& chunk = base_.layout.chunks[base_.layout.chunk_of[index(page)]];
  if (!base_.layout.trains(chunk)) captures_.note_frozen_written();
}

// Masters of what changed become what was written; the others stay. `before` is empty where the old
// bytes are not known.
void InPlaceWrites::keep_masters(Lock& lock, const Piece& piece, const std::byte* bytes,
                                 const std::vector<std::byte>& before) {
  const Chunk& chunk = base_.layout.chunks[piece.chunk];
  if (chunk.run(Role::master).count == 0) return;
  const Dtype dtype = base_.layout.segments[chunk.segment].dtype;
  const std::size_t at = base_.byte_in_page(chunk, Role::param, piece.in_chunk);
  const auto* const now = reinterpret_cast<const std::uint16_t*>(bytes + at);
  const PageId page = base_.page_of(chunk, Role::master, piece.in_chunk);
  const Pin pin = base_.open(lock, page, Intent::modify);
  const Unlocked unlocked(lock);
  std::byte* const rest = pin.bytes() + base_.byte_in_page(chunk, Role::master, piece.in_chunk);
  if (dtype == Dtype::float16) {
    // The master is whole, so it says itself what the old bits were.
    std::vector<float> values(piece.count), clean(piece.count);
    std::vector<std::uint16_t> old(piece.count);
    auto* const masters = reinterpret_cast<float*>(rest);
    base_.kernels.land_gradient(values.data(), Dtype::float32, now, dtype, piece.count,
                                GradMode::copy, {});
    base_.kernels.split(masters, piece.count, dtype, old.data(), clean.data());
    for (std::size_t i = 0; i < piece.count; ++i) {
      if (now[i] != old[i]) masters[i] = values[i];
    }
  } else {
    auto* const residual = reinterpret_cast<std::uint16_t*>(rest);
    const auto* const old =
        before.empty() ? nullptr : reinterpret_cast<const std::uint16_t*>(before.data() + at);
    for (std::size_t i = 0; i < piece.count; ++i) {
      if (old == nullptr || now[i] != old[i]) residual[i] = 0;
    }
  }
}

void InPlaceWrites::expect(std::uint32_t param) {
  base_.check_param(param);
  written_[index(base_.config.params[param].unit)] = true;
}

// What rests on the device is changed by now, elsewhere it is not.
bool InPlaceWrites::may_change(std::uint32_t chunk) {
  if (updates_.behind(chunk, captures_.step())) return true;
  if (!base_.on_device(base_.layout.chunks[chunk])) return captures_.may_change(chunk);
  if (captures_.active()) {
    captures_.spoil(
        chunk, "parameters of " +
                   base_.names.of(base_.layout.segments[base_.layout.chunks[chunk].segment].unit) +
                   " were written in place, for the first time, before they were captured");
  }
  return true;
}

void InPlaceWrites::await_captured(Lock& lock, UnitId unit) {
  if (!captures_.active() || !base_.on_device(unit) || !may_write(unit)) return;
  base_.gate.wait(lock,
                  [&] {
                    bool all = true;
                    for (const std::uint32_t chunk : base_.layout.units[index(unit)].chunks) {
                      all &= captures_.may_change(chunk);
                    }
                    return all;
                  },
                  {"a snapshot of", unit});
}

void InPlaceWrites::begin_visit(Lock& lock, UnitId unit) {
  if (!base_.on_device(unit)) return;
  if (!may_write(unit)) return;
  struct Begins {
    InPlaceWrites& of;
    UnitId unit;
    ~Begins() {
      std::erase(of.beginning_, unit);
      of.base_.gate.notify();
    }
  } const begins{.of = *this, .unit = unit};
  beginning_.push_back(unit);
  for (const std::uint32_t id : base_.layout.units[index(unit)].chunks) {
    const Chunk& chunk = base_.layout.chunks[id];
    const Segment& segment = base_.layout.segments[chunk.segment];
    if (!segment.trainable || segment.dtype != Dtype::bfloat16) continue;
    const PageId page = chunk.run(Role::param).first;
    before_[page] = base_.copied_out(lock, base_.table.placement(page).device_frame(), page);
  }
}

void InPlaceWrites::end_visit(UnitId unit) {
  if (before_.empty()) return;
  for (const PageId page : base_.layout.units[index(unit)].pages) before_.erase(page);
}

void InPlaceWrites::note_written(PageId page, std::size_t at, std::span<const std::byte> bytes) {
  note_if_frozen(page);
  const auto kept = before_.find(page);
  if (kept == before_.end()) return;
  STRATA_ASSERT(at + bytes.size() <= kept->second.size());
  std::memcpy(kept->second.data() + at, bytes.data(), bytes.size());
}

}  // namespace strata
