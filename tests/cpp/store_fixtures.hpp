// What the suites of Store share: small stores, and requests that are waited for.
//
// Threads: none.
//
//   Store store(options_for({}), engine_named("memory"));
//   AlignedBuffer page(kSlot);
//   EXPECT_FALSE(write(store, store.acquire().value(), page, 1));
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "io_fixtures.hpp"
#include "offload/storage/make_engine.hpp"
#include "offload/storage/store.hpp"

namespace strata {

inline constexpr std::size_t kSlot = 8 * kKiB;  // two sectors: the least that can be cut short

inline std::unique_ptr<IoEngine> engine_named(const std::string& name, std::uint32_t depth = 4) {
  std::string why;
  return make_io_engine(name, nullptr, depth, &why);
}

inline StoreOptions options_for(std::vector<std::string> paths, std::uint32_t slots = 8) {
  StoreOptions options;
  options.paths = std::move(paths);
  options.slot_bytes = kSlot;
  options.slot_count = slots;
  options.in_flight_max = 4;
  return options;
}

// For stores of disks that err: every pause is over at the next look.
inline std::function<std::int64_t()> hurried_clock() {
  return [time_ns = std::int64_t{0}]() mutable { return time_ns += 1'000'000'000; };
}

// Turns until `count` requests have completed.
inline std::vector<StoreCompletion> finish(Store& store, std::size_t count) {
  std::vector<StoreCompletion> done;
  const auto start = std::chrono::steady_clock::now();
  while (done.size() < count) {
    if (!store.turn(done)) std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (std::chrono::steady_clock::now() - start > std::chrono::seconds(20)) {
      ADD_FAILURE() << "requests never completed";
      break;
    }
  }
  return done;
}

inline std::optional<Error> write(Store& store, SlotId slot, AlignedBuffer& from,
                                  std::uint64_t version) {
  EXPECT_TRUE(store.write(slot, from.span(), version, 1));
  return finish(store, 1).at(0).error;
}

inline std::optional<Error> read(Store& store, SlotId slot, AlignedBuffer& to,
                                 std::uint64_t version) {
  EXPECT_TRUE(store.read(slot, to.data(), version, 2));
  return finish(store, 1).at(0).error;
}

inline std::string text_of(const std::optional<Error>& error) {
  return error ? error->text() : std::string("(no error)");
}

inline bool mentions(const Error& error, const std::string& word) {
  return error.text().find(word) != std::string::npos;
}

}  // namespace strata
