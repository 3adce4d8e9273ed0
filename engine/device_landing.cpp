// Gradients in memory that the processor cannot reach, or that rest there; and what a device must
// have so that units can rest on it.
#include <algorithm>
#include <utility>

#include "engine/landing.hpp"
#include "memory/check.hpp"
#include "memory/clock.hpp"

namespace strata {

// Note [Landing frames]
// A gradient in a GPU's memory whose page is in host memory comes through two pinned frames, run
// after run: while the processor lands one run, the next is being copied. So what lands, how it is
// added to what was there, and the sum of its squares are the same code and the same bits as where
// the processor reaches all memory. Where the gradient rests on the GPU, a kernel lands it there,
// and its sums, of blocks, come back through the same frames, to be added up in the order in which
// the processor would have. The frames are taken before any page is opened: whoever has them waits
// for pages, and nobody who has a page open waits for them.

// For work on the device, of the unit: others go on meanwhile.
void Session::wait_for(Lock& lock, CopyTicket ticket, UnitId unit) {
  if (!backend_->done(ticket)) {
    awaited_.push_back(ticket);
    const auto over = [&] { return std::count(awaited_.begin(), awaited_.end(), ticket) == 0; };
    wait(lock, over, {"computation on the device", unit});
  }
  if (auto error = backend_->take_error(ticket)) {
    error->unit = name_of(unit);
    fail(std::move(*error));
    throw_if_failed();
  }
}

Session::LandingFrames::LandingFrames(Session& session, Lock& lock, UnitId unit)
    : session_(session) {
  const auto taken = [this] { return !std::exchange(session_.landing_, true); };
  session_.wait(lock, taken, {"another gradient to land, before one", unit});
}

Session::LandingFrames::~LandingFrames() {
  session_.landing_ = false;
  session_.moved_.notify_all();
}

std::byte* Session::landing_frame(std::size_t which) const {
  STRATA_ASSERT(which < home_.landing_frames);
  return host_->address(FrameId{home_.scale_frames + static_cast<std::uint32_t>(which)});
}

// Submits the copies of the run that lands and of those behind it that have a frame.
void Session::ask_ahead(Incoming& incoming) {
  if (backend_->reachable()) return;
  const std::size_t end = std::min(incoming.runs.size(), incoming.at + kLandingFrames);
  for (; incoming.asked < end; ++incoming.asked) {
    const std::span<const Piece> run = incoming.runs[incoming.asked];
    const Piece& last = run.back();
    const std::size_t count = last.in_param + last.count - run.front().in_param;
    const std::size_t frame = incoming.asked % kLandingFrames;
    incoming.coming[frame] = backend_->copy_from(landing_frame(frame), incoming.address(run),
                                                 count * size_of(incoming.dtype), incoming.made);
  }
}

// Where the processor reads the run that lands.
const std::byte* Session::arrived(Lock& lock, const Incoming& incoming) {
  if (backend_->reachable()) return incoming.address(incoming.runs[incoming.at]);
  const std::size_t frame = incoming.at % kLandingFrames;
  wait_for(lock, incoming.coming[frame], incoming.unit);
  return landing_frame(frame);
}

// The pieces of one gradient page that rests on the device, where nobody else uses it.
void Session::land_on_device(Lock& lock, Incoming& incoming, std::span<const Piece> pieces) {
  const Chunk& chunk = home_.layout.chunks[pieces.front().chunk];
  const PageId page = page_of(chunk, Role::grad, pieces.front().in_chunk);
  Waiting waiting(timeline_, home_.layout.segments[chunk.segment].unit, true);
  wait_settled(lock, pieces.front().chunk, waiting);
  waiting.over();
  std::byte* const bytes = backend_->address(mover_->frame_of(page));
  const GradMode mode = page_mode(incoming);
  if (!backend_->reachable()) return land_there(lock, incoming, pieces, bytes, mode);
  land_pieces(
      lock, incoming, pieces,
      [&](const Piece& piece) { return bytes + byte_in_page(chunk, Role::grad, piece.in_chunk); },
      mode);
}

// By a kernel, into the page's frame.
void Session::land_there(Lock& lock, Incoming& incoming, std::span<const Piece> pieces,
                         std::byte* page, GradMode mode) {
  const Chunk& chunk = home_.layout.chunks[pieces.front().chunk];
  const std::size_t bytes = size_of(incoming.dtype);
  TimelineSpan span{
      .track = Track::download, .unit = incoming.unit, .begin_ns = SteadyClock().now_ns()};
  std::vector<LandSpan> landings;
  auto* sums = reinterpret_cast<double*>(landing_frame(0));
  for (const Piece& piece : pieces) {
    landings.push_back({.to = page + byte_in_page(chunk, Role::grad, piece.in_chunk),
                        .from = incoming.from + piece.in_param * bytes,
                        .sums = sums,
                        .count = piece.count,
                        .to_dtype = home_.layout.grad_dtype(home_.layout.segments[chunk.segment]),
                        .from_dtype = incoming.dtype,
                        .mode = mode});
    sums += norm_blocks(piece.count);
    span.bytes += piece.count * bytes;
  }
  STRATA_ASSERT(reinterpret_cast<std::byte*>(sums) <= landing_frame(0) + home_.layout.page_bytes);
  if (std::string why = compute_->land(landings, incoming.stream); !why.empty()) {
    Error error;
    error.tier = Tier::device;
    error.unit = name_of(incoming.unit);
    error.what = std::move(why);
    fail(std::move(error));
    throw_if_failed();
  }
  wait_for(lock, backend_->record(incoming.stream), incoming.unit);
  for (const LandSpan& landing : landings) {
    incoming.sum += sum_in_order(landing.sums, norm_blocks(landing.count));
  }
  span.end_ns = SteadyClock().now_ns();
  timeline_.add(span);
}

// The first bytes of host memory, as many as the system lets.
void Session::pin(std::size_t host_bytes) {
  pinned_ = backend_->pin_host(slab_->bytes().first(host_bytes));
}

// Throws StrataError (config) where a unit would rest on a device that cannot update it.
void Session::check_resting(const Residence& then) const {
  if (backend_->reachable() || then.rest_frames == 0) return;
  if (!compute_->reaches_host()) {
    refuse("units cannot rest on " + backend_->description() +
           ": its kernels do not reach host memory, where the sums of gradients go");
  }
  for (const ParamSpec& spec : config_.params) {
    if (!spec.trainable || !then.on_device[index(spec.unit)]) continue;
    if (config_.groups[spec.group].rule != Rule::foreign) continue;
    refuse(config_.units[index(spec.unit)] + " cannot rest on " + backend_->description() +
           ": its optimizer is a Python class, which computes on the processor");
  }
}

// Likewise. Kernels reach pinned host memory by its own address: the sums of what lands, scales of
// moments, and gradients without pages, which may be in any frame.
void Session::check_pinned(const Residence& then) const {
  if (backend_->reachable() || then.rest_frames == 0) return;
  const bool pages = home_.layout.grad_pages;
  const std::size_t first = std::size_t{then.scale_frames} + then.landing_frames;
  const std::size_t needed = pages ? first * home_.layout.page_bytes : slab_->bytes().size();
  if (pinned_ >= needed) return;
  refuse("units cannot rest on " + backend_->description() + ": its kernels would use " +
         bytes_text(needed) + " of host memory, of which " + bytes_text(pinned_) +
         " could be pinned; raise the limit of locked memory (ulimit -l)" +
         (pages ? "" : ", or take update=\"on_step\", which needs little of it"));
}

}  // namespace strata
