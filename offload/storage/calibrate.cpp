#include "offload/storage/calibrate.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <optional>

#include "memory/check.hpp"
#include "memory/clock.hpp"
#include "offload/storage/make_engine.hpp"

namespace strata {
namespace {

constexpr std::size_t kInFlightBytes = 64 * kMiB;
constexpr std::uint32_t kDepthMax = 64;        // as a session's I/O engine
constexpr std::uint32_t kSlotsPerRequest = 4;  // at least: two for each way
constexpr double kFillSeconds = 0.7;           // a slow disk gets a smaller file
constexpr std::size_t kFramesMin = 4;
constexpr std::size_t kCopiesInFlightMax = 64;  // as a session's mover
constexpr int kBellMs = 20;                     // a lost ring costs no more than this

std::uint32_t depth_of(const SsdProbeOptions& options) {
  if (options.depth != 0) return options.depth;
  STRATA_ASSERT(options.page_bytes > 0);
  const std::size_t pages = kInFlightBytes / options.page_bytes;
  return static_cast<std::uint32_t>(std::clamp<std::size_t>(pages, 2, kDepthMax));
}

StoreOptions store_options(const SsdProbeOptions& options) {
  const std::uint64_t wanted = options.file_bytes / options.page_bytes;
  StoreOptions store;
  store.paths = options.paths;
  store.slot_bytes = options.page_bytes;
  store.slot_count =
      std::max(static_cast<std::uint32_t>(wanted), kSlotsPerRequest * depth_of(options));
  store.in_flight_max = depth_of(options);
  store.hash_threads = hash_threads_here();
  return store;
}

// Bytes that a drive or a file system cannot make smaller.
void scramble(std::span<std::byte> bytes) {
  std::uint64_t random = 0x9E3779B97F4A7C15u;
  STRATA_ASSERT(bytes.size() % sizeof(random) == 0);
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(random)) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    std::memcpy(bytes.data() + at, &random, sizeof(random));
  }
}

}  // namespace

SsdProbe::SsdProbe(const SsdProbeOptions& options, std::string_view io_engine)
    : depth_(depth_of(options)),
      page_bytes_(options.page_bytes),
      memory_(depth_ * options.page_bytes),
      store_(store_options(options), make_io_engine(io_engine, &bell_, depth_), &bell_) {
  STRATA_ASSERT(depth_ >= 2);
  store_.warn(store_.register_memory(memory_.bytes()));
  for (std::uint32_t i = 0; i < depth_; ++i) buffers_.push_back(i);
  fill();
}

std::byte* SsdProbe::buffer(std::uint32_t which) const {
  STRATA_ASSERT(which < depth_);
  return memory_.bytes().data() + which * page_bytes_;
}

void SsdProbe::fill() {
  scramble(memory_.bytes());
  while (const std::optional<SlotId> slot = store_.acquire()) slots_.push_back({.id = *slot});
  Stream all{.count = static_cast<std::uint32_t>(slots_.size()), .in_flight_max = depth_};
  Stream none;
  const std::int64_t begin_ns = now_ns();
  const std::uint32_t enough = kSlotsPerRequest * depth_;
  std::uint32_t begun = 0;
  while (begun < all.count && (begun < enough || seconds_since(begin_ns) < kFillSeconds)) {
    while (begun < all.count && start(all, IoOp::write)) ++begun;
    reap(none, all);
  }
  while (all.in_flight > 0) reap(none, all);
  STRATA_ASSERT(begun >= 2 && buffers_.size() == depth_);
  slots_.resize(begun);  // the others stay with the store, never written
}

// False where the stream has enough in flight, or its next slot is still under way.
bool SsdProbe::start(Stream& stream, IoOp op) {
  if (stream.in_flight == stream.in_flight_max) return false;
  STRATA_ASSERT(stream.in_flight < stream.in_flight_max && stream.next < stream.count);
  const std::uint32_t place = stream.first + stream.next;
  Slot& slot = slots_[place];
  if (slot.buffer != kIdle) return false;
  STRATA_ASSERT(!buffers_.empty());
  slot.buffer = buffers_.back();
  buffers_.pop_back();
  const std::uint64_t tag = std::uint64_t{place} << 1 | (op == IoOp::write ? 1 : 0);
  const bool taken = op == IoOp::read ? store_.read(slot.id, buffer(slot.buffer), slot.version, tag)
                                      : store_.write(slot.id, {buffer(slot.buffer), page_bytes_},
                                                     ++slot.version, tag);
  STRATA_ASSERT(taken);
  stream.next = (stream.next + 1) % stream.count;
  ++stream.in_flight;
  return true;
}

void SsdProbe::reap(Stream& reads, Stream& writes) {
  completions_.clear();
  if (!store_.turn(completions_)) bell_.wait(kBellMs);
  for (StoreCompletion& seen : completions_) {
    if (seen.error) throw StrataError(std::move(*seen.error));
    Stream& stream = (seen.tag & 1) != 0 ? writes : reads;
    STRATA_ASSERT((seen.tag >> 1) < slots_.size());
    Slot& slot = slots_[seen.tag >> 1];
    STRATA_ASSERT(stream.in_flight > 0 && slot.buffer != kIdle);
    --stream.in_flight;
    stream.bytes += page_bytes_;
    buffers_.push_back(slot.buffer);
    slot.buffer = kIdle;
  }
}

LinkSpeed SsdProbe::run(Ways ways, double seconds) {
  const auto half = static_cast<std::uint32_t>(slots_.size() / 2);
  const std::uint32_t share = ways == Ways::both ? depth_ / 2 : depth_;
  Stream reads{.count = half, .in_flight_max = ways == Ways::out ? 0 : share};
  Stream writes{.first = half,
                .count = static_cast<std::uint32_t>(slots_.size()) - half,
                .in_flight_max = ways == Ways::in ? 0 : share};
  const std::int64_t begin_ns = now_ns();
  while (seconds_since(begin_ns) < seconds) {
    while (start(reads, IoOp::read)) {
    }
    while (start(writes, IoOp::write)) {
    }
    reap(reads, writes);
  }
  while (reads.in_flight + writes.in_flight > 0) reap(reads, writes);
  const double took = seconds_since(begin_ns);
  return {.in_bytes_s = static_cast<double>(reads.bytes) / took,
          .out_bytes_s = static_cast<double>(writes.bytes) / took};
}

CopyProbe::CopyProbe(Device device, std::size_t page_bytes, std::size_t bytes)
    : page_bytes_(page_bytes),
      frame_count_(std::max(kFramesMin, bytes / 4 / page_bytes)),
      page_count_(std::max(frame_count_, bytes / page_bytes)),
      in_flight_max_(std::min(frame_count_, kCopiesInFlightMax)),
      memory_(page_count_ * page_bytes),
      device_(std::move(device)) {
  if (auto error = device_.memory->claim(frame_count_, page_bytes)) {
    throw StrataError(std::move(*error));
  }
  device_.copies->pin_host(memory_.bytes());
}

void CopyProbe::finish(CopyTicket copy) {
  if (auto error = device_.copies->wait(copy)) throw StrataError(std::move(*error));
}

// The first bytes of a page, between the frame and the host memory whose turn it is.
CopyTicket CopyProbe::submit(CopyStream stream, std::size_t turn, std::size_t bytes,
                             const Computation& compute) {
  STRATA_ASSERT(bytes <= page_bytes_);
  const FrameId frame{static_cast<std::uint32_t>(turn % frame_count_)};
  std::byte* const there = device_.memory->address(frame);
  std::byte* const page = memory_.bytes().data() + turn % page_count_ * page_bytes_;
  const bool out = stream == CopyStream::out;
  return device_.copies->copy({.to = out ? page : there,
                               .from = out ? there : page,
                               .bytes = bytes,
                               .stream = stream,
                               .compute = compute});
}

template <typename Submit, typename Enough>
double CopyProbe::keep_busy(Submit submit, Enough enough) {
  STRATA_ASSERT(in_flight_max_ > 0);
  std::deque<CopyTicket> in_flight;
  const std::int64_t begin_ns = now_ns();
  for (std::size_t turn = 0; !enough(turn, seconds_since(begin_ns)); ++turn) {
    in_flight.push_back(submit(turn));
    if (in_flight.size() < in_flight_max_) continue;
    finish(in_flight.front());
    in_flight.pop_front();
  }
  for (const CopyTicket copy : in_flight) finish(copy);
  return seconds_since(begin_ns);
}

LinkSpeed CopyProbe::run(Ways ways, double seconds) {
  std::array<std::uint64_t, 2> bytes{};
  const auto next = [&](std::size_t turn) {
    const bool out = ways == Ways::out || (ways == Ways::both && turn % 2 == 1);
    bytes[out ? 1 : 0] += page_bytes_;
    return submit(out ? CopyStream::out : CopyStream::pages_in, turn, page_bytes_);
  };
  const std::size_t least = ways == Ways::both ? 2 : 1;
  const double took = keep_busy(
      next, [&](std::size_t turns, double so_far) { return turns >= least && so_far >= seconds; });
  return {.in_bytes_s = static_cast<double>(bytes[0]) / took,
          .out_bytes_s = static_cast<double>(bytes[1]) / took};
}

double CopyProbe::computed_bytes_s(const Computation& compute, double seconds) {
  std::uint64_t pages = 0;
  const auto next = [&](std::size_t turn) {
    ++pages;
    return submit(CopyStream::pages_in, turn, page_bytes_, compute);
  };
  const double took = keep_busy(
      next, [&](std::size_t turns, double so_far) { return turns >= 1 && so_far >= seconds; });
  return static_cast<double>(pages * page_bytes_) / took;
}

double CopyProbe::transfer_seconds() {
  constexpr std::size_t kCopies = 500;
  const auto first = [&](std::size_t turn) {
    return submit(CopyStream::pages_in, turn, kIoAlignment);
  };
  const double took = keep_busy(first, [](std::size_t turns, double) { return turns == kCopies; });
  return took / static_cast<double>(kCopies);
}

}  // namespace strata
