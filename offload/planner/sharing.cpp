#include "offload/planner/sharing.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "memory/check.hpp"
#include "offload/planner/lanes.hpp"

namespace strata {
namespace {

// Of numbers around 1: what is smaller is rounding, and dividing by it would make it count.
constexpr double kTiny = 1e-9;

// The simplex method on max gain · y with rows · y ≤ limit, y ≥ 0, limit ≥ 0. A row holds its
// coefficients and then its limit; whoever leaves and enters is the first that may (Bland's rule),
// so that it ends.
class Simplex final {
 public:
  using Row = std::array<double, kLaneCount + 1>;

  explicit Simplex(const PerLane<double>& gain) {
    for (std::size_t a = 0; a < kLaneCount; ++a) gain_[a] = -gain[a], column_[a] = a;
    gain_[kLaneCount] = 0.0;
  }
  void add(const Row& row) {
    base_.push_back(kLaneCount + base_.size());
    rows_.push_back(row);
  }

  double solve() {
    for (;;) {
      std::size_t in = kLaneCount;
      for (std::size_t a = 0; a < kLaneCount; ++a) {
        if (gain_[a] < -kTiny && (in == kLaneCount || column_[a] < column_[in])) in = a;
      }
      if (in == kLaneCount) return gain_[kLaneCount];
      std::size_t out = rows_.size();
      double least = 0.0;
      for (std::size_t r = 0; r < rows_.size(); ++r) {
        if (rows_[r][in] <= kTiny) continue;
        const double step = rows_[r][kLaneCount] / rows_[r][in];
        const bool tie = out != rows_.size() && step <= least + kTiny;
        if (out == rows_.size() || step < least - kTiny || (tie && base_[r] < base_[out])) {
          out = r;
          least = step;
        }
      }
      STRATA_ASSERT(out != rows_.size());  // a lane alone is a set too, and takes its time
      pivot(out, in);
    }
  }

 private:
  // Variable `in` of the columns and that of row `out` change places.
  void pivot(std::size_t out, std::size_t in) {
    STRATA_ASSERT(rows_[out][in] > kTiny);
    Row& row = rows_[out];
    const double by = 1.0 / row[in];
    row[in] = 1.0;
    for (double& value : row) value *= by;
    const auto clear = [&](Row& other) {
      const double factor = other[in];
      other[in] = 0.0;
      for (std::size_t i = 0; i < other.size(); ++i) other[i] -= factor * row[i];
    };
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      if (r != out) clear(rows_[r]);
    }
    clear(gain_);
    std::swap(base_[out], column_[in]);
  }

  Row gain_{};                                    // of each column, negated; then what was gained
  std::array<std::size_t, kLaneCount> column_{};  // which variable it stands for
  std::vector<Row> rows_;
  std::vector<std::size_t> base_;  // by row: the variable it gives
};

// Every set of lanes is a row.
template <typename Limit>
double solve(const Costs& costs, const PerLane<double>& gain, const Limit& limit) {
  for (const double seconds : gain) STRATA_ASSERT(seconds >= 0.0);
  const double most = *std::max_element(gain.begin(), gain.end());
  if (most <= 0.0) return 0.0;
  PerLane<double> scaled = gain;
  for (double& seconds : scaled) seconds /= most;
  const auto speed = speeds(costs);
  Simplex simplex(scaled);
  for (std::size_t busy = 1; busy < speed.size(); ++busy) {
    Simplex::Row row{};
    for (std::size_t a = 0; a < kLaneCount; ++a) {
      if ((busy >> a & 1U) != 0) row[a] = speed[busy][a];
    }
    row[kLaneCount] = limit(row);
    simplex.add(row);
  }
  return most * simplex.solve();
}

}  // namespace

double share_lanes(const Costs& costs, const PerLane<double>& work) {
  return solve(costs, work, [](const Simplex::Row&) { return 1.0; });
}

double share_lane(const Costs& costs, const PerLane<double>& work, Lane whole) {
  const auto fixed = index(whole);
  PerLane<double> others = work;
  others[fixed] = 0.0;
  // What is left of each second beside y(whole) = 1.
  const double more = solve(costs, others, [fixed](Simplex::Row& row) {
    const double left = 1.0 - row[fixed];
    row[fixed] = 0.0;
    return left < 0.0 ? 0.0 : left;
  });
  return work[fixed] + more;
}

}  // namespace strata
