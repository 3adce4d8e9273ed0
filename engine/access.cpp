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

Role role_of(Kind kind) {
  switch (kind) {
    case Kind::master:
      return Role::param;
    case Kind::moment1:
      return Role::moment1;
    case Kind::moment2:
      return Role::moment2;
    case Kind::grad:
      return Role::grad;
  }
  return Role::param;
}

}  // namespace

PageId Session::page_of(const Chunk& chunk, Role role, std::size_t element) const {
  const auto in_run =
      static_cast<std::uint32_t>(element / home_.layout.elements_per_page(chunk, role));
  STRATA_ASSERT(in_run < chunk.run(role).count);
  return PageId{index(chunk.run(role).first) + in_run};
}

std::size_t Session::byte_in_page(const Chunk& chunk, Role role, std::size_t element) const {
  return element % home_.layout.elements_per_page(chunk, role) *
         home_.layout.element_bytes(chunk, role);
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
  wait(lock, [&] { return updates_->settled(chunk); });
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

void Session::write(std::uint32_t param, Kind kind, std::size_t offset, const float* values,
                    std::size_t count) {
  STRATA_ASSERT(kind != Kind::grad);
  Lock lock(mutex_);
  for_pieces(param, offset, count, [&](const Piece& piece) {
    wait_idle_chunk(lock, piece.chunk);
    const float* from = values + (piece.in_param - offset);
    if (kind == Kind::master) return write_master(lock, piece, from);
    const Chunk& chunk = home_.layout.chunks[piece.chunk];
    const PageId page = page_of(chunk, role_of(kind), piece.in_chunk);
    std::byte* to = open(lock, page, Intent::modify);
    std::memcpy(to + byte_in_page(chunk, role_of(kind), piece.in_chunk), from,
                piece.count * sizeof(float));
    cache_->close(page, Intent::modify);
  });
}

void Session::read(std::uint32_t param, Kind kind, std::size_t offset, float* values,
                   std::size_t count) {
  Lock lock(mutex_);
  if (kind == Kind::grad && landed_[param] == 0) {
    refuse("no gradient of " + config_.params[param].name +
           " has landed since the last step or zero_grad");
  }
  for_pieces(param, offset, count, [&](const Piece& piece) {
    wait_idle_chunk(lock, piece.chunk);
    float* to = values + (piece.in_param - offset);
    if (kind == Kind::master) return read_master(lock, piece, to);
    const Chunk& chunk = home_.layout.chunks[piece.chunk];
    const Role role = role_of(kind);
    const PageId page = page_of(chunk, role, piece.in_chunk);
    const std::byte* from = open(lock, page, Intent::read);
    from += byte_in_page(chunk, role, piece.in_chunk);
    const bool wide = home_.layout.element_bytes(chunk, role) == sizeof(float);
    const Dtype dtype = wide ? Dtype::float32 : home_.layout.segments[chunk.segment].dtype;
    kernels_.land_gradient(to, Dtype::float32, from, dtype, piece.count, GradMode::copy);
    cache_->close(page, Intent::read);
  });
}

void Session::device_written(std::uint32_t param) {
  Lock lock(mutex_);
  const Layout& layout = home_.layout;
  PageId copied = kNoPage;
  for_pieces(param, 0, layout.numel[param], [&](const Piece& piece) {
    const Chunk& chunk = layout.chunks[piece.chunk];
    const Dtype dtype = layout.segments[chunk.segment].dtype;
    // 1. The page comes back whole: its other parameters are the same on both sides.
    const PageId page = chunk.run(Role::param).first;
    std::byte* bytes = open(lock, page, Intent::modify);
    if (page != copied) {
      backend_->wait(backend_->copy_out(bytes, executor_->frame_of(page), layout.page_bytes));
      copied = page;
    }
    // 2. What the master holds beyond it is gone.
    if (chunk.run(Role::master).count != 0) {
      const PageId master = page_of(chunk, Role::master, piece.in_chunk);
      std::byte* rest = open(lock, master, Intent::modify);
      rest += byte_in_page(chunk, Role::master, piece.in_chunk);
      const std::byte* from = bytes + byte_in_page(chunk, Role::param, piece.in_chunk);
      if (dtype == Dtype::float16) {
        kernels_.land_gradient(rest, Dtype::float32, from, dtype, piece.count, GradMode::copy);
      } else {
        std::memset(rest, 0, piece.count * layout.element_bytes(chunk, Role::master));
      }
      cache_->close(master, Intent::modify);
    }
    cache_->close(page, Intent::modify);
  });
}

// The pieces of one gradient page; the copy itself runs without the lock, the page is ours alone.
// Adds each piece's sum of squares to `sum`, one after the other, whatever the page size.
void Session::land_page(Lock& lock, std::uint32_t param, std::span<const Piece> pieces,
                        const void* from, Dtype dtype, double& sum) {
  const Chunk& chunk = home_.layout.chunks[pieces.front().chunk];
  const PageId page = page_of(chunk, Role::grad, pieces.front().in_chunk);
  const UnitId unit = home_.layout.segments[chunk.segment].unit;
  Waiting waiting(timeline_, unit, true);
  wait(lock, [&] {
    if (updates_->settled(pieces.front().chunk)) return true;
    waiting.missing(Cause::update);
    return false;
  });
  Intent intent = Intent::overwrite;
  std::byte* bytes = nullptr;
  wait(lock, [&] {
    // Asked anew each time: another thread may land the first gradient in it meanwhile.
    intent = table_.newest(page) == 0 ? Intent::overwrite : Intent::modify;
    if ((bytes = cache_->open(page, intent)) != nullptr) return true;
    waiting.missing(intent == Intent::modify ? Cause::ssd : Cause::room);
    return false;
  });
  waiting.over();
  const GradMode mode =
      landed_[param] != 0 && home_.layout.accumulate ? GradMode::add : GradMode::copy;
  const Dtype to_dtype =
      home_.layout.accumulate ? Dtype::float32 : home_.layout.segments[chunk.segment].dtype;
  TimelineSpan span{.track = Track::download, .unit = unit, .begin_ns = SteadyClock().now_ns()};
  ++copying_;
  lock.unlock();
  for (const Piece& piece : pieces) {
    span.bytes += piece.count * size_of(dtype);
    sum += kernels_.land_gradient(
        bytes + byte_in_page(chunk, Role::grad, piece.in_chunk), to_dtype,
        static_cast<const std::byte*>(from) + piece.in_param * size_of(dtype), dtype, piece.count,
        mode);
  }
  span.end_ns = SteadyClock().now_ns();
  lock.lock();
  --copying_;
  timeline_.add(span);
  cache_->close(page, intent);
  moved_.notify_all();  // for whoever waits for this page, or to close
}

void Session::land_gradient(std::uint32_t param, const void* from, Dtype dtype) {
  Lock lock(mutex_);
  throw_if_failed();
  STRATA_ASSERT(config_.params[param].trainable);
  // Pieces are cut at kGrain, so that the order of the sum does not depend on the page size.
  const std::vector<Piece> pieces =
      home_.layout.pieces(param, 0, home_.layout.numel[param], kGrain);
  double sum = 0.0;
  for (std::size_t first = 0; first < pieces.size();) {
    const Chunk& chunk = home_.layout.chunks[pieces[first].chunk];
    const PageId page = page_of(chunk, Role::grad, pieces[first].in_chunk);
    std::size_t end = first + 1;
    while (end < pieces.size() && pieces[end].chunk == pieces[first].chunk &&
           page_of(chunk, Role::grad, pieces[end].in_chunk) == page) {
      ++end;
    }
    land_page(lock, param, std::span(pieces).subspan(first, end - first), from, dtype, sum);
    first = end;
  }
  sum_squares_[param] = sum;
  ++landed_[param];
}

void Session::drop_gradients(Lock& lock) {
  for (std::uint32_t param = 0; param < landed_.size(); ++param) {
    if (landed_[param] == 0) continue;
    landed_[param] = 0;
    for_pieces(param, 0, home_.layout.numel[param], [&](const Piece& piece) {
      const Chunk& chunk = home_.layout.chunks[piece.chunk];
      const PageId page = page_of(chunk, Role::grad, piece.in_chunk);
      wait(lock, [&] { return cache_->discard(page); });
    });
  }
}

void Session::drop_gradients() {
  Lock lock(mutex_);
  throw_if_failed();
  drop_gradients(lock);
}

std::uint32_t Session::gradient_count(std::uint32_t param) {
  const Lock lock(mutex_);
  throw_if_failed();
  return landed_[param];
}

}  // namespace strata
