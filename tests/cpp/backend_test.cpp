// The conformance suite of the Backend port: what every backend must do, whatever it is made of.
#include "memory/backend.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

#include "backend_subjects.hpp"
#include "memory/doorbell.hpp"
#include "pattern.hpp"

namespace strata {
namespace {

constexpr std::uint32_t kFrames = 6;

class BackendTest : public testing::TestWithParam<std::tuple<Subject, std::size_t>> {
 protected:
  void SetUp() override {
    const Subject& subject = std::get<0>(GetParam());
    page_ = std::get<1>(GetParam());
    if (subject.real_gpu && !gpu_is_asked_for()) GTEST_SKIP() << "STRATA_TEST_DEVICE is not cuda";
    if (page_ < subject.page_bytes_min) GTEST_SKIP() << "a GPU maps no pages as small as these";
    rig_ = subject.make(&bell_);
    backend_ = rig_.device.get();
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

  // What is at an address of the device, which the host may not be able to read by itself.
  std::vector<std::byte> look(const std::byte* device, std::size_t bytes) {
    std::vector<std::byte> got(bytes);
    finish(backend_->copy_from(got.data(), device, bytes, backend_->record(nullptr)));
    return got;
  }

  void put(std::byte* device, const std::vector<std::byte>& bytes) {
    finish(backend_->copy_to(device, bytes.data(), bytes.size(), backend_->record(nullptr)));
  }

  bool shows(const std::byte* view, const std::vector<std::byte>& bytes) {
    return look(view, bytes.size()) == bytes;
  }

  void TearDown() override {
    for (const auto& [view, bytes] : views_) backend_->release(view, bytes);
    EXPECT_EQ(rig_.close(), "");
  }

  Doorbell bell_;
  Rig rig_;
  Backend* backend_ = nullptr;
  std::size_t page_ = 0;
  std::vector<std::pair<std::byte*, std::size_t>> views_;
};

TEST_P(BackendTest, BytesSurviveTheWayInAndOut) {
  const auto sent = pattern(page_, 1);
  std::vector<std::byte> got(page_);
  fill(FrameId{5}, sent);
  backend_->wait(backend_->copy_out(got.data(), FrameId{5}, page_));
  EXPECT_EQ(got, sent);
}

TEST_P(BackendTest, APartOfAPageLeavesTheRest) {
  const auto first = pattern(page_, 1);
  const auto second = pattern(page_ / 2, 2);
  const std::byte* view = view_of({FrameId{0}});
  fill(FrameId{0}, first);
  fill(FrameId{0}, second);
  EXPECT_TRUE(shows(view, second));
  const auto rest = look(view + page_ / 2, page_ / 2);
  EXPECT_EQ(0, std::memcmp(rest.data(), first.data() + page_ / 2, page_ / 2));
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
  for (const auto& hop : hops) ASSERT_EQ(hop, start);
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
  const auto written = pattern(page_, 13);
  put(one, written);
  EXPECT_TRUE(shows(two + page_, written));
  std::vector<std::byte> got(page_);
  finish(backend_->copy_out(got.data(), FrameId{1}, page_));
  EXPECT_EQ(got, written);
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
  const CopyTicket passed = backend_->record(nullptr);
  backend_->wait(passed);
  EXPECT_TRUE(backend_->done(passed));
}

// Memory of the caller on the device: here that which a view shows, used by its address.
TEST_P(BackendTest, BytesSurviveTheWayToAndFromMemoryThatIsNoFrame) {
  const auto sent = pattern(page_, 11);
  std::byte* tensor = view_of({FrameId{3}, FrameId{1}});
  put(tensor, std::vector<std::byte>(2 * page_));
  put(tensor + 1, sent);  // at an odd address, with a byte on either side
  EXPECT_TRUE(shows(tensor + 1, sent));
  EXPECT_EQ(look(tensor, 1).front(), std::byte{0});
  EXPECT_EQ(look(tensor + 1 + page_, 1).front(), std::byte{0});
}

// Whoever sleeps on the bell, and polls where that is asked for, hears of every end.
TEST_P(BackendTest, AnEndRingsOrIsFoundByPolling) {
  const auto bytes = pattern(page_, 20);
  for (int turn = 0; turn < 3; ++turn) {
    const CopyTicket ticket = backend_->copy_in(FrameId{0}, bytes.data(), page_);
    bool over = false;
    for (int look = 0; look < 10'000 && !over; ++look) {
      const bool rang = bell_.wait(1);
      const bool found = backend_->needs_polling() && backend_->poll();
      if (rang || found) over = backend_->done(ticket);
    }
    EXPECT_TRUE(over);
    while (backend_->poll()) continue;
    EXPECT_FALSE(backend_->needs_polling()) << "nothing is in flight";
  }
}

TEST_P(BackendTest, CopiesOfAllLanesRunInOrderWhereTheyTouchTheSameBytes) {
  const auto first = pattern(page_, 12);
  std::byte* tensor = view_of({FrameId{1}});
  std::vector<std::byte> middle(page_);
  std::vector<std::byte> last(page_);
  // Each reads what the one before wrote.
  backend_->copy_in(FrameId{0}, first.data(), page_);
  backend_->copy_out(middle.data(), FrameId{0}, page_);
  backend_->copy_to(tensor, middle.data(), page_, backend_->record(nullptr));
  finish(backend_->copy_from(last.data(), tensor, page_, backend_->record(nullptr)));
  EXPECT_EQ(last, first);
}

TEST_P(BackendTest, AFrameLiesWhereItsAddressSays) {
  const auto in = pattern(page_, 14);
  const auto out = pattern(page_, 15);
  fill(FrameId{2}, in);
  EXPECT_TRUE(shows(backend_->address(FrameId{2}), in));
  put(backend_->address(FrameId{4}), out);
  EXPECT_TRUE(shows(view_of({FrameId{4}}), out));
}

TEST_P(BackendTest, FramesComeAndGo) {
  const auto kept = pattern(page_, 16);
  const auto added = pattern(page_, 17);
  const auto again = pattern(page_, 18);
  const std::byte* view = view_of({FrameId{0}, FrameId{5}});
  fill(FrameId{0}, kept);
  // 1. More of them.
  auto error = backend_->resize(kFrames + 3);
  ASSERT_FALSE(error) << error->text();
  fill(FrameId{kFrames + 2}, added);
  EXPECT_TRUE(shows(view_of({FrameId{kFrames + 2}}), added));
  EXPECT_TRUE(shows(view, kept));
  // 2. Fewer: what remains is as it was, and views release what they show no longer.
  error = backend_->resize(2);
  ASSERT_FALSE(error) << error->text();
  EXPECT_TRUE(shows(view, kept));
  // 3. Views show frames that come back.
  error = backend_->resize(kFrames);
  ASSERT_FALSE(error) << error->text();
  fill(FrameId{5}, again);
  EXPECT_TRUE(shows(view, kept));
  EXPECT_TRUE(shows(view + page_, again));
}

TEST_P(BackendTest, MemoryIsPinnedOrCopiedAllTheSame) {
  std::vector<std::byte> memory(4 * page_);
  const std::span<std::byte> all(memory);
  // It grows, shrinks and goes.
  for (const std::size_t pages : {2U, 4U, 1U, 0U, 3U}) {
    EXPECT_LE(backend_->pin_host(all.first(pages * page_)), pages * page_);
    for (std::size_t page = 0; page < pages; ++page) {
      const auto sent = pattern(page_, 19 + page);
      std::memcpy(&memory[page * page_], sent.data(), page_);
      finish(backend_->copy_in(FrameId{0}, &memory[page * page_], page_));
      std::vector<std::byte> got(page_);
      finish(backend_->copy_out(got.data(), FrameId{0}, page_));
      EXPECT_EQ(got, sent);
    }
  }
  EXPECT_EQ(backend_->pin_host({}), 0U);
}

std::string name_of(const testing::TestParamInfo<BackendTest::ParamType>& info) {
  return std::string(std::get<0>(info.param).name) + "_" +
         std::to_string(std::get<1>(info.param) / kKiB) + "KiB";
}

INSTANTIATE_TEST_SUITE_P(Backends, BackendTest,
                         testing::Combine(testing::ValuesIn(subjects()),
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
  Rig rig = subject.make(&bell);
  Backend* backend = rig.device.get();
  ASSERT_FALSE(backend->claim(kFrames, kPageBytesMin));
  std::byte* view = backend->reserve(4 * kPageBytesMin);
  for (std::uint32_t i = 0; i < 4; ++i) ASSERT_FALSE(backend->map(view, i, FrameId{i + i % 2}));
  ASSERT_GT(count_mappings("strata-device"), 0);
  const auto bytes = pattern(kPageBytesMin, 1);
  backend->wait(backend->copy_in(FrameId{1}, bytes.data(), bytes.size()));
  backend->release(view, 4 * kPageBytesMin);
  EXPECT_EQ(rig.close(), "");
}

TEST(BackendLeaks, NothingIsLeftBehind) {
  for (const Subject& subject : subjects()) {
    if (subject.real_gpu) continue;  // its driver maps what it likes
    use_once(subject);               // what the C library keeps for the next thread is no leak
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

}  // namespace
}  // namespace strata
