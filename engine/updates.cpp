#include "engine/updates.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/residence.hpp"
#include "memory/check.hpp"

namespace strata {

Updates::Updates(const Parts& parts, std::uint32_t frames_max)
    : layout_(parts.layout),
      config_(parts.config),
      cache_(parts.cache),
      mover_(parts.mover),
      device_(parts.device),
      executor_(parts.executor),
      workers_(parts.workers),
      timeline_(parts.timeline),
      gradients_(parts.gradients),
      scales_(parts.scales),
      worker_is_done_(parts.worker_is_done),
      frames_max_(frames_max),
      chunks_(layout_.chunks.size()),
      groups_(config_.groups),
      slots_(update_slots(workers_.thread_count())) {
  for (const Segment& segment : layout_.segments) {
    if (!segment.trainable) continue;
    for (const std::uint32_t param : segment.params) {
      const std::size_t grain = layout_.page_bytes / sizeof(float);
      for (const Piece& piece : layout_.pieces(param, 0, layout_.numel[param], grain)) {
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
  set_staging(frames_max);
}

void Updates::set_staging(std::uint32_t frames_max) {
  STRATA_ASSERT(!busy());
  frames_max_ = frames_max;
  for (ChunkState& chunk : chunks_) chunk.staging_need = 0;
  for (std::uint32_t page = 0; page < layout_.page_count; ++page) {
    if (cache_.rests_on_ssd(PageId{page})) ++chunks_[layout_.chunk_of[page]].staging_need;
  }
}

bool Updates::on_device(std::uint32_t chunk) const {
  return cache_.tier(layout_.chunks[chunk].run(Role::param).first) == Tier::device;
}

// Steps that the chunk's readers may lag behind.
std::int64_t Updates::staleness_of(std::uint32_t chunk) const {
  return on_device(chunk) ? 0 : config_.max_staleness;
}

void Updates::note_landed(std::uint32_t chunk, std::uint32_t param) {
  for (ChunkPiece& piece : chunks_[chunk].pieces) {
    if (piece.param == param) piece.landed = true;
  }
}

bool Updates::holds_gradient(std::uint32_t chunk, std::uint32_t param) const {
  const auto& pieces = chunks_[chunk].pieces;
  return std::any_of(pieces.begin(), pieces.end(), [param](const ChunkPiece& piece) {
    return piece.param == param && (piece.landed || piece.waiting);
  });
}

void Updates::forget_landed(std::uint32_t chunk) {
  STRATA_ASSERT(!merged(chunk));
  for (ChunkPiece& piece : chunks_[chunk].pieces) piece.landed = false;
  if (gradients_ != nullptr && !chunks_[chunk].queued) gradients_->drop(chunk);
}

bool Updates::is_held(std::uint32_t chunk) const {
  if (gradients_ == nullptr) return false;
  const auto& pieces = chunks_[chunk].pieces;
  return gradients_->is_open(chunk) ||
         std::any_of(pieces.begin(), pieces.end(), [](const ChunkPiece& p) { return p.landed; });
}

void Updates::release(const Release& release) {
  STRATA_ASSERT(release.step >= released_);
  released_ = release.step;
  groups_.assign(release.groups.begin(), release.groups.end());
  std::uint32_t rank = 0;
  for (const UnitId unit : release.units) {
    for (const std::uint32_t id : layout_.units[index(unit)].chunks) {
      ChunkState& chunk = chunks_[id];
      chunk.rank = rank++;
      bool touched = false;
      bool merges = false;
      for (ChunkPiece& piece : chunk.pieces) {
        if (!piece.landed) continue;
        touched = true;
        merges |= piece.waiting;
        if (!piece.waiting) ++piece.step;
        piece.landed = false;
        piece.waiting = true;
      }
      if (!touched) continue;
      staleness_.merged[index(unit)] += merges;
      chunk.scale = release.scale_of[index(unit)];
      if (chunk.queued) continue;
      chunk.queued = true;
      chunk.oldest = release.step;
      queue_.push_back(id);
    }
  }
  std::sort(queue_.begin(), queue_.end(), [this](std::uint32_t a, std::uint32_t b) {
    const ChunkState& one = chunks_[a];
    const ChunkState& other = chunks_[b];
    return std::pair(one.oldest, one.rank) < std::pair(other.oldest, other.rank);
  });
  for (std::uint32_t id = 0; id < chunks_.size(); ++id) block_or_not(id);
}

// See Note [Versions].
void Updates::block_or_not(std::uint32_t id) {
  const ChunkState& chunk = chunks_[id];
  const std::int64_t allowed = released_ - staleness_of(id);
  const bool late =
      (chunk.queued && chunk.oldest <= allowed) || (chunk.open && chunk.oldest_open <= allowed);
  const PageId page = layout_.chunks[id].run(Role::param).first;
  if (late)
    executor_.block(page);
  else
    executor_.unblock(page);
}

void Updates::count_forward(UnitId unit) {
  std::int64_t oldest = released_ + 1;
  for (const std::uint32_t id : layout_.units[index(unit)].chunks) {
    const ChunkState& chunk = chunks_[id];
    if (chunk.queued) oldest = std::min(oldest, chunk.oldest);
    if (chunk.open) oldest = std::min(oldest, chunk.oldest_open);
  }
  const auto lag = static_cast<std::size_t>(released_ + 1 - oldest);
  STRATA_ASSERT(lag <= config_.max_staleness);
  ++staleness_.seen[index(unit)][lag];
}

bool Updates::settled(std::uint32_t chunk) const {
  if (chunks_[chunk].queued || chunks_[chunk].open) return false;
  return std::none_of(spent_.begin(), spent_.end(),
                      [&](PageId page) { return layout_.chunk_of[index(page)] == chunk; });
}

bool Updates::waits_for_release() const {
  return open_ == 0 && spent_.empty() && !queue_.empty() &&
         std::all_of(queue_.begin(), queue_.end(), [this](std::uint32_t c) { return is_held(c); });
}

bool Updates::admit() {
  bool moved = false;
  for (Slot& slot : slots_) {
    if (slot.stage != Stage::free) continue;
    const auto next = std::find_if(queue_.begin(), queue_.end(), [this](std::uint32_t id) {
      return !chunks_[id].open && !is_held(id);
    });
    if (next == queue_.end()) break;
    const std::uint32_t need = chunks_[*next].staging_need;
    STRATA_ASSERT(need <= frames_max_);
    if (frames_held_ + need > frames_max_) break;
    if (writes_beside(*next) && !gradients_->has_free()) break;
    open_slot(slot, *next);
    queue_.erase(next);
    moved = true;
  }
  return moved;
}

void Updates::open_slot(Slot& slot, std::uint32_t id) {
  ChunkState& chunk = chunks_[id];
  slot.stage = Stage::loading;
  slot.chunk = id;
  slot.groups = groups_;
  slot.scale = chunk.scale;
  frames_held_ += chunk.staging_need;
  ++open_;
  // 1. The gradient: what lands from here on is the next one.
  if (gradients_ != nullptr) slot.gradient = gradients_->take(id);
  slot.pieces.clear();
  for (ChunkPiece& piece : chunk.pieces) {
    if (std::exchange(piece.waiting, false)) slot.pieces.push_back(piece);
  }
  chunk.oldest_open = chunk.oldest;
  chunk.open = true;
  chunk.queued = false;
  // 2. Its pages.
  if (writes_beside(id)) slot.fresh = gradients_->borrow();
  slot.pages.clear();
  for (std::size_t r = 0; r < kRoleCount; ++r) {
    const PageRun& run = layout_.chunks[id].roles[r];
    const auto role = static_cast<Role>(r);
    const bool only_read = role == Role::grad || (role == Role::param && writes_beside(id));
    for (std::uint32_t i = 0; i < run.count; ++i) {
      slot.pages.push_back(
          {PageId{index(run.first) + i}, only_read ? Intent::read : Intent::modify, nullptr});
    }
  }
}

// The page's bytes where it rests, or null: not yet.
std::byte* Updates::open(const OpenPage& page) {
  if (cache_.tier(page.page) != Tier::device) return cache_.open(page.page, page.intent);
  // Gradients on the device are nobody else's. Parameters may be read there by what was submitted
  // before the unit was left.
  const bool gradient = layout_.role_of[index(page.page)] == Role::grad;
  const Chunk& chunk = layout_.chunks[layout_.chunk_of[index(page.page)]];
  if (!gradient && !executor_.passed(layout_.segments[chunk.segment].unit)) return nullptr;
  if (!gradient && !cache_.open_on_device(page.page)) return nullptr;
  return device_.address(mover_.frame_of(page.page));
}

void Updates::close(const OpenPage& page) {
  const bool gradient = layout_.role_of[index(page.page)] == Role::grad;
  if (cache_.tier(page.page) == Tier::device) {
    if (!gradient) cache_.close_on_device(page.page);
    return;
  }
  cache_.close(page.page, page.intent, WriteBack::now);
  if (page.intent == Intent::read) spent_.push_back(page.page);
}

// Opens what can be opened; hands the chunk to a worker when all of it is there.
bool Updates::load(Slot& slot) {
  bool moved = false;
  bool complete = true;
  for (OpenPage& page : slot.pages) {
    if (page.bytes != nullptr) continue;
    page.bytes = open(page);
    moved |= page.bytes != nullptr;
    complete &= page.bytes != nullptr;
  }
  if (!complete) return moved;
  make_spans(slot);
  const auto tag = static_cast<std::uint64_t>(&slot - slots_.data());
  if (!workers_.submit({slot.spans, tag, on_device(slot.chunk)})) return moved;
  slot.stage = Stage::updating;
  return true;
}

std::byte* Updates::at(const Slot& slot, Role role, std::size_t element) const {
  const Chunk& chunk = layout_.chunks[slot.chunk];
  if (role == Role::grad && gradients_ != nullptr) {
    return gradients_->at(slot.gradient, slot.chunk, element);
  }
  const Spot spot = layout_.spot(chunk, role, element);
  if (spot.page == kNoPage) return nullptr;
  const auto open = std::find_if(slot.pages.begin(), slot.pages.end(),
                                 [&spot](const OpenPage& p) { return p.page == spot.page; });
  STRATA_ASSERT(open != slot.pages.end());
  return open->bytes + spot.byte;
}

std::uint16_t* Updates::scales_at(const Chunk& chunk, Role moment, std::size_t element) const {
  const bool kept = layout_.moments >= (moment == Role::moment1 ? 1 : 2);
  if (layout_.moment_dtype != MomentDtype::block8 || !kept) return nullptr;
  return reinterpret_cast<std::uint16_t*>(scales_ + layout_.scale_offset(chunk, moment, element));
}

void Updates::make_spans(Slot& slot) const {
  slot.spans.clear();
  const Chunk& chunk = layout_.chunks[slot.chunk];
  const Segment& segment = layout_.segments[chunk.segment];
  for (const ChunkPiece& piece : slot.pieces) {
    UpdateSpan span;
    span.dtype = segment.dtype;
    span.grad_dtype = layout_.grad_dtype(segment);
    span.count = piece.count;
    std::byte* const param = at(slot, Role::param, piece.in_chunk);
    span.param = param;
    span.new_param = param;
    if (slot.fresh != kNoFrame) {
      span.new_param = gradients_->address(slot.fresh) + piece.in_chunk * size_of(segment.dtype);
    }
    span.master = at(slot, Role::master, piece.in_chunk);
    span.moment_dtype = layout_.moment_dtype;
    span.moment1 = at(slot, Role::moment1, piece.in_chunk);
    span.moment2 = at(slot, Role::moment2, piece.in_chunk);
    span.scales1 = scales_at(chunk, Role::moment1, piece.in_chunk);
    span.scales2 = scales_at(chunk, Role::moment2, piece.in_chunk);
    span.grad = at(slot, Role::grad, piece.in_chunk);
    span.hyper = &slot.groups[config_.params[piece.param].group];
    span.step = piece.step;
    span.grad_scale = slot.scale;
    span.param_id = piece.param;
    span.first = piece.in_param;
    slot.spans.push_back(span);
  }
}

// Closes the chunk's pages. False: somebody still reads its old parameters, and all is as it was.
bool Updates::publish(Slot& slot) {
  if (slot.fresh != kNoFrame) {
    const PageId page = layout_.chunks[slot.chunk].run(Role::param).first;
    const auto old = cache_.close_with(page, slot.fresh, WriteBack::now);
    if (!old) return false;
    slot.gradient.push_back(*old);
    slot.fresh = kNoFrame;
    std::erase_if(slot.pages, [page](const OpenPage& open) { return open.page == page; });
  }
  for (const OpenPage& page : slot.pages) close(page);
  finish(slot);
  return true;
}

void Updates::finish(Slot& slot) {
  ChunkState& chunk = chunks_[slot.chunk];
  if (gradients_ != nullptr) gradients_->give_back(std::exchange(slot.gradient, {}));
  frames_held_ -= chunk.staging_need;
  chunk.open = false;
  block_or_not(slot.chunk);
  --open_;
  slot.stage = Stage::free;
  ++chunks_done_;
}

bool Updates::turn() {
  bool moved = false;
  const bool may_collect = !worker_is_done_ || worker_is_done_();
  for (UpdateDone done; may_collect && workers_.collect(done);) {
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
  Error error;
  error.fault = Fault::cancelled;
  error.unit = config_.units[index(unit)];
  error.what = "an update failed, and its parameters are half old, half new: " + what;
  failure_ = std::move(error);
}

std::int64_t Updates::step_of(std::uint32_t param) const {
  std::int64_t most = 0;
  for (const Piece& piece :
       layout_.pieces(param, 0, layout_.numel[param], layout_.page_bytes / sizeof(float))) {
    for (const ChunkPiece& mine : chunks_[piece.chunk].pieces) {
      if (mine.param == param) most = std::max(most, mine.step);
    }
  }
  return most;
}

void Updates::set_step(std::uint32_t param, std::int64_t step) {
  for (const Piece& piece :
       layout_.pieces(param, 0, layout_.numel[param], layout_.page_bytes / sizeof(float))) {
    for (ChunkPiece& mine : chunks_[piece.chunk].pieces) {
      if (mine.param == param) mine.step = step;
    }
  }
}

}  // namespace strata
