#include "engine/updates.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/residence.hpp"
#include "memory/check.hpp"

namespace strata {

Updates::Updates(UpdateSlots::Parts parts, Gate& gate, Doorbell& bell, Captures& captures,
                 std::uint32_t frames_max, bool shares_processors)
    : layout_(parts.layout),
      config_(parts.config),
      gate_(gate),
      bell_(bell),
      captures_(captures),
      table_(parts.table),
      prefetcher_(parts.prefetcher),
      timeline_(parts.timeline),
      gradients_(parts.gradients),
      shares_processors_(shares_processors && config_.update == UpdateMode::on_step),
      pieces_(config_, layout_),
      chunks_(layout_.chunks.size()),
      exact_(layout_.units.size(), false),
      exact_next_(exact_),
      slots_(std::move(parts), pieces_) {
  staleness_.seen.assign(layout_.units.size(),
                         std::vector<std::uint64_t>(config_.max_staleness + std::size_t{1}));
  staleness_.merged.assign(layout_.units.size(), 0);
  set_staging(frames_max);
}

void Updates::set_staging(std::uint32_t frames_max) {
  STRATA_ASSERT(!busy());
  slots_.set_frames(frames_max);
  for (ChunkState& chunk : chunks_) chunk.staging_need = 0;
  for (std::uint32_t page = 0; page < layout_.page_count; ++page) {
    if (table_.tier(PageId{page}) == Tier::ssd) ++chunks_[layout_.chunk_of[page]].staging_need;
  }
  staged_ = false;
  for (std::uint32_t id = 0; id < chunks_.size(); ++id) {
    staged_ |= !pieces_.of(id).empty() && chunks_[id].staging_need != 0;
  }
}

// Steps that the chunk's readers may lag behind.
std::int64_t Updates::staleness_of(std::uint32_t chunk) const {
  const UnitId unit = layout_.segments[layout_.chunks[chunk].segment].unit;
  return slots_.on_device(chunk) || exact_[index(unit)] ? 0 : config_.max_staleness;
}

bool Updates::may_land(std::uint32_t chunk, std::int64_t step) const {
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

std::shared_ptr<const std::byte> Updates::lent_gradient(std::uint32_t chunk,
                                                        std::uint32_t param) const {
  const ChunkPiece* const piece = pieces_.find(chunk, param);
  return piece == nullptr ? nullptr : piece->lent;
}

bool Updates::holds_gradient(std::uint32_t chunk, std::uint32_t param) const {
  return pieces_.any(chunk, param, &ChunkPiece::has_gradient);
}

void Updates::forget_landed(std::uint32_t chunk) {
  STRATA_ASSERT(!(chunks_[chunk].queued && is_held(chunk)));
  pieces_.forget_landed(chunk);
  if (gradients_ != nullptr && !chunks_[chunk].queued) gradients_->drop(chunk);
}

bool Updates::forget_landed(std::uint32_t chunk, std::uint32_t param) {
  STRATA_ASSERT(gradients_ == nullptr);
  return pieces_.forget_landed(chunk, param);
}

void Updates::forget_merged() {
  STRATA_ASSERT(slots_.idle());
  for (const std::uint32_t id : std::exchange(queue_, {})) {
    pieces_.forget_all(id);
    chunks_[id].queued = false;
    gradients_->drop(id);
    block_or_not(id);
  }
}

bool Updates::is_held(std::uint32_t chunk) const {
  return gradients_ != nullptr && (gradients_->is_open(chunk) || pieces_.any_landed(chunk));
}

void Updates::release(const Release& release) {
  STRATA_ASSERT(release.step >= released_ && release.step > ended_);
  released_ = release.step;
  if (release.ends_step) ended_ = release.step;
  exact_ = exact_next_;
  const ReleaseId kept = pieces_.keep(release);
  for (const UnitId unit : release.units) {
    for (const std::uint32_t id : layout_.units[index(unit)].chunks) {
      if (pieces_.any_landed(id)) this->release(id, release, kept);
    }
  }
  pieces_.let_go(kept);
  sort_queue();
  for (std::uint32_t id = 0; id < chunks_.size(); ++id) block_or_not(id);
}

// REQUIRES: a gradient has landed in it.
void Updates::release(std::uint32_t id, const Release& release, ReleaseId kept) {
  const UnitId unit = layout_.segments[layout_.chunks[id].segment].unit;
  staleness_.merged[index(unit)] += pieces_.release(id, release, kept);
  ChunkState& chunk = chunks_[id];
  if (chunk.queued) return;
  chunk.queued = true;
  chunk.oldest = release.step;
  queue_.push_back(id);
}

void Updates::sort_queue() {
  std::vector<std::uint32_t> rank(chunks_.size());  // by chunk: in the order of the next use
  std::uint32_t next = 0;
  for (const UnitId unit : prefetcher_.order()) {
    for (const std::uint32_t id : layout_.units[index(unit)].chunks) rank[id] = next++;
  }
  std::ranges::sort(queue_, {},
                    [&](std::uint32_t id) { return std::pair(chunks_[id].oldest, rank[id]); });
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
  return !chunks_[chunk].queued && !chunks_[chunk].open && !slots_.has_spent(chunk);
}

std::int64_t Updates::version_of(std::uint32_t id) const {
  const ChunkState& chunk = chunks_[id];
  std::int64_t version = ended_;
  if (chunk.queued) version = std::min(version, chunk.oldest - 1);
  if (chunk.open) version = std::min(version, chunk.oldest_open - 1);
  return version;
}

bool Updates::is_waiting(std::uint32_t chunk, std::uint32_t param) const {
  return pieces_.any(chunk, param, &ChunkPiece::waits);
}

bool Updates::behind(std::uint32_t id, std::int64_t step) const {
  const ChunkState& chunk = chunks_[id];
  return (chunk.queued && chunk.oldest <= step) || (chunk.open && chunk.oldest_open <= step);
}

bool Updates::waits_for_release() const {
  return slots_.idle() && !slots_.has_spent() && !queue_.empty() &&
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

void Updates::wait_done(Lock& lock) {
  gate_.wait(lock, [&] {
    refuse_if_merged();
    return !busy();
  });
}

bool Updates::turn() {
  bool moved = slots_.collect();
  for (const std::uint32_t id : slots_.publish()) {
    chunks_[id].open = false;
    block_or_not(id);
    moved = true;
  }
  moved |= slots_.discard_spent();
  moved |= admit();
  return slots_.load() || moved;
}

bool Updates::admit() {
  bool moved = false;
  while (slots_.has_free()) {
    const auto next = std::ranges::find_if(queue_, [this](auto id) { return may_open(id); });
    if (next == queue_.end() || !slots_.has_room(chunks_[*next].staging_need)) break;
    if (writes_beside(*next) && !gradients_->has_free()) break;
    open(*next);
    queue_.erase(next);
    moved = true;
  }
  return moved;
}

bool Updates::may_open(std::uint32_t id) {
  const ChunkState& chunk = chunks_[id];
  if (chunk.open || chunk.deferrals != 0 || is_held(id)) return false;
  return captures_.may_update(id, chunk.oldest);
}

void Updates::open(std::uint32_t id) {
  ChunkState& chunk = chunks_[id];
  chunk.oldest_open = chunk.oldest;
  chunk.open = true;
  chunk.queued = false;
  slots_.open(id, chunk.staging_need, pieces_.take(id), writes_beside(id));
}

void Updates::set_run(std::uint32_t param, std::size_t first, std::size_t count,
                      std::int64_t step) {
  for (const std::uint32_t id : layout_.chunks_of(param)) STRATA_ASSERT(settled(id));
  pieces_.set_run(param, first, count, step);
}

}  // namespace strata
