// What the suites of Mover, HostCache and Executor share: a few pages over a small host memory full
// of old bytes, a polled device, and a disk that is memory. Invariants are checked at every turn.
//
// Threads: none.
//
//   SmallCore core({Tier::host, Tier::ssd, Tier::ssd}, {.staging = 1});
//   core.write(PageId{1}, 7);
//   EXPECT_TRUE(core.holds(PageId{1}, 7));
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "doubles/faulty_backend.hpp"
#include "doubles/faulty_engine.hpp"
#include "io_fixtures.hpp"
#include "memory/host_backend.hpp"
#include "offload/executor.hpp"
#include "offload/storage/memory_engine.hpp"

namespace strata {

// Calls visit(seed) for 1 to `count`; STRATA_SEED=7 replays one, STRATA_SEEDS=1000 runs more.
template <typename Visit>
void for_seeds(std::uint64_t count, Visit visit) {
  const char* one = std::getenv("STRATA_SEED");
  const char* many = std::getenv("STRATA_SEEDS");
  if (many != nullptr) count = std::strtoull(many, nullptr, 10);
  const std::uint64_t first = one == nullptr ? 1 : std::strtoull(one, nullptr, 10);
  if (one != nullptr) count = first;
  for (std::uint64_t seed = first; seed <= count && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("replay with STRATA_SEED=" + std::to_string(seed));
    visit(seed);
  }
}

struct SmallCoreOptions {
  std::uint32_t staging = 2;
  std::uint32_t device_frames = 4;
  std::uint32_t in_flight = 8;
  std::uint32_t spare_slots = 0;  // that no page has
  bool aside = false;             // one frame more, which the cache does not have
  BackendFaults backend = {};
};

class SmallCore final {
 public:
  static constexpr std::size_t kPage = kPageBytesMin;

  explicit SmallCore(std::vector<Tier> tier, SmallCoreOptions options = {})
      : options_(options),
        host_frames_(count(tier, Tier::host) + options.staging + (options.aside ? 1U : 0U)),
        memory_(host_frames_ * kPage),
        slots_(std::max(1U, count(tier, Tier::ssd) + options.spare_slots)) {
    const auto pages = static_cast<std::uint32_t>(tier.size());
    table.add(pages);
    device = std::make_unique<FaultyBackend>(
        std::make_unique<HostBackend>(nullptr, CopyEngine::polled), options.backend);
    EXPECT_FALSE(device->claim(options.device_frames, kPage));
    auto engine =
        std::make_unique<FaultyEngine>(std::make_unique<MemoryEngine>(nullptr, 64), FaultPlan{});
    disk = engine.get();
    StoreOptions store;
    store.paths = {"memory"};
    store.slot_bytes = kPage;
    store.slot_count = slots_;
    store_ = std::make_unique<Store>(store, std::move(engine));
    host_ = std::make_unique<Pool>(host_frames_, kPage, memory_.data());
    std::vector<SlotId> slot_of(pages, kNoSlot);
    for (std::uint32_t page = 0; page < pages; ++page) {
      if (tier[page] == Tier::ssd) slot_of[page] = store_->acquire().value();
    }
    mover = std::make_unique<Mover>(table, *device, *host_, store_.get(), std::move(slot_of),
                                    options.in_flight);
    if (options.aside) aside = host_->acquire().value();
    cache = std::make_unique<HostCache>(table, *mover, *host_, std::move(tier));
  }

  ~SmallCore() {
    for (const UnitPages& unit : units_) {
      if (unit.view != nullptr) device->release(unit.view, unit.pages.size() * kPage);
    }
  }
  SmallCore(const SmallCore&) = delete;
  SmallCore& operator=(const SmallCore&) = delete;

  // Makes the executor: unit u has the next sizes[u] pages.
  void make_units(const std::vector<std::uint32_t>& sizes, std::uint32_t fetches = 4) {
    std::uint32_t next = 0;
    for (const std::uint32_t size : sizes) {
      UnitPages unit;
      for (std::uint32_t i = 0; i < size; ++i) unit.pages.push_back(PageId{next++});
      unit.view = size == 0 ? nullptr : device->reserve(size * kPage);
      units_.push_back(std::move(unit));
    }
    executor = std::make_unique<Executor>(table, *mover, *cache, *device, units_,
                                          options_.device_frames, fetches);
  }
  const UnitPages& unit(UnitId id) const { return units_[index(id)]; }

  bool turn() {
    std::vector<Arrival> arrivals;
    bool moved = mover->turn(arrivals);
    for (Arrival& arrival : arrivals) {
      cache->arrived(arrival);
      if (executor) executor->arrived(arrival);
      if (arrival.error) errors.push_back(std::move(*arrival.error));
    }
    if (executor) moved |= executor->turn();
    moved |= cache->turn();
    const auto wrong = table.check_invariants({options_.device_frames, host_frames_, slots_});
    EXPECT_FALSE(wrong) << *wrong;
    return moved;
  }

  // Turns until `ready`; false: it never comes.
  template <typename Ready>
  bool until(Ready ready) {
    for (int turns = 0; turns < 1000; ++turns) {
      if (ready()) return true;
      turn();
    }
    return false;
  }
  // Turns until nothing moves any more.
  void settle() {
    EXPECT_TRUE(until([this] { return !turn() && mover->idle(); }));
  }

  std::byte* open(PageId page, Intent intent) {
    std::byte* bytes = nullptr;
    EXPECT_TRUE(until([&] { return (bytes = cache->open(page, intent)) != nullptr; }))
        << "page " << index(page) << " never came";
    return bytes;
  }
  void write(PageId page, int value, WriteBack write_back = WriteBack::later) {
    std::byte* bytes = open(page, Intent::modify);
    std::fill_n(bytes, kPage, static_cast<std::byte>(value));
    cache->close(page, Intent::modify, write_back);
  }
  bool holds(PageId page, int value) {
    const std::byte* bytes = open(page, Intent::read);
    const bool same = filled_with(bytes, value);
    cache->close(page, Intent::read);
    return same;
  }
  static bool filled_with(const std::byte* bytes, int value) {
    return std::all_of(bytes, bytes + kPage,
                       [value](std::byte byte) { return byte == static_cast<std::byte>(value); });
  }
  // Everything is written back and nothing is in flight.
  void flush() {
    cache->flush();
    EXPECT_TRUE(until([this] { return !cache->dirty() && mover->idle(); }));
  }
  SlotId acquire_slot() { return store_->acquire().value(); }
  const Pool& host() const { return *host_; }
  CopyState state(PageId page, Tier tier) const { return table.copy(page, tier).state; }
  std::uint64_t moved_pages(Link link) const { return mover->bytes(link) / kPage; }

 private:
  static std::uint32_t count(const std::vector<Tier>& tiers, Tier tier) {
    return static_cast<std::uint32_t>(std::count(tiers.begin(), tiers.end(), tier));
  }

  SmallCoreOptions options_;
  std::uint32_t host_frames_;
  AlignedBuffer memory_;
  std::uint32_t slots_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Pool> host_;
  std::vector<UnitPages> units_;

 public:
  PageTable table;
  std::unique_ptr<FaultyBackend> device;
  FaultyEngine* disk = nullptr;  // of the store
  std::unique_ptr<Mover> mover;
  std::unique_ptr<HostCache> cache;
  std::unique_ptr<Executor> executor;
  std::vector<Error> errors;  // that arrived
  FrameId aside = kNoFrame;   // where options.aside
};

}  // namespace strata
