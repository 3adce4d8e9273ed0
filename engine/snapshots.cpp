#include "engine/snapshots.hpp"

#include <algorithm>
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

Snapshots::Snapshots(Foundation& base, Captures& captures, Updates& updates, Gradients& gradients,
                     SnapshotRoom& room)
    : base_(base),
      captures_(captures),
      updates_(updates),
      gradients_(gradients),
      room_(room),
      slots_(snapshot_slots(base.layout, base.owns)),
      taken_(base.layout.page_count, 0),
      slot_of_(base.layout.page_count, kNoSlot) {}

std::uint64_t Snapshots::slots_for(std::uint32_t keep, bool gradients) const {
  if (!frozen_changes_) return slots_.beside(keep, gradients);
  SnapshotSlots all = slots_;
  all.trained += std::exchange(all.frozen, 0);
  return all.beside(keep, gradients);
}

void Snapshots::want(std::uint32_t keep) {
  if (captures_.take_frozen_written() && any()) frozen_changes_ = true;
  room_.want(slots_for(keep, gradients_.any() || gradients_rest(base_.config)));
  kept_ = keep;
}

std::uint64_t Snapshots::begin(std::uint32_t keep) {
  Error error{.fault = Fault::busy};
  const bool in_backward = base_.config.update == UpdateMode::in_backward;
  if (gradients_.any_landing()) {
    error.what = "a gradient is landing on another thread: take a snapshot when its backward ended";
  } else if (gradients_.any_used() || (in_backward && gradients_.any())) {
    error.what =
        "updates of this step begin as its gradients land, so parameters are of two steps: call "
        "step() first, and take the snapshot behind it";
  } else if (!gradients_.looked()) {
    error.what =
        "gradients of ranks where updates may lag are not kept: take the snapshot behind step()";
  }
  if (!error.what.empty()) throw StrataError(std::move(error));
  want(keep);
  const Asked asked{++last_, {updates_.released(), gradients_.any()}};
  if (captures_.active()) {
    next_.push_back(asked);
    const bool gradients =
        std::ranges::any_of(next_, [](const Asked& a) { return a.subject.gradients; });
    captures_.set_next(Captures::Subject{asked.subject.step, gradients});
  } else {
    start(asked);
  }
  base_.bell.ring();
  return asked.id;
}

void Snapshots::start(const Asked& asked) {
  captures_.begin(asked.subject);
  now_id_ = asked.id;
  now_.step = asked.subject.step;
  now_.has_gradients = asked.subject.gradients;
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
  for (const SavedFrame& saved : snapshot.frames) store().unhold(saved.slot);
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
  if (captures_.left() == 0 && flush_scales() && saving_.empty()) {
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
  if (!updates_.ready_for(id, captures_)) return false;
  bool moved = false, all = true;
  const auto add = [&](Taken taken) {
    moved |= taken == Taken::begun;
    all &= taken == Taken::done;
  };
  for (const Role role : kSavedRoles) {
    const PageRun& run = base_.layout.chunks[id].run(role);
    for (std::uint32_t i = 0; i < run.count && !doomed_; ++i) {
      add(take(PageId{index(run.first) + i}, saves_max));
    }
  }
  if (!captures_.takes_gradients() && !all) return moved || doomed_.has_value();
  const Runs runs = runs_of(id);
  const std::size_t per_page = base_.layout.elements_per_page(base_.layout.chunks[id], Role::grad);
  for (std::uint32_t n = 0; n < base_.layout.grad_frames(base_.layout.chunks[id]); ++n) {
    const auto lies_there = [&](const SavedRun& run) {
      return run.gradient != HeldGradient::none && run.in_chunk < (n + 1) * per_page &&
             run.in_chunk + run.count > n * per_page;
    };
    if (!doomed_ && std::ranges::any_of(runs, lies_there))
      add(take_gradient(id, runs, n, saves_max));
  }
  if (doomed_) return true;
  if (!all || !finish_chunk(id, runs)) return moved;
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
    if (saving->scratch != nullptr) saving->scratch->taken = false;
    saving_.erase(saving);
  }
  return !completions.empty();
}

// It is where the snapshot has it.
void Snapshots::note(const Saving& saving) {
  if (saving.pin) return note(saving.pin.page(), saving.slot);
  note_place(kNoPage, saving.slot);
  SavedFrame frame = saving.frame.value();
  frame.slot = saving.slot;
  frame.contents = store().contents(saving.slot).value();
  if (saving.scales) {
    now_.scales[frame.number] = frame;
    return;
  }
  now_.frames.push_back(frame);
  frames_[{frame.chunk, frame.number}] = Taken::done;
}

// What was asked for and is not needed any more: else its frame would stay promised to us.
bool Snapshots::leave_fetched() {
  if (fetching_ == kNoPage || !base_.cache.open(fetching_, Intent::read)) return false;
  fetching_ = kNoPage;
  return true;
}

// False: not yet.
bool Snapshots::finish_chunk(std::uint32_t id, const Runs& runs) {
  for (const SavedRun& run : runs) {
    const std::uint32_t group = base_.config.params[run.param].group;
    if (run.gradient != HeldGradient::waiting) continue;
    if (base_.config.groups[group].rule != Rule::foreign) continue;
    give_up("a gradient of " + base_.config.params[run.param].name +
                " waits for an update by a Python class: call step() first",
            Fault::busy);
    return true;
  }
  if (!keep_scales(id)) return false;
  for (const SavedRun& run : runs) {
    if (run.gradient != HeldGradient::none) gradients_.note(run.param);
  }
  now_.runs.insert(now_.runs.end(), runs.begin(), runs.end());
  frames_.erase(frames_.lower_bound({id, 0}), frames_.lower_bound({id + 1, 0}));
  captures_.done(id);
  base_.gate.notify();
  return true;
}

void Snapshots::finish() {
  now_.gradients = captures_.gradients();
  now_.hypers = captures_.hypers();
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
  frames_.clear();
  if (scales_ != nullptr) std::exchange(scales_, nullptr)->taken = false;
  for (Scratch& scratch : scratch_) scratch.gathers.reset();
  failed_.emplace(now_id_, std::move(*std::exchange(doomed_, std::nullopt)));
  start_next();
}

}  // namespace strata
