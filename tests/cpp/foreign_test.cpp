// Somebody else's optimizer behind the workers: what it sees, what becomes of what it writes, and
// what happens when it throws.
#include "optimizers/foreign.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <stdexcept>
#include <thread>
#include <vector>

#include "memory/doorbell.hpp"
#include "optimizers/workers.hpp"

namespace strata::foreign_test {
namespace {

constexpr std::size_t kCount = 2 * kForeignSlice + 77;  // a last slice that is short and odd
const Hyper kForeign{.rule = Rule::foreign, .options = 7};

// A parameter of any dtype at rest, and one span over all of it.
struct Stored {
  explicit Stored(Dtype dtype, Dtype grad_dtype)
      : param(kCount), master(kCount), grad(kCount), moment1(kCount, 1.0f), moment2(kCount, 2.0f) {
    std::vector<float> unused(kCount);
    for (std::size_t i = 0; i < kCount; ++i) values.push_back(0.3f + static_cast<float>(i));
    kernels(Isa::scalar).split(values.data(), kCount, dtype, param.data(), master.data());
    std::vector<float> ones(kCount, 3.0f);
    kernels(Isa::scalar).split(ones.data(), kCount, grad_dtype, grad.data(), unused.data());
    span = {.dtype = dtype,
            .grad_dtype = grad_dtype,
            .count = kCount,
            .param = param.data(),
            .new_param = param.data(),
            .master = dtype == Dtype::float32 ? nullptr : master.data(),
            .moment1 = moment1.data(),
            .moment2 = moment2.data(),
            .grad = grad.data(),
            .hyper = &kForeign,
            .step = 5,
            .grad_scale = 0.5f,
            .param_id = 9,
            .first = 1000};
  }

  std::vector<float> joined() const {
    std::vector<float> out(kCount);
    kernels(Isa::scalar).join(span.new_param, span.master, kCount, span.dtype, out.data());
    return out;
  }

  std::vector<float> values, param, master, grad;  // room for any dtype
  std::vector<float> moment1, moment2;
  UpdateSpan span;
};

// A rule of which every stream takes part.
void step_of(const UpdateSpan& slice) {
  auto* const param = static_cast<float*>(slice.new_param);
  auto* const moment1 = static_cast<float*>(slice.moment1);
  auto* const moment2 = static_cast<float*>(slice.moment2);
  const auto* const grad = static_cast<const float*>(slice.grad);
  for (std::size_t i = 0; i < slice.count; ++i) {
    moment1[i] += grad[i];
    moment2[i] *= 2.0f;
    param[i] += 0.25f * moment1[i];
  }
}

TEST(Foreign, SeesFloat32AndIsStoredExactly) {
  const std::pair<Dtype, Dtype> forms[] = {{Dtype::float32, Dtype::float32},
                                           {Dtype::bfloat16, Dtype::bfloat16},
                                           {Dtype::bfloat16, Dtype::float32},
                                           {Dtype::float16, Dtype::float16}};
  for (const auto& [dtype, grad_dtype] : forms) {
    Stored stored(dtype, grad_dtype);
    std::size_t seen = 0;
    update_foreign(stored.span, kernels(best_isa()), [&](const UpdateSpan& slice) {
      EXPECT_EQ(slice.dtype, Dtype::float32);
      EXPECT_EQ(slice.grad_dtype, Dtype::float32);
      EXPECT_EQ(slice.master, nullptr);
      EXPECT_EQ(slice.param, slice.new_param);
      EXPECT_EQ(slice.grad_scale, 1.0f);
      EXPECT_EQ(slice.step, 5);
      EXPECT_EQ(slice.param_id, 9u);
      EXPECT_EQ(slice.first, 1000 + seen);
      EXPECT_EQ(slice.hyper->options, 7u);
      EXPECT_LE(slice.count, kForeignSlice);
      seen += slice.count;
      step_of(slice);
    });
    EXPECT_EQ(seen, kCount);
    const std::vector<float> now = stored.joined();
    for (std::size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(stored.moment1[i], 2.5f) << i;  // 1 + 3 / 2
      ASSERT_EQ(stored.moment2[i], 4.0f) << i;
      ASSERT_EQ(now[i], stored.values[i] + 0.625f) << name(dtype) << " " << i;
    }
  }
}

TEST(Foreign, WritesNewParametersBesideTheOldOnes) {
  Stored stored(Dtype::bfloat16, Dtype::bfloat16);
  const std::vector<float> before = stored.param;
  std::vector<float> beside(kCount);
  stored.span.new_param = beside.data();
  update_foreign(stored.span, kernels(best_isa()), step_of);
  EXPECT_EQ(stored.param, before);
  EXPECT_EQ(stored.joined()[kCount - 1], stored.values[kCount - 1] + 0.625f);
}

TEST(Foreign, GetsOnlyTheMomentsThatThereAre) {
  Stored stored(Dtype::float32, Dtype::float32);
  stored.span.moment2 = nullptr;
  int calls = 0;
  update_foreign(stored.span, kernels(best_isa()), [&](const UpdateSpan& slice) {
    EXPECT_NE(slice.moment1, nullptr);
    EXPECT_EQ(slice.moment2, nullptr);
    ++calls;
  });
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(moment_count({.rule = Rule::foreign, .foreign_moments = 1}), 1);
  EXPECT_EQ(moment_count({.rule = Rule::adamw}), 2);
}

UpdateDone wait_for_one(Workers& workers, Doorbell& bell) {
  UpdateDone done;
  while (!workers.collect(done)) {
    if (!bell.wait(20'000)) ADD_FAILURE() << "nobody rang";
  }
  return done;
}

TEST(ForeignWorkers, RunTheCallbackOnTheirOwnThreads) {
  for (const int threads : {0, 1, 2}) {
    Stored stored(Dtype::float32, Dtype::float32);
    Doorbell bell;
    std::atomic<int> here{0};
    const auto caller = std::this_thread::get_id();
    WorkerOptions options;
    options.foreign = [&](const UpdateSpan& slice) {
      here += std::this_thread::get_id() == caller ? 1 : 0;
      step_of(slice);
    };
    Workers workers(threads, &bell, options);
    ASSERT_TRUE(workers.submit({.spans = {&stored.span, 1}, .tag = 3}));
    const UpdateDone done = wait_for_one(workers, bell);
    EXPECT_EQ(done.tag, 3u);
    EXPECT_EQ(done.error, "");
    EXPECT_EQ(here, threads == 0 ? 3 : 0);
    EXPECT_EQ(stored.joined()[0], stored.values[0] + 0.625f);
  }
}

// What is thrown ends that job only: it says so, and the worker goes on with the next one.
TEST(ForeignWorkers, SayWhatWasThrownAndGoOn) {
  for (const int threads : {0, 1}) {
    Stored stored(Dtype::float32, Dtype::float32);
    std::vector<UpdateSpan> spans(2, stored.span);
    Doorbell bell;
    int calls = 0;
    WorkerOptions options;
    options.foreign = [&](const UpdateSpan&) {
      if (++calls == 2) throw std::runtime_error("no such option");
    };
    Workers workers(threads, &bell, options);
    ASSERT_TRUE(workers.submit({.spans = spans, .tag = 1}));
    EXPECT_EQ(wait_for_one(workers, bell).error, "no such option");
    EXPECT_EQ(calls, 2) << "the rest of the job is left alone";
    ASSERT_TRUE(workers.submit({.spans = {spans.data(), 1}, .tag = 2}));
    const UpdateDone next = wait_for_one(workers, bell);
    EXPECT_EQ(next.tag, 2u);
    EXPECT_EQ(next.error, "");
    EXPECT_EQ(workers.in_flight(), 0u);
  }
}

TEST(ForeignWorkers, AnExceptionWithoutWordsIsStillAnError) {
  Stored stored(Dtype::float32, Dtype::float32);
  WorkerOptions options;
  options.foreign = [](const UpdateSpan&) { throw std::runtime_error(""); };
  Workers workers(0, nullptr, options);
  ASSERT_TRUE(workers.submit({.spans = {&stored.span, 1}}));
  UpdateDone done;
  ASSERT_TRUE(workers.collect(done));
  EXPECT_EQ(done.error, "an exception without a message");
}

TEST(ForeignWorkers, ArePlacedAsTheyAreTold) {
  Stored stored(Dtype::float32, Dtype::float32);
  Doorbell bell;
  std::vector<int> seen;
  WorkerOptions options;
  options.placement.cpus = {allowed_cpus().front()};
  options.foreign = [&](const UpdateSpan&) { seen = allowed_cpus(); };
  Workers workers(1, &bell, options);
  ASSERT_TRUE(workers.submit({.spans = {&stored.span, 1}}));
  wait_for_one(workers, bell);
  EXPECT_EQ(seen, options.placement.cpus);
}

}  // namespace
}  // namespace strata::foreign_test
