#include "engine/elements.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "memory/check.hpp"

namespace strata {
namespace {

// The piece, grown to whole blocks of its parameter: those of one scale are stored together.
Piece whole_blocks(const Piece& piece, std::size_t numel, std::size_t block = kMomentBlock) {
  const std::size_t before = piece.in_chunk % block;
  Piece whole = piece;
  whole.in_chunk -= before;
  whole.in_param -= before;
  whole.count = std::min(round_up(before + piece.count, block), numel - whole.in_param);
  return whole;
}

}  // namespace

void Elements::check(std::uint32_t param, Kind kind, std::size_t offset, const void* values,
                     std::size_t count) const {
  base_.check_param(param);
  const ParamSpec& spec = base_.config.params[param];
  if (offset > spec.numel || count > spec.numel - offset) {
    refuse("elements " + std::to_string(offset) + " to " + std::to_string(offset + count) + " of " +
           spec.name + ", which has " + std::to_string(spec.numel));
  }
  if (values == nullptr && count != 0) refuse("no memory was given for values of " + spec.name);
  if (kind != Kind::moment1 && kind != Kind::moment2) return;
  const int number = kind == Kind::moment1 ? 1 : 2;
  if (!spec.trainable || number > base_.layout.moments) {
    refuse("no moment " + std::to_string(number) + " is kept of " + spec.name);
  }
}

void Elements::write_master(Lock& lock, const Piece& piece, const float* values) {
  const Chunk& chunk = base_.layout.chunks[piece.chunk];
  const Dtype dtype = base_.layout.segments[chunk.segment].dtype;
  const Pin param =
      base_.open(lock, base_.page_of(chunk, Role::param, piece.in_chunk), Intent::modify);
  const std::size_t at = base_.byte_in_page(chunk, Role::param, piece.in_chunk);
  std::byte* const to = param.bytes() + at;
  if (chunk.run(Role::master).count == 0) {
    const Unlocked unlocked(lock);
    // float32 is its own master; a frozen 16-bit parameter has none.
    std::vector<std::byte> none(dtype == Dtype::float32 ? 0 : piece.count * sizeof(float));
    base_.kernels.split(values, piece.count, dtype, to, none.data());
  } else {
    const Pin master =
        base_.open(lock, base_.page_of(chunk, Role::master, piece.in_chunk), Intent::modify);
    const Unlocked unlocked(lock);
    std::byte* const rest =
        master.bytes() + base_.byte_in_page(chunk, Role::master, piece.in_chunk);
    base_.kernels.split(values, piece.count, dtype, to, rest);
  }
  writes_.note_written(param.page(), at, {to, piece.count * size_of(dtype)});
}

void Elements::read_codes(Lock& lock, std::uint32_t param, const Piece& piece, float* values) {
  const Piece whole = whole_blocks(piece, base_.layout.numel[param], kCodeBlock);
  const Chunk& chunk = base_.layout.chunks[piece.chunk];
  const Pin pin = base_.open(lock, base_.page_of(chunk, Role::param, piece.in_chunk), Intent::read);
  const Unlocked unlocked(lock);
  std::vector<float> blocks(whole.count);
  base_.decoder.decode(base_.layout.segment_of(param), whole.in_chunk, whole.count, pin.bytes(),
                       blocks.data(), Dtype::float32);
  std::copy_n(blocks.data() + (piece.in_chunk - whole.in_chunk), piece.count, values);
}

void Elements::read_master(Lock& lock, const Piece& piece, float* values) {
  const Chunk& chunk = base_.layout.chunks[piece.chunk];
  const Dtype dtype = base_.layout.segments[chunk.segment].dtype;
  const PageId shown = base_.page_of(chunk, Role::param, piece.in_chunk);
  Pin param = base_.open(lock, shown, Intent::read);
  const std::byte* from = param.bytes() + base_.byte_in_page(chunk, Role::param, piece.in_chunk);
  // Who reads what another rank holds has one page of it at a time: see lender.hpp.
  std::vector<std::byte> copy;
  const bool remote = param.tier() == Tier::remote;
  const std::uint64_t version = base_.table.newest(shown);
  if (remote) {
    {
      const Unlocked unlocked(lock);
      copy.assign(from, from + piece.count * size_of(dtype));
    }
    from = copy.data();
    param.close();
  }
  if (chunk.run(Role::master).count == 0) {
    const Unlocked unlocked(lock);
    base_.kernels.land_gradient(values, Dtype::float32, from, dtype, piece.count, GradMode::copy,
                                {});
    return;
  }
  Pin master = base_.open(lock, base_.page_of(chunk, Role::master, piece.in_chunk), Intent::read);
  // A step may have come between the two, as other threads make them: both are read again. The next
  // step waits for who has a page open, and lets nobody open one: this one is closed first.
  if (remote && base_.table.newest(shown) != version) {
    master.close();
    return read_master(lock, piece, values);
  }
  const Unlocked unlocked(lock);
  const std::byte* rest = master.bytes() + base_.byte_in_page(chunk, Role::master, piece.in_chunk);
  base_.kernels.join(from, rest, piece.count, dtype, values);
}

Elements::Moments Elements::open_moments(Lock& lock, std::uint32_t param, Kind kind,
                                         const Piece& piece, Intent intent) {
  STRATA_ASSERT(kind == Kind::moment1 || kind == Kind::moment2);
  const Layout& layout = base_.layout;
  const Role role = kind == Kind::moment1 ? Role::moment1 : Role::moment2;
  const Chunk& chunk = layout.chunks[piece.chunk];
  Moments moments;
  moments.whole = whole_blocks(piece, layout.numel[param]);
  STRATA_ASSERT(moments.whole.in_chunk <= piece.in_chunk);
  STRATA_ASSERT(piece.in_chunk + piece.count <= moments.whole.in_chunk + moments.whole.count);
  moments.stored = moment_kind(base_.config.groups[base_.config.params[param].group].rule,
                               kind == Kind::moment1 ? 1 : 2);
  moments.pin = base_.open(lock, base_.page_of(chunk, role, moments.whole.in_chunk), intent);
  moments.bytes = moments.pin.bytes() + base_.byte_in_page(chunk, role, moments.whole.in_chunk);
  moments.scales = base_.owns.mine(piece.chunk)
                       ? updates_.scales_at(piece.chunk, role, moments.whole.in_chunk)
                       : remote_scales(piece.chunk, role, moments.whole);
  return moments;
}

// They lie in the first frames of their owner's memory: see foundation.hpp. While it lends the page
// of the codes it updates neither.
std::uint16_t* Elements::remote_scales(std::uint32_t chunk, Role moment, const Piece& whole) const {
  if (!base_.layout.has_scales(moment)) return nullptr;
  const std::size_t at = base_.owns.scale_offset(base_.layout, chunk, moment, whole.in_chunk);
  const std::size_t bytes = ceil_div(whole.count, kMomentBlock) * sizeof(std::uint16_t);
  const std::byte* const there = base_.peers->bytes(base_.owns.owner(chunk), at, bytes);
  STRATA_ASSERT(there != nullptr);
  // They are only read.
  return reinterpret_cast<std::uint16_t*>(const_cast<std::byte*>(there));
}

void Elements::load(const Moments& from, float* values) const {
  base_.kernels.load_moments(from.bytes, from.scales, base_.layout.moment_dtype, from.stored,
                             from.whole.count, values);
}

void Elements::store(const Moments& to, const float* values) const {
  base_.kernels.store_moments(values, to.whole.count, base_.layout.moment_dtype, to.stored,
                              to.bytes, to.scales);
}

void Elements::write_moments(Lock& lock, std::uint32_t param, Kind kind, const Piece& piece,
                             const float* values) {
  const Moments moments = open_moments(lock, param, kind, piece, Intent::modify);
  const Unlocked unlocked(lock);
  if (moments.whole.count == piece.count) return store(moments, values);
  std::vector<float> blocks(moments.whole.count);
  load(moments, blocks.data());
  std::copy_n(values, piece.count, blocks.data() + (piece.in_chunk - moments.whole.in_chunk));
  store(moments, blocks.data());
}

void Elements::read_moments(Lock& lock, std::uint32_t param, Kind kind, const Piece& piece,
                            float* values) {
  const Moments moments = open_moments(lock, param, kind, piece, Intent::read);
  const Unlocked unlocked(lock);
  if (moments.whole.count == piece.count) return load(moments, values);
  std::vector<float> blocks(moments.whole.count);
  load(moments, blocks.data());
  std::copy_n(blocks.data() + (piece.in_chunk - moments.whole.in_chunk), piece.count, values);
}

void Elements::write(Lock& lock, std::uint32_t param, Kind kind, std::size_t offset,
                     std::span<const float> values) {
  if (kind == Kind::grad) refuse("gradients land, and are not written");
  if (const ParamSpec& spec = base_.config.params[param]; spec.stored) {
    refuse(spec.name + " rests as " + std::string(name(spec.stored->codes)) +
           ", whose values are not written one by one: quantise() writes all of them");
  }
  for (const Piece& piece : base_.layout.pieces(param, offset, values.size())) {
    if (!base_.owns.mine(piece.chunk)) continue;
    updates_.wait_writable(lock, piece.chunk);
    const Updates::Deferral deferral(updates_, piece.chunk);
    const float* from = values.data() + (piece.in_param - offset);
    if (kind == Kind::master)
      write_master(lock, piece, from);
    else
      write_moments(lock, param, kind, piece, from);
  }
  if (base_.remote) base_.renew_remote(lock, param);
}

void Elements::renew_others(Lock& lock) {
  if (!base_.remote) return;
  const auto params = static_cast<std::uint32_t>(base_.config.params.size());
  for (std::uint32_t param = 0; param < params; ++param) base_.renew_remote(lock, param);
}

void Elements::read(Lock& lock, std::uint32_t param, Kind kind, std::size_t offset,
                    std::span<float> values) {
  STRATA_ASSERT(kind != Kind::grad);
  for (const Piece& piece : base_.layout.pieces(param, offset, values.size())) {
    updates_.wait_settled(lock, piece.chunk);
    const Updates::Deferral deferral(updates_, piece.chunk);
    float* to = values.data() + (piece.in_param - offset);
    if (kind == Kind::master && base_.config.params[param].stored)
      read_codes(lock, param, piece, to);
    else if (kind == Kind::master)
      read_master(lock, piece, to);
    else
      read_moments(lock, param, kind, piece, to);
  }
}

void Elements::set_step(Lock& lock, std::uint32_t param, std::int64_t step) {
  base_.check_param(param);
  if (step < 0) refuse("a parameter cannot have made " + std::to_string(step) + " steps");
  for (const Piece& piece : base_.layout.pieces(param)) updates_.wait_writable(lock, piece.chunk);
  updates_.set_step(param, step);
}

}  // namespace strata
