// The conformance suite of the Backend port: what every backend must do, whatever it is made of.
#include "memory/backend.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "doubles/faulty_backend.hpp"
#include "memory/doorbell.hpp"
#include "memory/host_backend.hpp"

namespace strata {
namespace {

constexpr std::uint32_t kFrames = 6;

struct Subject {
  const char* name;
  std::function<std::unique_ptr<Backend>(Doorbell*)> make;
};

std::unique_ptr<Backend> make_late(Doorbell* bell) {
  const BackendFaults late{.polls_late_max = 7, .seed = 42};
  return std::make_unique<FaultyBackend>(std::make_unique<HostBackend>(bell, CopyEngine::threaded),
                                         late);
}

const Subject kSubjects[] = {
    {"threaded", [](Doorbell* b) { return std::make_unique<HostBackend>(b); }},
    {"polled", [](Doorbell* b) { return std::make_unique<HostBackend>(b, CopyEngine::polled); }},
    {"late", make_late},
};

std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> words(bytes / sizeof(std::uint64_t));
  for (std::uint64_t& word : words) word = random();
  std::vector<std::byte> out(bytes);
  std::memcpy(out.data(), words.data(), bytes);
  return out;
}

class BackendTest : public testing::TestWithParam<std::tuple<Subject, std::size_t>> {
 protected:
  void SetUp() override {
    backend_ = std::get<0>(GetParam()).make(&bell_);
    page_ = std::get<1>(GetParam());
    const auto error = backend_->claim(kFrames, page_);
    ASSERT_FALSE(error) << error->text();
  }

  // A view whose pages show `frames`, released at the end of the test.
  std::byte* view_of(const std::vector<FrameId>& frames) {
    std::byte* view = backend_->reserve(frames.size() * page_);
    views_.emplace_back(view, frames.size() * page_);
    for (std::size_t i = 0; i < frames.size(); ++i) {
      const auto error = backend_->map(view, i, frames[i]);
      EXPECT_FALSE(error) << error->text();
    }
    return view;
  }

  void fill(FrameId frame, const std::vector<std::byte>& bytes) {
    finish(backend_->copy_in(frame, bytes.data(), bytes.size()));
  }

  void finish(CopyTicket ticket) {
    backend_->wait(ticket);
    const auto error = backend_->take_error(ticket);
    EXPECT_FALSE(error) << error->text();
  }

  bool shows(const std::byte* view, const std::vector<std::byte>& bytes) const {
    return std::memcmp(view, bytes.data(), bytes.size()) == 0;
  }

  void TearDown() override {
    for (const auto& [view, bytes] : views_) backend_->release(view, bytes);
  }

  Doorbell bell_;
  std::unique_ptr<Backend> backend_;
  std::size_t page_ = 0;
  std::vector<std::pair<std::byte*, std::size_t>> views_;
};

TEST_P(BackendTest, BytesSurviveTheWayInAndOut) {
  const auto sent = pattern(page_, 1);
  std::vector<std::byte> got(page_);
  fill(FrameId{5}, sent);
  backend_->wait(backend_->copy_out(got.data(), FrameId{5}, page_));
  EXPECT_TRUE(shows(got.data(), sent));
}

TEST_P(BackendTest, APartOfAPageLeavesTheRest) {
  const auto first = pattern(page_, 1);
  const auto second = pattern(page_ / 2, 2);
  const std::byte* view = view_of({FrameId{0}});
  fill(FrameId{0}, first);
  fill(FrameId{0}, second);
  EXPECT_TRUE(shows(view, second));
  EXPECT_EQ(0, std::memcmp(view + page_ / 2, first.data() + page_ / 2, page_ - page_ / 2));
}

TEST_P(BackendTest, CopiesRunInOrder) {
  // Each hop reads what the one before wrote: one copy out of turn breaks the chain. Small pages
  // make more hops than any queue holds.
  const auto start = pattern(page_, 3);
  const std::size_t count = std::min<std::size_t>(300, 32 * kMiB / page_);
  std::vector<std::vector<std::byte>> hops(count, std::vector<std::byte>(page_));
  CopyTicket last = backend_->copy_in(FrameId{0}, start.data(), page_);
  for (std::uint32_t i = 0; i < count; ++i) {
    backend_->copy_out(hops[i].data(), FrameId{i % kFrames}, page_);
    last = backend_->copy_in(FrameId{(i + 1) % kFrames}, hops[i].data(), page_);
  }
  backend_->wait(last);
  EXPECT_TRUE(backend_->done(last));
  for (const auto& hop : hops) ASSERT_TRUE(shows(hop.data(), start));
}

TEST_P(BackendTest, ADoneTicketMeansEveryEarlierOneIsDone) {
  const auto bytes = pattern(page_, 4);
  std::vector<CopyTicket> tickets;
  for (std::uint32_t i = 0; i < kFrames; ++i) {
    tickets.push_back(backend_->copy_in(FrameId{i}, bytes.data(), page_));
  }
  while (!backend_->done(tickets.back())) bell_.wait(1);
  for (const CopyTicket ticket : tickets) EXPECT_TRUE(backend_->done(ticket));
  EXPECT_TRUE(std::is_sorted(tickets.begin(), tickets.end()));
}

TEST_P(BackendTest, TwoViewsOfOneFrameAreOneMemory) {
  std::byte* one = view_of({FrameId{1}, FrameId{2}});
  std::byte* two = view_of({FrameId{2}, FrameId{1}});
  const auto bytes = pattern(page_, 5);
  fill(FrameId{2}, bytes);
  EXPECT_TRUE(shows(one + page_, bytes));
  EXPECT_TRUE(shows(two, bytes));
  // And what is written through a view, every other view and the copy engine see.
  std::memset(one, 0x5a, page_);
  EXPECT_EQ(two[page_], std::byte{0x5a});
  std::vector<std::byte> got(page_);
  backend_->wait(backend_->copy_out(got.data(), FrameId{1}, page_));
  EXPECT_EQ(got, std::vector<std::byte>(page_, std::byte{0x5a}));
}

TEST_P(BackendTest, ARemappedPageShowsTheOtherFrameAtTheSameAddress) {
  const auto a = pattern(page_, 6);
  const auto b = pattern(page_, 7);
  const auto c = pattern(page_, 8);
  std::byte* view = view_of({FrameId{0}, FrameId{3}});
  fill(FrameId{0}, a);
  fill(FrameId{3}, b);
  fill(FrameId{4}, c);
  ASSERT_TRUE(shows(view, a) && shows(view + page_, b));
  ASSERT_FALSE(backend_->map(view, 0, FrameId{4}));
  EXPECT_TRUE(shows(view, c));
  EXPECT_TRUE(shows(view + page_, b));
  // The frame that is no longer shown keeps its bytes.
  ASSERT_FALSE(backend_->map(view, 0, FrameId{0}));
  EXPECT_TRUE(shows(view, a));
}

TEST_P(BackendTest, ScatteredFramesReadAsOneTensor) {
  const std::vector<FrameId> order{FrameId{4}, FrameId{0}, FrameId{5}, FrameId{2}};
  const std::byte* view = view_of(order);
  const auto whole = pattern(order.size() * page_, 9);
  CopyTicket last{};
  for (std::size_t i = 0; i < order.size(); ++i) {
    last = backend_->copy_in(order[i], whole.data() + i * page_, page_);
  }
  backend_->wait(last);
  EXPECT_TRUE(shows(view, whole));
}

TEST_P(BackendTest, AStreamThatWaitsSeesTheBytes) {
  const auto bytes = pattern(page_, 10);
  const std::byte* view = view_of({FrameId{0}});
  backend_->stream_waits(nullptr, backend_->copy_in(FrameId{0}, bytes.data(), page_));
  EXPECT_TRUE(shows(view, bytes));
  EXPECT_TRUE(backend_->done(backend_->record(nullptr)));
}

// Memory of the caller on the device: that of a host backend is any memory at all.
TEST_P(BackendTest, BytesSurviveTheWayToAndFromMemoryThatIsNoFrame) {
  const auto sent = pattern(page_, 11);
  std::vector<std::byte> tensor(page_ + 2);  // at an odd address, with a byte on either side
  finish(backend_->copy_to(tensor.data() + 1, sent.data(), page_, backend_->record(nullptr)));
  EXPECT_TRUE(shows(tensor.data() + 1, sent));
  EXPECT_EQ(tensor.front(), std::byte{0});
  EXPECT_EQ(tensor.back(), std::byte{0});
  std::vector<std::byte> got(page_);
  finish(backend_->copy_from(got.data(), tensor.data() + 1, page_, backend_->record(nullptr)));
  EXPECT_EQ(got, sent);
}

TEST_P(BackendTest, CopiesOfBothKindsShareTheirLanes) {
  const auto first = pattern(page_, 12);
  std::vector<std::byte> tensor(page_);
  std::vector<std::byte> middle(page_);
  std::vector<std::byte> last(page_);
  // Each reads what the one before wrote.
  backend_->copy_in(FrameId{0}, first.data(), page_);
  backend_->copy_out(middle.data(), FrameId{0}, page_);
  backend_->copy_to(tensor.data(), middle.data(), page_, backend_->record(nullptr));
  finish(backend_->copy_from(last.data(), tensor.data(), page_, backend_->record(nullptr)));
  EXPECT_EQ(last, first);
}

std::string name_of(const testing::TestParamInfo<BackendTest::ParamType>& info) {
  return std::string(std::get<0>(info.param).name) + "_" +
         std::to_string(std::get<1>(info.param) / kKiB) + "KiB";
}

INSTANTIATE_TEST_SUITE_P(Backends, BackendTest,
                         testing::Combine(testing::ValuesIn(kSubjects),
                                          testing::Values(4 * kKiB, 64 * kKiB, 2 * kMiB)),
                         name_of);

// A sanitizer maps memory of its own whenever it likes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
constexpr bool kSanitized = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
constexpr bool kSanitized = false;
#endif

// Mappings of this process whose line contains `what`.
std::ptrdiff_t count_mappings(const std::string& what) {
  std::ifstream maps("/proc/self/maps");
  std::ptrdiff_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(what) != std::string::npos;
  return count;
}

std::ptrdiff_t count_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

void use_once(const Subject& subject) {
  Doorbell bell;
  auto backend = subject.make(&bell);
  ASSERT_FALSE(backend->claim(kFrames, kPageBytesMin));
  std::byte* view = backend->reserve(4 * kPageBytesMin);
  for (std::uint32_t i = 0; i < 4; ++i) ASSERT_FALSE(backend->map(view, i, FrameId{i + i % 2}));
  ASSERT_GT(count_mappings("strata-device"), 0);
  const auto bytes = pattern(kPageBytesMin, 1);
  backend->wait(backend->copy_in(FrameId{1}, bytes.data(), bytes.size()));
  backend->release(view, 4 * kPageBytesMin);
}

TEST(BackendLeaks, NothingIsLeftBehind) {
  for (const Subject& subject : kSubjects) {
    use_once(subject);  // what the C library keeps for the next thread is no leak
    const auto mappings = count_mappings("");
    const auto files = count_files();
    for (int i = 0; i < 3; ++i) use_once(subject);
    EXPECT_EQ(count_mappings("strata-device"), 0) << subject.name;
    if (!kSanitized) {
      EXPECT_EQ(count_mappings(""), mappings) << subject.name;
    }
    EXPECT_EQ(count_files(), files) << subject.name;
  }
}

TEST(HostBackend, RefusesAClaimBeyondTheMachine) {
  HostBackend device(nullptr);
  const auto error = device.claim(1u << 24, kPageBytesMax);  // 1 PiB
  ASSERT_TRUE(error);
  EXPECT_EQ(error->fault, Fault::memory);
  EXPECT_EQ(error->tier, Tier::device);
  EXPECT_NE(error->text().find("device tier"), std::string::npos) << error->text();
}

TEST(HostBackend, PolledCopiesWaitUntilTheyAreAskedFor) {
  Doorbell bell;
  HostBackend device(&bell, CopyEngine::polled);
  ASSERT_FALSE(device.claim(2, kPageBytesMin));
  auto bytes = pattern(kPageBytesMin, 1);
  const CopyTicket ticket = device.copy_in(FrameId{0}, bytes.data(), bytes.size());
  EXPECT_TRUE(bell.wait(0)) << "nobody is told that there is something to poll";
  // Not run yet: it carries what its source holds now.
  bytes.assign(bytes.size(), std::byte{7});
  EXPECT_TRUE(device.done(ticket));
  std::vector<std::byte> got(kPageBytesMin);
  device.wait(device.copy_out(got.data(), FrameId{0}, got.size()));
  EXPECT_EQ(got, bytes);
}

TEST(HostBackend, FinishesItsCopiesBeforeItGoes) {
  std::vector<std::byte> got(kPageBytesMin);
  const auto bytes = pattern(kPageBytesMin, 1);
  for (const CopyEngine engine : {CopyEngine::threaded, CopyEngine::polled}) {
    got.assign(got.size(), std::byte{0});
    {
      HostBackend device(nullptr, engine);
      ASSERT_FALSE(device.claim(1, kPageBytesMin));
      device.copy_in(FrameId{0}, bytes.data(), bytes.size());
      device.copy_out(got.data(), FrameId{0}, got.size());
    }
    EXPECT_EQ(got, bytes);
  }
}

TEST(HostBackendDeathTest, MisuseDies) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  HostBackend device(nullptr, CopyEngine::polled);
  ASSERT_FALSE(device.claim(2, kPageBytesMin));
  std::vector<std::byte> bytes(2 * kPageBytesMin);
  EXPECT_DEATH(device.copy_in(FrameId{2}, bytes.data(), 1), "frame_count_");
  EXPECT_DEATH(device.copy_in(FrameId{0}, bytes.data(), bytes.size()), "page_bytes_");
  EXPECT_DEATH(device.done(CopyTicket{9}), "last_");
  EXPECT_DEATH(static_cast<void>(device.claim(2, kPageBytesMin)), "fd_");
}

TEST(FaultyBackend, ANthCopyFailsAloneAndIsReportedOnce) {
  for (std::uint64_t nth = 1; nth <= 3; ++nth) {
    FaultyBackend device(std::make_unique<HostBackend>(nullptr), {.nth_copy = nth});
    ASSERT_FALSE(device.claim(3, kPageBytesMin));
    const auto bytes = pattern(kPageBytesMin, nth);
    std::vector<CopyTicket> tickets;
    for (std::uint32_t i = 0; i < 3; ++i) {
      tickets.push_back(device.copy_in(FrameId{i}, bytes.data(), bytes.size()));
    }
    device.wait(tickets.back());
    EXPECT_TRUE(device.fired());
    for (std::uint32_t i = 0; i < 3; ++i) {
      const auto error = device.take_error(tickets[i]);
      ASSERT_EQ(error.has_value(), i + 1 == nth) << "copy " << i;
      EXPECT_EQ(error ? error->fault : Fault::io, Fault::io);
      EXPECT_FALSE(device.take_error(tickets[i])) << "told twice";
    }
    for (std::uint32_t i = 0; i < 3; ++i) {
      std::vector<std::byte> got(kPageBytesMin);
      device.wait(device.copy_out(got.data(), FrameId{i}, got.size()));
      EXPECT_EQ(got == bytes, i + 1 != nth);
    }
  }
}

TEST(FaultyBackend, ClaimsAndMapsFail) {
  FaultyBackend no_memory(std::make_unique<HostBackend>(nullptr), {.nth_claim = 1});
  EXPECT_EQ(no_memory.claim(1, kPageBytesMin)->fault, Fault::memory);

  FaultyBackend no_mapping(std::make_unique<HostBackend>(nullptr), {.nth_map = 2});
  ASSERT_FALSE(no_mapping.claim(1, kPageBytesMin));
  std::byte* view = no_mapping.reserve(2 * kPageBytesMin);
  EXPECT_FALSE(no_mapping.map(view, 0, FrameId{0}));
  EXPECT_FALSE(no_mapping.fired());
  EXPECT_TRUE(no_mapping.map(view, 1, FrameId{0}));
  EXPECT_TRUE(no_mapping.fired());
  no_mapping.release(view, 2 * kPageBytesMin);
}

}  // namespace
}  // namespace strata
