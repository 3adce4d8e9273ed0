// What a rank of a simulated training sees, held against what it should: bits of the oracle; where
// updates may lag, how many gradients are in a parameter, for there each one adds 1.
//
// Threads: the rank's, while it has its turn.
//
//   RankChecks checks(world, config, [&](const char* name, auto call) { ...call()... });
//   checks.look(session, unit);                   // while it is entered
//   window = checks.ask(session, look);           // what all ranks ask of their gradients
//   checks.end_step(result, step);
//   checks.compare(session);
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "engine/session.hpp"
#include "rank_world.hpp"

namespace strata {

class RankChecks final {
 public:
  // Makes a call of the session, known by a name.
  using Caller = std::function<void(const char* name, const std::function<void()>& call)>;

  RankChecks(World& world, const Config& config, Caller call)
      : world_(world),
        config_(config),
        layout_(make_layout(config, config.page_bytes)),
        call_(std::move(call)) {}

  std::vector<std::byte> shown(Session& session, std::uint32_t p) const {
    const std::byte* const at = session.device_address(p);
    return {at, at + world_.oracle.params()[p].bytes().size()};
  }

  void look(Session& session, std::uint32_t unit) {
    const std::size_t lag = std::min<std::size_t>(steps_, config_.max_staleness);
    look(session, unit, steps_ - lag);
  }

  // Of several ranks all ask: returns how many ranges of windows it took.
  std::uint32_t ask(Session& session, const Look& look) {
    call_("look", [&] {
      promise(session.look_at_gradients() == (config_.ranks > 1), "a look saw nothing");
    });
    once([&] {
      world_.oracle.add_up();
      ++world_.result.looks;
      world_.looked.clear();
      for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
        const std::uint32_t count = world_.oracle.count(p);
        world_.looked.emplace_back(count, count == 0 ? 0.0 : world_.oracle.squares(p));
      }
    });
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) check_sum(session, p);
    if (look.what == Look::What::drops_all) {
      call_("drop", [&] { session.drop_gradients(); });
      once([&] {
        for (std::uint32_t p = 0; p < config_.params.size(); ++p) world_.oracle.forget(p);
      });
      return 2;
    }
    if (look.what == Look::What::norms || session.gradient_count(look.param) == 0) return 1;
    if (look.what == Look::What::scales) {
      for (const bool divides : {look.divides, !look.divides}) {  // the second writes the first
        call_("scale", [&] {
          promise(session.scale_gradient(look.param, look.factor, divides), "it was not scaled");
        });
        once([&] { world_.oracle.scale(look.param, look.factor, divides); });
      }
      return 1;
    }
    call_("drop", [&] { session.drop_gradients_of({look.param}); });
    once([&] { world_.oracle.forget(look.param); });
    return 2;
  }

  void end_step(const StepResult& result, std::size_t step) {
    if (world_.expected.size() == step) expect(step);
    steps_ += world_.had_gradients[step] ? 1 : 0;
    if (world_.script.counts()) return;
    const StepResult& expected = world_.expected[step];
    promise(
        std::bit_cast<std::uint64_t>(result.norm) == std::bit_cast<std::uint64_t>(expected.norm),
        "another norm");
    promise(result.finite == expected.finite && result.skipped == expected.skipped,
            "a step was skipped, or was not");
  }

  // REQUIRES: nothing has landed since the last step.
  void compare(Session& session) {
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      if (world_.script.counts()) {
        const auto count = static_cast<float>(world_.applied[steps_][p]);
        compare(session, p, Kind::master, std::vector<float>(config_.params[p].numel, count),
                "count");
        continue;
      }
      const PlainParam& plain = world_.oracle.params()[p];
      compare(session, p, Kind::master, plain.master(), "master");
      const Hyper& group = config_.groups[config_.params[p].group];
      const int moments = config_.params[p].trainable ? moment_count(group) : 0;
      if (moments > 0) compare(session, p, Kind::moment1, plain.moment(1), "first moment");
      if (moments > 1) compare(session, p, Kind::moment2, plain.moment(2), "second moment");
    }
  }

  // The same by a forward that is no part of a step.
  void evaluate(Session& session) {
    call_("drain", [&] { session.drain(); });
    for (std::uint32_t u = 0; u < config_.units.size(); ++u) {
      call_("evaluate", [&] { session.enter(UnitId{u}, false, false); });
      look(session, u, steps_);
      session.leave(UnitId{u});
    }
  }

 private:
  // What the first rank that comes here does for all.
  template <typename Do>
  void once(Do what) {
    if (asked_++ != world_.asked) return;
    ++world_.asked;
    what();
  }

  // `oldest`: steps with gradients whose updates must be in what is shown.
  void look(Session& session, std::uint32_t unit, std::size_t oldest) {
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      if (config_.params[p].unit != UnitId{unit}) continue;
      if (world_.script.counts())
        count(session, p, oldest);
      else
        promise(shown(session, p) == world_.oracle.params()[p].bytes(),
                "the device shows another " + config_.params[p].name);
    }
  }

  // Each page shows one number of gradients: those of all steps up to one that is not too old.
  void count(Session& session, std::uint32_t p, std::size_t oldest) {
    const ParamSpec& spec = config_.params[p];
    std::vector<float> values(spec.numel);
    kernels(Isa::scalar)
        .land_gradient(values.data(), Dtype::float32, shown(session, p).data(), spec.dtype,
                       spec.numel, GradMode::copy, {});
    const auto of = [&](std::size_t step) { return static_cast<float>(world_.applied[step][p]); };
    for (const Piece& piece : layout_.pieces(p, 0, spec.numel)) {
      const auto begin = values.begin() + static_cast<std::ptrdiff_t>(piece.in_param);
      const auto end = begin + static_cast<std::ptrdiff_t>(piece.count);
      promise(std::all_of(begin, end, [&](float value) { return value == *begin; }),
              "a torn page of " + spec.name);
      promise(*begin >= of(oldest), spec.name + " is older than declared");
      promise(*begin <= of(steps_), spec.name + " has a gradient of the future");
      bool known = false;
      for (std::size_t step = oldest; step <= steps_; ++step) known |= *begin == of(step);
      promise(known, spec.name + " has part of a step");
      world_.result.lagging += *begin < of(steps_) ? 1 : 0;
    }
  }

  void check_sum(Session& session, std::uint32_t p) {
    const auto [count, squares_of_sum] = world_.looked[p];
    promise(session.gradient_count(p) == count, "another number of gradients");
    if (count == 0) return;
    const double ranks = config_.sums_ranks ? 1.0 : double{1} * config_.ranks;
    const double expected = squares_of_sum / (ranks * ranks);
    const double squares = session.gradient_squares(p).first;
    promise(std::bit_cast<std::uint64_t>(squares) == std::bit_cast<std::uint64_t>(expected),
            "other squares of " + config_.params[p].name);
  }

  void expect(std::size_t step) {
    const Script::Step& asked = world_.script.steps[step];
    bool any = false;
    std::vector<std::uint32_t> applied = world_.applied.back();
    for (std::uint32_t p = 0; p < applied.size(); ++p) {
      applied[p] += world_.oracle.count(p);
      any |= world_.oracle.count(p) != 0;
    }
    world_.had_gradients.push_back(any);
    if (any) world_.applied.push_back(applied);
    const double ranks = config_.sums_ranks ? 1.0 : double{1} * config_.ranks;
    world_.expected.push_back(
        world_.oracle.step(asked.groups, asked.options, asked.options.grad_divisor * ranks));
    world_.result.skipped += world_.expected.back().skipped ? 1 : 0;
  }

  void compare(Session& session, std::uint32_t p, Kind kind, const std::vector<float>& expected,
               const char* what) {
    std::vector<float> actual(expected.size());
    call_("read", [&] { session.read(p, kind, 0, actual.data(), actual.size()); });
    promise(std::memcmp(expected.data(), actual.data(), expected.size() * 4) == 0,
            config_.params[p].name + " has another " + what);
  }

  World& world_;
  const Config& config_;
  const Layout layout_;
  Caller call_;
  std::size_t steps_ = 0;    // of this rank that had gradients
  std::uint64_t asked_ = 0;  // things that are done once for all
};

}  // namespace strata
