// The session's way to elements: reading and writing parameters, moments and gradients through host
// pages. Every access waits until the chunk's update is published.
#include <algorithm>
#include <array>
#include <cstring>

#include "engine/session.hpp"
#include "memory/check.hpp"
#include "memory/clock.hpp"

namespace strata {
namespace {

Role moment_of(Kind kind) {
  STRATA_ASSERT(kind == Kind::moment1 || kind == Kind::moment2);
  return kind == Kind::moment1 ? Role::moment1 : Role::moment2;
}

// The piece, grown to whole blocks of its parameter: those of one scale are stored together.
Piece whole_blocks(const Piece& piece, std::size_t numel) {
  const std::size_t before = piece.in_chunk % kMomentBlock;
  Piece whole = piece;
  whole.in_chunk -= before;
  whole.in_param -= before;
  whole.count = std::min(round_up(before + piece.count, kMomentBlock), numel - whole.in_param);
  return whole;
}

}  // namespace

bool Session::on_device(const Chunk& chunk) const {
  return home_.on_device[index(home_.layout.segments[chunk.segment].unit)];
}

PageId Session::page_of(const Chunk& chunk, Role role, std::size_t element) const {
  const Spot spot = home_.layout.spot(chunk, role, element);
  STRATA_ASSERT(spot.page != kNoPage);
  return spot.page;
}

std::size_t Session::byte_in_page(const Chunk& chunk, Role role, std::size_t element) const {
  return home_.layout.spot(chunk, role, element).byte;
}

std::byte* Session::open(Lock& lock, PageId page, Intent intent) {
  std::byte* bytes = nullptr;
  wait(lock, [&] { return (bytes = cache_->open(page, intent)) != nullptr; });
  return bytes;
}

// Visits runs that lie within one page of every role.
void Session::for_pieces(std::uint32_t param, std::size_t offset, std::size_t count,
                         const std::function<void(const Piece&)>& visit) const {
  const std::size_t grain = home_.layout.page_bytes / sizeof(float);
  for (const Piece& piece : home_.layout.pieces(param, offset, count, grain)) visit(piece);
}

void Session::wait_idle_chunk(Lock& lock, std::uint32_t chunk) {
  wait(lock, [&] {
    if (updates_->merged(chunk)) throw_if_merged();
    return updates_->settled(chunk);
  });
}

void Session::write_master(Lock& lock, const Piece& piece, const float* values) {
  const Chunk& chunk = home_.layout.chunks[piece.chunk];
  const Dtype dtype = home_.layout.segments[chunk.segment].dtype;
  const PageId param = page_of(chunk, Role::param, piece.in_chunk);
  std::byte* to = open(lock, param, Intent::modify);
  to += byte_in_page(chunk, Role::param, piece.in_chunk);
  if (chunk.run(Role::master).count == 0) {
    // float32 is its own master; a frozen 16-bit parameter has none.
    std::vector<std::byte> none(dtype == Dtype::float32 ? 0 : piece.count * sizeof(float));
    kernels_.split(values, piece.count, dtype, to, none.data());
  } else {
    const PageId master = page_of(chunk, Role::master, piece.in_chunk);
    std::byte* rest = open(lock, master, Intent::modify);
    rest += byte_in_page(chunk, Role::master, piece.in_chunk);
    kernels_.split(values, piece.count, dtype, to, rest);
    cache_->close(master, Intent::modify);
  }
  if (const auto kept = before_.find(index(param)); kept != before_.end()) {
    const std::size_t at = byte_in_page(chunk, Role::param, piece.in_chunk);
    std::memcpy(kept->second.data() + at, to, piece.count * size_of(dtype));
  }
  cache_->close(param, Intent::modify);
}

void Session::read_master(Lock& lock, const Piece& piece, float* values) {
  const Chunk& chunk = home_.layout.chunks[piece.chunk];
  const Dtype dtype = home_.layout.segments[chunk.segment].dtype;
  const PageId param = page_of(chunk, Role::param, piece.in_chunk);
  const std::byte* from = open(lock, param, Intent::read);
  from += byte_in_page(chunk, Role::param, piece.in_chunk);
  if (chunk.run(Role::master).count == 0) {
    kernels_.land_gradient(values, Dtype::float32, from, dtype, piece.count, GradMode::copy);
  } else {
    const PageId master = page_of(chunk, Role::master, piece.in_chunk);
    const std::byte* rest = open(lock, master, Intent::read);
    rest += byte_in_page(chunk, Role::master, piece.in_chunk);
    kernels_.join(from, rest, piece.count, dtype, values);
    cache_->close(master, Intent::read);
  }
  cache_->close(param, Intent::read);
}

// Hands the moments behind the piece to `visit`, which may change them where `intent` is modify.
void Session::visit_moments(Lock& lock, std::uint32_t param, Role moment, const Piece& piece,
                            Intent intent, const std::function<void(float*)>& visit) {
  const Layout& layout = home_.layout;
  const Chunk& chunk = layout.chunks[piece.chunk];
  const Piece whole = whole_blocks(piece, layout.numel[param]);
  const PageId page = page_of(chunk, moment, whole.in_chunk);
  const MomentKind kind = moment_kind(config_.groups[config_.params[param].group].rule,
                                      moment == Role::moment1 ? 1 : 2);
  std::uint16_t* const scales = updates_->scales_at(chunk, moment, whole.in_chunk);
  std::vector<float> values(whole.count);
  std::byte* const bytes = open(lock, page, intent) + byte_in_page(chunk, moment, whole.in_chunk);
  kernels_.load_moments(bytes, scales, layout.moment_dtype, kind, whole.count, values.data());
  visit(values.data() + (piece.in_chunk - whole.in_chunk));
  if (intent == Intent::modify) {
    kernels_.store_moments(values.data(), whole.count, layout.moment_dtype, kind, bytes, scales);
  }
  cache_->close(page, intent);
}

void Session::write(std::uint32_t param, Kind kind, std::size_t offset, const float* values,
                    std::size_t count) {
  Lock lock(mutex_);
  throw_if_failed();
  check_elements(param, kind, offset, values, count);
  if (kind == Kind::grad) refuse("gradients land, and are not written");
  for_pieces(param, offset, count, [&](const Piece& piece) {
    wait_idle_chunk(lock, piece.chunk);
    const float* from = values + (piece.in_param - offset);
    if (kind == Kind::master) return write_master(lock, piece, from);
    visit_moments(lock, param, moment_of(kind), piece, Intent::modify,
                  [&](float* moments) { std::copy_n(from, piece.count, moments); });
  });
}

void Session::read(std::uint32_t param, Kind kind, std::size_t offset, float* values,
                   std::size_t count) {
  Lock lock(mutex_);
  throw_if_failed();
  check_elements(param, kind, offset, values, count);
  if (kind == Kind::grad && landed_[param] == 0) {
    refuse("no gradient of " + config_.params[param].name +
           " has landed since the last step or zero_grad");
  }
  for_pieces(param, offset, count, [&](const Piece& piece) {
    float* to = values + (piece.in_param - offset);
    if (kind == Kind::grad) return read_gradient(lock, param, piece, to);
    wait_idle_chunk(lock, piece.chunk);
    if (kind == Kind::master) return read_master(lock, piece, to);
    visit_moments(lock, param, moment_of(kind), piece, Intent::read,
                  [&](const float* moments) { std::copy_n(moments, piece.count, to); });
  });
}

}  // namespace strata
