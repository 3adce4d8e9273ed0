#include "engine/snapshots.hpp"

#include <algorithm>
#include <span>
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
                     const Gradients& gradients, SnapshotRoom& room)
    : base_(base),
      captures_(captures),
      updates_(updates),
      gradients_(gradients),
      room_(room),
      slots_(snapshot_slots(base.layout, base.owns)),
      pages_(base.layout.page_count),
      scales_(base.layout.page_bytes) {}

std::uint64_t Snapshots::slots_for(std::uint32_t keep) const {
  if (!frozen_changes_) return slots_.beside(keep);
  SnapshotSlots all = slots_;
  all.trained += std::exchange(all.frozen, 0);
  return all.beside(keep);
}

void Snapshots::want(std::uint32_t keep) {
  if (captures_.take_frozen_written() && any()) frozen_changes_ = true;
  room_.want(slots_for(keep));
  kept_ = keep;
}

void Snapshots::refuse_within_step() const {
  if (!gradients_.any() && !gradients_.any_used() && !gradients_.any_landing()) return;
  throw StrataError({.fault = Fault::busy,
                     .what = "a snapshot has no gradients, and some have landed since the last "
                             "step: take it after step(), before the next backward"});
}

std::uint64_t Snapshots::begin(std::uint32_t keep) {
  refuse_within_step();
  want(keep);
  const Asked asked{++last_, updates_.released()};
  if (captures_.active()) {
    next_.push_back(asked);
    captures_.set_next(asked.step);
  } else {
    start(asked);
  }
  base_.bell.ring();
  return asked.id;
}

void Snapshots::start(const Asked& asked) {
  captures_.begin(asked.step);
  now_id_ = asked.id;
  now_.step = asked.step;
  rest_ = static_cast<std::uint32_t>(base_.layout.chunks.size());
  next_chunk_ = 0;
}

void Snapshots::start_next() {
  if (!next_.empty()) {
    start(next_.front());
    next_.pop_front();
  }
  if (next_.empty()) captures_.set_next(std::nullopt);
  base_.gate.notify();
  base_.bell.ring();
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
  if (captures_.active() && id == now_id_) {
    fail_spoiled();
    if (now_id_ == id && captures_.active()) {
      give_up("it was given up", Fault::cancelled);
      abandon();
    }
  } else if (std::erase_if(next_, [id](const Asked& asked) { return asked.id == id; }) != 0) {
    if (next_.empty()) captures_.set_next(std::nullopt);
  }
  failed_.erase(id);
  const auto found = complete_.find(id);
  if (found != complete_.end()) {
    let_go(found->second);
    complete_.erase(found);
    rest_ = static_cast<std::uint32_t>(base_.layout.chunks.size());  // there may be slots again
  }
  base_.gate.notify();
  base_.bell.ring();
}

// With those behind it, which count on the same state.
void Snapshots::fail_spoiled() {
  if (!captures_.active() || captures_.spoiled().empty()) return;
  fail_all(std::string(captures_.spoiled()), Fault::cancelled);
}

void Snapshots::fail_all(const std::string& why, Fault fault) {
  while (captures_.active()) {
    give_up(why, fault);
    abandon();
  }
}

void Snapshots::let_go(const Snapshot& snapshot) {
  for (const SavedPage& saved : snapshot.pages) store().unhold(saved.slot);
  for (const SavedSlot& saved : snapshot.others) store().unhold(saved.slot);
  for (const SavedSlot& saved : snapshot.scales) {
    if (saved.slot != kNoSlot) store().unhold(saved.slot);
  }
}

std::uint64_t Snapshots::take_over(Snapshot snapshot) {
  complete_.emplace(++last_, std::move(snapshot));
  return last_;
}

bool Snapshots::turn(bool others_moved) {
  bool moved = reap();
  fail_spoiled();
  if (const auto why = room_.take_failure()) fail_all(*why, Fault::no_space);
  if (!captures_.active()) return leave_fetched() || moved;
  if (room_.missing()) {
    rest_ = static_cast<std::uint32_t>(base_.layout.chunks.size());  // others move meanwhile
    return moved;
  }
  // A copy: what is captured is asked for no longer.
  for (const std::uint32_t chunk : std::vector(captures_.asked())) {
    if (captures_.owed(chunk) && !doomed_) moved |= capture(chunk, kSavesAsked);
  }
  moved |= sweep(moved || others_moved);
  if (doomed_) {
    abandon();
    return true;
  }
  if (captures_.left() == 0 && save_scales() && saving_.empty()) {
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
    if (doomed_) return true;
    --rest_;
    const std::uint32_t chunk = next_chunk_++ % count;
    if (!captures_.owed(chunk) || !capture(chunk, kSavesAhead)) continue;
    ++taken;
    rest_ = count;
  }
  return rest_ > 0;
}

bool Snapshots::capture(std::uint32_t id, std::size_t saves_max) {
  if (!base_.owns.mine(id)) {
    captures_.done(id);
    return true;
  }
  if (updates_.behind(id, captures_.step())) return false;
  bool moved = false, all = true;
  for (const Role role : kSavedRoles) {
    const PageRun& run = base_.layout.chunks[id].run(role);
    for (std::uint32_t i = 0; i < run.count && !doomed_; ++i) {
      const Taken taken = take(PageId{index(run.first) + i}, saves_max);
      moved |= taken == Taken::begun;
      all &= taken == Taken::done;
    }
  }
  if (doomed_) return true;
  if (!all || !keep_scales(id)) return moved;
  const std::vector<SavedRun> runs = updates_.runs_of(id);
  now_.runs.insert(now_.runs.end(), runs.begin(), runs.end());
  captures_.done(id);
  base_.gate.notify();
  return true;
}

bool Snapshots::reap() {
  const std::vector<Completion> completions = base_.transfers.take(Requester::snapshots);
  for (const Completion& completion : completions) {
    const SlotId slot{static_cast<std::uint32_t>(completion.tag)};
    const auto saving = std::ranges::find(saving_, slot, &Saving::slot);
    STRATA_ASSERT(saving != saving_.end());
    const bool wanted = captures_.active() && saving->epoch == captures_.epoch();
    if (wanted && !completion.failed) {
      store().keep(slot);
      note(*saving);
    } else {
      store().release(slot);
    }
    if (saving->scales != nullptr) scales_.give_back(saving->scales);
    saving_.erase(saving);
  }
  return !completions.empty();
}

// It is where the snapshot has it.
void Snapshots::note(const Saving& saving) {
  if (saving.pin) return note(saving.pin.page(), saving.slot);
  pages_.note_bytes(saving.slot);
  now_.scales[saving.number] = {saving.slot, store().contents(saving.slot).value()};
}

void Snapshots::note(PageId page, SlotId slot) {
  pages_.note(page, slot, captures_.epoch());
  now_.pages.push_back({{slot, store().contents(slot).value()}, page});
}

// What was asked for and is not needed any more: else its frame would stay promised to us.
bool Snapshots::leave_fetched() {
  if (fetching_ == kNoPage || !base_.cache.open(fetching_, Intent::read)) return false;
  fetching_ = kNoPage;
  return true;
}

// See Note [How a page is captured].
Snapshots::Taken Snapshots::take(PageId page, std::size_t saves_max) {
  if (pages_.has(page, captures_.epoch())) return Taken::done;
  const PageTable& table = base_.table;
  const std::uint64_t newest = table.newest(page);
  if (newest == 0) return Taken::done;
  const bool in_slot = table.tier(page) == Tier::ssd;
  std::optional<SlotId> slot = pages_.unchanged(page, newest, store());
  if (!slot && in_slot && table.is_current(page, Tier::ssd)) {
    slot = table.at(page, Tier::ssd).slot();
  }
  if (!slot && in_slot) {
    base_.cache.write_soon(page);
    return Taken::not_yet;
  }
  if (!slot) return save(page, saves_max);
  if (!store().held(*slot) && !find_room()) return Taken::not_yet;
  if (!store().hold(*slot)) {
    find_room();
    return Taken::not_yet;
  }
  note(page, *slot);
  return Taken::done;
}

// A slot for one page more. False: not yet, or there will be none, and the snapshot is given up.
bool Snapshots::find_room() {
  if (has_room()) return true;
  if (complete_.size() <= kept_) give_up("its slots are used up", Fault::no_space);
  return false;
}

// Slots that pages may yet come to rest in are not a snapshot's.
bool Snapshots::has_room() const {
  const std::size_t acquired = store().acquired_slots() - saving_.size();
  const std::size_t promised =
      base_.claims.slots - std::min<std::size_t>(base_.claims.slots, acquired);
  return store().spare_slots() > promised;
}

Snapshots::Taken Snapshots::save(PageId page, std::size_t saves_max) {
  const auto same = [page](const Saving& saving) {
    return saving.pin && saving.pin.page() == page;
  };
  if (std::ranges::any_of(saving_, same)) return Taken::not_yet;
  if (saving_.size() >= saves_max || base_.transfers.full()) return Taken::not_yet;
  // Of what passes through staging, one page at a time: see page_cache.hpp.
  const bool staged = base_.table.tier(page) != Tier::host;
  const auto passes = [this](const Saving& saving) {
    return saving.pin && base_.table.tier(saving.pin.page()) != Tier::host;
  };
  if (staged && fetching_ != page && fetching_ != kNoPage) return Taken::not_yet;
  if (staged && std::ranges::any_of(saving_, passes)) return Taken::not_yet;
  if (!find_room()) return Taken::not_yet;
  Pin pin = base_.cache.open(page, Intent::read);
  if (!pin) {
    if (staged) fetching_ = page;
    return Taken::not_yet;
  }
  if (fetching_ == page) fetching_ = kNoPage;
  const SlotId slot = store().acquire().value();
  base_.transfers.save(page, slot, Requester::snapshots);
  saving_.push_back({.pin = std::move(pin), .slot = slot, .epoch = captures_.epoch()});
  return Taken::begun;
}

// Returns false if not yet.
bool Snapshots::keep_scales(std::uint32_t id) {
  const std::size_t bytes = base_.layout.scale_bytes(base_.layout.chunks[id]);
  if (bytes == 0) return true;
  if (!scales_.fits(bytes) && !save_scales()) return false;
  const auto at = scales_.add({base_.scales + base_.owns.scales[id], bytes});
  if (!at) return false;
  if (*at == 0) now_.scales.emplace_back();
  const auto page = static_cast<std::uint32_t>(now_.scales.size() - 1);
  now_.scales_at.push_back({.chunk = id, .page = page, .byte = *at});
  return true;
}

// What was gathered goes to its slot. Returns false if not yet.
bool Snapshots::save_scales() {
  if (scales_.empty()) return true;
  if (saving_.size() >= kSavesAsked || base_.transfers.full() || !find_room()) return false;
  const Chunk& last = base_.layout.chunks[now_.scales_at.back().chunk];
  const std::span<const std::byte> filled = scales_.hand_over();
  const SlotId slot = store().acquire().value();
  base_.transfers.save(filled, slot, base_.layout.segments[last.segment].unit,
                       Requester::snapshots);
  saving_.push_back({.slot = slot,
                     .epoch = captures_.epoch(),
                     .scales = filled.data(),
                     .number = static_cast<std::uint32_t>(now_.scales.size() - 1)});
  return true;
}

void Snapshots::finish() {
  captures_.end();
  complete_.emplace(now_id_, std::exchange(now_, {}));
  start_next();
}

// There will be none: the turn ends it.
void Snapshots::give_up(const std::string& why, Fault fault) {
  if (doomed_) return;
  doomed_ = Error{.fault = fault};
  doomed_->what = "the snapshot behind step " + std::to_string(captures_.step()) +
                  " could not be taken: " + why;
}

void Snapshots::abandon() {
  captures_.end();
  let_go(std::exchange(now_, {}));
  scales_.drop();
  failed_.emplace(now_id_, std::move(*std::exchange(doomed_, std::nullopt)));
  start_next();
}

}  // namespace strata
