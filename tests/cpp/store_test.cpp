// Store: what was written comes back, from any engine and any number of paths.
#include "offload/storage/store.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "store_fixtures.hpp"

namespace strata::store_test {
namespace {

bool is_empty(const std::string& folder) {
  return std::filesystem::is_empty(folder);
}

// An engine, so many paths, so many threads that hash.
class StoreRoundTrip : public ::testing::TestWithParam<std::tuple<std::string, int, int>> {};

TEST_P(StoreRoundTrip, EveryPageComesBackFromItsStripe) {
  const auto& [name, path_count, hash_threads] = GetParam();
  Doorbell bell;
  TempFolder root;
  std::vector<std::string> paths;
  for (int i = 0; i < path_count; ++i) {
    paths.push_back(root.path() + "/" + std::to_string(i));
    std::filesystem::create_directory(paths.back());
  }
  constexpr std::uint32_t kSlots = 7;  // not a multiple of the number of paths
  {
    std::unique_ptr<IoEngine> engine;
    try {
      engine = engine_named(name, 2);  // fewer than the store has in flight
    } catch (const StrataError& error) {
      GTEST_SKIP() << error.what();
    }
    StoreOptions options = options_for(paths, kSlots);
    options.hash_threads = hash_threads;
    Store store(options, std::move(engine), &bell);
    EXPECT_EQ(store.free_slots(), kSlots);
    std::vector<SlotId> slots;
    std::vector<AlignedBuffer> pages;
    for (std::uint32_t i = 0; i < kSlots; ++i) {
      slots.push_back(store.acquire().value());
      pages.emplace_back(kSlot).fill(i + 1);
    }
    AlignedBuffer arena(kSlots * kSlot);
    store.warn(store.register_memory(arena.span()));

    std::size_t done = 0;
    for (std::uint32_t i = 0; i < kSlots; ++i) {
      while (!store.write(slots[i], pages[i].span(), 10 + i, i)) {
        for (const StoreCompletion& seen : finish(store, 1)) {
          EXPECT_EQ(text_of(seen.error), "(no error)");
          ++done;
        }
      }
    }
    for (const StoreCompletion& seen : finish(store, kSlots - done)) {
      EXPECT_EQ(text_of(seen.error), "(no error)");
    }
    for (std::uint32_t i = kSlots; i-- > 0;) {
      ASSERT_TRUE(store.read(slots[i], arena.data() + i * kSlot, 10 + i, i));
      EXPECT_EQ(text_of(finish(store, 1).at(0).error), "(no error)");
      EXPECT_TRUE(
          std::equal(arena.data() + i * kSlot, arena.data() + (i + 1) * kSlot, pages[i].data()));
    }
    EXPECT_EQ(store.in_flight(), 0u);
    EXPECT_EQ(store.counters().written_bytes, kSlots * kSlot);
    EXPECT_EQ(store.counters().read_bytes, kSlots * kSlot);
    for (const std::string& path : paths) EXPECT_EQ(is_empty(path), name == "memory");
  }
  for (const std::string& path : paths) EXPECT_TRUE(is_empty(path)) << "left something behind";
}

INSTANTIATE_TEST_SUITE_P(Engines, StoreRoundTrip,
                         ::testing::Combine(::testing::Values("io_uring", "libaio", "threads",
                                                              "memory"),
                                            ::testing::Values(1, 2, 3), ::testing::Values(0, 2)),
                         [](const auto& suite) {
                           return std::get<0>(suite.param) + "_" +
                                  std::to_string(std::get<1>(suite.param)) + "_paths_" +
                                  std::to_string(std::get<2>(suite.param)) + "_hash_threads";
                         });

TEST(StoreTest, SaysWhenSlotsOrTransfersAreUsedUp) {
  Store store(options_for({}, 6), engine_named("memory"));
  std::set<SlotId> slots;
  for (int i = 0; i < 6; ++i) slots.insert(store.acquire().value());
  EXPECT_EQ(slots.size(), 6u);
  EXPECT_EQ(store.acquire(), std::nullopt);
  store.release(SlotId{3});
  EXPECT_EQ(store.free_slots(), 1u);
  EXPECT_EQ(store.acquire(), SlotId{3});

  AlignedBuffer page(kSlot);
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_TRUE(store.write(SlotId{i}, page.span(), 1, i));
  EXPECT_EQ(store.in_flight(), 4u);
  EXPECT_FALSE(store.write(SlotId{4}, page.span(), 1, 4));
  finish(store, 4);
  EXPECT_TRUE(store.write(SlotId{4}, page.span(), 1, 4));
}

// Neither the disk nor the reader's memory is touched behind what the slot holds.
TEST(StoreTest, ContentsMayBeShorterThanTheirSlot) {
  Store store(options_for({}), engine_named("memory"));
  const SlotId slot = store.acquire().value();
  AlignedBuffer page(kSlot), seen(kSlot), untouched(kSlot);
  page.fill(1);
  EXPECT_EQ(text_of(write(store, slot, page, 1)), "(no error)");
  page.fill(2);
  ASSERT_TRUE(store.write(slot, page.span().first(kIoAlignment), 2, 0));
  EXPECT_EQ(text_of(finish(store, 1).at(0).error), "(no error)");
  EXPECT_EQ(store.contents(slot).value().bytes, kIoAlignment);
  EXPECT_EQ(text_of(read(store, slot, seen, 2)), "(no error)");
  EXPECT_TRUE(std::equal(seen.data(), seen.data() + kIoAlignment, page.data()));
  EXPECT_TRUE(
      std::equal(seen.data() + kIoAlignment, seen.data() + kSlot, untouched.data() + kIoAlignment));
  EXPECT_EQ(store.counters().written_bytes, kSlot + kIoAlignment);
  EXPECT_EQ(store.counters().read_bytes, kIoAlignment);
}

TEST(StoreTest, AReadAsksForTheVersionThatIsThere) {
  Store store(options_for({}), engine_named("memory"));
  const SlotId slot = store.acquire().value();
  AlignedBuffer page(kSlot);
  const auto never_written = read(store, slot, page, 1);
  ASSERT_TRUE(never_written);
  EXPECT_EQ(never_written->fault, Fault::corrupt);

  EXPECT_EQ(text_of(write(store, slot, page, 41)), "(no error)");
  const auto other = read(store, slot, page, 42);
  ASSERT_TRUE(other);
  EXPECT_EQ(other->fault, Fault::corrupt);
  EXPECT_TRUE(mentions(*other, "version 42 was asked for, version 41 is there")) << other->text();
  EXPECT_EQ(text_of(read(store, slot, page, 41)), "(no error)");

  // What the last owner of a slot wrote is not there for the next one.
  store.release(slot);
  ASSERT_EQ(store.acquire(), slot);
  EXPECT_TRUE(read(store, slot, page, 41));
}

TEST(StoreTest, AFlippedBitInTheFileIsSeen) {
  TempFolder folder;
  Store store(options_for({folder.path()}), engine_named("threads"));
  const SlotId first = store.acquire().value();
  const SlotId second = store.acquire().value();
  AlignedBuffer page(kSlot);
  page.fill(5);
  EXPECT_FALSE(write(store, first, page, 1));
  EXPECT_FALSE(write(store, second, page, 1));
  {
    const std::uint64_t at = index(second) * kSlot + 1234;
    std::fstream file(swap_files(folder.path()).at(0),
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(byte);
  }
  EXPECT_FALSE(read(store, first, page, 1));
  const auto error = read(store, second, page, 1);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->fault, Fault::corrupt);
  EXPECT_EQ(error->path, "the swap file in " + folder.path());
  EXPECT_EQ(error->offset, index(second) * kSlot);
}

TEST(StoreTest, ExtendedFilesKeepTheirPages) {
  for (const char* engine : {"io_uring", "libaio", "threads", "memory"}) {
    TempFolder one, two;
    std::unique_ptr<IoEngine> made;
    try {
      made = engine_named(engine);
    } catch (const StrataError&) {
      continue;  // not on this kernel
    }
    Store store(options_for({one.path(), two.path()}, 3), std::move(made));
    AlignedBuffer page(kSlot), back(kSlot);
    for (std::uint32_t slots = 3; slots < 12; slots += 3) {
      for (std::uint32_t i = slots - 3; i < slots; ++i) {
        ASSERT_EQ(store.acquire(), SlotId{i}) << engine;
        page.fill(i);
        EXPECT_EQ(text_of(write(store, SlotId{i}, page, 1 + i)), "(no error)") << engine;
      }
      EXPECT_EQ(store.acquire(), std::nullopt);
      for (std::uint32_t i = 0; i < slots; ++i) {
        page.fill(i);
        EXPECT_EQ(text_of(read(store, SlotId{i}, back, 1 + i)), "(no error)") << engine;
        EXPECT_TRUE(page == back) << engine << " slot " << i;
      }
      store.lengthen(3);
      store.extend(3);
      EXPECT_EQ(store.free_slots(), 3u);
    }
  }
}

TEST(StoreTest, EndsWithRequestsInFlight) {
  TempFolder folder;
  AlignedBuffer page(kSlot);
  Doorbell bell;
  for (const int hash_threads : {0, 1, 3}) {
    {
      StoreOptions options = options_for({folder.path()});
      options.hash_threads = hash_threads;
      Store store(options, engine_named("threads"), &bell);
      for (std::uint64_t i = 0; i < 4; ++i) {
        ASSERT_TRUE(store.write(store.acquire().value(), page.span(), 1, i));
      }
      std::vector<StoreCompletion> done;
      store.turn(done);
    }
    EXPECT_TRUE(is_empty(folder.path()));
  }
}

// Whoever sleeps between turns that moved nothing is woken by every hash and every disk.
TEST(StoreTest, RingsForEverythingThatTurnLeftUnderWay) {
  Doorbell bell;
  StoreOptions options = options_for({}, 100);
  options.in_flight_max = 100;
  options.hash_threads = 1;  // holds 64 jobs: the others wait for room
  std::string why;
  Store store(options, make_io_engine("memory", &bell, 3, &why), &bell);
  AlignedBuffer pages(100 * kSlot);
  for (const std::uint64_t version : {std::uint64_t{1}, std::uint64_t{2}}) {
    for (std::uint32_t i = 0; i < 100; ++i) {
      std::byte* const page = pages.data() + i * kSlot;
      const SlotId slot = version == 1 ? store.acquire().value() : SlotId{i};
      ASSERT_TRUE(version == 1 ? store.write(slot, {page, kSlot}, 1, i)
                               : store.read(slot, page, 1, i));
    }
    std::vector<StoreCompletion> done;
    while (done.size() < 100) {
      const bool moved = store.turn(done);
      ASSERT_TRUE(moved || bell.wait(20'000)) << "nobody rang";
    }
    for (const StoreCompletion& seen : done) EXPECT_FALSE(seen.error);
  }
}

}  // namespace
}  // namespace strata::store_test
