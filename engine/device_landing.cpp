// Gradients in memory that the processor cannot reach, or that rest there; and what a device must
// have so that units can rest on it.
#include <algorithm>
#include <optional>
#include <utility>

#include "engine/landing.hpp"
#include "memory/check.hpp"
#include "memory/clock.hpp"

namespace strata {

// Note [Landing frames]
// A gradient in a GPU's memory lands run after run, a run being what goes into one page, in one of
// three ways. What lands, how it meets what was there, and the sum of the squares, added up in the
// promised order, are the same bits in each of them, and where the processor reaches all memory.
//   1. Its page is on the GPU: a kernel lands it there.
//   2. It is copied as it is to a page in host memory that is pinned: the GPU's copy engine writes
//      into the page, while a kernel reads the same bytes for their sums. No byte of it passes the
//      processor.
//   3. Everything else (it is added to what is there, or becomes float32, or the page is not
//      pinned, or kernels do not reach host memory): it comes through two pinned frames that are
//      set aside, and the processor lands it: one run while the next is being copied.
// Sums, of blocks, come back through the same frames. A gradient begins in one of the first two
// ways where it can, and goes on in the third from the first run on that has to: then nothing else
// uses the frames any more.
//
// Note [Landing cannot deadlock]
// The frames are taken before any page is opened: whoever has them waits for pages, and nobody who
// has a page open waits for them. In the first two ways several runs are under way at a time, their
// pages open. Who has a page open waits for nothing but the GPU, whose work is submitted already
// and needs nothing more from us: the next page is opened only where that needs no waiting, else
// the runs under way end first, the oldest before the others, until none is left, and only then is
// there a wait for the page, with none open. So pages open here are given back whatever others do,
// and in the smallest staging area a gradient lands page by page: it holds more than one staging
// frame only while nobody else wants them, as Note [Staging cannot deadlock] asks.
//
// Note [Memory in flight]
// Pages stay open until the copies into them are done, so no update, discard or eviction gets
// them. Where a wait ends by an exception (the session failed, or is closed), the pages stay open
// for good; what is in flight is waited for before the exception goes on, so the caller may free
// the gradient, and close() gives nothing back before that: copying_ counts who has the frames.

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

Session::LandingFrames::LandingFrames(Session& session, Lock& lock, const Incoming& incoming)
    : session_(session), incoming_(incoming) {
  const auto taken = [this] { return !std::exchange(session_.landing_, true); };
  session_.wait(lock, taken, {"another gradient to land, before one", incoming.unit});
  ++session_.copying_;
}

Session::LandingFrames::~LandingFrames() {
  // Done already, unless an exception is on its way. Copies end in order, and so do kernels.
  session_.backend_->wait(incoming_.copied);
  session_.backend_->wait(incoming_.summed);
  session_.landing_ = false;
  --session_.copying_;
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
    incoming.copied = backend_->copy_from(landing_frame(frame), incoming.address(run.front()),
                                          count * size_of(incoming.dtype), incoming.made);
    incoming.coming[frame] = incoming.copied;
  }
}

// Where the processor reads the run that lands.
const std::byte* Session::arrived(Lock& lock, const Incoming& incoming) {
  if (backend_->reachable()) return incoming.address(incoming.runs[incoming.at].front());
  const std::size_t frame = incoming.at % kLandingFrames;
  wait_for(lock, incoming.coming[frame], incoming.unit);
  return landing_frame(frame);
}

// See Note [Landing frames].
void Session::land_from_device(Lock& lock, Incoming& incoming) {
  const LandingFrames frames(*this, lock, incoming);
  incoming.made = backend_->record(incoming.stream);
  // 1. As far as the device lands it, several runs at a time.
  std::optional<Destination> left;
  const std::size_t end = device_may_land(incoming) ? incoming.runs.size() : 0;
  while (incoming.asked < end && !left) {
    const RunSize size = incoming.size(incoming.runs[incoming.asked]);
    while (!incoming.under_way.fits(size)) finish_oldest(lock, incoming);
    Destination to = destination(incoming.runs[incoming.asked]);
    open_next(lock, incoming, to);
    if (device_lands(to))
      land_there(incoming, to, size);
    else
      left = to;
  }
  while (incoming.at != incoming.asked) finish_oldest(lock, incoming);
  // 2. What is left, by the processor; the first run of it is open.
  if (left) {
    ask_ahead(incoming);
    land_pieces(lock, incoming, *left);
  }
  while (incoming.at < incoming.runs.size()) land_run(lock, incoming);
}

// Opens where the next run goes: see Note [Landing cannot deadlock].
void Session::open_next(Lock& lock, Incoming& incoming, Destination& to) {
  while (try_open(incoming, to) != Cause::none) {
    if (incoming.at == incoming.asked) return wait_open(lock, incoming, to);
    finish_oldest(lock, incoming);
  }
}

// All of it, as far as its pages allow.
bool Session::device_may_land(const Incoming& incoming) const {
  if (incoming.runs.empty()) return false;
  if (!compute_ || !compute_->reaches_host()) return false;
  if (!pinned(landing_frame(0), home_.layout.page_bytes)) return false;
  const Destination first = destination(incoming.runs.front());
  return first.on_device || incoming.dtype == grad_dtype(first);
}

// Whether the device reaches these bytes of host memory by itself.
bool Session::pinned(const std::byte* at, std::size_t bytes) const {
  return at + bytes <= slab_->bytes().data() + pinned_;
}

// One run, which is open. REQUIRES: device_may_land().
bool Session::device_lands(const Destination& to) const {
  if (to.on_device) return true;
  const std::size_t bytes = size_of(grad_dtype(to));
  return to.mode == GradMode::copy &&
         std::all_of(to.pieces.begin(), to.pieces.end(), [&](const Piece& piece) {
           return pinned(place_of(to, piece), piece.count * bytes);
         });
}

// Submits the copies of a run into its place in host memory: one for each frame that it lies in.
CopyTicket Session::copy_there(const Incoming& incoming, const Destination& to) {
  const std::size_t page = home_.layout.page_bytes;
  CopyTicket last{};
  for (auto piece = to.pieces.begin(); piece != to.pieces.end();) {
    std::byte* const at = place_of(to, *piece);
    const std::byte* const from = incoming.address(*piece);
    const auto in_slab = static_cast<std::size_t>(at - slab_->bytes().data());
    const std::size_t room = page - in_slab % page;
    std::size_t bytes = 0;
    for (; piece != to.pieces.end() && bytes < room; ++piece) {
      bytes += piece->count * size_of(incoming.dtype);
    }
    STRATA_ASSERT(bytes <= room);
    last = backend_->copy_from(at, from, bytes, incoming.made);
  }
  return last;
}

// Submits the landing of the next run, which is open, by the device.
void Session::land_there(Incoming& incoming, const Destination& to, RunSize size) {
  Incoming::Run& run = incoming.landing.emplace_back(
      Incoming::Run{.to = to, .size = size, .begin_ns = SteadyClock().now_ns()});
  run.sums_at = incoming.under_way.begin(size);
  // 1. Bytes that go to host memory.
  if (!to.on_device) incoming.copied = run.copied = copy_there(incoming, to);
  // 2. Sums, and bytes that stay on the device.
  std::vector<LandSpan> landings;
  double* sums = sums_of(run.sums_at);
  for (const Piece& piece : to.pieces) {
    landings.push_back({.to = to.on_device ? place_of(to, piece) : nullptr,
                        .from = incoming.address(piece),
                        .sums = sums,
                        .count = piece.count,
                        .to_dtype = grad_dtype(to),
                        .from_dtype = incoming.dtype,
                        .mode = to.mode});
    sums += norm_blocks(piece.count);
  }
  STRATA_ASSERT(sums == sums_of(run.sums_at) + size.sums);
  std::string why = compute_->land(landings, incoming.stream);
  incoming.summed = run.summed = backend_->record(incoming.stream);
  ++incoming.asked;
  if (why.empty()) return;
  Error error;
  error.tier = Tier::device;
  error.unit = name_of(incoming.unit);
  error.what = std::move(why);
  fail(std::move(error));
  throw_if_failed();
}

// Where the kernel that lands a run leaves its sums.
double* Session::sums_of(std::size_t sums_at) const {
  return reinterpret_cast<double*>(landing_frame(0)) + sums_at;
}

// Waits for the device to have landed the first run that is under way.
void Session::finish_oldest(Lock& lock, Incoming& incoming) {
  const Incoming::Run run = incoming.landing.front();
  wait_for(lock, run.copied, incoming.unit);
  wait_for(lock, run.summed, incoming.unit);
  TimelineSpan span{.track = Track::download,
                    .unit = incoming.unit,
                    .begin_ns = run.begin_ns,
                    .end_ns = SteadyClock().now_ns()};
  const double* sums = sums_of(run.sums_at);
  for (const Piece& piece : run.to.pieces) {
    incoming.sum += sum_in_order(sums, norm_blocks(piece.count));
    sums += norm_blocks(piece.count);
  }
  incoming.landing.pop_front();
  incoming.under_way.end();
  span.bytes = run.size.bytes;
  note_landing(span, run.to);
  run_landed(incoming, run.to);
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
