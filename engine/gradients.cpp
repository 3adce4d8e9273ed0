#include "engine/gradients.hpp"

#include <cmath>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

// One more of them is under way while this lives.
class OneMore final {
 public:
  explicit OneMore(std::uint32_t& count) : count_(count) { ++count_; }
  ~OneMore() { --count_; }
  OneMore(const OneMore&) = delete;
  OneMore& operator=(const OneMore&) = delete;

 private:
  std::uint32_t& count_;
};

}  // namespace

Gradients::Gradients(Foundation& base, BetweenSteps& between, Updates& updates, bool threads,
                     std::unique_ptr<Column> column)
    : base_(base),
      between_(between),
      updates_(updates),
      copies_(base),
      landing_(base, updates, copies_),
      landed_(base.config.params.size(), 0),
      sum_squares_(base.config.params.size(), 0.0),
      scalings_(base.config.params.size()),
      used_(base.config.params.size(), false) {
  if (base.owns.alone()) return;
  exchange_.emplace(base, updates, copies_, threads);
  sums_.emplace(base, *exchange_, std::move(column));
  if (base.config.update == UpdateMode::in_backward) early_.emplace(base, *exchange_);
}

void Gradients::land(Lock& lock, std::uint32_t param, std::shared_ptr<const std::byte> from,
                     Dtype dtype, Stream stream) {
  const ParamSpec& spec = base_.config.params[param];
  if (!spec.trainable) refuse(spec.name + " is not trained, so there is no room for its gradient");
  if (dtype != spec.dtype && !base_.layout.accumulate) {
    refuse("a gradient of " + spec.name + " as " + name(dtype) + ": it is " + name(spec.dtype));
  }
  if (base_.config.update == UpdateMode::in_backward && landed_[param] != 0) {
    refuse("a second gradient of " + spec.name + " before step(), and gradients do not add up");
  }
  refuse_behind_end();
  if (exchange_ && !scalings_[param].empty()) {
    refuse("a gradient of " + spec.name +
           " behind one that was scaled, of several ranks: call step() or zero_grad() first");
  }
  land_now(lock, {.param = param,
                  .unit = spec.unit,
                  .from = std::move(from),
                  .dtype = dtype,
                  .stream = stream,
                  .adds = landed_[param] != 0,
                  .of_older = scalings_[param],
                  .step = step_});
}

void Gradients::land_now(Lock& lock, const IncomingGradient& gradient) {
  const BetweenSteps::StepCall call(between_, lock);
  STRATA_ASSERT(gradient.from != nullptr || base_.layout.numel[gradient.param] == 0);
  ExactSum squares;
  {
    const OneMore landing(landings_);
    if (!exchange_) squares = landing_.land(lock, gradient);
    if (exchange_) exchange_->land(lock, gradient);
  }
  sum_squares_[gradient.param] = squares.value();
  scalings_[gradient.param] = {};
  if (sums_) sums_->note_landed(gradient.param);
  if (landed_[gradient.param]++ == 0) ++landed_params_;
}

void Gradients::begin_window() {
  refuse_behind_end();
  if (exchange_) exchange_->begin_window();
}

void Gradients::refuse_behind_end() const {
  if (!exchange_ || !exchange_->meets()) return;
  refuse(
      "other ranks were told that this one has all gradients of its step, and then what it asked "
      "was refused: call step() again, on all ranks, before the next backward");
}

void Gradients::agree(Lock& lock, std::uint64_t asked) {
  if (!exchange_) return;
  sums_->end_step(lock, asked);
  take_sums();
}

bool Gradients::look(Lock& lock, bool wanted) {
  if (!sums_ || base_.config.update != UpdateMode::on_step) return false;
  if (wanted ? exchange_->meets() : sums_->looked()) return false;
  const BetweenSteps::StepCall call(between_, lock);
  const GradientSums::Look look = meet_others(lock, kLook);
  return true;
}

// All ranks do what was asked while this lives.
GradientSums::Look Gradients::meet_others(Lock& lock, std::uint64_t asked) {
  refuse_behind_end();
  GradientSums::Look look = sums_->look(lock, asked);
  take_sums();
  return look;
}

void Gradients::take_sums() {
  landed_params_ = 0;
  for (std::uint32_t param = 0; param < landed_.size(); ++param) {
    const Agreement::Entry sum = sums_->of(param);
    landed_[param] = sum.landed;
    landed_params_ += sum.landed != 0 ? 1 : 0;
    if (sums_->is_scaled(param)) continue;  // scale() keeps its squares, as where a rank is alone
    sum_squares_[param] = scalings_[param].of_squares(sum.squares.value());
  }
}

void Gradients::replace(Lock& lock, std::uint32_t param, const std::byte* from, Dtype dtype,
                        Stream stream) {
  const ParamSpec& spec = base_.config.params[param];
  refuse_shared(param);
  refuse_without_pages(param, "replaced");
  STRATA_ASSERT(spec.trainable && (dtype == spec.dtype || base_.layout.accumulate));
  land_now(lock, {.param = param,
                  .unit = spec.unit,
                  .from = {std::shared_ptr<void>(), from},
                  .dtype = dtype,
                  .stream = stream,
                  .step = step_});
}

bool Gradients::scale(Lock& lock, std::uint32_t param, const GradScaling& scaling) {
  const BetweenSteps::StepCall call(between_, lock);
  refuse_hidden(param);
  refuse_without_pages(param, "scaled");
  refuse_where_none_landed(param);
  STRATA_ASSERT(!scaling.divides || scaling.factor != 0.0f);
  if (!scalings_[param].empty() && !write_scaled(lock, param)) return false;
  scalings_[param] = scaling;
  sum_squares_[param] = scaling.of_squares(sum_squares_[param]);
  if (sums_) sums_->note_scaled(param, scaling);
  return true;
}

// What rests becomes what was asked of it. False: a GPU alone reaches it.
bool Gradients::write_scaled(Lock& lock, std::uint32_t param) {
  const GradScaling scaling = scalings_[param];
  const OneMore writing(landings_);
  if (exchange_) {
    exchange_->scale(lock, param, scaling);
    scalings_[param] = {};
    return true;
  }
  const Layout& layout = base_.layout;
  const Segment& segment = layout.segments[layout.places[param].segment];
  if (base_.on_device(segment.unit) && !base_.tiers.device().reachable()) return false;
  const Dtype dtype = layout.grad_dtype(segment);
  const std::vector<Piece> pieces = layout.pieces(param, 0, layout.numel[param], kGrain);
  const IncomingGradient older{.param = param, .adds = true, .step = step_};
  ExactSum squares;
  for (const std::span<const Piece> run : cut_runs(base_, pieces, dtype)) {
    GradientPlace to(base_, run);
    base_.gate.wait(lock, [&] { return to.try_open(updates_, older) == Cause::none; });
    const Unlocked unlocked(lock);
    squares.add(to.scale(scaling));
  }
  scalings_[param] = {};
  // In float32 they stay as if nothing was rounded, for all numbers of ranks.
  if (dtype != Dtype::float32) sum_squares_[param] = squares.value();
  return true;
}

void Gradients::refuse_without_pages(std::uint32_t param, const char* what) const {
  const std::string name = base_.config.params[param].name;
  if (base_.config.update == UpdateMode::on_step) return;
  refuse("the gradient of " + name + " cannot be " + what + ": its update may begin at any time");
}

void Gradients::refuse_where_none_landed(std::uint32_t param) const {
  if (landed_[param] != 0) return;
  refuse("no gradient of " + base_.config.params[param].name +
         " has landed since the last step or zero_grad");
}

bool Gradients::fits(Lock& lock, std::uint32_t param) {
  base_.check_param(param);
  if (!base_.gradient_frames) return true;
  const std::vector<std::uint32_t> chunks = base_.layout.chunks_of(param);
  base_.gate.wait(lock, [&] {
    return base_.gradient_frames->room_for(chunks) || !updates_.busy() ||
           updates_.waits_for_release();
  });
  return base_.gradient_frames->room_for(chunks);
}

void Gradients::refuse_shared(std::uint32_t param) const {
  if (!exchange_) return;
  refuse("the values of the gradient of " + base_.config.params[param].name +
         " lie with the ranks that own them, and cannot be seen or set: its norm can be asked for, "
         "and it can be scaled, by all ranks alike");
}

void Gradients::refuse_hidden(std::uint32_t param) const {
  if (!sums_ || sums_->looked()) return;
  refuse("the gradient of " + base_.config.params[param].name +
         " cannot be asked for while a backward runs: ranks are still to add theirs");
}

void Gradients::read(Lock& lock, std::uint32_t param, std::size_t offset, std::span<float> values) {
  refuse_shared(param);
  refuse_where_none_landed(param);
  for (const Piece& piece : base_.layout.pieces(param, offset, values.size())) {
    read_piece(lock, param, piece, values.data() + (piece.in_param - offset));
  }
}

void Gradients::read_piece(Lock& lock, std::uint32_t param, const Piece& piece, float* values) {
  const Chunk& chunk = base_.layout.chunks[piece.chunk];
  const Dtype dtype = base_.layout.grad_dtype(base_.layout.segments[chunk.segment]);
  const auto copy = [&](const std::byte* from) {
    base_.kernels.read_gradient(from, dtype, scalings_[param], piece.count, values);
  };
  if (const auto lent = updates_.lent_gradient(piece.chunk, param)) {
    return copy(lent.get() + piece.in_param * size_of(dtype));
  }
  if (base_.gradient_frames) {
    if (!updates_.holds_gradient(piece.chunk, param)) {
      refuse("the gradient was used by its update already");
    }
    return copy(base_.gradient_frames->at(piece.chunk, piece.in_chunk));
  }
  updates_.wait_settled(lock, piece.chunk);
  const PageId page = base_.page_of(chunk, Role::grad, piece.in_chunk);
  const std::size_t at = base_.byte_in_page(chunk, Role::grad, piece.in_chunk);
  if (base_.on_device(chunk)) {
    const auto bytes = base_.copied_out(lock, base_.table.placement(page).device_frame(), page);
    const Unlocked unlocked(lock);
    return copy(bytes.data() + at);
  }
  const Pin pin = base_.open(lock, page, Intent::read);
  const Unlocked unlocked(lock);
  copy(pin.bytes() + at);
}

double Gradients::sum_squares(std::uint32_t param) const {
  if (landed_[param] != 0) refuse_hidden(param);
  const double ranks = mean_of(base_.config);
  return sum_squares_[param] / (ranks * ranks);
}

double Gradients::norm() const {
  double total = 0.0;
  for (std::size_t param = 0; param < landed_.size(); ++param) {
    if (landed_[param] != 0) total += sum_squares_[param];
  }
  return std::sqrt(total);
}

std::vector<double> Gradients::unit_norms() const {
  std::vector<double> norms(base_.config.units.size(), 0.0);
  for (std::size_t param = 0; param < landed_.size(); ++param) {
    if (landed_[param] != 0) norms[index(base_.config.params[param].unit)] += sum_squares_[param];
  }
  for (double& norm : norms) norm = std::sqrt(norm);
  return norms;
}

bool Gradients::use(UnitId unit) {
  bool any = false;
  for (std::size_t param = 0; param < landed_.size(); ++param) {
    if (landed_[param] == 0 || base_.config.params[param].unit != unit) continue;
    any |= !used_[param];
    used_params_ += used_[param] ? 0 : 1;
    used_[param] = true;
  }
  return any;
}

std::vector<bool> Gradients::landed() const {
  std::vector<bool> any;
  for (const std::uint32_t count : landed_) any.push_back(count != 0);
  return any;
}

}  // namespace strata
