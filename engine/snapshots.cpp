#include "engine/snapshots.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

// Pages in flight: as many as keep a disk at work beside a step, and those that somebody waits for.
constexpr std::size_t kSavesAhead = 2;
constexpr std::size_t kSavesAsked = 8;
// Of one turn.
constexpr std::uint32_t kChunksLookedAt = 64;
constexpr std::uint32_t kChunksTaken = 8;

}  // namespace

Snapshots::Snapshots(Foundation& base, Captures& captures, Updates& updates,
                     const Gradients& gradients)
    : base_(base), captures_(captures), updates_(updates), gradients_(gradients) {}

std::uint64_t Snapshots::slots_for(std::uint32_t keep) const {
  return base_.layout.snapshot_slots(keep);
}

std::uint64_t Snapshots::begin() {
  Error error{.fault = Fault::busy};
  if (base_.tiers.store(Tier::ssd) == nullptr) {
    refuse("a snapshot is kept on the SSD: give ssd= and ssd_path=, or use save()");
  }
  if (captures_.active()) error.what = "the last snapshot is still being captured";
  if (gradients_.any() || gradients_.any_used()) {
    error.what = "gradients have landed since the last step(): a snapshot is taken behind step()";
  }
  if (!error.what.empty()) throw StrataError(std::move(error));
  captures_.begin(updates_.released());
  taken_.resize(base_.layout.page_count, 0);
  slot_of_.resize(base_.layout.page_count, kNoSlot);
  now_.step = captures_.step();
  now_.steps.assign(base_.config.params.size(), 0);
  now_.scales.resize(base_.layout.scale_bytes);
  rest_ = static_cast<std::uint32_t>(base_.layout.chunks.size());
  next_ = 0;
  base_.bell.ring();
  return ++last_;
}

bool Snapshots::complete(std::uint64_t id) const {
  if (const auto failed = failed_.find(id); failed != failed_.end()) {
    throw StrataError(failed->second);
  }
  return complete_.contains(id);
}

void Snapshots::wait(Lock& lock, std::uint64_t id) {
  if (id == 0 || id > last_) refuse("there is no snapshot " + std::to_string(id));
  base_.gate.wait(lock, [&] { return complete(id); }, {"a snapshot"});
}

const Snapshot& Snapshots::of(std::uint64_t id) const {
  if (!complete(id)) refuse("there is no complete snapshot " + std::to_string(id));
  return complete_.at(id);
}

void Snapshots::drop(std::uint64_t id) {
  failed_.erase(id);
  if (captures_.active() && id == last_) {
    abandon("it was given up", Fault::cancelled);
    failed_.erase(id);
  }
  const auto found = complete_.find(id);
  if (found == complete_.end()) return;
  for (const SavedPage& saved : found->second.pages) store().unhold(saved.slot);
  complete_.erase(found);
  base_.bell.ring();
}

std::uint64_t Snapshots::take_over(Snapshot snapshot) {
  complete_.emplace(++last_, std::move(snapshot));
  return last_;
}

void Snapshots::note_restored(PageId page, SlotId slot) {
  slot_of_.resize(base_.layout.page_count, kNoSlot);
  slot_of_[index(page)] = slot;
}

bool Snapshots::turn(bool others_moved) {
  bool moved = reap();
  if (captures_.active() && !captures_.spoiled().empty()) {
    abandon(captures_.spoiled(), Fault::cancelled);
  }
  if (!captures_.active()) return leave_fetched() || moved;
  // A copy: what is captured is asked for no longer.
  for (const std::uint32_t chunk : std::vector(captures_.asked())) {
    if (captures_.owed(chunk)) moved |= capture(chunk, kSavesAsked);
  }
  moved |= sweep(moved || others_moved);
  if (captures_.active() && captures_.left() == 0) {
    finish();
    moved = true;
  }
  return moved;
}

// Looks at some chunks that are left. True: something moved, or not all have been looked at since
// something did.
bool Snapshots::sweep(bool restart) {
  const auto count = static_cast<std::uint32_t>(base_.layout.chunks.size());
  if (restart) rest_ = count;
  std::uint32_t taken = 0;
  for (std::uint32_t i = 0; i < kChunksLookedAt && rest_ > 0 && taken < kChunksTaken; ++i) {
    --rest_;
    const std::uint32_t chunk = next_++ % count;
    if (!captures_.owed(chunk) || !capture(chunk, kSavesAhead)) continue;
    ++taken;
    rest_ = count;
  }
  return captures_.active() && rest_ > 0;
}

bool Snapshots::capture(std::uint32_t id, std::size_t saves_max) {
  if (updates_.behind(id, captures_.step())) return false;
  bool moved = false, all = true;
  for (const Role role : kSavedRoles) {
    const PageRun& run = base_.layout.chunks[id].run(role);
    for (std::uint32_t i = 0; i < run.count; ++i) {
      const Taken taken = take(PageId{index(run.first) + i}, saves_max);
      if (!captures_.active()) return true;  // there is no room
      moved |= taken == Taken::begun;
      all &= taken == Taken::done;
    }
  }
  if (all) finish_chunk(id);
  return moved || all;
}

// See Note [How a page is captured].
Snapshots::Taken Snapshots::take(PageId page, std::size_t saves_max) {
  if (taken_[index(page)] == captures_.epoch()) return Taken::done;
  const PageTable& table = base_.table;
  const std::uint64_t newest = table.newest(page);
  if (newest == 0) return Taken::done;
  const bool in_slot = table.tier(page) == Tier::ssd;
  std::optional<SlotId> slot = unchanged(page);
  if (!slot && in_slot && table.is_current(page, Tier::ssd)) {
    slot = table.at(page, Tier::ssd).slot();
  }
  if (!slot && in_slot) {
    base_.cache.write_soon(page);
    return Taken::not_yet;
  }
  if (!slot) return save(page, saves_max);
  const bool held = store().held(*slot) || has_room();
  if (!held || !store().hold(*slot)) {
    abandon("its slots are used up", Fault::no_space);
    return Taken::not_yet;
  }
  note(page, *slot);
  return Taken::done;
}

// The slot of an older snapshot that has the page as it is.
std::optional<SlotId> Snapshots::unchanged(PageId page) const {
  const SlotId slot = slot_of_[index(page)];
  if (slot == kNoSlot || !store().held(slot)) return std::nullopt;
  const auto contents = store().contents(slot);
  if (!contents || contents->version != base_.table.newest(page)) return std::nullopt;
  return slot;
}

// Slots that pages may yet come to rest in are not a snapshot's.
bool Snapshots::has_room() const {
  const std::size_t acquired = store().acquired_slots() - saving_.size();
  const std::size_t promised =
      base_.claims.slots - std::min<std::size_t>(base_.claims.slots, acquired);
  return store().spare_slots() > promised;
}

Snapshots::Taken Snapshots::save(PageId page, std::size_t saves_max) {
  const auto same = [page](const Saving& saving) { return saving.pin.page() == page; };
  if (std::ranges::any_of(saving_, same)) return Taken::not_yet;
  if (saving_.size() >= saves_max || base_.transfers.full()) return Taken::not_yet;
  // Of what passes through staging, one page at a time: see page_cache.hpp.
  const bool staged = base_.table.tier(page) != Tier::host;
  const auto passes = [this](const Saving& saving) {
    return base_.table.tier(saving.pin.page()) != Tier::host;
  };
  if (staged && fetching_ != page && fetching_ != kNoPage) return Taken::not_yet;
  if (staged && std::ranges::any_of(saving_, passes)) return Taken::not_yet;
  if (!has_room()) {
    abandon("its slots are used up", Fault::no_space);
    return Taken::not_yet;
  }
  Pin pin = base_.cache.open(page, Intent::read);
  if (!pin) {
    if (staged) fetching_ = page;
    return Taken::not_yet;
  }
  if (fetching_ == page) fetching_ = kNoPage;
  const SlotId slot = store().acquire().value();
  base_.transfers.save(page, slot, Requester::snapshots);
  saving_.push_back({std::move(pin), slot, captures_.epoch()});
  return Taken::begun;
}

void Snapshots::note(PageId page, SlotId slot) {
  taken_[index(page)] = captures_.epoch();
  slot_of_[index(page)] = slot;
  now_.pages.push_back({page, slot, store().contents(slot).value()});
}

bool Snapshots::reap() {
  const std::vector<Completion> completions = base_.transfers.take(Requester::snapshots);
  for (const Completion& completion : completions) {
    const auto saving = std::ranges::find_if(
        saving_, [&](const Saving& s) { return s.pin.page() == completion.page; });
    STRATA_ASSERT(saving != saving_.end());
    const bool wanted = captures_.active() && saving->epoch == captures_.epoch();
    if (wanted && !completion.failed) {
      store().keep(saving->slot);
      note(completion.page, saving->slot);
    } else {
      store().release(saving->slot);
    }
    saving_.erase(saving);
  }
  return !completions.empty();
}

// What was asked for and is not needed any more: else its frame would stay promised to us.
bool Snapshots::leave_fetched() {
  if (fetching_ == kNoPage || !base_.cache.open(fetching_, Intent::read)) return false;
  fetching_ = kNoPage;
  return true;
}

void Snapshots::finish_chunk(std::uint32_t id) {
  updates_.note_steps(id, now_.steps);
  if (base_.layout.scale_bytes != 0) {
    const auto& chunks = base_.layout.chunks;
    const std::size_t begin = chunks[id].scales;
    const std::size_t end =
        id + 1 < chunks.size() ? chunks[id + 1].scales : base_.layout.scale_bytes;
    std::copy(base_.scales + begin, base_.scales + end, now_.scales.data() + begin);
  }
  captures_.done(id);
  base_.gate.notify();
}

void Snapshots::finish() {
  captures_.end();
  std::ranges::sort(now_.pages, {}, &SavedPage::page);
  complete_.emplace(last_, std::exchange(now_, {}));
  base_.gate.notify();
}

void Snapshots::abandon(const std::string& why, Fault fault) {
  captures_.end();
  for (const SavedPage& saved : std::exchange(now_, {}).pages) store().unhold(saved.slot);
  Error error{.fault = fault};
  error.what = "the snapshot behind step " + std::to_string(captures_.step()) +
               " could not be taken: " + why;
  failed_.emplace(last_, std::move(error));
  base_.gate.notify();
  base_.bell.ring();
}

}  // namespace strata
