// Ranks that would train something else are refused when they meet, by what differs.
#include "engine/ranks/hello.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "memory/result.hpp"

namespace strata::hello_test {
namespace {

Config plain_config() {
  Config config;
  config.units = {"block0", "block1"};
  config.params = {
      {.name = "a", .numel = 128, .unit = UnitId{0}},
      {.name = "b", .numel = 128, .trainable = false, .unit = UnitId{1}},
  };
  config.groups = {Hyper{.rule = Rule::sgd}, Hyper{.rule = Rule::sgd}};
  config.ranks = 2;
  return config;
}

// What rank 0 says of rank 1, whose configuration or pages differ so; empty: they train together.
std::string said_of(const std::function<void(Config&, SeatOffer&)>& change) {
  Config config = plain_config();
  SeatOffer offer{.page_bytes = kPageBytesMin};
  const Hello mine = hello_of(config, offer, 0);
  change(config, offer);
  const Hello theirs = hello_of(config, offer, 0);
  try {
    checked(std::as_bytes(std::span(&theirs, 1)), 1, mine, 0);
    return "";
  } catch (const StrataError& error) {
    return error.what();
  }
}

TEST(Hello, NamesWhatDiffers) {
  using Change = std::function<void(Config&, SeatOffer&)>;
  const std::pair<Change, const char*> kChanges[] = {
      {[](Config& c, SeatOffer&) { c.params[0].name = "c"; }, "other parameters"},
      {[](Config& c, SeatOffer&) { c.params[0].numel = 64; }, "other parameters"},
      {[](Config& c, SeatOffer&) { c.params[1].trainable = true; }, "other parameters"},
      {[](Config& c, SeatOffer&) { c.units.emplace_back("block2"); }, "another number"},
      {[](Config& c, SeatOffer&) { c.params[1].unit = UnitId{0}; }, "units= must be the same"},
      {[](Config& c, SeatOffer&) { c.params[0].group = 1; }, "units= must be the same"},
      {[](Config& c, SeatOffer&) { c.params[1].stored = StoredForm{}; },
       "frozen= must be the same"},
      {[](Config& c, SeatOffer&) { c.groups[1].rule = Rule::adamw; }, "other optimizers"},
      {[](Config& c, SeatOffer&) { c.groups[1].momentum = 0.9; }, "other optimizers"},
      {[](Config& c, SeatOffer&) { c.moment_dtype = MomentDtype::block8; }, "store moments"},
      {[](Config&, SeatOffer& o) { o.page_bytes *= 2; }, "page_size must be the same"},
      {[](Config& c, SeatOffer&) { c.update = UpdateMode::lock_free; }, "another way to update"},
      {[](Config& c, SeatOffer&) { c.max_staleness = 2; }, "another way to update"},
  };
  for (const auto& [change, words] : kChanges) {
    const std::string said = said_of(change);
    EXPECT_NE(said.find(words), std::string::npos) << words << ": " << said;
    EXPECT_NE(said.find("rank 1"), std::string::npos) << said;
  }
  EXPECT_EQ(said_of([](Config& c, SeatOffer&) { c.groups[0].lr = 7.0; }), "");
}

// Of two frozen parameters the forms are told apart, and not only that there are some.
TEST(Hello, TellsFormsApart) {
  const auto with = [](const StoredForm& form) {
    Config config = plain_config();
    config.params[1].stored = form;
    return hello_of(config, {.page_bytes = kPageBytesMin}, 0);
  };
  const Hello nf4 = with({.codes = Codes::nf4});
  EXPECT_NE(nf4.facts, with({.codes = Codes::nf4_double}).facts);
  EXPECT_NE(nf4.facts, with({.codes = Codes::nf4, .dtype = Dtype::float32}).facts);
  EXPECT_NE(with({.codes = Codes::nf4_double}).facts,
            with({.codes = Codes::nf4_double, .arithmetic = Arithmetic::torchao}).facts);
}

}  // namespace
}  // namespace strata::hello_test
