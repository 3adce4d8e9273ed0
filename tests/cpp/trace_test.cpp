// Traces: what is refused, and lifetimes worked out by hand.
#include "offload/planner/trace.hpp"

#include <gtest/gtest.h>

namespace strata::trace_test {
namespace {

constexpr std::uint32_t kNone = UINT32_MAX;

// Forward of units 0 and 1, 1 again, and back: uses 0 to 5. Unit 2 is not used.
Trace twice_called(Activation traced) {
  Trace trace;
  trace.units.resize(3);
  trace.units[1].traced = traced;
  const std::uint32_t units[] = {0, 1, 1, 1, 1, 0};
  for (std::uint32_t i = 0; i < 6; ++i) {
    Use use;
    use.unit = UnitId{units[i]};
    use.backward = i >= 3;
    use.enter = 2 * i;
    use.leave = 2 * i + 1;
    use.seconds = i < 3 ? 1.0 : 5.0;
    trace.uses.push_back(use);
  }
  trace.moments = 12;
  trace.tensors = {{UnitId{0}, 1, 0, 5, false},
                   {UnitId{1}, 10, 1, 4, false},
                   {UnitId{1}, 100, 1, 4, true},
                   {UnitId{1}, 1000, 2, 3, false}};
  return trace;
}

TEST(Lifetimes, CountEachTensorFromItsBirthToItsLastUse) {
  const Lifetimes lives = lifetimes(twice_called(Activation::keep));
  EXPECT_EQ(lives.units[1].saved_bytes, 1110U);
  EXPECT_EQ(lives.units[1].input_bytes, 100U);
  EXPECT_EQ(lives.units[1].forward_seconds, 2.0);
  EXPECT_EQ(lives.units[1].backward_seconds, 10.0);
  EXPECT_EQ(lives.units[1].forward_leave, 2U);
  EXPECT_EQ(lives.units[1].backward_enter, 3U);
  EXPECT_EQ(lives.units[2].forward_leave, kNone);
  EXPECT_EQ(lives.units[2].backward_enter, kNone);
  EXPECT_EQ(lives.held_bytes, (std::vector<std::uint64_t>{0, 1, 111, 1111, 111, 1, 0}));
}

// Backward goes through the calls of a unit the other way round, and computes each when it is due.
TEST(Lifetimes, EachCallIsComputedAgainInItsTurn) {
  const Lifetimes lives = lifetimes(twice_called(Activation::recompute));
  EXPECT_EQ(lives.recomputed, (std::vector<std::uint32_t>{5, 4, 4, 3}));
  EXPECT_EQ(lives.units[1].backward_seconds, 8.0);  // the traced step computed forward again
}

// An input that was away is there from the use that computed with it again.
TEST(Lifetimes, InputsThatWereAwayAreHeldInTheirOwnBackward) {
  Trace trace = twice_called(Activation::recompute);
  trace.tensors.front().input = true;  // of unit 0, around unit 1
  EXPECT_EQ(lifetimes(trace).held_bytes, (std::vector<std::uint64_t>{0, 1, 101, 101, 101, 1, 0}));
  trace.units[0].traced = Activation::recompute_host;
  EXPECT_EQ(lifetimes(trace).held_bytes, (std::vector<std::uint64_t>{0, 0, 100, 100, 100, 1, 0}));
}

TEST(CheckTrace, AcceptsWhatCanBePlanned) {
  EXPECT_EQ(check_trace(twice_called(Activation::keep)), "");
}

TEST(CheckTrace, SaysWhatContradictsItself) {
  const auto refused = [](auto change, const std::string& what) {
    Trace trace = twice_called(Activation::keep);
    change(trace);
    const std::string why = check_trace(trace);
    EXPECT_NE(why.find(what), std::string::npos) << "'" << why << "' and not '" << what << "'";
  };
  refused([](Trace& t) { t.uses.clear(); }, "no uses");
  refused([](Trace& t) { t.units.clear(); }, "nothing of its units");
  refused(
      [](Trace& t) {
        t.units[2].name = "head", t.uses[2] = {UnitId{2}, false, 5, 5};
      },
      "it is entered (head)");
  refused([](Trace& t) { t.uses[1].leave = 5; }, "use 2: the unit is in use already");
  refused([](Trace& t) { t.uses[2].unit = UnitId{3}; }, "use 2: there is no such unit");
  refused([](Trace& t) { t.uses[2].leave = 12; }, "use 2: it is left after the last moment");
  refused([](Trace& t) { t.uses[2].leave = 4; }, "use 2: it is left before it is entered");
  refused([](Trace& t) { t.uses[2].enter = 2; }, "use 2: it is not in order");
  refused([](Trace& t) { t.uses[2].seconds = -1; }, "use 2: its time");
  refused([](Trace& t) { t.uses[2].live_bytes = 7; }, "use 2: its peak");
  refused([](Trace& t) { t.units[1].slices_max = 0; }, "unit 1: it has no slices");
  refused([](Trace& t) { t.units[1].traced = Activation::swap_ssd; }, "unit 1: it was recorded");
  refused([](Trace& t) { t.units[1].slices_traced = 2; }, "unit 1: it was recorded on a number");
  refused([](Trace& t) { t.units[1].slices_traced = 0; }, "unit 1: it was recorded on a number");
  refused([](Trace& t) { t.units[1].slices_traced = t.units[1].slices_max = 2; },
          "unit 1: it was recorded on slices");
  refused([](Trace& t) { t.tensors[1].unit = UnitId{9}; }, "saved tensor 1: there is no such unit");
  refused([](Trace& t) { t.tensors[1].born = 6; }, "saved tensor 1: the use that saved it");
  refused([](Trace& t) { t.tensors[1].last_used = 6; }, "saved tensor 1: the use that read it");
  refused([](Trace& t) { t.tensors[1].last_used = 0; }, "saved tensor 1: it was read before");
  refused([](Trace& t) { t.tensors[0].born = 1; }, "saved tensor 0: it was not saved by a forward");
  refused([](Trace& t) { t.tail_seconds = -1; }, "after the last use");
}

}  // namespace
}  // namespace strata::trace_test
