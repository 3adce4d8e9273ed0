// What check_plan must see: every promise of a good plan, broken by hand.
#include <gtest/gtest.h>

#include "offload/planner/plan.hpp"
#include "random_traces.hpp"

namespace strata::plan_check_test {
namespace {

class PlanCheck : public testing::Test {
 protected:
  PlanCheck() {
    std::mt19937_64 random(11);
    of_ = random_paper_step(random, 6);
    for (TracedUnit& unit : of_.trace.units) unit.may_swap = unit.may_recompute = true;
    of_.budgets.device_bytes = least_device();
    of_.budgets.ssd_bytes = kGiB;
    plan_ = make_plan(of_.trace, of_.costs, of_.budgets, {});
  }

  void SetUp() override { ASSERT_EQ(check(), ""); }

  std::uint64_t least_device() const {
    return make_plan(of_.trace, of_.costs, of_.budgets, {}).device_bytes_min;
  }
  std::string check() const { return check_plan(of_.trace, of_.budgets, plan_); }
  bool sees(const std::string& what) const {
    const std::string why = check();
    EXPECT_NE(why.find(what), std::string::npos) << why;
    return !why.empty();
  }

  PaperStep of_;
  Plan plan_;
};

TEST_F(PlanCheck, ADeviceThatIsAByteTooSmall) {
  of_.budgets.device_bytes = plan_.peaks[static_cast<std::size_t>(Tier::device)].bytes - 1;
  EXPECT_TRUE(sees("device "));
}

TEST_F(PlanCheck, AHostThatIsAByteTooSmall) {
  of_.budgets.host_bytes = plan_.peaks[static_cast<std::size_t>(Tier::host)].bytes - 1;
  EXPECT_TRUE(sees("host "));
}

TEST_F(PlanCheck, AnSsdThatIsAByteTooSmall) {
  of_.budgets.host_bytes /= 4;
  plan_ = make_plan(of_.trace, of_.costs, of_.budgets, {});
  ASSERT_EQ(check(), "");
  const std::uint64_t used = plan_.peaks[static_cast<std::size_t>(Tier::ssd)].bytes;
  ASSERT_GT(used, 0U);
  of_.budgets.ssd_bytes = used - 1;
  EXPECT_TRUE(sees("ssd "));
}

TEST_F(PlanCheck, MoreKeptThanTheCurveSays) {
  for (UnitPlan& unit : plan_.units) {
    unit.activation = Activation::keep;
    unit.slices = 1;
  }
  EXPECT_TRUE(sees("device "));
}

TEST_F(PlanCheck, ACurveThatSaysLess) {
  --plan_.device_curve[3];
  EXPECT_TRUE(sees("the device curve says"));
}

TEST_F(PlanCheck, FramesThatAreShared) {
  plan_.frames.frames[1].front() = plan_.frames.frames[2].front();
  plan_.frames.lookahead = 1;
  EXPECT_TRUE(sees("shares a frame"));
}

TEST_F(PlanCheck, FramesThatAreNotThere) {
  plan_.param_device_bytes -= plan_.frames.frames_used * of_.budgets.page_bytes;
  EXPECT_TRUE(sees("a frame that is not there"));
}

TEST_F(PlanCheck, FramesThatAreMissing) {
  plan_.frames.frames[2].pop_back();
  EXPECT_TRUE(sees("another number of frames"));
}

TEST_F(PlanCheck, ModesThatCannotBe) {
  plan_.units[2] = {.activation = Activation::recompute};
  of_.trace.units[2].may_recompute = false;
  EXPECT_TRUE(sees("cannot be recomputed"));
  plan_.units[2] = {.activation = Activation::recompute_host};
  EXPECT_TRUE(sees("cannot be recomputed"));
  of_.trace.units[2].may_recompute = true;
  of_.trace.units[2].may_swap = false;
  EXPECT_TRUE(sees("cannot be swapped"));
  of_.trace.units[2].may_swap = true;
  plan_.units[2] = {.activation = Activation::swap_host};
  of_.trace.units[2].may_swap = false;
  EXPECT_TRUE(sees("cannot be swapped"));
  plan_.units[2] = {.activation = Activation::keep, .slices = 2};
  of_.trace.units[2].slices_max = 2;
  EXPECT_TRUE(sees("not recomputed"));
  of_.trace.units[2].slices_max = 1;
  EXPECT_TRUE(sees("cannot be cut into 2 slices"));
}

TEST_F(PlanCheck, BytesThatRestNowhere) {
  ++plan_.resting_host_bytes;
  EXPECT_TRUE(sees("does not add up"));
}

// The planner gives the device what its smallest budget leaves; here three units get more of it.
class PlanCheckOnDevice : public PlanCheck {
 protected:
  PlanCheckOnDevice() {
    of_.budgets.device_bytes = kGiB;
    wishes_.on_device.emplace(of_.trace.units.size(), false);
    for (const std::size_t unit : {1U, 2U, 4U}) wishes_.on_device->at(unit) = true;
    plan_ = make_plan(of_.trace, of_.costs, of_.budgets, wishes_);
  }

  void SetUp() override { ASSERT_EQ(check_plan(of_.trace, of_.budgets, plan_, wishes_), ""); }

  Wishes wishes_;
};

TEST_F(PlanCheckOnDevice, ADeviceThatIsAByteTooSmall) {
  of_.budgets.device_bytes = plan_.peaks[static_cast<std::size_t>(Tier::device)].bytes - 1;
  EXPECT_TRUE(sees("device "));
}

TEST_F(PlanCheckOnDevice, BytesThatDoNotAddUp) {
  plan_.resting_device_bytes -= of_.budgets.page_bytes;
  EXPECT_TRUE(sees("what rests on the device does not add up"));
}

TEST_F(PlanCheckOnDevice, ACurveWithoutThem) {
  for (std::uint64_t& bytes : plan_.device_curve) bytes -= plan_.resting_device_bytes;
  EXPECT_TRUE(sees("the device curve says"));
}

TEST_F(PlanCheckOnDevice, BytesElsewhereToo) {
  plan_.units[2].state_ssd_bytes = of_.budgets.page_bytes;
  plan_.resting_ssd_bytes += of_.budgets.page_bytes;
  EXPECT_TRUE(sees("rests on the device and on the SSD"));
}

TEST_F(PlanCheckOnDevice, BytesInHostMemoryToo) {
  plan_.resting_host_bytes += of_.budgets.resting(of_.trace.units[2]);
  EXPECT_TRUE(sees("does not add up"));
}

TEST_F(PlanCheckOnDevice, FramesThatNothingMovesInto) {
  plan_.frames.frames[2].push_back(FrameId{0});
  EXPECT_TRUE(sees("another number of frames"));
}

TEST_F(PlanCheckOnDevice, OthersThanWereWished) {
  wishes_.on_device->at(3) = true;
  EXPECT_EQ(check_plan(of_.trace, of_.budgets, plan_, wishes_),
            of_.trace.units[3].name + " does not rest on the device, against the wish");
  wishes_.on_device->assign(plan_.units.size(), false);
  EXPECT_EQ(check_plan(of_.trace, of_.budgets, plan_, wishes_),
            of_.trace.units[1].name + " rests on the device, against the wish");
}

TEST_F(PlanCheck, LessRoomThanSwappedActivationsTake) {
  of_.budgets.device_bytes = of_.budgets.host_bytes = kGiB;
  for (const Activation wish : {Activation::swap_host, Activation::recompute_host}) {
    plan_ = make_plan(of_.trace, of_.costs, of_.budgets, {.activation = wish});
    ASSERT_EQ(check(), "");
    ASSERT_GT(plan_.activation_host_bytes + plan_.activation_ssd_bytes, 0U);
    plan_.activation_host_bytes = plan_.activation_ssd_bytes = 0;
    EXPECT_TRUE(sees("less room"));
  }
}

TEST_F(PlanCheck, APlanThatWasRefused) {
  of_.budgets.device_bytes = of_.budgets.page_bytes;
  plan_ = make_plan(of_.trace, of_.costs, of_.budgets, {});
  EXPECT_TRUE(sees("infeasible: device"));
}

}  // namespace
}  // namespace strata::plan_check_test
