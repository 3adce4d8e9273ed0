#include "engine/updates.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/residence.hpp"
#include "memory/check.hpp"

namespace strata {

Updates::Updates(Parts parts, std::uint32_t frames_max)
    : layout_(parts.layout),
      owns_(parts.owns),
      config_(parts.config),
      steps_of_empty_(parts.config.params.size(), 0),
      gate_(parts.gate),
      bell_(parts.bell),
      captures_(parts.captures),
      table_(parts.table),
      cache_(parts.cache),
      device_(parts.device),
      prefetcher_(parts.prefetcher),
      timeline_(parts.timeline),
      gradients_(parts.gradients),
      scales_(parts.scales),
      worker_is_done_(std::move(parts.worker_is_done)),
      shares_processors_(parts.shares_processors && config_.update == UpdateMode::on_step),
      frames_max_(frames_max),
      chunks_(layout_.chunks.size()),
      slots_(update_slots(parts.workers->thread_count())),
      workers_(std::move(parts.workers)) {
  for (const Segment& segment : layout_.segments) {
    if (!segment.trainable) continue;
    for (const std::uint32_t param : segment.params) {
      for (const Piece& piece : layout_.pieces(param)) {
        chunks_[piece.chunk].pieces.push_back({.param = param,
                                               .in_chunk = piece.in_chunk,
                                               .in_param = piece.in_param,
                                               .count = piece.count});
      }
    }
  }
  staleness_.seen.assign(layout_.units.size(),
                         std::vector<std::uint64_t>(config_.max_staleness + std::size_t{1}));
  staleness_.merged.assign(layout_.units.size(), 0);
  exact_.assign(layout_.units.size(), false);
  exact_next_ = exact_;
  set_staging(frames_max);
}

void Updates::set_staging(std::uint32_t frames_max) {
  STRATA_ASSERT(!busy());
  frames_max_ = frames_max;
  for (ChunkState& chunk : chunks_) chunk.staging_need = 0;
  for (std::uint32_t page = 0; page < layout_.page_count; ++page) {
    if (table_.tier(PageId{page}) == Tier::ssd) ++chunks_[layout_.chunk_of[page]].staging_need;
  }
  staged_ = std::ranges::any_of(
      chunks_, [](const ChunkState& c) { return !c.pieces.empty() && c.staging_need != 0; });
}

bool Updates::on_device(std::uint32_t chunk) const {
  return table_.tier(layout_.chunks[chunk].run(Role::param).first) == Tier::device;
}

// Steps that the chunk's readers may lag behind.
std::int64_t Updates::staleness_of(std::uint32_t chunk) const {
  const UnitId unit = layout_.segments[layout_.chunks[chunk].segment].unit;
  return on_device(chunk) || exact_[index(unit)] ? 0 : config_.max_staleness;
}

bool Updates::may_land(std::uint32_t chunk, std::int64_t step) const {
  // See captures.hpp, Note [Snapshots and updates].
  const bool queued = chunks_[chunk].queued;
  if (!captures_.may_land(chunk, queued ? chunks_[chunk].oldest : 0)) return false;
  if (gradients_ == nullptr) return settled(chunk);
  return staleness_of(chunk) != 0 || !chunks_[chunk].queued || chunks_[chunk].oldest >= step;
}

Updates::Deferral::Deferral(Updates& updates, std::uint32_t chunk)
    : updates_(updates), chunk_(chunk) {
  STRATA_ASSERT(!updates.is_open(chunk));
  ++updates.chunks_[chunk].deferrals;
}

Updates::Deferral::~Deferral() {
  ChunkState& chunk = updates_.chunks_[chunk_];
  STRATA_ASSERT(chunk.deferrals > 0 && !chunk.open);
  --chunk.deferrals;
  if (chunk.queued) updates_.bell_.ring();
}

void Updates::note_landed(std::uint32_t chunk, std::uint32_t param,
                          const std::shared_ptr<const std::byte>& lent) {
  for (ChunkPiece& piece : chunks_[chunk].pieces) {
    if (piece.param != param) continue;
    STRATA_ASSERT(!lent || !piece.waiting);
    piece.landed = true;
    piece.lent = lent;
  }
}

std::shared_ptr<const std::byte> Updates::lent_gradient(std::uint32_t chunk,
                                                        std::uint32_t param) const {
  for (const ChunkPiece& piece : chunks_[chunk].pieces) {
    if (piece.param == param) return piece.lent;
  }
  return nullptr;
}

bool Updates::holds_gradient(std::uint32_t chunk, std::uint32_t param) const {
  const auto& pieces = chunks_[chunk].pieces;
  return std::any_of(pieces.begin(), pieces.end(), [param](const ChunkPiece& piece) {
    return piece.param == param && piece.has_gradient();
  });
}

void Updates::forget_landed(std::uint32_t chunk) {
  STRATA_ASSERT(!(chunks_[chunk].queued && is_held(chunk)));
  for (ChunkPiece& piece : chunks_[chunk].pieces) {
    piece.older = false;
    if (std::exchange(piece.landed, false)) piece.lent.reset();
  }
  if (gradients_ != nullptr && !chunks_[chunk].queued) gradients_->drop(chunk);
}

bool Updates::forget_landed(std::uint32_t chunk, std::uint32_t param) {
  STRATA_ASSERT(gradients_ == nullptr);
  bool left = false;
  for (ChunkPiece& piece : chunks_[chunk].pieces) {
    if (piece.param == param && std::exchange(piece.landed, false)) piece.lent.reset();
    left |= piece.landed;
  }
  return !left;
}

void Updates::forget_merged() {
  STRATA_ASSERT(open_ == 0);
  for (const std::uint32_t id : std::exchange(queue_, {})) {
    ChunkState& chunk = chunks_[id];
    for (ChunkPiece& piece : chunk.pieces) {
      piece.landed = piece.older = false;
      piece.lent.reset();
      if (std::exchange(piece.waiting, false)) released_groups_.drop(piece.release);
    }
    chunk.queued = false;
    gradients_->drop(id);
    block_or_not(id);
  }
}

bool Updates::is_held(std::uint32_t chunk) const {
  if (gradients_ == nullptr) return false;
  const auto& pieces = chunks_[chunk].pieces;
  return gradients_->is_open(chunk) ||
         std::any_of(pieces.begin(), pieces.end(), [](const ChunkPiece& p) { return p.landed; });
}

// See Note [Hyperparameters].
void Updates::release_piece(ChunkPiece& piece, const Release& release, ReleaseId kept) {
  const ParamSpec& spec = config_.params[piece.param];
  const std::uint32_t group = spec.group;
  if (piece.waiting) {
    piece.step -= counts_as_step(released_groups_.of(piece.release, group)) ? 1 : 0;
    released_groups_.drop(piece.release);
  }
  piece.step += counts_as_step(released_groups_.of(kept, group)) ? 1 : 0;
  released_groups_.hold(kept);
  piece.release = kept;
  piece.scale = release.scale_of[index(spec.unit)];
  piece.scaling = release.scalings[piece.param];
  piece.landed = piece.older = false;
  piece.waiting = true;
}

void Updates::release(const Release& release) {
  STRATA_ASSERT(release.step >= released_ && release.step > ended_);
  released_ = release.step;
  if (release.ends_step) ended_ = release.step;
  exact_ = exact_next_;
  const ReleaseId kept = released_groups_.keep(release.groups);
  for (const UnitId unit : release.units) {
    for (const std::uint32_t id : layout_.units[index(unit)].chunks) {
      ChunkState& chunk = chunks_[id];
      const auto landed = [](const ChunkPiece& piece) { return piece.landed; };
      if (captures_.needs_runs(id) && std::ranges::any_of(chunk.pieces, landed)) {
        captures_.keep_runs(id, runs_of(id, true));
      }
      bool touched = false;
      bool merges = false;
      for (ChunkPiece& piece : chunk.pieces) {
        if (!piece.landed) continue;
        touched = true;
        merges |= piece.waiting;
        release_piece(piece, release, kept);
      }
      if (!touched) continue;
      staleness_.merged[index(unit)] += merges;
      if (chunk.queued) continue;
      chunk.queued = true;
      chunk.oldest = release.step;
      queue_.push_back(id);
    }
  }
  released_groups_.drop(kept);
  std::vector<std::uint32_t> rank(chunks_.size());  // by chunk: in the order of the next use
  std::uint32_t next = 0;
  for (const UnitId unit : prefetcher_.order()) {
    for (const std::uint32_t id : layout_.units[index(unit)].chunks) rank[id] = next++;
  }
  std::ranges::sort(queue_, {},
                    [&](std::uint32_t id) { return std::pair(chunks_[id].oldest, rank[id]); });
  for (std::uint32_t id = 0; id < chunks_.size(); ++id) block_or_not(id);
}

// See Note [Versions].
void Updates::block_or_not(std::uint32_t id) {
  const PageId page = layout_.chunks[id].run(Role::param).first;
  if (behind(id, released_ - staleness_of(id)))
    prefetcher_.block(page);
  else
    prefetcher_.unblock(page);
}

void Updates::count_forward(UnitId unit, std::int64_t remote) {
  std::int64_t oldest = released_ + 1;
  for (const std::uint32_t id : layout_.units[index(unit)].chunks) {
    const ChunkState& chunk = chunks_[id];
    if (chunk.queued) oldest = std::min(oldest, chunk.oldest);
    if (chunk.open) oldest = std::min(oldest, chunk.oldest_open);
  }
  const auto lag = static_cast<std::size_t>(std::max(released_ + 1 - oldest, remote));
  STRATA_ASSERT(lag <= config_.max_staleness);
  ++staleness_.seen[index(unit)][lag];
}

bool Updates::settled(std::uint32_t chunk) const {
  if (chunks_[chunk].queued || chunks_[chunk].open) return false;
  return std::none_of(spent_.begin(), spent_.end(),
                      [&](PageId page) { return layout_.chunk_of[index(page)] == chunk; });
}

std::int64_t Updates::version_of(std::uint32_t id) const {
  const ChunkState& chunk = chunks_[id];
  std::int64_t version = ended_;
  if (chunk.queued) version = std::min(version, chunk.oldest - 1);
  if (chunk.open) version = std::min(version, chunk.oldest_open - 1);
  return version;
}

bool Updates::is_waiting(std::uint32_t chunk, std::uint32_t param) const {
  return std::ranges::any_of(chunks_[chunk].pieces, [param](const ChunkPiece& piece) {
    return piece.param == param && piece.waiting;
  });
}

bool Updates::behind(std::uint32_t id, std::int64_t step) const {
  const ChunkState& chunk = chunks_[id];
  return (chunk.queued && chunk.oldest <= step) || (chunk.open && chunk.oldest_open <= step);
}

bool Updates::waits_for_release() const {
  return open_ == 0 && spent_.empty() && !queue_.empty() &&
         std::all_of(queue_.begin(), queue_.end(), [this](std::uint32_t c) { return is_held(c); });
}

void Updates::refuse_if_merged() const {
  if (!waits_for_release()) return;
  refuse(
      "gradients were added to those of an earlier step whose update was still to come, and wait "
      "for step(): call it first");
}

void Updates::wait_settled(Lock& lock, std::uint32_t chunk) {
  gate_.wait(lock, [&] {
    if (merged(chunk)) refuse_if_merged();
    return settled(chunk);
  });
}

void Updates::wait_writable(Lock& lock, std::uint32_t chunk) {
  gate_.wait(lock, [&] {
    if (merged(chunk)) refuse_if_merged();
    return settled(chunk) && captures_.may_change(chunk);
  });
}

void Updates::wait_idle(Lock& lock) {
  Waiting waiting(timeline_, kNoUnit, true);
  gate_.wait(lock, [&] {
    if (!busy()) return true;
    waiting.missing(Cause::update);
    return false;
  });
  waiting.over();
}

void Updates::wait_begun(Lock& lock) {
  gate_.wait(lock, [&] { return !captures_.has_next(); }, {"the last snapshot to be captured"});
}

void Updates::wait_gradients_captured(Lock& lock) {
  gate_.wait(lock, [&] { return !captures_.has_next() && !captures_.takes_gradients(); },
             {"a snapshot of gradients"});
}

void Updates::wait_done(Lock& lock) {
  gate_.wait(lock, [&] {
    refuse_if_merged();
    return !busy();
  });
}

bool Updates::turn() {
  bool moved = false;
  const bool may_collect = !worker_is_done_ || worker_is_done_();
  for (UpdateDone done; may_collect && workers_->collect(done);) {
    Slot& slot = slots_[done.tag];
    STRATA_ASSERT(slot.stage == Stage::updating);
    const UnitId unit = layout_.segments[layout_.chunks[slot.chunk].segment].unit;
    if (!done.error.empty()) fail(unit, done.error);
    slot.stage = Stage::publishing;
    timeline_.add({.track = Track::update,
                   .lane = done.worker,
                   .unit = unit,
                   .begin_ns = done.begin_ns,
                   .end_ns = done.end_ns,
                   .bytes = slot.pages.size() * layout_.page_bytes});
    moved = true;
  }
  for (Slot& slot : slots_) {
    if (slot.stage == Stage::publishing) moved |= publish(slot);
  }
  moved |= std::erase_if(spent_, [this](PageId page) { return cache_.discard(page); }) != 0;
  moved |= admit();
  for (Slot& slot : slots_) {
    if (slot.stage == Stage::loading) moved |= load(slot);
  }
  return moved;
}

void Updates::fail(UnitId unit, const std::string& what) {
  if (failure_) return;
  failure_ = Error{.fault = Fault::cancelled,
                   .what = "an update failed, and its parameters are half old, half new: " + what,
                   .unit = config_.units[index(unit)]};
}

std::int64_t Updates::step_of(std::uint32_t param) const {
  if (layout_.numel[param] == 0) return steps_of_empty_[param];
  std::int64_t most = 0;
  for (const Piece& piece : layout_.pieces(param)) {
    for (const ChunkPiece& mine : chunks_[piece.chunk].pieces) {
      if (mine.param == param) most = std::max(most, mine.step);
    }
  }
  return most;
}

void Updates::set_step(std::uint32_t param, std::int64_t step) {
  if (layout_.numel[param] == 0) steps_of_empty_[param] = step;
  for (const Piece& piece : layout_.pieces(param)) {
    for (ChunkPiece& mine : chunks_[piece.chunk].pieces) {
      if (mine.param == param) mine.step = step;
    }
  }
}

}  // namespace strata
