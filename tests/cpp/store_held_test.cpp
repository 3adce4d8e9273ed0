// Slots that a snapshot holds: they stay as they are, under a running session and after it.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <map>
#include <random>

#include "doubles/faulty_engine.hpp"
#include "offload/storage/memory_engine.hpp"
#include "seeds.hpp"
#include "store_fixtures.hpp"

namespace strata::store_held_test {
namespace {

namespace fs = std::filesystem;

TEST(HeldSlots, AreFreeWhenNobodyHasAcquiredOrHoldsThem) {
  Store store(options_for({}, 4), engine_named("memory"));
  AlignedBuffer page(kSlot);
  const SlotId slot = store.acquire().value();
  EXPECT_FALSE(write(store, slot, page, 1));
  EXPECT_FALSE(store.held(slot));
  ASSERT_TRUE(store.hold(slot));
  ASSERT_TRUE(store.hold(slot));
  EXPECT_EQ(store.spare_slots(), 2U) << "one of the three is for the next write of its page";
  store.release(slot);
  EXPECT_EQ(store.spare_slots(), 3U);
  EXPECT_EQ(store.free_slots(), 3U);
  EXPECT_FALSE(read(store, slot, page, 1));
  store.unhold(slot);
  EXPECT_EQ(store.free_slots(), 3U);
  store.unhold(slot);
  EXPECT_EQ(store.free_slots(), 4U);
}

TEST(HeldSlots, AreRefusedWhereNoneIsSpareForTheNextWrite) {
  Store store(options_for({}, 3), engine_named("memory"));
  AlignedBuffer page(kSlot);
  const SlotId a = store.acquire().value(), b = store.acquire().value();
  for (const SlotId slot : {a, b}) EXPECT_FALSE(write(store, slot, page, 1));
  EXPECT_TRUE(store.hold(a));
  EXPECT_FALSE(store.hold(b));
  EXPECT_TRUE(store.hold(a)) << "a second holder needs no other slot";
  store.keep(b);
  EXPECT_TRUE(store.held(b));
  EXPECT_EQ(store.acquired_slots(), 1U);
}

// One writer of a few pages, who takes a fresh slot where his is held, and holders that come and
// go, over a disk that delays: at any moment every held slot reads as it was when it was held.
class Holding final {
 public:
  explicit Holding(std::uint64_t seed)
      : random_(seed), store_(options(), faulty(seed)), buffer_(kSlot) {
    for (Page& page : pages_) page.slot = store_.acquire().value();
  }

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      Page& page = pages_[below(kPages)];
      switch (below(4)) {
        case 0:
        case 1:
          rewrite(page);
          break;
        case 2:
          hold(page);
          break;
        default:
          drop();
          break;
      }
      check();
    }
    while (!held_.empty()) drop();
    EXPECT_EQ(store_.free_slots(), kPages * 3);
  }

 private:
  static constexpr std::uint32_t kPages = 6;
  struct Page {
    SlotId slot = kNoSlot;
    std::uint64_t version = 0;
  };

  static StoreOptions options() {
    StoreOptions options = options_for({}, kPages * 4);
    options.now = hurried_clock();
    return options;
  }
  static std::unique_ptr<IoEngine> faulty(std::uint64_t seed) {
    FaultPlan plan{.seed = seed};
    plan.chance_of(IoFault::shortened) = 0.2;
    plan.chance_of(IoFault::again) = 0.1;
    return std::make_unique<FaultyEngine>(std::make_unique<MemoryEngine>(nullptr, 4), plan);
  }
  std::uint32_t below(std::uint32_t end) { return static_cast<std::uint32_t>(random_() % end); }

  void rewrite(Page& page) {
    if (store_.held(page.slot)) {
      const SlotId fresh = store_.acquire().value();  // never refused: see Note [Held slots]
      store_.release(page.slot);
      page.slot = fresh;
    }
    page.version = ++version_;
    buffer_.fill(page.version);
    EXPECT_FALSE(write(store_, page.slot, buffer_, page.version));
  }
  void hold(const Page& page) {
    if (page.version != 0 && store_.hold(page.slot)) held_.push_back(page);
  }
  void drop() {
    if (held_.empty()) return;
    const auto which = held_.begin() + below(static_cast<std::uint32_t>(held_.size()));
    store_.unhold(which->slot);
    held_.erase(which);
  }
  void check() {
    std::map<SlotId, std::uint64_t> version_of;
    for (const Page& page : held_) {
      const auto [at, first] = version_of.try_emplace(page.slot, page.version);
      EXPECT_EQ(at->second, page.version) << "two contents in one slot";
    }
    for (const auto& [slot, version] : version_of) {
      EXPECT_FALSE(read(store_, slot, buffer_, version));
    }
  }

  std::mt19937_64 random_;
  Store store_;
  AlignedBuffer buffer_;
  std::array<Page, kPages> pages_{};
  std::vector<Page> held_;
  std::uint64_t version_ = 0;
};

TEST(HeldSlots, AreNeverOverwritten) {
  for_seeds(40, [](std::uint64_t seed) { Holding(seed).run(150); });
}

// What of a run is on the disk, with the links by which it is found again.
struct Left {
  StoreOptions options;
  std::vector<std::string> names = {};
  std::vector<SavedFiles::Slot> slots = {};

  SavedFiles open(Existing use) const {
    return {.files = open_page_files(options.paths, names, use), .slots = slots};
  }
};

std::string link_folder(const std::string& path) {
  return path + "/links";
}

// Links the files of the store, and names what of it is kept.
Left leave(Store& store, const StoreOptions& options, const std::vector<SlotId>& slots) {
  Left left{options};
  EXPECT_TRUE(store.keep_linkable());
  const std::vector<Descriptor> files = store.duplicate_files();
  for (std::size_t i = 0; i < files.size(); ++i) {
    fs::create_directories(link_folder(options.paths[i]));
    make_durable(files[i].get());
    EXPECT_TRUE(link_file(files[i].get(), link_folder(options.paths[i]) + "/kept"));
    left.names.emplace_back("links/kept");
  }
  for (const SlotId slot : slots) {
    left.slots.push_back({.slot = slot, .contents = store.contents(slot).value()});
  }
  return left;
}

class LinkedFiles : public ::testing::TestWithParam<Naming> {
 protected:
  LinkedFiles() {
    for (const char* name : {"/a", "/b"}) {
      paths_.push_back(root_.path() + name);
      fs::create_directory(paths_.back());
    }
    options_ = options_for(paths_, 8);
    options_.naming = GetParam();
  }
  // A session that wrote five pages, held them, and ended.
  Left ended() {
    Store store(options_, engine_named("threads"));
    std::vector<SlotId> slots;
    for (std::uint64_t i = 1; i <= 5; ++i) {
      slots.push_back(store.acquire().value());
      page_.fill(i);
      EXPECT_FALSE(write(store, slots.back(), page_, i));
      store.keep(slots.back());
    }
    return leave(store, options_, slots);
  }
  void expect_contents(Store& store, const Left& left) {
    AlignedBuffer expected(kSlot);
    for (const SavedFiles::Slot& kept : left.slots) {
      EXPECT_EQ(text_of(read(store, kept.slot, page_, kept.contents.version)), "(no error)");
      expected.fill(kept.contents.version);
      EXPECT_TRUE(std::equal(page_.data(), page_.data() + kSlot, expected.data()));
    }
  }

  TempFolder root_;
  std::vector<std::string> paths_;
  StoreOptions options_;
  AlignedBuffer page_{kSlot};
};

TEST_P(LinkedFiles, OutliveTheirSessionAndAreTakenOver) {
  Left left = ended();
  for (const std::string& path : paths_) {
    EXPECT_EQ(std::distance(fs::directory_iterator(path), {}), 1) << "more than the links is left";
  }
  left.options.slot_count = 12;  // more than there were
  {
    Store store(left.options, engine_named("threads"), left.open(Existing::to_write));
    EXPECT_EQ(store.free_slots(), 7U);
    while (const auto slot = store.acquire()) {
      page_.fill(100 + index(*slot));
      EXPECT_FALSE(write(store, *slot, page_, 100));
    }
    expect_contents(store, left);
  }
  Store store(left.options, engine_named("threads"), left.open(Existing::to_read));
  EXPECT_EQ(store.acquire(), std::nullopt);
  expect_contents(store, left);
}

// A session that has files of its own goes on with those of another.
TEST_P(LinkedFiles, TakeThePlaceOfASessionsOwn) {
  const Left left = ended();
  {
    Store store(options_for(paths_, 4), engine_named("threads"));
    const SlotId slot = store.acquire().value();
    page_.fill(50);
    EXPECT_FALSE(write(store, slot, page_, 50));
    store.release(slot);
    SavedFiles saved = left.open(Existing::to_write);
    EXPECT_EQ(fit_slots(saved, kSlot, 12), 12U) << "they grow";
    store.change_files(std::move(saved));
    EXPECT_EQ(store.slot_count(), 12U);
    EXPECT_EQ(store.free_slots(), 7U);
    expect_contents(store, left);
    store.share(left.slots[0].slot);
    EXPECT_EQ(store.spare_slots(), 6U) << "one is for the next write of what rests there";
    while (store.spare_slots() != 0) {
      const SlotId fresh = store.acquire().value();
      page_.fill(100 + index(fresh));
      EXPECT_FALSE(write(store, fresh, page_, 100));
    }
    store.lengthen(4);
    store.extend(4);
    EXPECT_EQ(store.slot_count(), 16U);
    EXPECT_TRUE(store.keep_linkable());
    expect_contents(store, left);
    std::uint64_t open = 0;
    for (const std::string& path : paths_) open += swap_files(path).size();
    EXPECT_EQ(open, paths_.size()) << "the files that it had are gone";
  }
  Store reader(left.options, engine_named("threads"), left.open(Existing::to_read));
  expect_contents(reader, left);
}

TEST_P(LinkedFiles, AreMadeLongerAllOrNone) {
  const Left left = ended();
  const SavedFiles saved = left.open(Existing::to_write);
  const std::uint64_t before = saved.files[0]->bytes();
  EXPECT_THROW(fit_slots(saved, kSlot, 1U << 31), StrataError) << "no disk has so much";
  for (const auto& file : saved.files) {
    EXPECT_EQ(file->bytes(), before);
    EXPECT_EQ(fs::file_size("/proc/self/fd/" + std::to_string(file->fd())), before);
  }
}

TEST_P(LinkedFiles, HaveOneWriterAndAnyReaders) {
  Left left = ended();
  Store writer(left.options, engine_named("threads"), left.open(Existing::to_write));
  try {
    Store second(left.options, engine_named("threads"), left.open(Existing::to_write));
    ADD_FAILURE() << "two sessions write to one file";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::busy) << error.what();
  }
  Store reader(left.options, engine_named("threads"), left.open(Existing::to_read));
  expect_contents(reader, left);
}

TEST_P(LinkedFiles, CanBeLinkedAgainWhenTheirOtherNamesAreGone) {
  Store store(options_, engine_named("threads"));
  leave(store, options_, {});
  for (const std::string& path : paths_) fs::remove_all(link_folder(path));
  leave(store, options_, {});
}

TEST_P(LinkedFiles, ThatWereDamagedAreNoticed) {
  const Left left = ended();
  {
    std::fstream file(link_folder(paths_[0]) + "/kept", std::ios::in | std::ios::out);
    file.seekp(kSlot + 17);  // the second slot of the first stripe
    file.put('\x55');
  }
  Store store(left.options, engine_named("threads"), left.open(Existing::to_read));
  int damaged = 0;
  for (const SavedFiles::Slot& kept : left.slots) {
    const auto error = read(store, kept.slot, page_, kept.contents.version);
    if (!error) continue;
    ++damaged;
    EXPECT_EQ(kept.slot, SlotId{2});
    EXPECT_EQ(error->fault, Fault::corrupt);
  }
  EXPECT_EQ(damaged, 1);
}

TEST_P(LinkedFiles, AreNoSymbolicLinksNorTooShort) {
  Left left = ended();
  left.slots.push_back({.slot = SlotId{1'000'000}});
  EXPECT_THROW(Store(left.options, engine_named("threads"), left.open(Existing::to_read)),
               StrataError);
  left.slots.pop_back();
  fs::rename(link_folder(paths_[0]) + "/kept", paths_[0] + "/other");
  fs::create_symlink(paths_[0] + "/other", link_folder(paths_[0]) + "/kept");
  EXPECT_THROW(Store(left.options, engine_named("threads"), left.open(Existing::to_read)),
               StrataError);
}

// A process that rewrites pages, holding what it had told us of, is killed at any moment.
TEST_P(LinkedFiles, KeepWhatWasHeldWhenTheirProcessIsKilled) {
  struct Told {
    std::uint32_t slot;
    SlotContents contents;
  };
  std::array<int, 2> pipe_ends{};
  ASSERT_EQ(pipe(pipe_ends.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    Store store(options_, engine_named("threads"));
    SlotId slot = store.acquire().value();
    for (std::uint64_t version = 1;; ++version) {
      if (store.held(slot)) {
        const SlotId fresh = store.acquire().value();
        store.release(slot);
        slot = fresh;
      }
      page_.fill(version);
      if (write(store, slot, page_, version)) _exit(1);
      if (version <= 3) {
        if (!store.hold(slot)) _exit(1);
        const Told told{index(slot), store.contents(slot).value()};
        if (version == 3) leave(store, options_, {});
        if (::write(pipe_ends[1], &told, sizeof told) != sizeof told) _exit(1);
      }
    }
  }
  Left left{options_};
  left.names = {"links/kept", "links/kept"};
  for (int i = 0; i < 3; ++i) {
    Told told{};
    ASSERT_EQ(::read(pipe_ends[0], &told, sizeof told), static_cast<ssize_t>(sizeof told));
    left.slots.push_back({.slot = SlotId{told.slot}, .contents = told.contents});
  }
  usleep(20'000);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  for (const int end : pipe_ends) close(end);
  Store store(left.options, engine_named("threads"), left.open(Existing::to_write));
  expect_contents(store, left);
  for (const std::string& path : paths_) {
    EXPECT_EQ(std::distance(fs::directory_iterator(path), {}), 2)
        << "besides the links there is the lock of this process only";
  }
}

INSTANTIATE_TEST_SUITE_P(Namings, LinkedFiles, testing::Values(Naming::nameless, Naming::named),
                         [](const auto& suite) {
                           return suite.param == Naming::named ? "named" : "nameless";
                         });

}  // namespace
}  // namespace strata::store_held_test
