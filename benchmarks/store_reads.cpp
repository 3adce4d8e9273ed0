// How fast the store reads pages and checks them, when the disk is not what limits it: several fast
// SSDs, played by memory. Two such disks: one whose bytes the caller copies (the memory engine),
// and one that moves bytes without a processor, as DMA does (its buffers hold the right bytes
// already). Beside them memcpy and XXH3 alone, the bounds of both. One JSON object a line: bytes
// per second, and the longest and the summed time the caller spent inside the store for a page.
//
//   store_reads [hash threads]        // medians of several rounds; 0, 1 and 2 threads if not given
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "memory/check.hpp"
#include "memory/slab.hpp"
#include "offload/storage/checksum.hpp"
#include "offload/storage/memory_engine.hpp"
#include "offload/storage/store.hpp"
#include "stopwatch.hpp"

namespace strata {
namespace {

constexpr std::size_t kPage = 4 * kMiB;
constexpr std::uint32_t kPages = 64;  // 256 MiB: beyond the caches
constexpr std::uint32_t kInFlight = 16;
constexpr int kPasses = 4;  // over all pages, in one round
constexpr int kRounds = 7;
constexpr double kBytes = double{kPasses} * kPages * kPage;

// A disk that is never waited for and whose bytes are where they belong already.
class InstantDisk final : public IoEngine {
 public:
  explicit InstantDisk(Doorbell* bell) : bell_(bell) {}
  const char* name() const override { return "instant"; }
  int attach(int, std::uint64_t) override { return 0; }
  [[nodiscard]] bool submit(const IoRequest& request) override {
    done_.push_back({.tag = request.tag, .result = request.bytes});
    return true;
  }
  void flush() override {
    if (!done_.empty()) bell_->ring();
  }
  std::size_t reap(std::span<IoCompletion> out) override {
    const std::size_t count = std::min(out.size(), done_.size());
    std::copy_n(done_.begin(), count, out.begin());
    done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }
  bool needs_files() const override { return false; }

 private:
  Doorbell* bell_;
  std::vector<IoCompletion> done_;
};

struct Measured {
  double bytes_s = 0.0;
  double inside_longest_s = 0.0;  // one call of read() or turn()
  double inside_page_s = 0.0;     // on average
};

// All pages, each in a buffer of its own, written once and then read again and again.
class Reader final {
 public:
  Reader(bool instant, int hash_threads) : memory_(kPages * kPage) {
    std::unique_ptr<IoEngine> engine = std::make_unique<InstantDisk>(&bell_);
    if (!instant) engine = std::make_unique<MemoryEngine>(&bell_, kInFlight);
    StoreOptions options;
    options.slot_bytes = kPage;
    options.slot_count = kPages;
    options.in_flight_max = kInFlight;
    options.hash_threads = hash_threads;
    store_ = std::make_unique<Store>(options, std::move(engine), &bell_);
    for (std::size_t i = 0; i < memory_.bytes().size(); ++i) {
      memory_.bytes()[i] = static_cast<std::byte>(i * 7 + i / 4096);
    }
    for (std::uint32_t i = 0; i < kPages; ++i) STRATA_ASSERT(store_->acquire() == SlotId{i});
    run(1, [this](std::uint32_t page) {
      return store_->write(SlotId{page}, {at(page), kPage}, 1, page);
    });
  }

  Measured read() {
    return run(kPasses, [this](std::uint32_t page) {
      return store_->read(SlotId{page}, at(page), 1, page);
    });
  }

 private:
  std::byte* at(std::uint32_t page) { return memory_.bytes().data() + page * kPage; }

  template <class Start>
  Measured run(int passes, Start start) {
    Measured seen;
    double inside = 0.0;
    const auto timed = [&](auto call) {
      const Stopwatch watch;
      const bool moved = call();
      const double took = watch.seconds();
      inside += took;
      seen.inside_longest_s = std::max(seen.inside_longest_s, took);
      return moved;
    };
    const std::uint32_t count = static_cast<std::uint32_t>(passes) * kPages;
    const Stopwatch watch;
    std::uint32_t started = 0;
    for (std::uint32_t done = 0; done < count;) {
      while (started < count && started - done < kInFlight) {
        timed([&] { return start(started++ % kPages); });
      }
      completions_.clear();
      if (!timed([&] { return store_->turn(completions_); })) bell_.wait(1000);
      for (const StoreCompletion& completion : completions_) STRATA_ASSERT(!completion.error);
      done += static_cast<std::uint32_t>(completions_.size());
    }
    seen.bytes_s = static_cast<double>(count) * kPage / watch.seconds();
    seen.inside_page_s = inside / count;
    return seen;
  }

  Doorbell bell_;
  Slab memory_;
  std::vector<StoreCompletion> completions_;
  std::unique_ptr<Store> store_;
};

template <class Once>
Measured median(Once once) {
  std::vector<Measured> rounds;
  rounds.reserve(kRounds);
  for (int i = 0; i < kRounds; ++i) rounds.push_back(once());
  const auto middle = rounds.begin() + kRounds / 2;
  std::nth_element(rounds.begin(), middle, rounds.end(),
                   [](const Measured& a, const Measured& b) { return a.bytes_s < b.bytes_s; });
  return *middle;
}

void print(const char* what, int hash_threads, const Measured& seen) {
  std::printf(
      "{\"what\": \"%s\", \"hash_threads\": %d, \"bytes_s\": %.4g, \"inside_longest_s\": %.3g, "
      "\"inside_page_s\": %.3g}\n",
      what, hash_threads, seen.bytes_s, seen.inside_longest_s, seen.inside_page_s);
  std::fflush(stdout);
}

// Pages one after the other, far more of them than caches hold.
template <class EachPage>
void measure_alone(const char* what, EachPage each_page) {
  print(what, 0, median([&] {
          const Stopwatch watch;
          for (std::uint32_t i = 0; i < kPasses * kPages; ++i) each_page(i % kPages);
          return Measured{.bytes_s = kBytes / watch.seconds()};
        }));
}

void measure(const std::vector<int>& hash_threads) {
  {
    Slab from(kPages * kPage);
    Slab to(kInFlight * kPage);
    measure_alone("memcpy", [&](std::uint32_t page) {
      std::memcpy(to.bytes().data() + page % kInFlight * kPage, from.bytes().data() + page * kPage,
                  kPage);
    });
    std::uint64_t sum = 0;
    measure_alone("xxh3", [&](std::uint32_t page) {
      sum ^= checksum(from.bytes().subspan(page * kPage, kPage), SlotId{page}, sum);
    });
  }
  for (const bool instant : {false, true}) {
    for (const int threads : hash_threads) {
      Reader reader(instant, threads);
      print(instant ? "store over DMA" : "store over memory", threads,
            median([&] { return reader.read(); }));
    }
  }
}

}  // namespace
}  // namespace strata

int main(int argc, char** argv) {
  std::vector<int> hash_threads = {0, 1, 2};
  if (argc > 1) hash_threads = {std::atoi(argv[1])};
  strata::measure(hash_threads);
  return 0;
}
