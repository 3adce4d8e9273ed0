// Activations of sessions whose device is a GPU's double: bytes that come back are in order before
// computation while nobody waits for them, and what was computed from bytes that never came is in
// no parameter.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "adoptions.hpp"
#include "gpu_session.hpp"
#include "pattern.hpp"
#include "session_fixtures.hpp"

namespace strata::cuda_swapping_test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr int kSteps = 2;
constexpr std::size_t kParamBytes = kNumel * 2;

Config config(std::size_t host_pages) {
  Config config = small_config("simulated");
  config.device = "cuda:0";
  config.host_bytes = (host_pages + kLandingFrames) * kPage;
  return config;
}

// A session, and computation on a stream that is far behind whoever submits it.
struct Gpu {
  RecordingDriver driver;
  std::optional<CallersWork> caller;
  Bytes scratch = Bytes(8);
  std::optional<Session> session;

  Gpu(std::uint64_t seed, std::size_t host_pages)
      : driver({.host_tensors = true, .late = true, .seed = seed}) {
    caller.emplace(driver.table());
    session.emplace(config(host_pages), parts_over(driver));
  }
  // More than any few questions make the driver do.
  void compute_for_long() {
    for (int i = 0; i < 2000; ++i) caller->write(scratch.data(), scratch.data() + 4, 4);
  }
  SaveId send(const Bytes& sent, Tier tier) {
    Bytes tensor(sent.size());
    caller->write(tensor.data(), sent.data(), sent.size());
    const auto id =
        session->save_activation(tensor.data(), tensor.size(), tier, UnitId{1}, caller->stream());
    EXPECT_TRUE(session->activation_saved(id.value(), true));
    return *id;
  }
  // What the driver has to say when the session is gone.
  std::string close() {
    session.reset();
    caller.reset();
    return driver.complaint() + driver.leaks();
  }
};

TEST(CudaSwapping, ComputationWaitsAndTheCallerDoesNot) {
  for (const std::size_t pages : {1U, 3U, 40U}) {  // the last are more than are fetched for later
    for (std::uint64_t seed = 1; seed < 5; ++seed) {
      SCOPED_TRACE(std::to_string(pages) + " pages, seed " + std::to_string(seed));
      Gpu gpu(seed, 256);
      CallersWork other(gpu.driver.table());
      reserve_activations(*gpu.session, (pages + 1) * kPage, 0);
      const Bytes sent = pattern(pages * kPage - 100, seed);
      const SaveId id = gpu.send(sent, Tier::host);
      const Bytes before(sent.size(), std::byte{0xDD});
      Bytes to = before, seen(sent.size()), seen_by_other(sent.size());
      gpu.compute_for_long();  // with what had the memory before
      gpu.session->fetch_activation(id, to.data(), gpu.caller->stream());
      EXPECT_FALSE(gpu.session->await_activation(id, gpu.caller->stream()));
      EXPECT_FALSE(gpu.session->await_activation(id, other.stream()));
      EXPECT_EQ(to, before) << "somebody waited for the copies";
      EXPECT_FALSE(gpu.session->activation_fetched(id, false));
      gpu.caller->read(seen.data(), to.data(), to.size());
      other.read(seen_by_other.data(), to.data(), to.size());
      other.finish();
      EXPECT_EQ(seen_by_other, sent);
      gpu.caller->finish();
      EXPECT_EQ(seen, sent);
      EXPECT_TRUE(gpu.session->activation_fetched(id, true));
      EXPECT_TRUE(gpu.session->await_activation(id, gpu.caller->stream()));
      gpu.session->drop_activation(id);
      gpu.session.reset();
      other.finish();
    }
  }
}

// What is dropped in flight waits for the device: the driver's double complains of a sleep with the
// core's lock.
TEST(CudaSwapping, NobodyStandsStillWhileADropWaits) {
  RecordingDriver driver({.host_tensors = true});
  {
    Session session(config(64), parts_over(driver, true));
    reserve_activations(session, 4 * kPage, 0);
    const CallersWork work(driver.table());
    Bytes tensor(3 * kPage);
    driver.hold(work.stream());
    const auto id =
        session.save_activation(tensor.data(), tensor.size(), Tier::host, UnitId{1}, work.stream());
    const std::jthread device([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      driver.let_go(work.stream());
    });
    session.drop_activation(id.value());
    EXPECT_FALSE(driver.in_flight(tensor.data(), tensor.size()));
    EXPECT_THROW(session.activation_saved(*id, false), StrataError);
  }
  EXPECT_EQ(left(driver), "");
}

TEST(CudaSwapping, PagesOnTheSsdAreReadAndNoMore) {
  Gpu gpu(3, 24);
  reserve_activations(*gpu.session, 2 * kPage, 40 * kPage);
  std::vector<SaveId> ids;
  for (std::uint64_t i = 0; i < 40; ++i) ids.push_back(gpu.send(pattern(kPage, i), Tier::ssd));
  gpu.session->synchronize();
  const auto read = [&] {
    return gpu.session->stats().link_bytes[static_cast<std::size_t>(Link::read)];
  };
  const std::uint64_t read_before = read();
  const Bytes before(kPage, std::byte{0xDD});
  Bytes to = before, seen(kPage);
  gpu.compute_for_long();
  gpu.session->fetch_activation(ids[0], to.data(), gpu.caller->stream());
  EXPECT_FALSE(gpu.session->await_activation(ids[0], gpu.caller->stream()));
  EXPECT_EQ(read(), read_before + kPage);
  EXPECT_EQ(to, before) << "somebody waited for more than the disk";
  gpu.caller->read(seen.data(), to.data(), to.size());
  gpu.caller->finish();
  EXPECT_EQ(seen, pattern(kPage, 0));
  for (const SaveId id : ids) gpu.session->drop_activation(id);
  EXPECT_EQ(gpu.close(), "");
}

TEST(CudaSwapping, ADeviceThatIsLostBehindTheOrderEndsTheStep) {
  for (std::uint64_t seed = 1; seed < 5; ++seed) {
    Bytes to(3 * kPage), gradient(kParamBytes);
    Gpu gpu(seed, 64);
    reserve_activations(*gpu.session, 4 * kPage, 0);
    fill(*gpu.session);
    gpu.session->enter(UnitId{1}, true, true, gpu.caller->stream());
    gpu.session->land_gradient(2, gpu.session->device_address(2), Dtype::bfloat16);
    const SaveId id = gpu.send(pattern(to.size(), seed), Tier::host);
    gpu.compute_for_long();
    gpu.session->fetch_activation(id, to.data(), gpu.caller->stream());
    EXPECT_FALSE(gpu.session->await_activation(id, gpu.caller->stream()));
    gpu.caller->write(gradient.data(), to.data(), gradient.size());
    gpu.driver.lose(kCudaLaunchFailed);
    std::vector<std::string> told;
    const auto expect_failure = [&](const auto& call) {
      try {
        call();
        ADD_FAILURE() << "nobody noticed, seed " << seed;
      } catch (const StrataError& error) {
        told.emplace_back(error.what());
      }
    };
    expect_failure([&] {
      gpu.session->land_gradient(3, gradient.data(), Dtype::bfloat16, gpu.caller->stream());
    });
    expect_failure([&] { gpu.session->step(gpu.session->config().groups, {}); });
    expect_failure([&] { gpu.session->activation_fetched(id, false); });
    expect_failure([&] { gpu.session->await_activation(id, gpu.caller->stream()); });
    ASSERT_EQ(told.size(), 4U);
    EXPECT_NE(told[0].find("unspecified launch failure"), std::string::npos) << told[0];
    EXPECT_EQ(told, std::vector(4, told[0])) << "one failure, several stories";
    EXPECT_EQ(gpu.session->stats().chunks_updated, 0U);
    gpu.session->drop_activation(id);
    EXPECT_EQ(gpu.close(), "");
  }
}

// What the caller's own calls were told, as PyTorch would tell it.
struct CallerFailed : std::runtime_error {
  CallerFailed() : std::runtime_error("a call of the caller's failed") {}
};

// train(), where every gradient is computed from a tensor that was swapped: the parameter, as the
// forward saw it.
class Trainer final {
 public:
  explicit Trainer(const RecordingOptions& options)
      : driver_(options),
        nth_(options.nth),
        saved_(kUnits * kParamsEach, Bytes(kParamBytes)),
        gradients_(saved_),
        ids_(saved_.size()) {}
  RecordingDriver& driver() { return driver_; }

  std::vector<float> train() {
    CallersWork caller(driver_.table());
    Session session(config(40), parts_over(driver_));
    const Finished finished{caller};
    reserve_activations(session, 6 * kPage, 10 * kPage);
    fill(session);
    for (int step = 0; step < kSteps; ++step) {
      for (std::uint32_t u = 0; u < kUnits; ++u) forward(session, caller, u);
      fetch(session, caller, kUnits - 1);
      for (std::uint32_t u = kUnits; u-- > 0;) {
        if (u > 0) fetch(session, caller, u - 1);
        backward(session, caller, u);
      }
      for (const SaveId id : ids_) {
        session.activation_fetched(id, true);
        session.drop_activation(id);
      }
      session.step(session.config().groups, {.max_norm = 1.0});
    }
    return contents(session);
  }

 private:
  // The session's memory goes when computation on it is over, as PyTorch's goes.
  struct Finished {
    CallersWork& caller;
    ~Finished() { caller.finish(); }
  };

  void compute(CallersWork& caller, std::byte* to, const std::byte* from) {
    const std::size_t calls = driver_.calls().size();
    caller.write(to, from, kParamBytes);
    if (calls < nth_ && nth_ <= driver_.calls().size()) throw CallerFailed();
  }

  void forward(Session& session, CallersWork& caller, std::uint32_t u) {
    session.enter(UnitId{u}, false, true, caller.stream());
    for (std::uint32_t p = u * kParamsEach; p < (u + 1) * kParamsEach; ++p) {
      compute(caller, saved_[p].data(), session.device_address(p));
      const Tier tier = p % 2 == 0 ? Tier::host : Tier::ssd;
      const auto id =
          session.save_activation(saved_[p].data(), kParamBytes, tier, UnitId{u}, caller.stream());
      ids_[p] = id.value();
    }
    session.leave(UnitId{u}, caller.stream());
    for (std::uint32_t p = u * kParamsEach; p < (u + 1) * kParamsEach; ++p) {
      session.activation_saved(ids_[p], true);
      std::fill(saved_[p].begin(), saved_[p].end(), std::byte{0xEE});
    }
  }

  void fetch(Session& session, CallersWork& caller, std::uint32_t u) {
    // The copies are late: the stream has much to do before.
    for (int i = 0; i < 100; ++i) caller.write(scratch_.data(), scratch_.data() + 4, 4);
    for (std::uint32_t p = u * kParamsEach; p < (u + 1) * kParamsEach; ++p) {
      session.fetch_activation(ids_[p], saved_[p].data(), caller.stream());
    }
  }

  void backward(Session& session, CallersWork& caller, std::uint32_t u) {
    session.enter(UnitId{u}, true, true, caller.stream());
    for (std::uint32_t p = u * kParamsEach; p < (u + 1) * kParamsEach; ++p) {
      session.await_activation(ids_[p], caller.stream());
      compute(caller, gradients_[p].data(), saved_[p].data());
      session.land_gradient(p, gradients_[p].data(), Dtype::bfloat16, caller.stream());
    }
    session.leave(UnitId{u}, caller.stream());
  }

  RecordingDriver driver_;
  std::uint64_t nth_;
  std::vector<Bytes> saved_;  // by parameter: device memory
  std::vector<Bytes> gradients_;
  Bytes scratch_ = Bytes(8);
  std::vector<SaveId> ids_;
};

TEST(CudaSwapping, LearnsWhatTheHostLearns) {
  const std::vector<float> learnt = expected(kSteps);
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    Trainer trainer({.host_tensors = true, .late = seed != 0, .seed = seed});
    EXPECT_EQ(trainer.train(), learnt) << "seed " << seed;
    EXPECT_EQ(trainer.driver().complaint() + trainer.driver().leaks(), "") << "seed " << seed;
  }
}

// Before these the caller has no stream to compute on.
std::uint64_t calls_of_the_caller() {
  RecordingDriver driver;
  const CallersWork caller(driver.table());
  return driver.calls().size();
}

// The 1st, 2nd, 3rd … call of a training fails, until one passes untouched.
TEST(CudaSwapping, EveryCallMayFail) {
  const std::vector<float> learnt = expected(kSteps);
  for (const int result : {kCudaOutOfMemory, kCudaLaunchFailed}) {
    std::size_t failures = 0;
    bool fired = true;
    for (std::uint64_t nth = calls_of_the_caller() + 1; fired; nth += 1 + nth / 8) {
      Trainer trainer(
          {.host_tensors = true, .late = true, .seed = nth, .nth = nth, .nth_result = result});
      try {
        ASSERT_EQ(trainer.train(), learnt) << "call " << nth << " failed with " << result;
      } catch (const StrataError&) {
        ++failures;
      } catch (const CallerFailed&) {
        ++failures;
      }
      fired = trainer.driver().fired();
      ASSERT_EQ(trainer.driver().complaint() + trainer.driver().leaks(), "")
          << "call " << nth << " failed with " << result;
    }
    EXPECT_GT(failures, 20U);
  }
}

}  // namespace
}  // namespace strata::cuda_swapping_test
