// An IoEngine that stands before another one and does what disks do wrong, by a seeded plan: the
// same seed and the same requests give the same faults.
//
// Threads: as IoEngine.
//
//   FaultPlan plan{.seed = 7, .delay_ns_max = 1'000'000};
//   plan.chance_of(IoFault::lost_write) = 0.01;
//   auto engine = std::make_unique<FaultyEngine>(std::move(inner), plan, &clock);
//   FaultyEngine* faulty = engine.get();                  // to look at, once the Store owns it
//   ... clock.advance(faulty->next_due_ns().value() - clock.now_ns());
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "doubles/virtual_clock.hpp"
#include "memory/doorbell.hpp"
#include "offload/storage/io_engine.hpp"

namespace strata {

// Each fault exists for a bug. A request it cannot happen to (a lost write to a read) is left
// alone.
enum class IoFault : std::uint8_t {
  none,
  eio,          // a place that cannot be read or written from then on: an error that is dropped,
                // retried for ever, or leaves a transfer, a slot or a waiter behind
  passing_eio,  // an error that is gone the next time: a run that ends by it
  no_space,     // writes: a full disk taken for a broken one, or for success
  interrupted,  // EINTR treated as an error, or retried from the wrong place
  again,        // EAGAIN treated as an error, retried without a pause, or for ever
  shortened,    // a short transfer taken for a whole one, or continued at the wrong byte
  corrupt,      // one flipped bit, on the medium or on the way, used unseen
  misdirected,  // the right bytes at another place of the file, or from there
  lost_write,   // a write that is acknowledged and never happens: the stale page looks intact
  no_memory,    // ENOMEM, of a kernel that is short of memory for a while: a run that ends by it
};
inline constexpr std::size_t kIoFaultCount = 11;

struct FaultPlan {
  std::uint64_t seed = 1;
  // How likely each fault meets a request; together at most 1.
  std::array<double, kIoFaultCount> chance{};
  // Besides, the nth request (from 1) meets nth_fault. 0: none does.
  std::uint64_t nth = 0;
  IoFault nth_fault = IoFault::eio;
  // Completions are held back up to so long, each by a draw of its own, and so overtake each other:
  // for code that relies on their order, or reuses a buffer too early.
  std::int64_t delay_ns_max = 0;

  double& chance_of(IoFault fault) { return chance[static_cast<std::size_t>(fault)]; }
  // What is written may not be what is there then.
  bool damages() const {
    for (const IoFault fault : {IoFault::corrupt, IoFault::misdirected, IoFault::lost_write}) {
      if (chance[static_cast<std::size_t>(fault)] > 0 || (nth != 0 && nth_fault == fault))
        return true;
    }
    return false;
  }
};

class FaultyEngine final : public IoEngine {
 public:
  // `clock` is needed for delays only; `bell` where somebody sleeps while a fault is to be seen.
  FaultyEngine(std::unique_ptr<IoEngine> inner, const FaultPlan& plan,
               const VirtualClock* clock = nullptr, Doorbell* bell = nullptr);

  // From here on; counts nth from here, and starts the seed anew.
  void set_plan(const FaultPlan& plan);
  // How often a fault happened, all plans together; `none` counts requests left alone.
  std::uint64_t injected(IoFault fault) const { return injected_[static_cast<std::size_t>(fault)]; }
  std::uint64_t requests() const {
    return std::accumulate(injected_.begin(), injected_.end(), std::uint64_t{0});
  }
  // When the earliest completion held back is due; nullopt when none is held back.
  std::optional<std::int64_t> next_due_ns() const;

  const char* name() const override { return "faulty"; }
  int attach(int fd, std::uint64_t file_bytes) override;
  void grew(int file, std::uint64_t file_bytes) override;
  void reattach(int file, int fd) override { inner_->reattach(file, fd); }
  [[nodiscard]] bool submit(const IoRequest& request) override;
  void flush() override;
  std::size_t reap(std::span<IoCompletion> out) override;
  std::optional<Error> register_memory(std::span<std::byte> memory) override;
  bool needs_files() const override { return inner_->needs_files(); }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  // A request under way. Slots are reused; `live` tells which are in use.
  struct Operation {
    IoRequest asked;
    IoFault fault = IoFault::none;
    bool live = false;
    std::uint64_t dice = 0;
    std::int64_t due_ns = 0;
    std::unique_ptr<std::byte, Free> damaged;  // what a corrupt write really writes
  };
  struct Held {
    std::int64_t due_ns;
    IoCompletion completion;
  };

  IoFault draw(const IoRequest& request);
  bool is_broken(const IoRequest& request) const;
  bool applies(IoFault fault, const IoRequest& request) const;
  IoRequest distort(Operation& operation) const;
  std::int64_t settle(Operation& operation, std::int64_t result) const;
  std::size_t free_operation();
  void hold(const Operation& operation, std::int64_t result);
  std::int64_t now_ns() const { return clock_ == nullptr ? 0 : clock_->now_ns(); }

  FaultPlan plan_;
  const VirtualClock* clock_;
  Doorbell* bell_;
  std::mt19937_64 random_;
  std::uint64_t requests_ = 0;  // since set_plan()
  std::array<std::uint64_t, kIoFaultCount> injected_{};
  std::vector<std::uint64_t> file_bytes_;
  std::vector<IoRequest> broken_;  // places, since set_plan()
  std::vector<Operation> operations_;
  std::vector<Held> held_;           // finished, in the order of being due
  std::unique_ptr<IoEngine> inner_;  // last: it is destroyed before the buffers it may be writing
};

}  // namespace strata
