#include "offload/storage/store.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <thread>

#include "memory/check.hpp"
#include "offload/storage/checksum.hpp"

namespace strata {
namespace {

// Where nothing moved, the disk is left alone for a while: each time twice as long, up to 128 ms.
constexpr std::int64_t kFirstPauseNs = 4'000'000;
constexpr std::uint32_t kDoublingsMax = 5;
// An error may pass: a link that was reset, a path that failed over. A quarter of a second in all.
constexpr std::uint32_t kErrorsMax = 6;
// The kernel may be short of memory for as long as a program needs to give some back. Two minutes,
// as for a disk that hangs.
constexpr std::uint32_t kShortagesMax = 1'000;
// Requests, and pages to hash, that one look hands over: each wakes a thread, which takes some
// 10 µs, and whoever looks has the core's lock. The rest goes with the next look.
constexpr std::size_t kHandedOverMax = 2;

}  // namespace

int hash_threads_here() {
  // One hashes about as fast as it reads memory; a second is for machines that can spare a core.
  return std::thread::hardware_concurrency() > 4 ? 2 : 1;
}

Store::Store(const StoreOptions& options, std::unique_ptr<IoEngine> engine, Doorbell* bell)
    : Store(options, std::move(engine), nullptr, bell) {}

Store::Store(const StoreOptions& options, std::unique_ptr<IoEngine> engine, SavedFiles&& saved,
             Doorbell* bell)
    : Store(options, std::move(engine), &saved, bell) {}

Store::Store(const StoreOptions& options, std::unique_ptr<IoEngine> engine, SavedFiles* saved,
             Doorbell* bell)
    : options_(options),
      transfers_(options.in_flight_max),
      hashes_(options.hash_threads, bell,
              {.name = "strata-hash",
               .run =
                   [](const HashJob& job, int) {
                     return HashDone{checksum(job.bytes, job.slot, job.version), job.transfer};
                   }}),
      engine_(std::move(engine)) {
  STRATA_ASSERT(engine_ != nullptr);
  STRATA_ASSERT(options.slot_bytes > 0 && options.slot_bytes % kIoAlignment == 0);
  STRATA_ASSERT(options.slot_bytes <= kPageBytesMax);
  STRATA_ASSERT(options.in_flight_max > 0);
  if (options.slot_count == 0) refuse("a store on SSD needs room for at least one page");
  // First: a budget beyond the disk is refused before memory is taken for its slots.
  if (saved == nullptr) {
    make_files();
  } else {
    STRATA_ASSERT(engine_->needs_files() && saved->files.size() == options_.paths.size());
    options_.slot_count = fit_slots(*saved, options_.slot_bytes, options_.slot_count);
    files_ = std::move(saved->files);
    attach_files(stripe_bytes(options_.slot_count));
  }
  add_slots(options_.slot_count);
  if (saved != nullptr) take_contents(*saved);
  for (std::uint32_t i = options.in_flight_max; i-- > 0;) idle_.push_back(i);
}

const Store::Slot& Store::look(SlotId slot) const {
  STRATA_ASSERT(index(slot) < slots_.size());
  return slots_[index(slot)];
}

std::optional<SlotId> Store::acquire() {
  if (free_slots_.empty()) return std::nullopt;
  const SlotId slot = free_slots_.back();
  free_slots_.pop_back();
  STRATA_ASSERT(!at(slot).acquired && !at(slot).busy && at(slot).holders == 0);
  at(slot) = Slot{.acquired = true};
  ++acquired_;
  return slot;
}

void Store::release(SlotId slot) {
  STRATA_ASSERT(at(slot).acquired);
  STRATA_ASSERT(!at(slot).busy);
  at(slot).acquired = false;
  --acquired_;
  if (held(slot))
    --both_;
  else
    free_slots_.push_back(slot);
}

bool Store::hold(SlotId slot) {
  Slot& of = at(slot);
  STRATA_ASSERT(of.sealed && (of.acquired || of.holders != 0));
  const bool first = of.acquired && of.holders == 0;
  if (first && spare_slots() == 0) return false;
  both_ += first ? 1 : 0;
  ++of.holders;
  return true;
}

void Store::unhold(SlotId slot) {
  Slot& of = at(slot);
  STRATA_ASSERT(of.sealed && of.holders != 0);
  if (--of.holders != 0) return;
  if (of.acquired) {
    --both_;
  } else {
    STRATA_ASSERT(!of.busy);
    free_slots_.push_back(slot);
  }
}

void Store::keep(SlotId slot) {
  Slot& of = at(slot);
  STRATA_ASSERT(of.sealed && of.acquired && !of.busy && of.holders == 0);
  of.acquired = false;
  --acquired_;
  of.holders = 1;
}

void Store::share(SlotId slot) {
  Slot& of = at(slot);
  STRATA_ASSERT(of.holders != 0 && !of.acquired);
  STRATA_ASSERT(spare_slots() != 0);
  of.acquired = true;
  ++acquired_;
  ++both_;
}

std::optional<SlotContents> Store::contents(SlotId slot) const {
  const Slot& of = look(slot);
  if (!of.sealed) return std::nullopt;
  return of.contents;
}

bool Store::start(const Transfer& transfer) {
  Slot& slot = at(transfer.slot);
  STRATA_ASSERT(slot.acquired || (slot.holders != 0 && transfer.op == IoOp::read));
  STRATA_ASSERT(slot.holders == 0 || transfer.op == IoOp::read);
  STRATA_ASSERT(!slot.busy);
  STRATA_ASSERT(transfer.buffer != nullptr);
  STRATA_ASSERT(reinterpret_cast<std::uintptr_t>(transfer.buffer) % kIoAlignment == 0);
  if (idle_.empty() || paused_) return false;
  const std::uint32_t which = idle_.back();
  idle_.pop_back();
  transfers_[which] = transfer;
  slot.busy = true;
  if (transfer.op == IoOp::write) {
    slot.sealed = false;
    slot.contents = {.version = transfer.version, .bytes = transfer.bytes};
  }
  (transfer.op == IoOp::write ? unhashed_ : waiting_).push_back(which);
  return true;
}

bool Store::turn(Completions& out) {
  if (paused_) return false;
  bool moved = false;
  bool reaped = false;
  // What was reaped is hashed, continued or retried in the same turn, or nobody would ring.
  do {
    moved |= end_pauses();
    moved |= hash(out);
    moved |= submit_waiting(out);
    engine_->flush();
    reaped = reap(out);
    moved |= reaped;
  } while (reaped && !(waiting_.empty() && unhashed_.empty()));
  return moved;
}

// Hands over what is to be hashed, and takes back what was: a write may go to the engine, a read is
// done. What finds no room is handed over once something is taken back.
bool Store::hash(Completions& out) {
  bool moved = false;
  bool took_back = false;
  std::size_t left = kHandedOverMax;
  do {
    for (; !unhashed_.empty() && left != 0; unhashed_.pop_front(), moved = true, --left) {
      const Transfer& transfer = transfers_[unhashed_.front()];
      const HashJob job{.bytes = {transfer.buffer, transfer.bytes},
                        .slot = transfer.slot,
                        .version = transfer.version,
                        .transfer = unhashed_.front()};
      if (!hashes_.submit(job)) break;
    }
    took_back = false;
    for (HashDone done; hashes_.collect(done); took_back = moved = true) {
      const Transfer& transfer = transfers_[done.transfer];
      STRATA_ASSERT(at(transfer.slot).busy);
      if (transfer.op == IoOp::read) {
        finish(done.transfer, check_contents(transfer, done.checksum), out);
      } else {
        at(transfer.slot).contents.checksum = done.checksum;
        waiting_.push_back(done.transfer);
      }
    }
  } while (took_back && !unhashed_.empty());
  return moved;
}

bool Store::submit_waiting(Completions& out) {
  STRATA_ASSERT(idle_.size() + unhashed_.size() + waiting_.size() <= transfers_.size());
  bool moved = false;
  std::size_t left = kHandedOverMax;
  for (; !waiting_.empty() && left != 0; waiting_.pop_front(), moved = true, --left) {
    const std::uint32_t which = waiting_.front();
    const Transfer& transfer = transfers_[which];
    if (transfer.op == IoOp::read) {
      if (auto error = check_version(transfer)) {
        finish(which, std::move(error), out);
        continue;
      }
    }
    const IoRequest request{.op = transfer.op,
                            .file = numbers_[stripe_of(transfer.slot)],
                            .offset = offset_of(transfer.slot) + transfer.moved_bytes,
                            .buffer = transfer.buffer + transfer.moved_bytes,
                            .bytes = transfer.bytes - transfer.moved_bytes,
                            .tag = which};
    if (!engine_->submit(request)) break;  // full: what it reaps makes room
  }
  return moved;
}

bool Store::reap(Completions& out) {
  std::array<IoCompletion, 64> seen;
  bool any = false;
  std::size_t count = 0;
  do {
    count = engine_->reap(seen);
    for (std::size_t i = 0; i < count; ++i) {
      STRATA_ASSERT(seen[i].tag < transfers_.size());
      advance(static_cast<std::uint32_t>(seen[i].tag), seen[i].result, out);
    }
    any |= count > 0;
  } while (count == seen.size());
  return any;
}

// One answer of the engine: what it means for the transfer.
void Store::advance(std::uint32_t which, std::int64_t result, Completions& out) {
  Transfer& transfer = transfers_[which];
  STRATA_ASSERT(at(transfer.slot).busy);
  STRATA_ASSERT(transfer.moved_bytes < transfer.bytes);
  const std::uint32_t left = transfer.bytes - transfer.moved_bytes;

  // 1. The sign.
  if (result < 0) {
    const int errno_value = static_cast<int>(-result);
    if (errno_value == EIO || is_transient(errno_value)) return retry(which, errno_value, out);
    const bool full = errno_value == ENOSPC || errno_value == EDQUOT;
    return finish(which, failure(transfer, full ? Fault::no_space : Fault::io, "", errno_value),
                  out);
  }

  // 2. The length. Direct I/O goes on at a sector: the rest of a broken one moves again.
  if (result > left) {
    return finish(which, failure(transfer, Fault::io, ": more bytes than were asked for", 0), out);
  }
  if (result == 0 && transfer.op == IoOp::read) {
    return finish(which, failure(transfer, Fault::short_read, ": the file ends here", 0), out);
  }
  const auto moved = static_cast<std::uint32_t>(
      result == left ? left : result - result % static_cast<std::int64_t>(kIoAlignment));
  if (moved == 0) return retry(which, 0, out);

  // 3. Bytes moved: go on from here, or look at the whole.
  transfer.moved_bytes += moved;
  transfer.shortages = transfer.errors = 0;
  (transfer.op == IoOp::read ? counters_.read_bytes : counters_.written_bytes) += moved;
  if (transfer.moved_bytes < transfer.bytes) {
    waiting_.push_back(which);
  } else if (transfer.op == IoOp::read) {
    unhashed_.push_back(which);
  } else {
    finish(which, std::nullopt, out);
  }
}

// Nothing moved. `errno_value` is 0 where the kernel gave no reason.
void Store::retry(std::uint32_t which, int errno_value, Completions& out) {
  Transfer& transfer = transfers_[which];
  const bool broken = errno_value == EIO;
  std::uint32_t& times = broken ? transfer.errors : transfer.shortages;
  if (times == (broken ? kErrorsMax : kShortagesMax)) {
    const std::string why = ": nothing moved in " + std::to_string(times) + " retries";
    return finish(which, failure(transfer, Fault::io, why, errno_value), out);
  }
  pausing_.push_back({which, options_.now() + (kFirstPauseNs << std::min(times, kDoublingsMax))});
  ++times;
  ++counters_.retries;
  counters_.errors += broken ? 1 : 0;
}

// Nobody rings when a pause is over: whoever takes turns looks often enough.
bool Store::end_pauses() {
  if (pausing_.empty()) return false;
  const std::int64_t now = options_.now();
  const auto over = std::partition(pausing_.begin(), pausing_.end(),
                                   [now](const Paused& p) { return p.end_ns > now; });
  for (auto pause = over; pause != pausing_.end(); ++pause) waiting_.push_back(pause->transfer);
  const bool any = over != pausing_.end();
  pausing_.erase(over, pausing_.end());
  return any;
}

void Store::finish(std::uint32_t which, std::optional<Error> error, Completions& out) {
  const Transfer& transfer = transfers_[which];
  Slot& slot = at(transfer.slot);
  STRATA_ASSERT(slot.busy);
  slot.busy = false;
  if (transfer.op == IoOp::write) slot.sealed = !error.has_value();
  out.push_back({.tag = transfer.tag, .error = std::move(error)});
  idle_.push_back(which);
}

std::optional<Error> Store::check_version(const Transfer& transfer) const {
  const Slot& slot = slots_[index(transfer.slot)];
  if (slot.sealed && slot.contents.version == transfer.version) return std::nullopt;
  const std::string expected = ": version " + std::to_string(transfer.version) + " was asked for, ";
  return failure(
      transfer, Fault::corrupt,
      expected + (slot.sealed ? "version " + std::to_string(slot.contents.version) + " is there"
                              : "nothing was ever written or the last write failed"),
      0);
}

std::optional<Error> Store::check_contents(const Transfer& transfer, std::uint64_t found) const {
  const Slot& slot = slots_[index(transfer.slot)];
  if (found == slot.contents.checksum) return std::nullopt;
  std::array<char, 96> text;
  std::snprintf(
      text.data(), text.size(), ": checksum %016llx was written, %016llx was read (version %llu)",
      static_cast<unsigned long long>(slot.contents.checksum),
      static_cast<unsigned long long>(found), static_cast<unsigned long long>(transfer.version));
  Error error = failure(transfer, Fault::corrupt, text.data(), 0);
  error.offset = offset_of(transfer.slot);
  return error;
}

// `why` goes on from "reading slot 7 failed"; empty where errno says it all.
Error Store::failure(const Transfer& transfer, Fault fault, const std::string& why,
                     int errno_value) const {
  Error error;
  error.fault = fault;
  error.what = (transfer.op == IoOp::read ? "reading slot " : "writing slot ") +
               std::to_string(index(transfer.slot)) + " failed" + why;
  error.errno_value = errno_value;
  if (!files_.empty()) error.path = files_[stripe_of(transfer.slot)]->place();
  error.offset = offset_of(transfer.slot) + transfer.moved_bytes;
  return error;
}

std::optional<Error> Store::register_memory(std::span<std::byte> memory) {
  STRATA_ASSERT(in_flight() == 0);
  return engine_->register_memory(memory);
}

bool Store::read(SlotId slot, std::byte* to, std::uint64_t version, std::uint64_t tag) {
  return start({.op = IoOp::read,
                .slot = slot,
                .buffer = to,
                .version = version,
                .tag = tag,
                .bytes = look(slot).contents.bytes});
}

bool Store::write(SlotId slot, std::span<const std::byte> bytes, std::uint64_t version,
                  std::uint64_t tag) {
  STRATA_ASSERT(fits_slot(bytes.size(), options_.slot_bytes));
  // The engine takes one kind of pointer for both directions; a write only reads through it.
  return start({.op = IoOp::write,
                .slot = slot,
                .buffer = const_cast<std::byte*>(bytes.data()),
                .version = version,
                .tag = tag,
                .bytes = static_cast<std::uint32_t>(bytes.size())});
}

}  // namespace strata
