#include "engine/ranks/machine_sums.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "memory/check.hpp"
#include "memory/units.hpp"

namespace strata {
namespace {

constexpr std::size_t kBlockElements = std::size_t{1} << 20;  // 4 MiB, beside the budget, twice

struct Header {
  std::int64_t step = 0;
  std::uint64_t asked = 0;
  std::uint64_t parts = 0;
};

}  // namespace

MachineSums::MachineSums(Foundation& base, GradientExchange& exchange,
                         std::unique_ptr<Column> column)
    : base_(base), exchange_(exchange), column_(std::move(column)), parts_(exchange.owned_parts()) {
  STRATA_ASSERT(column_ != nullptr && base.config.machines > 1);
  STRATA_ASSERT(base.config.update == UpdateMode::on_step);
}

std::vector<std::uint32_t> MachineSums::add_up(Lock& lock, std::uint64_t asked,
                                               std::span<const std::uint32_t> landed) {
  // 1. What every machine has.
  const Found found = gather(lock, asked, landed);
  check(found, asked);
  // 2. The sums, block after block.
  Block block;
  for (std::size_t part = 0; part <= parts_.size(); ++part) {
    const bool ends = part == parts_.size();
    if (!ends && !crosses(found, part)) continue;
    const std::size_t count = ends ? 0 : exchange_.count_of(parts_[part]);
    if (!block.parts.empty() && (ends || block.count + count > kBlockElements)) {
      send(lock, found, block);
      block = {};
    }
    if (ends) break;
    block.parts.push_back(static_cast<std::uint32_t>(part));
    block.first.push_back(block.count);
    block.count += count;
  }
  // 3. How many gradients are in them.
  std::vector<std::uint32_t> all(landed.size(), 0);
  for (std::uint32_t machine = 0; machine < base_.config.machines; ++machine) {
    const std::byte* const at = found.all.data() + machine * found.bytes + sizeof(Header);
    for (std::size_t param = 0; param < all.size(); ++param) {
      std::uint32_t count = 0;
      std::memcpy(&count, at + param * sizeof count, sizeof count);
      all[param] += count;
    }
  }
  return all;
}

// See Note [Nothing used].
MachineSums::Found MachineSums::gather(Lock& lock, std::uint64_t asked,
                                       std::span<const std::uint32_t> landed) {
  const std::span<const std::byte> counts = std::as_bytes(landed);
  std::vector<std::byte> mine(sizeof(Header) + counts.size() + parts_.size());
  const Header header{.step = exchange_.step(), .asked = asked, .parts = parts_.size()};
  std::memcpy(mine.data(), &header, sizeof header);
  std::ranges::copy(counts, mine.begin() + sizeof header);
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    mine[mine.size() - parts_.size() + part] =
        std::byte{static_cast<std::uint8_t>(exchange_.has(parts_[part]))};
  }
  Found found{.all = std::vector<std::byte>(base_.config.machines * mine.size()),
              .bytes = mine.size()};
  carry(lock, [&] {
    column_->meet();
    column_->gather(mine, found.all);
  });
  return found;
}

void MachineSums::check(const Found& found, std::uint64_t asked) const {
  for (std::uint32_t machine = 0; machine < base_.config.machines; ++machine) {
    Header theirs;
    std::memcpy(&theirs, found.all.data() + machine * found.bytes, sizeof theirs);
    const bool same = theirs.step == exchange_.step() && theirs.asked == asked;
    if (same && theirs.parts == parts_.size()) continue;
    refuse("machine " + std::to_string(machine) + " and machine " +
           std::to_string(base_.config.machine) +
           " ask different things of this step: learning rates, other options of the optimizer, "
           "how gradients are clipped, scaled and divided, and where they are read or dropped must "
           "be the same on all ranks");
  }
}

GradientExchange::Has MachineSums::has(const Found& found, std::uint32_t machine,
                                       std::size_t part) const {
  const std::size_t at = (machine + 1) * found.bytes - parts_.size() + part;
  return static_cast<GradientExchange::Has>(found.all[at]);
}

// A machine has landed some of it since all had the sum.
bool MachineSums::crosses(const Found& found, std::size_t part) const {
  for (std::uint32_t machine = 0; machine < base_.config.machines; ++machine) {
    if (has(found, machine, part) == GradientExchange::Has::fresh) return true;
  }
  return false;
}

void MachineSums::send(Lock& lock, const Found& found, const Block& block) {
  // 1. What this machine has.
  const std::size_t machines = base_.config.machines;
  const std::size_t range = ceil_div(block.count, machines);
  mine_.assign(machines * range, 0.0f);
  theirs_.resize(mine_.size());
  for (std::size_t i = 0; i < block.parts.size(); ++i) {
    const std::uint32_t part = parts_[block.parts[i]];
    if (exchange_.has(part) != GradientExchange::Has::none) {
      exchange_.read(lock, part, mine_.data() + block.first[i]);
    }
  }
  // 2. This machine's range of what all have; its sum goes to all.
  carry(lock, [&] {
    column_->exchange(std::as_bytes(std::span(mine_)), std::as_writable_bytes(std::span(theirs_)));
    add(found, block, range);
    column_->gather(std::as_bytes(std::span(mine_).first(range)),
                    std::as_writable_bytes(std::span(theirs_)));
  });
  // 3. The sums of all.
  for (std::size_t i = 0; i < block.parts.size(); ++i) {
    exchange_.replace(lock, parts_[block.parts[i]], theirs_.data() + block.first[i]);
  }
}

// See Note [Order of machines]. The sum of the range is at the beginning of mine_ then.
void MachineSums::add(const Found& found, const Block& block, std::size_t range) {
  const std::size_t begin = base_.config.machine * range;
  const std::size_t end = std::min(begin + range, block.count);
  for (std::size_t i = 0; i < block.parts.size(); ++i) {
    const std::size_t count = exchange_.count_of(parts_[block.parts[i]]);
    const std::size_t first = std::max(begin, block.first[i]);
    const std::size_t last = std::min(end, block.first[i] + count);
    if (first >= last) continue;
    GradMode mode = GradMode::copy;
    for (std::uint32_t machine = 0; machine < base_.config.machines; ++machine) {
      const GradientExchange::Has its = has(found, machine, block.parts[i]);
      if (its == GradientExchange::Has::none) continue;
      // What the others have of an older sum, the first one has, too.
      if (its == GradientExchange::Has::total && machine != 0) continue;
      const std::array<const void*, 1> from = {theirs_.data() + machine * range + (first - begin)};
      base_.kernels.land_pieces(mine_.data() + (first - begin), Dtype::float32, from,
                                Dtype::float32, last - first, mode, {});
      mode = GradMode::add;
    }
  }
}

// The session ends where a machine is lost.
void MachineSums::carry(Lock& lock, const std::function<void()>& call) {
  try {
    const Unlocked unlocked(lock);
    call();
  } catch (const std::exception& error) {
    base_.gate.fail({.fault = Fault::cancelled, .what = error.what()});
  }
  base_.gate.throw_if_failed();
}

}  // namespace strata
