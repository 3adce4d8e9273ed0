// Gradients that stay where autograd left them: the same bits as of a copy, given back when they
// are used and not before, and held once.
#include "engine/lent_gradients.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <fstream>

#include "io_fixtures.hpp"
#include "optimizers/exact_sum.hpp"
#include "session_fixtures.hpp"

namespace strata::lent_gradients_test {
namespace {

// One gradient, whose bytes are others when it is given back.
class Lent final {
 public:
  explicit Lent(std::span<const std::byte> values) : values_(values.begin(), values.end()) {}

  std::shared_ptr<const std::byte> lend() {
    return {values_.data(), [this](const std::byte*) {
              std::memset(values_.data(), 0x7f, values_.size());
              given_back_ = true;
            }};
  }
  bool given_back() const { return given_back_; }

 private:
  std::vector<std::byte> values_;
  std::atomic<bool> given_back_ = false;
};

class Lending : public testing::Test {
 protected:
  // As the device shows the parameter.
  Lent& gradient(Session& session, std::uint32_t param) {
    const std::byte* const shown = session.device_address(param);
    lent_.push_back(std::make_unique<Lent>(std::span(shown, kNumel * sizeof(std::uint16_t))));
    return *lent_.back();
  }

  void lend(Session& session, std::uint32_t param) {
    session.lend_gradient(param, gradient(session, param).lend(), Dtype::bfloat16);
  }

  // Lends the gradients of a unit's backward.
  void lend_unit(Session& session, std::uint32_t unit) {
    session.enter(UnitId{unit}, true);
    for (std::uint32_t p = 0; p < kParamsEach; ++p) lend(session, unit * kParamsEach + p);
    session.leave(UnitId{unit});
  }

  bool all_given_back() const {
    return std::ranges::all_of(lent_, [](const auto& one) { return one->given_back(); });
  }
  bool none_given_back() const {
    return std::ranges::none_of(lent_, [](const auto& one) { return one->given_back(); });
  }

  std::vector<std::unique_ptr<Lent>> lent_;
};

TEST_F(Lending, GiveTheSameBitsAndComeBackBehindTheirUpdate) {
  for (const UpdateMode mode : {UpdateMode::on_step, UpdateMode::in_backward}) {
    Config config = roomy_config();
    config.update = mode;
    Session copies(config), lends(config);
    fill(copies);
    fill(lends);
    for (int step = 0; step < 3; ++step) {
      lent_.clear();
      for (std::uint32_t u = kUnits; u-- > 0;) {
        visit(copies, u, true);
        lend_unit(lends, u);
        EXPECT_FALSE(lent_.back()->given_back());
        if (mode != UpdateMode::in_backward) continue;
        copies.complete(UnitId{u}, config.groups, 0.0);
        lends.complete(UnitId{u}, config.groups, 0.0);
      }
      EXPECT_EQ(lends.step(config.groups, {}).norm, copies.step(config.groups, {}).norm);
      lends.synchronize();
      EXPECT_TRUE(all_given_back());
    }
    EXPECT_EQ(contents(lends), contents(copies));
  }
}

// Lent or copied, in pages of any size: the sums of all pieces, added exactly and rounded once.
TEST_F(Lending, SquaresOfPiecesAreAddedExactly) {
  constexpr std::size_t kMany = 20 * kGrain + 100;
  std::mt19937 random(1);
  std::vector<std::uint16_t> values(kMany);
  for (auto& value : values) value = static_cast<std::uint16_t>(0x3000 + random() % 0x1000);
  for (const std::size_t page : {kPage, 4 * kPage}) {
    Config config = roomy_config(page);
    config.units.resize(1);
    config.params.resize(1);
    config.params[0].numel = kMany;
    ExactSum squares;
    double rounded_each_time = 0.0;
    for (const Piece& piece : make_layout(config, page).pieces(0, 0, kMany, kGrain)) {
      const double sum =
          kernels(Isa::scalar)
              .land_gradient(nullptr, Dtype::bfloat16, values.data() + piece.in_param,
                             Dtype::bfloat16, piece.count, GradMode::stay, {});
      squares.add(sum);
      rounded_each_time += sum;
    }
    ASSERT_NE(squares.value(), rounded_each_time) << "they would not be told apart";
    Session session(config);
    session.land_gradient(0, values.data(), Dtype::bfloat16);
    EXPECT_EQ(session.gradient_squares(0).first, squares.value());
    session.drop_gradients();
    lent_.push_back(std::make_unique<Lent>(std::as_bytes(std::span(values))));
    session.lend_gradient(0, lent_.back()->lend(), Dtype::bfloat16);
    EXPECT_FALSE(lent_.back()->given_back());
    EXPECT_EQ(session.gradient_squares(0).first, squares.value());
    session.drop_gradients();
  }
}

TEST_F(Lending, AreReadAndDroppedAsOthers) {
  Session session(roomy_config());
  fill(session);
  visit(session, 0, true);  // copied
  lend_unit(session, 1);
  std::vector<float> expected(kNumel), read(kNumel);
  for (const std::uint32_t param : {0U, 2U, 3U}) {
    kernels(Isa::scalar)
        .land_gradient(expected.data(), Dtype::float32, session.device_address(param),
                       Dtype::bfloat16, kNumel, GradMode::copy, {});
    session.read(param, Kind::grad, 0, read.data(), kNumel);
    EXPECT_EQ(read, expected) << param;
  }
  EXPECT_TRUE(none_given_back());
  session.drop_gradients();
  EXPECT_TRUE(all_given_back());
}

// Two parameters of a page: one is lent, one is copied, in either order, and neither is lost.
TEST_F(Lending, ShareAPageWithCopiedOnes) {
  for (const std::uint32_t copied : {0U, 1U}) {
    Session mixed(roomy_config()), copies(roomy_config());
    fill(mixed);
    fill(copies);
    for (int step = 0; step < 2; ++step) {
      mixed.enter(UnitId{0}, true);
      for (const std::uint32_t param : {0U, 1U}) {
        if (param == copied)
          land(mixed, param);
        else
          lend(mixed, param);
      }
      mixed.leave(UnitId{0});
      visit(copies, 0, true);
      for (Session* session : {&mixed, &copies}) {
        session->step(session->config().groups, {.max_norm = 0.5});
      }
    }
    mixed.synchronize();
    EXPECT_EQ(contents(mixed), contents(copies));
    EXPECT_TRUE(all_given_back());
  }
}

// Beside an SSD host memory may be registered with the kernel, and has to stay.
TEST_F(Lending, AreCopiedWhereTheyAddUpAndBesideAnSsd) {
  Config adds = roomy_config();
  adds.accumulate = true;
  TempFolder folder;
  Config small = small_config(folder.path());
  for (const Config& config : {adds, small}) {
    Session session(config);
    fill(session);
    std::size_t copied = 0;
    for (std::uint32_t u = 0; u < kUnits; ++u) {
      session.enter(UnitId{u}, true);
      lend(session, u * kParamsEach);
      copied += lent_.back()->given_back();
      session.leave(UnitId{u});
    }
    EXPECT_EQ(copied, kUnits);
    session.step(config.groups, {});
  }
  EXPECT_TRUE(all_given_back());
}

TEST_F(Lending, ComeBackWhenTheSessionGoes) {
  {
    Session session(roomy_config());
    fill(session);
    for (std::uint32_t u = 0; u < kUnits; ++u) lend_unit(session, u);
  }
  EXPECT_TRUE(all_given_back());
}

std::size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t pages = 0, resident = 0;
  statm >> pages >> resident;
  return resident * 4096;
}

TEST_F(Lending, TakeTheMemoryOfTheirPlace) {
  constexpr std::size_t kLarge = 16 << 20;  // elements, of two bytes
  for (const UpdateMode mode : {UpdateMode::on_step, UpdateMode::in_backward}) {
    Config config = roomy_config();
    config.update = mode;
    config.units.resize(1);
    config.params.resize(1);
    config.params[0].numel = kLarge;
    config.page_bytes = 4 * kMiB;
    config.device_bytes = config.host_bytes = kGiB;
    Lent gradient(std::vector<std::byte>(kLarge * 2));
    Session session(config);
    session.enter(UnitId{0}, true);
    const std::size_t before = resident_bytes();
    session.lend_gradient(0, gradient.lend(), Dtype::bfloat16);
    EXPECT_FALSE(gradient.given_back());
    EXPECT_LT(resident_bytes() + kLarge * 3 / 2, before);
    session.leave(UnitId{0});
    session.step(config.groups, {});
  }
}

}  // namespace
}  // namespace strata::lent_gradients_test
