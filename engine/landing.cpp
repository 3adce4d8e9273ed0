// The session's way to gradients: they land piece by piece, with their squares added up in passing,
// in pages or in frames that are set aside; and they are dropped.
#include "engine/landing.hpp"

#include <algorithm>
#include <optional>

#include "memory/check.hpp"
#include "memory/clock.hpp"

namespace strata {

// The copy itself runs without the lock: nobody else touches these bytes.
void Session::land_pieces(Lock& lock, Incoming& incoming, std::span<const Piece> pieces,
                          const std::function<std::byte*(const Piece&)>& to, GradMode mode) {
  const Chunk& chunk = home_.layout.chunks[pieces.front().chunk];
  const Dtype to_dtype = home_.layout.grad_dtype(home_.layout.segments[chunk.segment]);
  const std::size_t bytes = size_of(incoming.dtype);
  const std::byte* const from = arrived(lock, incoming);
  TimelineSpan span{.track = Track::download,
                    .unit = home_.layout.segments[chunk.segment].unit,
                    .begin_ns = SteadyClock().now_ns()};
  ++copying_;
  lock.unlock();
  for (const Piece& piece : pieces) {
    span.bytes += piece.count * bytes;
    incoming.sum += kernels_.land_gradient(
        to(piece), to_dtype, from + (piece.in_param - pieces.front().in_param) * bytes,
        incoming.dtype, piece.count, mode);
  }
  span.end_ns = SteadyClock().now_ns();
  lock.lock();
  --copying_;
  timeline_.add(span);
}

// Until the chunk's last update has read what its gradient pages held.
void Session::wait_settled(Lock& lock, std::uint32_t chunk, Waiting& waiting) {
  wait(lock, [&] {
    if (updates_->settled(chunk)) return true;
    waiting.missing(Cause::update);
    return false;
  });
}

// How the next gradient of the parameter meets what its page holds.
GradMode Session::page_mode(const Incoming& incoming) const {
  const bool adds = landed_[incoming.param] != 0 && home_.layout.accumulate;
  return adds ? GradMode::add : GradMode::copy;
}

// The pieces of one gradient page, which is open for us alone.
void Session::land_page(Lock& lock, Incoming& incoming, std::span<const Piece> pieces) {
  ask_ahead(incoming);
  const Chunk& chunk = home_.layout.chunks[pieces.front().chunk];
  const PageId page = page_of(chunk, Role::grad, pieces.front().in_chunk);
  Waiting waiting(timeline_, home_.layout.segments[chunk.segment].unit, true);
  wait_settled(lock, pieces.front().chunk, waiting);
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
  land_pieces(
      lock, incoming, pieces,
      [&](const Piece& piece) { return bytes + byte_in_page(chunk, Role::grad, piece.in_chunk); },
      page_mode(incoming));
  cache_->close(page, intent);
  moved_.notify_all();  // for whoever waits for this page, or to close
}

// The pieces of one chunk whose gradient has no pages.
void Session::land_chunk(Lock& lock, Incoming& incoming, std::span<const Piece> pieces) {
  ask_ahead(incoming);
  const std::uint32_t id = pieces.front().chunk;
  const Chunk& chunk = home_.layout.chunks[id];
  Waiting waiting(timeline_, home_.layout.segments[chunk.segment].unit, true);
  wait(lock, [&] {
    if (gradients_->open(id)) return true;
    waiting.missing(Cause::update);
    return false;
  });
  waiting.over();
  const bool adds = updates_->holds_gradient(id, incoming.param);
  land_pieces(
      lock, incoming, pieces,
      [&](const Piece& piece) { return gradients_->at(id, piece.in_chunk); },
      adds ? GradMode::add : GradMode::copy);
  gradients_->close(id);
  moved_.notify_all();
}

// Runs that land as one: of a page, or of a chunk whose gradient has none, and of `bytes` an
// element no more than fit into a page.
std::vector<std::span<const Piece>> Session::cut(std::span<const Piece> pieces,
                                                 std::size_t bytes) const {
  const auto page = [&](const Piece& piece) {
    if (gradients_) return kNoPage;
    return page_of(home_.layout.chunks[piece.chunk], Role::grad, piece.in_chunk);
  };
  std::vector<std::span<const Piece>> runs;
  while (!pieces.empty()) {
    const Piece& first = pieces.front();
    std::size_t run = 0, run_bytes = 0;
    for (const Piece& piece : pieces) {
      run_bytes += piece.count * bytes;
      if (piece.chunk != first.chunk || page(piece) != page(first)) break;
      if (run_bytes > home_.layout.page_bytes) break;
      ++run;
    }
    STRATA_ASSERT(run > 0);
    runs.push_back(pieces.first(run));
    pieces = pieces.subspan(run);
  }
  return runs;
}

void Session::land_gradient(std::uint32_t param, const void* from, Dtype dtype, Stream stream) {
  Lock lock(mutex_);
  throw_if_failed();
  STRATA_ASSERT(config_.params[param].trainable);
  // Pieces are cut at kGrain, so that the order of the sum does not depend on the page size.
  const std::vector<Piece> pieces =
      home_.layout.pieces(param, 0, home_.layout.numel[param], kGrain);
  Incoming incoming{.param = param,
                    .unit = config_.params[param].unit,
                    .from = static_cast<const std::byte*>(from),
                    .dtype = dtype,
                    .stream = stream,
                    .runs = cut(pieces, size_of(dtype))};
  std::optional<LandingFrames> frames;
  if (!backend_->reachable()) {
    frames.emplace(*this, lock, incoming.unit);
    incoming.made = backend_->record(stream);
  }
  for (; incoming.at < incoming.runs.size(); ++incoming.at) {
    const std::span<const Piece> run = incoming.runs[incoming.at];
    const std::uint32_t chunk = run.front().chunk;
    if (on_device(home_.layout.chunks[chunk]) && !gradients_)
      land_on_device(lock, incoming, run);
    else if (gradients_)
      land_chunk(lock, incoming, run);
    else
      land_page(lock, incoming, run);
    const bool last = incoming.at + 1 == incoming.runs.size();
    if (last || incoming.runs[incoming.at + 1].front().chunk != chunk) {
      updates_->note_landed(chunk, param);
    }
  }
  sum_squares_[param] = incoming.sum;
  ++landed_[param];
}

bool Session::gradient_fits(std::uint32_t param) {
  Lock lock(mutex_);
  throw_if_failed();
  if (!gradients_) return true;
  std::vector<std::uint32_t> chunks;
  for (const Piece& piece : home_.layout.pieces(param, 0, home_.layout.numel[param], kGrain)) {
    if (chunks.empty() || chunks.back() != piece.chunk) chunks.push_back(piece.chunk);
  }
  wait(lock, [&] { return gradients_->room_for(chunks) || !updates_->busy(); });
  return gradients_->room_for(chunks);
}

void Session::read_gradient(Lock& lock, const Piece& piece, float* values) {
  const Chunk& chunk = home_.layout.chunks[piece.chunk];
  const auto land = [&](const std::byte* from) {
    kernels_.land_gradient(values, Dtype::float32, from,
                           home_.layout.grad_dtype(home_.layout.segments[chunk.segment]),
                           piece.count, GradMode::copy);
  };
  if (gradients_) {
    if (!updates_->holds_landed(piece.chunk)) refuse("the gradient was used by its update already");
    return land(gradients_->at(piece.chunk, piece.in_chunk));
  }
  wait_idle_chunk(lock, piece.chunk);
  const PageId page = page_of(chunk, Role::grad, piece.in_chunk);
  if (on_device(chunk)) {
    std::vector<std::byte> copy(home_.layout.page_bytes);
    const CopyTicket out = backend_->copy_out(copy.data(), mover_->frame_of(page), copy.size());
    backend_->wait(out);  // a throw would leave the copy without its memory
    wait_for(lock, out, home_.layout.segments[chunk.segment].unit);
    return land(copy.data() + byte_in_page(chunk, Role::grad, piece.in_chunk));
  }
  land(open(lock, page, Intent::read) + byte_in_page(chunk, Role::grad, piece.in_chunk));
  cache_->close(page, Intent::read);
}

void Session::drop_gradients(Lock& lock) {
  for (std::uint32_t unit = 0; unit < completed_.size(); ++unit) {
    if (!completed_[unit]) continue;
    refuse("the gradients of " + config_.units[unit] +
           " were used already, during the backward: call step() behind every backward");
  }
  std::vector<bool> touched(home_.layout.chunks.size(), false);
  for (std::uint32_t param = 0; param < landed_.size(); ++param) {
    if (landed_[param] == 0) continue;
    for_pieces(param, 0, home_.layout.numel[param],
               [&](const Piece& piece) { touched[piece.chunk] = true; });
  }
  for (std::uint32_t id = 0; id < touched.size(); ++id) {
    if (!touched[id] || !gradients_ || !updates_->merged(id)) continue;
    refuse(
        "gradients were added to those of an earlier step whose update was still to come, and "
        "cannot be dropped: call step() behind every backward");
  }
  for (std::uint32_t id = 0; id < touched.size(); ++id) {
    if (!touched[id]) continue;
    const PageRun& run = home_.layout.chunks[id].run(Role::grad);
    // Those on the device are no contents of a page: what lands next takes their place.
    for (std::uint32_t i = 0; i < run.count; ++i) {
      wait(lock, [&] { return cache_->discard(PageId{index(run.first) + i}); });
    }
    updates_->forget_landed(id);
  }
  std::fill(landed_.begin(), landed_.end(), 0U);
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
