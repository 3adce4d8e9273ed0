// A disk with a cache that a crash empties, as memory: what was written is durable once it was
// flushed behind its completion. Of every other write a crash leaves all, nothing, or some of its
// sectors, in any order: for code that takes a completion for durability, or writes over what is
// still needed.
//
// Threads: as IoEngine; it has none of its own.
//
//   VolatileDisk* disk = new VolatileDisk(64);            // owned by the session's parts
//   const std::size_t begun = disk->completed();          // fdatasync() begins,
//   disk->make_durable(begun);                            // and returns
//   std::vector<std::byte> image = disk->crash(random);   // what is found at the next start
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>
#include <span>
#include <vector>

#include "memory/check.hpp"
#include "offload/storage/memory_engine.hpp"

namespace strata {

class VolatileDisk final : public IoEngine {
 public:
  explicit VolatileDisk(std::uint32_t depth) : inner_(nullptr, depth) {}

  const char* name() const override { return "volatile"; }
  bool needs_files() const override { return false; }
  // REQUIRES: it is the only file.
  int attach(int fd, std::uint64_t file_bytes) override {
    STRATA_ASSERT(durable_.empty());
    durable_.resize(file_bytes);
    return inner_.attach(fd, file_bytes);
  }
  void grew(int file, std::uint64_t file_bytes) override {
    durable_.resize(file_bytes);
    inner_.grew(file, file_bytes);
  }
  [[nodiscard]] bool submit(const IoRequest& request) override {
    if (!inner_.submit(request)) return false;
    under_way_.push_back(request);
    return true;
  }
  void flush() override { inner_.flush(); }
  std::size_t reap(std::span<IoCompletion> out) override {
    const std::size_t count = inner_.reap(out);
    for (std::size_t i = 0; i < count; ++i) {  // in the order of their submission
      const IoRequest request = under_way_.front();
      under_way_.pop_front();
      if (request.op != IoOp::write || out[i].result <= 0) continue;
      cached_.push_back(written(request, static_cast<std::size_t>(out[i].result)));
      ++completed_;
    }
    return count;
  }

  // Writes so far.
  std::size_t completed() const { return completed_; }
  // The first so many are durable.
  void make_durable(std::size_t writes) {
    while (!cached_.empty() && completed_ - cached_.size() < writes) {
      put(cached_.front(), durable_, nullptr);
      cached_.pop_front();
    }
  }
  // Nothing of the disk itself changes.
  std::vector<std::byte> crash(std::mt19937_64& random) const {
    std::vector<Written> lost(cached_.begin(), cached_.end());
    for (const IoRequest& request : under_way_) {
      if (request.op == IoOp::write) lost.push_back(written(request, request.bytes));
    }
    std::shuffle(lost.begin(), lost.end(), random);
    std::vector<std::byte> image = durable_;
    for (const Written& write : lost) put(write, image, &random);
    return image;
  }
  std::span<const std::byte> contents() { return inner_.contents(0); }

 private:
  static constexpr std::size_t kSector = 512;

  struct Written {
    std::uint64_t offset = 0;
    std::vector<std::byte> bytes;
  };

  static Written written(const IoRequest& request, std::size_t bytes) {
    return {request.offset, {request.buffer, request.buffer + bytes}};
  }
  // `random`: some of it only.
  static void put(const Written& write, std::vector<std::byte>& to, std::mt19937_64* random) {
    enum { all, none, torn };
    const auto how = random == nullptr ? all : static_cast<int>((*random)() % 3);
    for (std::size_t at = 0; at < write.bytes.size() && how != none; at += kSector) {
      if (how == torn && (*random)() % 2 == 0) continue;
      const std::size_t bytes = std::min(kSector, write.bytes.size() - at);
      std::memcpy(to.data() + write.offset + at, write.bytes.data() + at, bytes);
    }
  }

  std::vector<std::byte> durable_;
  std::deque<Written> cached_;       // completed, in order
  std::deque<IoRequest> under_way_;  // likewise
  std::size_t completed_ = 0;
  MemoryEngine inner_;
};

}  // namespace strata
