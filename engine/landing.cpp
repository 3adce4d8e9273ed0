#include "engine/landing.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <utility>

#include "engine/under_way.hpp"
#include "memory/check.hpp"
#include "memory/clock.hpp"

namespace strata {
// One gradient on its way.
class Landing::Course final {
 public:
  Course(Landing& landing, const IncomingGradient& gradient);

  ExactSum land_all(Lock& lock) STRATA_REQUIRES(core_lock);

 private:
  // Who has the bounce buffers. When they are given back, whatever became of the gradient, nothing
  // of the device uses them, its memory, or a page that it lands in.
  class Buffers;
  // A run that lands on the device.
  struct Run {
    GradientPlace to;
    RunSize size;
    std::size_t sums_at = 0;
    GradientCopy copied{};  // the last of its copies
    CopyTicket summed{};
    std::int64_t begin_ns = 0;
  };

  const Layout& layout() const { return base_.layout; }
  const DeviceMemory& device() const { return base_.tiers.device(); }
  CopyEngine& engine() const { return base_.tiers.copies(); }
  GradientCopies& copies() const { return landing_.copies_; }
  RunSize size_of_run(std::span<const Piece> run) const;
  std::byte* buffer(std::size_t which) const;
  double* sums_of(std::size_t sums_at) const;

  void wait_open(Lock& lock, GradientPlace& to) STRATA_REQUIRES(core_lock);
  void close(const GradientPlace& to);
  GradientCopy copy_out(std::byte* to, const std::byte* from, std::size_t bytes);

  void land_by_processor(Lock& lock, GradientPlace to) STRATA_REQUIRES(core_lock);
  void land_rest(Lock& lock) STRATA_REQUIRES(core_lock);
  void ask_ahead();

  bool device_may_land() const;
  bool device_lands(const GradientPlace& to) const;
  void land_from_device(Lock& lock) STRATA_REQUIRES(core_lock);
  void open_next(Lock& lock, GradientPlace& to) STRATA_REQUIRES(core_lock);
  void land_there(GradientPlace to, RunSize size) STRATA_REQUIRES(core_lock);
  void copy_there(const GradientPlace& to);
  void finish_oldest(Lock& lock) STRATA_REQUIRES(core_lock);

  Landing& landing_;
  Foundation& base_;
  const IncomingGradient& gradient_;
  const std::vector<Piece> pieces_;
  const std::vector<std::span<const Piece>> runs_;
  // Runs [0, at_) have landed; [at_, asked_) are under way on the device.
  std::size_t at_ = 0;
  std::size_t asked_ = 0;
  ExactSum sum_;                // of what has landed
  CopyTicket made_{};           // the work that wrote the gradient
  GradientCopy last_copied_{};  // behind these two nothing of the device touches the gradient, ...
  CopyTicket last_summed_{};    // ... or what it lands in
  // Run r through buffer r % kLandingFrames, where the processor lands it: its copy.
  std::array<GradientCopy, kLandingFrames> coming_{};
  std::deque<Run> under_way_;  // runs [at_, asked_), oldest first, where the device lands them
  UnderWay bytes_under_way_;
};

Landing::Course::Course(Landing& landing, const IncomingGradient& gradient)
    : landing_(landing),
      base_(landing.base_),
      gradient_(gradient),
      // Cut at kGrain, so that what the exact sum is made of does not depend on the page size.
      pieces_(layout().pieces(gradient.param, 0, layout().numel[gradient.param], kGrain)),
      runs_(cut_runs(base_, pieces_, gradient.dtype)),
      bytes_under_way_(layout().page_bytes / sizeof(double)) {}

class Landing::Course::Buffers final {
 public:
  Buffers(Course& course, Lock& lock) STRATA_REQUIRES(core_lock) : course_(course), lock_(lock) {
    const auto taken = [this] { return !std::exchange(course_.landing_.buffers_taken_, true); };
    course_.base_.gate.wait(lock, taken,
                            {"another gradient to land, before one", course_.gradient_.unit});
  }
  ~Buffers() {
    // Done already, unless an exception is on its way. Copies end in order, and so do kernels.
    course_.copies().finish(lock_, course_.last_copied_);
    course_.base_.outwait(lock_, course_.last_summed_);
    course_.landing_.buffers_taken_ = false;
    course_.base_.gate.notify();
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

 private:
  Course& course_;
  Lock& lock_;
};

ExactSum Landing::land(Lock& lock, const IncomingGradient& gradient) {
  if (lent_.takes(gradient)) return lent_.land(lock, gradient);
  return Course(*this, gradient).land_all(lock);
}

ExactSum Landing::Course::land_all(Lock& lock) {
  if (device().reachable())
    land_rest(lock);
  else
    land_from_device(lock);
  STRATA_ASSERT(at_ == runs_.size() && under_way_.empty());
  return sum_;
}

RunSize Landing::Course::size_of_run(std::span<const Piece> run) const {
  RunSize size;
  for (const Piece& piece : run) {
    size.bytes += piece.count * size_of(gradient_.dtype);
    size.sums += norm_blocks(piece.count);
  }
  return size;
}

std::byte* Landing::Course::buffer(std::size_t which) const {
  STRATA_ASSERT(which < base_.claims.landing_frames);
  return base_.landing + which * layout().page_bytes;
}

// Where the kernel that lands a run leaves its sums.
double* Landing::Course::sums_of(std::size_t sums_at) const {
  return reinterpret_cast<double*>(buffer(0)) + sums_at;
}

void Landing::Course::wait_open(Lock& lock, GradientPlace& to) {
  Waiting waiting(base_.timeline, gradient_.unit, true);
  base_.gate.wait(lock, [&] {
    const Cause missing = to.try_open(landing_.updates_, gradient_);
    if (missing == Cause::none) return true;
    waiting.missing(missing);
    return false;
  });
  waiting.over();
}

// The next run has landed; its place closes as it goes.
void Landing::Course::close(const GradientPlace& to) {
  base_.gate.notify();  // for whoever waits for this page
  const bool last = ++at_ == runs_.size();
  if (last || runs_[at_].front().chunk != to.chunk()) {
    landing_.updates_.note_landed(to.chunk(), gradient_.param, to.lent());
  }
}

GradientCopy Landing::Course::copy_out(std::byte* to, const std::byte* from, std::size_t bytes) {
  last_copied_ = copies().ask(to, from, bytes, made_, gradient_.unit);
  return last_copied_;
}

// The next run, without the lock: nobody else touches these bytes.
void Landing::Course::land_by_processor(Lock& lock, GradientPlace to) {
  STRATA_ASSERT(!to.on_device() || device().reachable());
  // 1. Where the processor reads it.
  const std::byte* from = gradient_.at(to.run().front());
  if (!device().reachable()) {
    const std::size_t which = at_ % kLandingFrames;
    copies().wait(lock, coming_[which], gradient_.unit);
    from = buffer(which);
  }
  // 2. It lands.
  TimelineSpan span{.track = Track::download, .unit = gradient_.unit, .begin_ns = now_ns()};
  {
    const Unlocked unlocked(lock);
    const std::size_t bytes = size_of(gradient_.dtype);
    for (const Piece& piece : to.run()) {
      span.bytes += piece.count * bytes;
      sum_.add(base_.kernels.land_gradient(
          to.at(piece), to.dtype(), from + (piece.in_param - to.run().front().in_param) * bytes,
          gradient_.dtype, piece.count, to.mode(), gradient_.of_older));
    }
    span.end_ns = now_ns();
  }
  // 3. What stays on the device crosses no link, and what came through a buffer was counted there.
  if (to.on_device() || !device().reachable()) span.bytes = 0;
  base_.transfers.note(Link::download, Requester::gradients, span);
  close(to);
}

// All runs from the next one on.
void Landing::Course::land_rest(Lock& lock) {
  while (at_ < runs_.size()) {
    ask_ahead();
    GradientPlace to(base_, runs_[at_]);
    wait_open(lock, to);
    land_by_processor(lock, std::move(to));
  }
}

// Submits the copies of the run that lands and of those behind it that have a buffer.
void Landing::Course::ask_ahead() {
  if (device().reachable()) return;
  const std::size_t end = std::min(runs_.size(), at_ + kLandingFrames);
  for (; asked_ < end; ++asked_) {
    const Piece& first = runs_[asked_].front();
    const Piece& last = runs_[asked_].back();
    const std::size_t count = last.in_param + last.count - first.in_param;
    const std::size_t which = asked_ % kLandingFrames;
    coming_[which] = copy_out(buffer(which), gradient_.at(first), count * size_of(gradient_.dtype));
  }
}

// See Note [Ways to land].
void Landing::Course::land_from_device(Lock& lock) {
  const Buffers buffers(*this, lock);
  made_ = engine().record(gradient_.stream);
  // 1. As far as the device lands it, several runs at a time.
  std::optional<GradientPlace> left;
  const std::size_t end = device_may_land() ? runs_.size() : 0;
  while (asked_ < end && !left) {
    const RunSize size = size_of_run(runs_[asked_]);
    while (!bytes_under_way_.fits(size)) finish_oldest(lock);
    GradientPlace to(base_, runs_[asked_]);
    open_next(lock, to);
    if (device_lands(to))
      land_there(std::move(to), size);
    else
      left = std::move(to);
  }
  while (at_ != asked_) finish_oldest(lock);
  // 2. What is left, by the processor; the first run of it is open.
  if (left) {
    ask_ahead();
    land_by_processor(lock, std::move(*left));
  }
  land_rest(lock);
}

// Opens where the next run goes: see Note [Landing cannot deadlock].
void Landing::Course::open_next(Lock& lock, GradientPlace& to) {
  while (to.try_open(landing_.updates_, gradient_) != Cause::none) {
    if (at_ == asked_) return wait_open(lock, to);
    finish_oldest(lock);
  }
}

// All of it, as far as its pages allow.
bool Landing::Course::device_may_land() const {
  if (runs_.empty()) return false;
  const DeviceCompute* compute = base_.tiers.compute();
  if (compute == nullptr || !compute->reaches_host()) return false;
  if (!base_.tiers.pinned(buffer(0), layout().page_bytes)) return false;
  const GradientPlace first(base_, runs_.front());
  return first.on_device() || gradient_.dtype == first.dtype();
}

// One run, which is open. REQUIRES: device_may_land().
bool Landing::Course::device_lands(const GradientPlace& to) const {
  return to.on_device() || (to.mode() == GradMode::copy && to.pinned());
}

// Submits the copies of a run into its place in host memory: one for each frame that it lies in.
void Landing::Course::copy_there(const GradientPlace& to) {
  for (auto piece = to.run().begin(); piece != to.run().end();) {
    std::byte* const at = to.at(*piece);
    const std::byte* const from = gradient_.at(*piece);
    const auto in_slab = static_cast<std::size_t>(at - base_.tiers.slab().bytes().data());
    const std::size_t room = layout().page_bytes - in_slab % layout().page_bytes;
    std::size_t bytes = 0;
    for (; piece != to.run().end() && bytes < room; ++piece) {
      bytes += piece->count * size_of(gradient_.dtype);
    }
    STRATA_ASSERT(bytes <= room);
    copy_out(at, from, bytes);
  }
}

// Submits the landing of the next run, which is open, by the device.
void Landing::Course::land_there(GradientPlace to, RunSize size) {
  Run& run = under_way_.emplace_back(Run{.to = std::move(to), .size = size, .begin_ns = now_ns()});
  run.sums_at = bytes_under_way_.begin(size);
  // 1. Bytes that go to host memory.
  if (!run.to.on_device()) copy_there(run.to);
  run.copied = last_copied_;
  // 2. Sums, and bytes that stay on the device.
  std::vector<LandSpan> landings;
  double* sums = sums_of(run.sums_at);
  for (const Piece& piece : run.to.run()) {
    const bool stays = !run.to.on_device();
    landings.push_back({.to = stays ? nullptr : run.to.at(piece),
                        .from = gradient_.at(piece),
                        .sums = sums,
                        .count = piece.count,
                        .to_dtype = run.to.dtype(),
                        .from_dtype = gradient_.dtype,
                        .mode = stays ? GradMode::stay : run.to.mode(),
                        .of_older = stays ? GradScaling{} : gradient_.of_older});
    sums += norm_blocks(piece.count);
  }
  STRATA_ASSERT(sums == sums_of(run.sums_at) + size.sums);
  std::string why = base_.tiers.compute()->land(landings, gradient_.stream);
  last_summed_ = run.summed = engine().record(gradient_.stream);
  ++asked_;
  if (why.empty()) return;
  base_.gate.fail(
      {.what = std::move(why), .tier = Tier::device, .unit = base_.names.of(gradient_.unit)});
  base_.gate.throw_if_failed();
}

// Waits for the device to have landed the first run that is under way.
void Landing::Course::finish_oldest(Lock& lock) {
  copies().wait(lock, under_way_.front().copied, gradient_.unit);
  base_.wait_for(lock, under_way_.front().summed, gradient_.unit);
  Run run = std::move(under_way_.front());
  under_way_.pop_front();
  bytes_under_way_.end();
  const double* sums = sums_of(run.sums_at);
  for (const Piece& piece : run.to.run()) {
    sum_.add(sum_in_order(sums, norm_blocks(piece.count)));
    sums += norm_blocks(piece.count);
  }
  if (run.to.on_device()) {
    base_.transfers.note(Link::download, Requester::gradients,
                         {.track = Track::download,
                          .unit = gradient_.unit,
                          .begin_ns = run.begin_ns,
                          .end_ns = now_ns()});
  }
  close(run.to);
}

}  // namespace strata
