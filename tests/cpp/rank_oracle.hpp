// What ranks should learn: one training in plain memory that all their gradients go to.
//
// Threads: one at a time.
//
//   RankOracle oracle(config, initial);
//   oracle.add_up();                         // where all look
//   oracle.land({.param = 0, .window = 1, .number = 0, .rank = 2, .dtype = dtype, .bytes = bytes});
//   const StepResult expected = oracle.step(groups, options, ranks);
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/layout.hpp"
#include "engine/steps.hpp"
#include "optimizers/exact_sum.hpp"
#include "plain_param.hpp"

namespace strata {

struct LandedPiece {
  std::uint32_t param = 0, window = 0, number = 0, rank = 0;
  Dtype dtype = Dtype::bfloat16;
  std::vector<std::byte> bytes;
};

class RankOracle final {
 public:
  RankOracle(const Config& config, const std::vector<std::vector<float>>& initial)
      : config_(config), layout_(make_layout(config, config.page_bytes)) {
    for (std::uint32_t p = 0; p < config.params.size(); ++p) {
      params_.emplace_back(config.params[p], true, initial[p]);
    }
  }

  const std::vector<PlainParam>& params() const { return params_; }

  void land(LandedPiece piece) {
    ++counts_[piece.param];
    pieces_.push_back(std::move(piece));
  }

  // What has landed so far, in the order of GradientExchange's note.
  void add_up() {
    const auto key = [](const LandedPiece& of) {
      return std::tuple(of.param, of.window, of.number, of.rank);
    };
    std::sort(pieces_.begin(), pieces_.end(),
              [&](const LandedPiece& a, const LandedPiece& b) { return key(a) < key(b); });
    for (const LandedPiece& piece : pieces_) params_[piece.param].land(piece.bytes, piece.dtype);
    pieces_.clear();
  }
  // Gradients of the parameter since the last step, and the squares of their sum. REQUIRES of the
  // second: all are added up.
  std::uint32_t count(std::uint32_t param) const { return counts_[param]; }
  double squares(std::uint32_t param) const {
    return scaled_[param] ? *scaled_[param] : squares_of(param);
  }
  void forget(std::uint32_t param) {
    params_[param].forget_gradient();
    counts_[param] = 0;
    scaled_[param].reset();
  }
  void scale(std::uint32_t param, float factor, bool divides) {
    const GradScaling scaling{.factor = factor, .divides = divides};
    scaled_[param] = scaling.of_squares(squares(param));
    params_[param].scale_gradient(factor, divides);
  }

  // What step() of every rank should return.
  StepResult step(const std::vector<Hyper>& groups, const StepOptions& options, double divisor) {
    // 1. The sums.
    add_up();
    // 2. Their norms.
    double total = 0.0;
    std::vector<double> by_unit(config_.units.size(), 0.0);
    for (std::uint32_t p = 0; p < params_.size(); ++p) {
      if (!params_[p].has_gradient()) continue;
      total += squares(p);
      by_unit[index(config_.params[p].unit)] += squares(p);
    }
    StepResult result{.norm = std::sqrt(total) / divisor};
    result.finite = std::isfinite(total);
    const bool any = std::any_of(params_.begin(), params_.end(),
                                 [](const PlainParam& param) { return param.has_gradient(); });
    result.skipped = any && !result.finite && options.skip_nonfinite;
    // 3. The updates.
    for (std::uint32_t p = 0; p < params_.size(); ++p) {
      const double unit_norm = std::sqrt(by_unit[index(config_.params[p].unit)]) / divisor;
      double scale = clip(result.norm, options.max_norm) / divisor;
      if (options.max_unit_norm > 0.0) scale *= clip(unit_norm, options.max_unit_norm);
      if (result.skipped)
        params_[p].forget_gradient();
      else
        params_[p].update(groups[config_.params[p].group], static_cast<float>(scale));
      counts_[p] = 0;
      scaled_[p].reset();
    }
    return result;
  }

 private:
  static double clip(double norm, double max_norm) {
    return max_norm <= 0.0 ? 1.0 : std::min(1.0, max_norm / (norm + 1e-6));
  }

  double squares_of(std::uint32_t param) const {
    const std::vector<float> sum = params_[param].gradient();
    std::vector<float> copy(sum.size());
    ExactSum squares;
    for (const Piece& piece : layout_.pieces(param, 0, sum.size(), kGrain)) {
      squares.add(kernels(Isa::scalar)
                      .land_gradient(copy.data(), Dtype::float32, sum.data() + piece.in_param,
                                     Dtype::float32, piece.count, GradMode::copy, {}));
    }
    return squares.value();
  }

  const Config& config_;
  Layout layout_;
  std::vector<PlainParam> params_;
  std::vector<LandedPiece> pieces_;  // of this step, and not added up
  std::vector<std::uint32_t> counts_ = std::vector<std::uint32_t>(config_.params.size(), 0);
  std::vector<std::optional<double>> scaled_ =
      std::vector<std::optional<double>>(config_.params.size());
};

}  // namespace strata
