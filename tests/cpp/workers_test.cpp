// The ring between two threads, and the update workers on both ends of a pair of them.
#include "optimizers/workers.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "memory/doorbell.hpp"
#include "memory/ring.hpp"
#include "optimizers/rule.hpp"

namespace strata::workers_test {
namespace {

TEST(Ring, FillsEmptiesAndKeepsTheOrder) {
  Ring<int, 4> ring;
  int value = -1;
  EXPECT_FALSE(ring.pop(value));
  EXPECT_EQ(value, -1);
  for (int round = 0; round < 3; ++round) {  // past the end, so that slots are used again
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(ring.push(10 * round + i));
    EXPECT_FALSE(ring.push(99));
    EXPECT_EQ(ring.size(), 4u);
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(ring.pop(value));
      EXPECT_EQ(value, 10 * round + i);
    }
    EXPECT_TRUE(ring.empty());
  }
}

TEST(Ring, CarriesValuesThatOnlyMove) {
  Ring<std::unique_ptr<int>, 2> ring;
  EXPECT_TRUE(ring.push(std::make_unique<int>(5)));
  std::unique_ptr<int> out;
  EXPECT_TRUE(ring.pop(out));
  EXPECT_EQ(*out, 5);
}

TEST(Ring, TwoThreadsLoseNothingAndSeeWholeValues) {
  struct Wide {
    std::uint64_t number = 0, twice = 0;
  };
  constexpr std::uint64_t kCount = 200'000;
  Ring<Wide, 8> ring;
  std::thread producer([&] {
    for (std::uint64_t i = 1; i <= kCount; ++i) {
      while (!ring.push({i, 2 * i})) std::this_thread::yield();
    }
  });
  for (std::uint64_t expected = 1; expected <= kCount;) {
    Wide got;
    if (!ring.pop(got)) {
      std::this_thread::yield();
      continue;
    }
    // No early return: the producer must be joined.
    EXPECT_EQ(got.number, expected);
    EXPECT_EQ(got.twice, 2 * expected);
    ++expected;
  }
  producer.join();
  EXPECT_TRUE(ring.empty());
}

// bfloat16 state cut into jobs of unequal size.
struct Model {
  static constexpr std::size_t kCount = 20'011;
  static constexpr std::size_t kJobs = 150;  // more than one worker may hold

  Model() : param(kCount), residual(kCount), grad(kCount), moment1(kCount), moment2(kCount) {
    std::mt19937 random(3);
    std::vector<float> values(kCount);
    std::vector<std::uint16_t> unused(kCount);
    const Kernels& scalar = kernels(Isa::scalar);
    for (float& value : values) value = std::normal_distribution<float>()(random);
    scalar.split(values.data(), kCount, Dtype::bfloat16, param.data(), residual.data());
    for (float& value : values) value = std::normal_distribution<float>()(random);
    scalar.split(values.data(), kCount, Dtype::bfloat16, grad.data(), unused.data());

    std::vector<std::size_t> cuts = {0, kCount};
    while (cuts.size() <= kJobs) cuts.push_back(random() % kCount);
    std::sort(cuts.begin(), cuts.end());
    for (std::size_t i = 0; i < kJobs; ++i) {
      spans.push_back({.count = cuts[i + 1] - cuts[i],
                       .param = param.data() + cuts[i],
                       .new_param = param.data() + cuts[i],
                       .master = residual.data() + cuts[i],
                       .moment1 = moment1.data() + cuts[i],
                       .moment2 = moment2.data() + cuts[i],
                       .grad = grad.data() + cuts[i],
                       .hyper = &hyper});
    }
  }

  bool operator==(const Model& other) const {
    return param == other.param && residual == other.residual && moment1 == other.moment1 &&
           moment2 == other.moment2;
  }

  Hyper hyper{.lr = 0.1, .weight_decay = 0.1};
  std::vector<std::uint16_t> param, residual, grad;
  std::vector<float> moment1, moment2;
  std::vector<UpdateSpan> spans;
};

// Runs every job and returns how often each tag came back.
std::vector<int> run_all(Model& model, Workers& workers, Doorbell& bell) {
  std::vector<int> seen(Model::kJobs);
  std::size_t submitted = 0;
  std::size_t collected = 0;
  while (collected < Model::kJobs) {
    while (submitted < Model::kJobs) {
      if (!workers.submit({.spans = {&model.spans[submitted], 1}, .tag = submitted})) break;
      ++submitted;
    }
    EXPECT_EQ(workers.in_flight(), submitted - collected);
    bool any = false;
    for (UpdateDone done; workers.collect(done); any = true) {
      EXPECT_LT(done.worker, std::max(1, workers.thread_count()));
      EXPECT_GE(done.end_ns, done.begin_ns);
      ++seen.at(done.tag);
      ++collected;
    }
    if (!any && !bell.wait(20'000)) {
      ADD_FAILURE() << "nobody rang";
      break;
    }
  }
  return seen;
}

TEST(Workers, AnyNumberOfThreadsGivesTheSameBits) {
  Model expected;
  for (const UpdateSpan& span : expected.spans) kernels(Isa::scalar).update(span);
  for (const int threads : {0, 1, 3}) {
    Model model;
    Doorbell bell;
    Workers workers(threads, &bell);
    EXPECT_EQ(workers.thread_count(), threads);
    EXPECT_EQ(run_all(model, workers, bell), std::vector<int>(Model::kJobs, 1));
    EXPECT_EQ(workers.in_flight(), 0u);
    EXPECT_GT(workers.busy_ns(), 0u);
    EXPECT_TRUE(model == expected) << threads << " threads";
  }
}

TEST(Workers, WithoutThreadsJobsRunInOrderInsideCollect) {
  Model model;
  Workers workers(0, nullptr);
  for (std::uint64_t tag = 0; tag < 3; ++tag) {
    ASSERT_TRUE(workers.submit({.spans = {&model.spans[tag], 1}, .tag = tag}));
  }
  EXPECT_TRUE(model == Model()) << "nothing runs before collect()";
  UpdateDone done;
  for (std::uint64_t expected = 0; expected < 3; ++expected) {
    ASSERT_TRUE(workers.collect(done));
    EXPECT_EQ(done.tag, expected);
  }
  EXPECT_FALSE(workers.collect(done));
  EXPECT_FALSE(model == Model());
}

TEST(Workers, RefuseMoreThanTheyCanHoldAndRecover) {
  Workers workers(0, nullptr);
  std::size_t held = 0;
  while (held < 10'000 && workers.submit({.spans = {}, .tag = held})) ++held;
  ASSERT_LT(held, 10'000u);
  EXPECT_EQ(workers.in_flight(), held);
  UpdateDone done;
  EXPECT_TRUE(workers.collect(done));
  EXPECT_TRUE(workers.submit({.spans = {}, .tag = held}));
}

TEST(Workers, FinishWhatWasSubmittedBeforeTheyEnd) {
  Model expected;
  for (std::size_t i = 0; i < 40; ++i) kernels(Isa::scalar).update(expected.spans[i]);
  for (const int threads : {0, 2}) {
    Model model;
    Doorbell bell;
    {
      Workers workers(threads, &bell);
      for (std::size_t i = 0; i < 40; ++i) {
        ASSERT_TRUE(workers.submit({.spans = {&model.spans[i], 1}, .tag = i}));
      }
    }
    EXPECT_TRUE(model == expected) << threads << " threads";
  }
}

TEST(Workers, WakeUpAgainAfterSleeping) {
  Model model;
  Doorbell bell;
  Workers workers(1, &bell);
  for (std::uint64_t round = 0; round < 200; ++round) {
    ASSERT_TRUE(workers.submit({.spans = {&model.spans[0], 1}, .tag = round}));
    UpdateDone done;
    while (!workers.collect(done)) ASSERT_TRUE(bell.wait(20'000)) << "round " << round;
    EXPECT_EQ(done.tag, round);
  }
}

}  // namespace
}  // namespace strata::workers_test
