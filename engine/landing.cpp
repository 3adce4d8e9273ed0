// The session's way to gradients: they land piece by piece, with their squares added up in passing,
// in pages or in frames that are set aside; and they are dropped.
#include "engine/landing.hpp"

#include <algorithm>

#include "engine/arranging.hpp"
#include "memory/check.hpp"
#include "memory/clock.hpp"

namespace strata {

// How the next gradient of the parameter meets what its page holds.
GradMode Session::page_mode(const Incoming& incoming) const {
  const bool adds = landed_[incoming.param] != 0 && home_.layout.accumulate;
  return adds ? GradMode::add : GradMode::copy;
}

Session::Destination Session::destination(std::span<const Piece> pieces) const {
  Destination to{.pieces = pieces, .chunk = pieces.front().chunk};
  if (gradients_) return to;
  const Chunk& chunk = home_.layout.chunks[to.chunk];
  to.page = page_of(chunk, Role::grad, pieces.front().in_chunk);
  to.on_device = on_device(chunk);
  return to;
}

// Opens it now, or tells what is missing.
Cause Session::try_open(const Incoming& incoming, Destination& to) {
  if (to.page == kNoPage) {
    if (updates_->must_settle(to.chunk, coming_step())) return Cause::update;
    if (!gradients_->open(to.chunk)) return Cause::update;
    const bool adds = updates_->holds_gradient(to.chunk, incoming.param);
    to.mode = adds ? GradMode::add : GradMode::copy;
    return Cause::none;
  }
  // The chunk's last update has read what its gradient pages held.
  if (!updates_->settled(to.chunk)) return Cause::update;
  to.mode = page_mode(incoming);
  if (to.on_device) {
    to.bytes = backend_->address(mover_->frame_of(to.page));
    return Cause::none;
  }
  // Asked anew each time: another thread may land the first gradient in it meanwhile.
  to.intent = table_.newest(to.page) == 0 ? Intent::overwrite : Intent::modify;
  to.bytes = cache_->open(to.page, to.intent);
  if (to.bytes != nullptr) return Cause::none;
  return to.intent == Intent::modify ? Cause::ssd : Cause::room;
}

void Session::wait_open(Lock& lock, const Incoming& incoming, Destination& to) {
  Waiting waiting(timeline_, incoming.unit, true);
  wait(lock, [&] {
    const Cause missing = try_open(incoming, to);
    if (missing == Cause::none) return true;
    waiting.missing(missing);
    return false;
  });
  waiting.over();
}

// Closes what the next run has landed in.
void Session::run_landed(Incoming& incoming, const Destination& to) {
  if (to.page == kNoPage)
    gradients_->close(to.chunk);
  else if (!to.on_device)
    cache_->close(to.page, to.intent);
  moved_.notify_all();  // for whoever waits for this page, or to close
  const bool last = ++incoming.at == incoming.runs.size();
  if (last || incoming.runs[incoming.at].front().chunk != to.chunk) {
    updates_->note_landed(to.chunk, incoming.param);
  }
}

// What lands on the device does not cross the link.
void Session::note_landing(const TimelineSpan& span, const Destination& to) {
  TimelineSpan noted = span;
  if (to.on_device) noted.bytes = 0;
  timeline_.add(noted);
  landed_bytes_ += noted.bytes;
}

std::byte* Session::place_of(const Destination& to, const Piece& piece) const {
  if (to.page == kNoPage) return gradients_->at(to.chunk, piece.in_chunk);
  return to.bytes + byte_in_page(home_.layout.chunks[to.chunk], Role::grad, piece.in_chunk);
}

Dtype Session::grad_dtype(const Destination& to) const {
  return home_.layout.grad_dtype(home_.layout.segments[home_.layout.chunks[to.chunk].segment]);
}

// By the processor, without the lock: nobody else touches these bytes.
void Session::land_pieces(Lock& lock, Incoming& incoming, const Destination& to) {
  STRATA_ASSERT(!to.on_device || backend_->reachable());
  const Dtype to_dtype = grad_dtype(to);
  const std::size_t bytes = size_of(incoming.dtype);
  const std::byte* const from = arrived(lock, incoming);
  TimelineSpan span{
      .track = Track::download, .unit = incoming.unit, .begin_ns = SteadyClock().now_ns()};
  ++copying_;
  lock.unlock();
  for (const Piece& piece : to.pieces) {
    span.bytes += piece.count * bytes;
    incoming.sum += kernels_.land_gradient(
        place_of(to, piece), to_dtype, from + (piece.in_param - to.pieces.front().in_param) * bytes,
        incoming.dtype, piece.count, to.mode);
  }
  span.end_ns = SteadyClock().now_ns();
  lock.lock();
  --copying_;
  note_landing(span, to);
  run_landed(incoming, to);
}

// The next run, by the processor.
void Session::land_run(Lock& lock, Incoming& incoming) {
  ask_ahead(incoming);
  Destination to = destination(incoming.runs[incoming.at]);
  wait_open(lock, incoming, to);
  land_pieces(lock, incoming, to);
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

// Throws StrataError (config) for what is no gradient that the parameter can take now.
void Session::check_landing(std::uint32_t param, const void* from, Dtype dtype) const {
  check_elements(param, Kind::grad, 0, from, config_.params.at(param).numel);
  const ParamSpec& spec = config_.params[param];
  if (!spec.trainable) refuse(spec.name + " is not trained, so there is no room for its gradient");
  if (dtype != spec.dtype && !home_.layout.accumulate) {
    refuse("a gradient of " + spec.name + " as " + name(dtype) + ": it is " + name(spec.dtype));
  }
  if (gradients_ && landed_[param] != 0 && !home_.layout.accumulate) {
    refuse("a second gradient of " + spec.name + " before step(), and gradients do not add up");
  }
}

void Session::land_gradient(std::uint32_t param, const void* from, Dtype dtype, Stream stream) {
  Lock lock(mutex_);
  throw_if_failed();
  check_landing(param, from, dtype);
  const StepCall call(*this, lock);
  // Pieces are cut at kGrain, so that the order of the sum does not depend on the page size.
  const std::vector<Piece> pieces =
      home_.layout.pieces(param, 0, home_.layout.numel[param], kGrain);
  Incoming incoming{.param = param,
                    .unit = config_.params[param].unit,
                    .from = static_cast<const std::byte*>(from),
                    .dtype = dtype,
                    .stream = stream,
                    .runs = cut(pieces, size_of(dtype)),
                    .under_way = UnderWay(home_.layout.page_bytes / sizeof(double))};
  if (backend_->reachable()) {
    while (incoming.at < incoming.runs.size()) land_run(lock, incoming);
  } else {
    land_from_device(lock, incoming);
  }
  sum_squares_[param] = incoming.sum;
  ++landed_[param];
}

bool Session::gradient_fits(std::uint32_t param) {
  Lock lock(mutex_);
  throw_if_failed();
  check_param(param);
  if (!gradients_) return true;
  std::vector<std::uint32_t> chunks;
  for (const Piece& piece : home_.layout.pieces(param, 0, home_.layout.numel[param], kGrain)) {
    if (chunks.empty() || chunks.back() != piece.chunk) chunks.push_back(piece.chunk);
  }
  wait(lock, [&] {
    return gradients_->room_for(chunks) || !updates_->busy() || updates_->waits_for_release();
  });
  return gradients_->room_for(chunks);
}

void Session::read_gradient(Lock& lock, std::uint32_t param, const Piece& piece, float* values) {
  const Chunk& chunk = home_.layout.chunks[piece.chunk];
  const auto land = [&](const std::byte* from) {
    kernels_.land_gradient(values, Dtype::float32, from,
                           home_.layout.grad_dtype(home_.layout.segments[chunk.segment]),
                           piece.count, GradMode::copy);
  };
  if (gradients_) {
    if (!updates_->holds_gradient(piece.chunk, param)) {
      refuse("the gradient was used by its update already");
    }
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

// By chunk: a gradient has landed there since the last step.
std::vector<bool> Session::touched_chunks() const {
  std::vector<bool> touched(home_.layout.chunks.size(), false);
  for (std::uint32_t param = 0; param < landed_.size(); ++param) {
    if (landed_[param] == 0) continue;
    for_pieces(param, 0, home_.layout.numel[param],
               [&](const Piece& piece) { touched[piece.chunk] = true; });
  }
  return touched;
}

void Session::drop_gradients(Lock& lock) {
  for (std::uint32_t param = 0; param < updated_.size(); ++param) {
    if (!updated_[param]) continue;
    refuse("the gradient of " + config_.params[param].name +
           " was used already, during the backward: call step() behind every backward");
  }
  const std::vector<bool> touched = touched_chunks();
  for (std::uint32_t id = 0; id < touched.size(); ++id) {
    if (!touched[id] || !gradients_ || !updates_->merged(id)) continue;
    refuse(
        "gradients were added to those of an earlier step whose update was still to come, and "
        "cannot be dropped: call step() behind every backward");
  }
  forget_gradients(lock);
}

// REQUIRES: none of them was added to one that waits for its update.
void Session::forget_gradients(Lock& lock) {
  const std::vector<bool> touched = touched_chunks();
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
  const StepCall call(*this, lock);
  drop_gradients(lock);
}

void Session::forget_step() {
  Lock lock(mutex_);
  const StepCall call(*this, lock);
  wait(lock, [&] { return !updates_->busy() || updates_->waits_for_release(); });
  updates_->forget_merged();
  forget_gradients(lock);
  std::fill(updated_.begin(), updated_.end(), false);
}

std::uint32_t Session::gradient_count(std::uint32_t param) {
  const Lock lock(mutex_);
  throw_if_failed();
  check_param(param);
  return landed_[param];
}

}  // namespace strata
