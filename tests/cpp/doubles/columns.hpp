// Columns: several machines within a process, each a loopback of ranks, and what goes between them.
// It exists for calls that machines make in other orders: those of a column are recorded, and one
// that makes another call than the others ends the test and does not hang.
//
// Threads: a rank of each machine has one; a column's ranks meet in its calls.
//
//   Columns columns(2, 3);                       // machines, ranks of each
//   parts.column = columns.column(machine, rank);
//   columns.fail_at(5);                          // the fifth call of each rank of the last machine
//   EXPECT_EQ(columns.calls(0, 1), columns.calls(1, 1));
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/ranks/column.hpp"

namespace strata {

class Columns final {
 public:
  Columns(std::uint32_t machines, std::uint32_t ranks) : machines_(machines), columns_(ranks) {
    for (One& one : columns_) {
      one.calls.resize(machines);
      one.given.resize(machines);
    }
  }

  std::unique_ptr<Column> column(std::uint32_t machine, std::uint32_t rank) {
    return std::make_unique<OfRank>(*this, columns_[rank], machine);
  }
  void fail_at(std::size_t call) { fails_at_ = call; }
  // A rank of that number makes no more calls: the others hear of it.
  void end(std::uint32_t rank) {
    const std::lock_guard lock(columns_[rank].mutex);
    columns_[rank].lost = true;
    columns_[rank].changed.notify_all();
  }
  // In words, in their order.
  const std::vector<std::string>& calls(std::uint32_t machine, std::uint32_t rank) const {
    return columns_[rank].calls[machine];
  }

 private:
  struct One {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::vector<std::string>> calls;      // by machine
    std::vector<std::span<const std::byte>> given{};  // likewise, of the call under way
    std::uint32_t there = 0, taken = 0;
    std::uint64_t round = 0;
    bool lost = false;
  };

  class OfRank final : public Column {
   public:
    OfRank(Columns& all, One& column, std::uint32_t machine)
        : all_(all), column_(column), machine_(machine) {}

    void meet() override {
      meet("meet", {}, [](std::uint32_t, std::span<const std::byte>) {});
    }
    void gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
      meet("gather", mine, [&](std::uint32_t other, std::span<const std::byte> given) {
        std::ranges::copy(given, all.subspan(other * mine.size()).begin());
      });
    }
    void exchange(std::span<const std::byte> parts, std::span<std::byte> mine) override {
      const std::size_t part = parts.size() / all_.machines_;
      meet("exchange", parts, [&](std::uint32_t other, std::span<const std::byte> given) {
        std::ranges::copy(given.subspan(machine_ * part, part), mine.subspan(other * part).begin());
      });
    }

   private:
    template <typename Take>
    void meet(const char* what, std::span<const std::byte> mine, const Take& take) {
      std::unique_lock lock(column_.mutex);
      std::vector<std::string>& calls = column_.calls[machine_];
      calls.push_back(what + std::string(" ") + std::to_string(mine.size()));
      if (machine_ == all_.machines_ - 1 && calls.size() == all_.fails_at_) lose();
      column_.given[machine_] = mine;
      const std::uint64_t round = column_.round;
      if (++column_.there == all_.machines_) column_.changed.notify_all();
      wait(lock, [&] { return column_.there == all_.machines_ || column_.round != round; });
      for (std::uint32_t other = 0; other < all_.machines_; ++other) {
        if (column_.calls[other].back() != calls.back()) lose();
        take(other, column_.given[other]);
      }
      if (++column_.taken == all_.machines_) {
        column_.taken = column_.there = 0;
        ++column_.round;
        column_.changed.notify_all();
      }
      wait(lock, [&] { return column_.round != round; });
    }
    template <typename Over>
    void wait(std::unique_lock<std::mutex>& lock, const Over& over) {
      column_.changed.wait(lock, [&] { return over() || column_.lost; });
      if (!over()) throw std::runtime_error("a machine is lost");
    }
    [[noreturn]] void lose() {
      column_.lost = true;
      column_.changed.notify_all();
      throw std::runtime_error("a machine is lost");
    }

    Columns& all_;
    One& column_;
    const std::uint32_t machine_;
  };

  const std::uint32_t machines_;
  std::vector<One> columns_;  // by rank
  std::size_t fails_at_ = 0;  // never
};

}  // namespace strata
