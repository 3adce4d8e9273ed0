// Crashes of a machine at any turn of a training with snapshots, on a disk that forgets what was
// not flushed: every snapshot that counted as complete is whole, and as the plain run was behind
// its step. STRATA_SEEDS=10000 runs more; STRATA_SEED=7 replays one.
#include <gtest/gtest.h>
#include <unistd.h>

#include <deque>
#include <fstream>

#include "doubles/faulty_engine.hpp"
#include "doubles/volatile_disk.hpp"
#include "io_fixtures.hpp"
#include "offload/storage/saved_pages.hpp"
#include "random_session.hpp"
#include "seeds.hpp"
#include "simulated_run.hpp"
#include "whole_snapshot.hpp"

namespace strata::crash_test {
namespace {

struct Crashed {};

// Snapshots as bindings/strata/_storage/snapshots/ takes them: it is complete in slots; what was
// written until then is made durable, which takes some turns; the manifest is there; older ones go.
class Crashing final {
 public:
  explicit Crashing(std::uint64_t seed) : random_(seed), config_(random_session(random_)) {
    config_.update = random_() % 2 == 0 ? UpdateMode::on_step : UpdateMode::in_backward;
    config_.accumulate &= config_.update == UpdateMode::on_step;
    config_.ssd_bytes = kPlenty * config_.page_bytes;
    config_.host_bytes += 16 * config_.page_bytes;
    keep_ = static_cast<std::uint32_t>(1 + random_() % 2);
    crash_at_ = 1 + random_() % (random_() % 4 == 0 ? 2'000 : 12'000);
    auto disk = std::make_unique<VolatileDisk>(64);
    disk_ = disk.get();
    FaultPlan plan{.seed = seed, .delay_ns_max = 500'000};
    plan.chance_of(IoFault::shortened) = 0.1;
    plan.chance_of(IoFault::again) = 0.02;
    plan.chance_of(IoFault::passing_eio) = 0.01;
    auto faulty = std::make_unique<FaultyEngine>(std::move(disk), plan, &clock_);
    run_ = std::make_unique<SimulatedRun>(
        config_, std::move(faulty), seed, &clock_, [this] { clock_.advance(10'000); },
        [this] { turn(); });
    layout_ = run_->session().residence().layout;
  }

  // Whether it came to that.
  bool crash() {
    try {
      train();
      return false;
    } catch (const Crashed&) {
      return true;
    }
  }
  std::size_t committed() const { return committed_.size(); }
  // What of the complete ones is lost; empty: nothing.
  std::string lost() {
    for (const Taken& taken : committed_) {
      const std::string wrong =
          difference(config_, layout_, taken.snapshot.pages, taken.plain, image_);
      if (!wrong.empty()) return wrong + ", step " + std::to_string(taken.snapshot.step);
    }
    return "";
  }
  // The newest one's pages by the reader that a later run has, from a file.
  void read_again() {
    if (committed_.empty() || committed_.back().snapshot.pages.empty()) return;
    const TempFolder folder;
    std::ofstream(folder.path() + "/pages", std::ios::binary)
        .write(reinterpret_cast<const char*>(image_.data()),
               static_cast<std::streamsize>(image_.size()));
    SavedFiles saved{.files = open_page_files({folder.path()}, {"pages"}, Existing::to_read),
                     .slots = {}};
    std::vector<SlotId> slots;
    for (const SavedPage& page : committed_.back().snapshot.pages) {
      saved.slots.push_back({.slot = page.slot, .contents = page.contents});
      slots.push_back(page.slot);
    }
    SavedPages pages(std::move(saved), config_.page_bytes, "threads");
    AlignedBuffer to(slots.size() * config_.page_bytes);
    pages.read(slots, to.data());  // verifies
  }

 private:
  struct Taken {
    std::uint64_t id = 0;
    std::vector<PlainParam> plain;
    Snapshot snapshot = {};
    std::size_t flushed = 0;  // writes that its flush covers
    std::uint64_t durable_at = 0;
  };

  void turn() {
    ++turns_;
    if (under_way_ && under_way_->durable_at != 0 && turns_ >= under_way_->durable_at) commit();
    if (turns_ != crash_at_ || run_ == nullptr) return;  // not while it is made
    image_ = disk_->crash(random_);
    throw Crashed{};
  }

  void train() {
    if (turns_ >= crash_at_) crash_at_ = turns_ + 1 + crash_at_ % 500;
    Session& session = run_->session();
    session.reserve_snapshots(keep_);
    for (int step = 0; step < 30; ++step) {
      run_->step();
      for (; !over_.empty(); over_.pop_front()) session.drop_snapshot(over_.front());
      if (!under_way_ && random_() % 3 != 0) {
        under_way_.emplace(Taken{session.begin_snapshot(keep_), run_->plain()});
      }
      const bool asks = under_way_ && under_way_->durable_at == 0;
      if (!asks || (random_() % 2 == 0 && !session.snapshot_complete(under_way_->id))) continue;
      under_way_->snapshot = session.snapshot(under_way_->id);
      under_way_->flushed = disk_->completed();
      under_way_->durable_at = turns_ + 1 + random_() % 40;
    }
  }

  void commit() {
    disk_->make_durable(under_way_->flushed);
    committed_.push_back(std::move(*under_way_));
    under_way_.reset();
    while (committed_.size() > keep_) {
      over_.push_back(committed_.front().id);
      committed_.pop_front();
    }
  }

  std::mt19937_64 random_;
  VirtualClock clock_;
  Config config_;
  Layout layout_;
  std::uint32_t keep_ = 1;
  std::uint64_t turns_ = 0, crash_at_ = 0;
  VolatileDisk* disk_ = nullptr;
  std::optional<Taken> under_way_;
  std::deque<Taken> committed_;     // the oldest first
  std::deque<std::uint64_t> over_;  // to be dropped where that may be
  std::vector<std::byte> image_;    // what the crash left
  std::unique_ptr<SimulatedRun> run_;
};

TEST(Crash, LosesNoSnapshotThatWasComplete) {
  std::uint64_t seeds = 0, crashes = 0, looked_at = 0;
  for_seeds(60, [&](std::uint64_t seed) {
    Crashing crashing(seed);
    ++seeds;
    if (!crashing.crash()) return;
    ++crashes;
    looked_at += crashing.committed();
    EXPECT_EQ(crashing.lost(), "");
    if (seed % 10 == 0) crashing.read_again();
  });
  RecordProperty("crashes", static_cast<int>(crashes));
  if (std::getenv("STRATA_SEED") != nullptr) return;
  EXPECT_GT(crashes, of_all_seeds(seeds / 2)) << "hardly any run came to its crash";
  EXPECT_GT(looked_at, of_all_seeds(crashes / 2)) << "hardly any snapshot was complete by then";
  std::printf("%lu crashes of %lu runs, %lu complete snapshots looked at\n",
              static_cast<unsigned long>(crashes), static_cast<unsigned long>(seeds),
              static_cast<unsigned long>(looked_at));
}

// The double itself: without a flush, something is lost.
TEST(Crash, OfAVolatileDiskLosesWhatWasNotFlushed) {
  std::mt19937_64 random(1);
  VolatileDisk disk(8);
  const int file = disk.attach(-1, 16 * kIoAlignment);
  AlignedBuffer page(kIoAlignment);
  const auto write = [&](std::uint64_t place, std::byte value) {
    std::fill_n(page.data(), kIoAlignment, value);
    ASSERT_TRUE(disk.submit({.op = IoOp::write,
                             .file = file,
                             .offset = place * kIoAlignment,
                             .buffer = page.data(),
                             .bytes = kIoAlignment}));
    disk.flush();
    std::array<IoCompletion, 4> seen;
    ASSERT_EQ(disk.reap(seen), 1U);
  };
  for (std::uint64_t i = 0; i < 8; ++i) write(i, std::byte{1});
  disk.make_durable(disk.completed());
  for (std::uint64_t i = 0; i < 16; ++i) write(i, std::byte{2});
  const std::vector<std::byte> image = disk.crash(random);
  std::size_t old = 0, torn = 0;
  for (std::size_t i = 0; i < 16; ++i) {
    const auto first = image.begin() + static_cast<std::ptrdiff_t>(i * kIoAlignment);
    const auto twos = std::count(first, first + kIoAlignment, std::byte{2});
    const auto ones = std::count(first, first + kIoAlignment, std::byte{1});
    EXPECT_EQ(twos + ones, i < 8 ? kIoAlignment : twos) << "flushed bytes are gone";
    old += twos == 0 ? 1 : 0;
    torn += twos != 0 && twos != kIoAlignment ? 1 : 0;
  }
  EXPECT_GT(old, 0U);
  EXPECT_GT(torn, 0U);
}

}  // namespace
}  // namespace strata::crash_test
