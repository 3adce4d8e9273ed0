// Store on a disk that does wrong: errors are reported once, and no page is ever silently wrong.
#include <gtest/gtest.h>

#include <cerrno>
#include <random>

#include "doubles/faulty_engine.hpp"
#include "offload/storage/memory_engine.hpp"
#include "store_fixtures.hpp"

namespace strata::store_fault_test {
namespace {

struct FaultyStore {
  Doorbell bell;
  FaultyEngine* engine;
  Store store;

  explicit FaultyStore(const FaultPlan& plan, const VirtualClock* clock = nullptr,
                       int hash_threads = 0)
      : FaultyStore(
            std::make_unique<FaultyEngine>(std::make_unique<MemoryEngine>(nullptr, 4), plan, clock),
            hash_threads) {}
  FaultyStore(std::unique_ptr<FaultyEngine> made, int hash_threads)
      : engine(made.get()), store(options(hash_threads), std::move(made), &bell) {}

  static StoreOptions options(int hash_threads) {
    StoreOptions options = options_for({});
    options.hash_threads = hash_threads;
    options.now = hurried_clock();
    return options;
  }
};

TEST(StoreFaultTest, ShortAndInterruptedTransfersAreGoneOnWith) {
  for (IoFault fault :
       {IoFault::shortened, IoFault::interrupted, IoFault::again, IoFault::no_memory}) {
    FaultPlan plan{.seed = 3};
    plan.chance_of(fault) = 0.5;
    FaultyStore faulty(plan);
    for (std::uint64_t i = 0; i < 8; ++i) {
      const SlotId slot = faulty.store.acquire().value();
      AlignedBuffer page(kSlot), back(kSlot);
      page.fill(i);
      EXPECT_EQ(text_of(write(faulty.store, slot, page, i)), "(no error)");
      EXPECT_EQ(text_of(read(faulty.store, slot, back, i)), "(no error)");
      EXPECT_TRUE(page == back);
    }
    EXPECT_GT(faulty.engine->injected(fault), 0u);
    EXPECT_EQ(faulty.store.counters().written_bytes, 8 * kSlot);
    if (fault != IoFault::shortened) {
      EXPECT_EQ(faulty.store.counters().retries, faulty.engine->injected(fault));
    }
  }
}

// A store on a faulty disk, whose pauses end as soon as nothing else moves.
struct HurriedStore {
  std::int64_t time_ns = 0;
  FaultyEngine* engine;
  Store store;

  HurriedStore()
      : HurriedStore(std::make_unique<FaultyEngine>(std::make_unique<MemoryEngine>(nullptr, 4),
                                                    FaultPlan{})) {}
  explicit HurriedStore(std::unique_ptr<FaultyEngine> made)
      : engine(made.get()), store(options(), std::move(made)) {}

  StoreOptions options() {
    StoreOptions options = options_for({});
    options.now = [this] { return time_ns; };
    return options;
  }
  // The error of a write that meets the fault so many times.
  std::optional<Error> write(SlotId slot, AlignedBuffer& page, std::uint64_t version, IoFault fault,
                             std::uint64_t times) {
    FaultPlan plan;
    plan.chance_of(fault) = 1;
    engine->set_plan(plan);
    const std::uint64_t before = engine->injected(fault);
    std::vector<StoreCompletion> done;
    EXPECT_TRUE(store.write(slot, page.span(), version, 7));
    for (; done.empty(); time_ns += 1'000'000'000) {
      if (engine->injected(fault) - before >= times) engine->set_plan({});
      const std::uint64_t asked = engine->requests();
      while (store.turn(done)) continue;
      EXPECT_LE(engine->requests(), asked + 1) << "it was asked again at once";
    }
    return done.at(0).error;
  }
};

TEST(StoreFaultTest, AShortageThatLastsIsWaitedFor) {
  for (const IoFault fault : {IoFault::again, IoFault::interrupted, IoFault::no_memory}) {
    HurriedStore hurried;
    AlignedBuffer page(kSlot), back(kSlot);
    page.fill(1);
    const SlotId slot = hurried.store.acquire().value();
    EXPECT_EQ(text_of(hurried.write(slot, page, 1, fault, 500)), "(no error)");
    EXPECT_EQ(hurried.store.counters().retries, 500u);
    EXPECT_EQ(hurried.store.counters().errors, 0u) << "none of the disk";
    EXPECT_FALSE(read(hurried.store, slot, back, 1));
    EXPECT_TRUE(page == back);
  }
}

TEST(StoreFaultTest, RetriesAreBounded) {
  HurriedStore hurried;
  const SlotId slot = hurried.store.acquire().value();
  AlignedBuffer page(kSlot);
  const auto error = hurried.write(slot, page, 1, IoFault::again, 10'000);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->fault, Fault::io);
  EXPECT_EQ(error->errno_value, EAGAIN);
  EXPECT_LE(hurried.engine->injected(IoFault::again), 1'100u);

  // The slot holds nothing now, and can be written again.
  hurried.engine->set_plan({});
  EXPECT_TRUE(read(hurried.store, slot, page, 1));
  EXPECT_FALSE(write(hurried.store, slot, page, 2));
  EXPECT_FALSE(read(hurried.store, slot, page, 2));
}

// An error that passes is waited for, longer each time, and counted; one that stays ends it.
TEST(StoreFaultTest, ErrorsThatPassAreRetriedAfterAPause) {
  std::int64_t time_ns = 0;
  StoreOptions options = options_for({});
  options.now = [&time_ns] { return time_ns; };
  auto made =
      std::make_unique<FaultyEngine>(std::make_unique<MemoryEngine>(nullptr, 4),
                                     FaultPlan{.nth = 1, .nth_fault = IoFault::passing_eio});
  FaultyEngine& disk = *made;
  Store store(options, std::move(made));
  const SlotId slot = store.acquire().value();
  AlignedBuffer page(kSlot);
  page.fill(1);
  std::vector<StoreCompletion> done;
  ASSERT_TRUE(store.write(slot, page.span(), 1, 7));
  while (store.turn(done)) {
  }
  EXPECT_EQ(disk.requests(), 1U) << "it was asked again at once";
  EXPECT_EQ(store.in_flight(), 1U);
  time_ns += 1'000'000'000;
  EXPECT_FALSE(finish(store, 1).at(0).error);
  EXPECT_EQ(store.counters().errors, 1U);

  disk.set_plan({.nth = 1, .nth_fault = IoFault::eio});
  ASSERT_TRUE(store.read(slot, page.data(), 1, 8));
  std::vector<std::int64_t> times_ns;
  for (std::uint64_t seen = 0; done.empty(); time_ns += 1'000'000) {
    while (store.turn(done)) {
    }
    if (disk.injected(IoFault::eio) != seen) times_ns.push_back(time_ns);
    seen = disk.injected(IoFault::eio);
    ASSERT_LT(seen, 100U);
  }
  EXPECT_EQ(done.at(0).error->errno_value, EIO);
  ASSERT_GE(times_ns.size(), 4U);
  for (std::size_t i = 2; i < times_ns.size(); ++i) {
    EXPECT_GT(times_ns[i] - times_ns[i - 1], times_ns[i - 1] - times_ns[i - 2]);
  }
}

TEST(StoreFaultTest, AFullDiskIsCalledFull) {
  FaultyStore faulty({.nth = 1, .nth_fault = IoFault::no_space});
  AlignedBuffer page(kSlot);
  const auto error = write(faulty.store, faulty.store.acquire().value(), page, 1);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->fault, Fault::no_space);
  EXPECT_EQ(error->errno_value, ENOSPC);
}

// The disk reports success, and the page that it has there is intact in itself: only the seal
// tells.
TEST(StoreFaultTest, LostAndMisdirectedWritesAreSeen) {
  for (IoFault fault : {IoFault::lost_write, IoFault::misdirected}) {
    FaultyStore faulty(FaultPlan{});
    const SlotId slot = faulty.store.acquire().value();
    AlignedBuffer page(kSlot);
    page.fill(1);
    EXPECT_FALSE(write(faulty.store, slot, page, 1));
    faulty.engine->set_plan({.nth = 1, .nth_fault = fault});
    page.fill(2);
    EXPECT_FALSE(write(faulty.store, slot, page, 2));
    ASSERT_EQ(faulty.engine->injected(fault), 1u);
    const auto error = read(faulty.store, slot, page, 2);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->fault, Fault::corrupt);
  }
}

TEST(StoreFaultTest, AMisdirectedReadOfAnotherPageIsSeen) {
  FaultyStore faulty(FaultPlan{});
  std::vector<SlotId> slots;
  for (std::uint64_t i = 0; i < 8; ++i) {
    AlignedBuffer page(kSlot);
    page.fill(i);
    slots.push_back(faulty.store.acquire().value());
    EXPECT_FALSE(write(faulty.store, slots.back(), page, 1));
  }
  faulty.engine->set_plan({.nth = 1, .nth_fault = IoFault::misdirected});
  AlignedBuffer back(kSlot);
  const auto error = read(faulty.store, slots[4], back, 1);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->fault, Fault::corrupt);
  EXPECT_FALSE(read(faulty.store, slots[4], back, 1)) << "the page itself was fine";
}

// Six pages out and back. Returns how many requests failed; what did not fail must be right.
int out_and_back(Store& store) {
  int failed = 0;
  for (std::uint32_t i = 0; i < 6; ++i) {
    AlignedBuffer page(kSlot), back(kSlot);
    page.fill(i);
    const SlotId slot = store.acquire().value();
    failed += write(store, slot, page, i) ? 1 : 0;
    const auto error = read(store, slot, back, i);
    failed += error ? 1 : 0;
    if (!error) {
      EXPECT_TRUE(page == back) << "silently wrong";
    }
    EXPECT_EQ(store.in_flight(), 0u);
  }
  return failed;
}

// Let the 1st, 2nd, 3rd … request meet the fault, until a run passes untouched.
TEST(StoreFaultTest, EveryRequestMayFailOnce) {
  for (std::size_t i = 1; i < kIoFaultCount; ++i) {
    const auto fault = static_cast<IoFault>(i);
    const bool heals = fault == IoFault::interrupted || fault == IoFault::again ||
                       fault == IoFault::shortened || fault == IoFault::passing_eio ||
                       fault == IoFault::no_memory;
    std::uint64_t met = 0;
    std::uint64_t requests = 0;
    for (std::uint64_t nth = 1; nth == 1 || nth <= requests + 1; ++nth) {
      FaultyStore faulty({.seed = nth, .nth = nth, .nth_fault = fault});
      const int failed = out_and_back(faulty.store);
      const std::uint64_t injected = faulty.engine->injected(fault);
      met += injected;
      requests = injected + faulty.engine->injected(IoFault::none);
      if (injected == 0 || heals) {
        EXPECT_EQ(failed, 0) << "fault " << i << ", nth " << nth;
      } else {
        // A failed or wrong write fails its read too.
        EXPECT_GE(failed, 1) << "fault " << i << ", nth " << nth;
        EXPECT_LE(failed, 2) << "fault " << i << ", nth " << nth;
      }
    }
    const bool writes_only = fault == IoFault::no_space || fault == IoFault::lost_write;
    EXPECT_GE(met, writes_only ? 6u : 12u) << "fault " << i;
  }
}

// Random requests, all faults together, completions that overtake each other: every request is
// answered once, and a page is never wrong without an error.
void chaos(std::uint64_t seed, int hash_threads) {
  FaultPlan plan{.seed = seed, .delay_ns_max = 1000};
  for (std::size_t i = 1; i < kIoFaultCount; ++i) plan.chance[i] = 0.04;
  VirtualClock clock;
  FaultyStore faulty(plan, &clock, hash_threads);
  Store& store = faulty.store;
  std::mt19937_64 random(seed);

  struct Page {
    SlotId slot;
    AlignedBuffer buffer{kSlot};
    std::uint64_t version = 0;
    bool busy = false;
    bool reading = false;
  };
  std::vector<Page> pages(8);
  for (Page& page : pages) page.slot = store.acquire().value();

  std::uint32_t answered = 0;
  std::uint32_t asked = 0;
  while (answered < 120) {
    // 1. Ask for something, unless that page is under way.
    const std::uint64_t which = random() % pages.size();
    Page& page = pages[which];
    const bool reads = page.version > 0 && random() % 2 == 0;
    if (!page.busy && asked < 120 && store.in_flight() < 4) {
      page.buffer.fill(reads ? 0 : which * 1000 + page.version + 1);
      const std::uint64_t version = reads ? page.version : ++page.version;
      ASSERT_TRUE(reads ? store.read(page.slot, page.buffer.data(), version, which)
                        : store.write(page.slot, page.buffer.span(), version, which));
      page.busy = true;
      page.reading = reads;
      ++asked;
    }
    // 2. Let time pass and look at what finished.
    clock.advance(static_cast<std::int64_t>(random() % 400));
    std::vector<StoreCompletion> done;
    store.turn(done);
    for (const StoreCompletion& seen : done) {
      Page& finished = pages.at(seen.tag);
      ASSERT_TRUE(finished.busy) << "answered twice";
      finished.busy = false;
      ++answered;
      if (finished.reading && !seen.error) {
        AlignedBuffer expected(kSlot);
        expected.fill(seen.tag * 1000 + finished.version);
        ASSERT_TRUE(finished.buffer == expected) << "silently wrong";
      }
    }
  }
  EXPECT_EQ(store.in_flight(), 0u);
}

TEST(StoreFaultTest, ChaosIsNeverSilentlyWrong) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    chaos(seed, 0);
    if (seed % 10 == 0) chaos(seed, 2);
    if (HasFatalFailure()) return;
  }
}

TEST(StoreFaultTest, TheSameSeedGivesTheSameFaults) {
  FaultPlan plan{.seed = 11};
  for (std::size_t i = 1; i < kIoFaultCount; ++i) plan.chance[i] = 0.05;
  FaultyStore one(plan), two(plan);
  EXPECT_EQ(out_and_back(one.store), out_and_back(two.store));
  for (std::size_t i = 0; i < kIoFaultCount; ++i) {
    const auto fault = static_cast<IoFault>(i);
    EXPECT_EQ(one.engine->injected(fault), two.engine->injected(fault));
  }
}

}  // namespace
}  // namespace strata::store_fault_test
