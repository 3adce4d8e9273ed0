#include "offload/planner/stack_model.hpp"

#include <algorithm>

#include "memory/check.hpp"

namespace strata {
namespace {

// Cells of a whole table: few units are told apart finely, many coarsely.
constexpr std::size_t kCellsMax = 100'000;
constexpr std::size_t kRowsMin = 128;
constexpr std::size_t kRowsMax = 2'048;
static_assert(2 * kRowsMax <= UINT16_MAX);

}  // namespace

StackModel::StackModel(const Problem& problem) : problem_(problem), uses_of_(problem.units()) {
  const Trace& trace = problem.trace();
  for (std::size_t i = 0; i < trace.uses.size(); ++i) {
    uses_of_[index(trace.uses[i].unit)].push_back(i);
  }
  order_ = units_in_order(trace, [](const Use& use) { return !use.backward; });
  for (const std::size_t unit : order_) {
    std::vector<Option>& options = options_.emplace_back();
    for (const UnitPlan& plan : problem.options(unit)) options.push_back(option_of(unit, plan));
  }
  rows_ = std::clamp(kCellsMax / std::max<std::size_t>(order_.size(), 1), kRowsMin, kRowsMax);
}

StackModel::Option StackModel::option_of(std::size_t unit, const UnitPlan& plan) const {
  const UnitLife& life = problem_.lives().units[unit];
  const Costs& costs = problem_.costs();
  STRATA_ASSERT(unit < problem_.units() && plan.slices > 0);
  Option option;
  option.plan = plan;
  for (const std::size_t use : uses_of_[unit]) {
    const bool backward = problem_.trace().uses[use].backward;
    std::uint64_t& most = backward ? option.backward : option.forward;
    most = std::max(most, problem_.memory().need(use, plan));
  }
  if (plan.activation == Activation::keep) option.held = life.saved_bytes;
  if (plan.activation == Activation::recompute) option.held = life.input_bytes;
  if (recomputes(plan.activation)) {
    option.compute_seconds =
        life.forward_seconds * costs.compute_scale + 2.0 * (plan.slices - 1) * costs.slice_seconds;
  }
  if (!swaps(plan.activation)) return option;
  const std::uint64_t leaving = life.leaving_bytes(plan.activation);
  option.leaving = leaving;
  option.swap_seconds = transfer_seconds(leaving, costs.download_bytes_s) +
                        transfer_seconds(leaving, costs.upload_bytes_s) +
                        2 * costs.transfer_seconds;
  // In host memory it drives as much of something else to the SSD, where that is in use.
  const bool host_is_full =
      problem_.resting().total_bytes() + leaving > problem_.budgets().host_bytes;
  if (swaps_to_ssd(plan.activation) || host_is_full) {
    option.ssd_seconds = transfer_seconds(leaving, costs.read_bytes_s) +
                         transfer_seconds(leaving, costs.write_bytes_s) +
                         2 * costs.transfer_seconds;
  }
  return option;
}

bool StackModel::left_out(const Option& option, const Without& without) const {
  const Activation activation = option.plan.activation;
  return swaps(activation) && (swaps_to_ssd(activation) ? without.swap_ssd : without.swap_host);
}

double StackModel::cost_of(const Option& option, const Prices& prices) const {
  return option.compute_seconds + prices.swap * (option.swap_seconds + option.ssd_seconds);
}

// Units that have no forward keep what their options say first.
Modes StackModel::base_modes() const {
  Modes modes;
  for (std::size_t unit = 0; unit < problem_.units(); ++unit) {
    modes.push_back(problem_.options(unit).front());
  }
  return modes;
}

// Of two ways that end with the same mode, the one that holds less is never worse: so one way per
// mode of the last unit is enough, and the answer is exact.
bool StackModel::fits_within(std::uint64_t bytes, const Without& without, Modes* modes) const {
  struct Way {
    std::uint64_t held = UINT64_MAX;
    std::uint32_t before = 0;
  };
  std::vector<std::vector<Way>> ways;
  for (std::size_t place = 0; place < order_.size(); ++place) {
    std::vector<Way>& here = ways.emplace_back(options_[place].size());
    for (std::size_t o = 0; o < here.size(); ++o) {
      const Option& option = options_[place][o];
      if (left_out(option, without)) continue;
      const auto try_from = [&](std::uint64_t held, std::uint64_t leaving, std::uint32_t before) {
        if (held == UINT64_MAX || held + leaving + option.forward > bytes ||
            held + option.backward > bytes) {
          return;
        }
        if (held + option.held < here[o].held) here[o] = {held + option.held, before};
      };
      if (place == 0) try_from(0, 0, 0);
      for (std::uint32_t b = 0; place > 0 && b < ways[place - 1].size(); ++b) {
        try_from(ways[place - 1][b].held, options_[place - 1][b].leaving, b);
      }
    }
  }
  std::uint32_t last = UINT32_MAX;
  if (ways.empty()) return true;
  for (std::uint32_t o = 0; o < ways.back().size(); ++o) {
    if (ways.back()[o].held == UINT64_MAX) continue;
    if (last == UINT32_MAX || ways.back()[o].held < ways.back()[last].held) last = o;
  }
  if (last == UINT32_MAX) return false;
  for (std::size_t place = order_.size(); modes != nullptr && place-- > 0;) {
    (*modes)[order_[place]] = options_[place][last].plan;
    last = ways[place][last].before;
  }
  return true;
}

std::optional<Modes> StackModel::least_memory(const Without& without) const {
  for (const std::vector<Option>& options : options_) {
    const auto out = [&](const Option& option) { return left_out(option, without); };
    if (std::all_of(options.begin(), options.end(), out)) return std::nullopt;
  }
  Modes modes = base_modes();
  std::uint64_t low = 0, high = 1;
  while (!fits_within(high, without, nullptr)) {
    low = high;
    high *= 2;
    STRATA_ASSERT(high != 0);  // with enough memory every unit has a mode
  }
  while (low + 1 < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    (fits_within(middle, without, nullptr) ? high : low) = middle;
  }
  const bool fits = fits_within(high, without, &modes);
  STRATA_ASSERT(fits && low < high);
  return modes;
}

void StackModel::advance(const std::vector<Cell>& from, std::size_t place, std::uint64_t bytes,
                         std::uint32_t lookahead, const Prices& prices, std::vector<Cell>& to,
                         std::span<Step> steps) const {
  STRATA_ASSERT(from.size() == 2 * rows_);
  STRATA_ASSERT(steps.size() == 2 * rows_);
  to.assign(2 * rows_, Cell{});
  const double scale = static_cast<double>(rows_) / (static_cast<double>(bytes) + 1);
  const std::vector<Option>& options = options_[place];
  std::vector<double> costs;
  costs.reserve(options.size());
  for (const Option& option : options) costs.push_back(cost_of(option, prices));
  for (std::size_t f = 0; f < from.size(); ++f) {
    const Cell& cell = from[f];
    if (!cell.reached) continue;
    for (std::size_t o = 0; o < options.size(); ++o) {
      const Option& option = options[o];
      const std::uint64_t ahead = lookahead == 0 ? 0 : cell.leaving;
      if (cell.held + cell.leaving + option.forward > bytes ||
          cell.held + ahead + option.backward > bytes || left_out(option, prices.without)) {
        continue;
      }
      const std::uint64_t held = cell.held + option.held;
      if (held > bytes) continue;
      const auto row = static_cast<std::size_t>(static_cast<double>(held) * scale);
      STRATA_ASSERT(row < rows_);
      const std::size_t place_to = 2 * row + (option.leaving != 0 ? 1 : 0);
      Cell& best = to[place_to];
      const double cost = cell.cost + costs[o];
      if (best.reached && (cost > best.cost || (cost == best.cost && held >= best.held))) continue;
      best = {cost, held, option.leaving, true};
      steps[place_to] = {static_cast<std::uint16_t>(o), static_cast<std::uint16_t>(f)};
    }
  }
}

std::optional<Modes> StackModel::cheapest(std::uint64_t bytes, std::uint32_t lookahead,
                                          const Prices& prices) const {
  const std::size_t width = 2 * rows_;
  std::vector<Step> steps(order_.size() * width);
  std::vector<Cell> row(width), next;
  row.front().reached = true;  // nothing is held before the first unit
  for (std::size_t place = 0; place < order_.size(); ++place) {
    advance(row, place, bytes, lookahead, prices, next,
            std::span(steps).subspan(place * width, width));
    std::swap(row, next);
  }
  std::size_t at = width;
  for (std::size_t c = 0; c < width; ++c) {
    if (row[c].reached && (at == width || row[c].cost < row[at].cost)) at = c;
  }
  if (at == width) return std::nullopt;
  Modes modes = base_modes();
  for (std::size_t place = order_.size(); place-- > 0;) {
    const Step& step = steps[place * width + at];
    modes[order_[place]] = options_[place][step.option].plan;
    at = step.before;
  }
  return modes;
}

}  // namespace strata
