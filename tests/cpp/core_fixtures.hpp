// What the suites of movement share: a few pages over a small host memory full
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
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "doubles/faulty_device.hpp"
#include "doubles/faulty_engine.hpp"
#include "engine/step_planner.hpp"
#include "io_fixtures.hpp"
#include "memory/host_device.hpp"
#include "offload/residency/prefetcher.hpp"
#include "offload/storage/memory_engine.hpp"
#include "seeds.hpp"

namespace strata {

struct SmallCoreOptions {
  std::uint32_t staging = 2;
  std::uint32_t device_frames = 4;
  std::uint32_t in_flight = 8;
  std::uint32_t spare_slots = 0;  // that no page has
  bool aside = false;             // one frame more, which the cache does not have
  DeviceFaults faults = {};
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
    device = faulty(host_device(nullptr, CopyMode::polled), options.faults);
    EXPECT_FALSE(device.memory->claim(options.device_frames, kPage));
    auto engine =
        std::make_unique<FaultyEngine>(std::make_unique<MemoryEngine>(nullptr, 64), FaultPlan{});
    disk = engine.get();
    store_ = make_store(std::move(engine), slots_);
    host_ = std::make_unique<Pool>(host_frames_, kPage, memory_.data());
    for (std::uint32_t page = 0; page < pages; ++page) {
      if (tier[page] == Tier::ssd)
        table.place(PageId{page}, acquire_slot());
      else
        table.place(PageId{page}, {tier[page], kNoPlace});
    }
    transfers = std::make_unique<Transfers>(table, *device.copies, *device.memory, *host_, timeline,
                                            options.in_flight);
    transfers->set_store(*store_);
    if (options.aside) aside = host_->acquire().value();
    cache = std::make_unique<PageCache>(table, *transfers, *host_, *device.memory);
  }
  SmallCore(const SmallCore&) = delete;
  SmallCore& operator=(const SmallCore&) = delete;

  // Makes what shows units: unit u has the next sizes[u] pages.
  void make_units(const std::vector<std::uint32_t>& sizes, std::uint32_t loads_max = 4) {
    std::uint32_t next = 0;
    std::vector<std::vector<PageId>> units;
    for (const std::uint32_t size : sizes) {
      std::vector<PageId>& pages = units.emplace_back();
      for (std::uint32_t i = 0; i < size; ++i) {
        table.set_unit(PageId{next}, UnitId{static_cast<std::uint32_t>(units.size() - 1)});
        pages.push_back(PageId{next++});
      }
    }
    frames = std::make_unique<DeviceFrames>(table, *device.memory, std::move(units), kPage,
                                            options_.device_frames);
    loads = std::make_unique<Loads>(table, *transfers, *cache, *frames, computed_, loads_max);
    prefetcher = std::make_unique<Prefetcher>(table, *cache, *device.copies, *frames, *loads);
    planner = std::make_unique<StepPlanner>(*prefetcher, *frames);
  }

  bool turn() {
    bool moved = transfers->turn();
    moved |= cache->turn();
    if (prefetcher) moved |= prefetcher->turn();
    if (transfers->failure() && errors.empty()) errors.push_back(transfers->failure()->error);
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
    EXPECT_TRUE(until([this] { return !turn() && transfers->idle(); }));
  }

  Pin open(PageId page, Intent intent) {
    Pin pin;
    EXPECT_TRUE(until([&] { return static_cast<bool>(pin = cache->open(page, intent)); }))
        << "page " << index(page) << " never came";
    return pin;
  }
  void write(PageId page, int value, WriteBack write_back = WriteBack::later) {
    Pin pin = open(page, Intent::modify);
    std::fill_n(pin.bytes(), kPage, static_cast<std::byte>(value));
    pin.close(write_back);
  }
  bool holds(PageId page, int value) {
    return filled_with(open(page, Intent::read).bytes(), value);
  }
  static bool filled_with(const std::byte* bytes, int value) {
    return std::all_of(bytes, bytes + kPage,
                       [value](std::byte byte) { return byte == static_cast<std::byte>(value); });
  }
  // Everything is written back and nothing is in flight.
  void flush() {
    cache->flush();
    EXPECT_TRUE(until([this] { return !cache->dirty() && transfers->idle(); }));
  }
  SlotId acquire_slot() { return store_->acquire().value(); }
  Store& store() { return *store_; }
  const Pool& host() const { return *host_; }
  CopyState state(PageId page, Tier tier) const { return table.copy(page, tier).state; }
  std::uint64_t moved_pages(Link link) const { return transfers->bytes(link) / kPage; }

 private:
  static std::uint32_t count(const std::vector<Tier>& tiers, Tier tier) {
    return static_cast<std::uint32_t>(std::count(tiers.begin(), tiers.end(), tier));
  }
  static std::unique_ptr<Store> make_store(std::unique_ptr<IoEngine> engine, std::uint32_t slots) {
    StoreOptions options;
    options.paths = {"memory"};
    options.slot_bytes = kPage;
    options.slot_count = slots;
    options.now = [time_ns = std::int64_t{0}]() mutable { return time_ns += 1'000'000; };
    return std::make_unique<Store>(options, std::move(engine));
  }

  SmallCoreOptions options_;
  std::uint32_t host_frames_;
  AlignedBuffer memory_;
  std::uint32_t slots_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Pool> host_;
  const ComputedPages computed_{};  // none

 public:
  PageTable table;
  Timeline timeline{64};
  Device device;
  FaultyEngine* disk = nullptr;  // of the store
  std::unique_ptr<Transfers> transfers;
  std::unique_ptr<PageCache> cache;
  std::unique_ptr<DeviceFrames> frames;
  std::unique_ptr<Loads> loads;
  std::unique_ptr<Prefetcher> prefetcher;
  std::unique_ptr<StepPlanner> planner;
  std::vector<Error> errors;         // the first one
  HostFrameId aside = kNoHostFrame;  // where options.aside
};

}  // namespace strata
