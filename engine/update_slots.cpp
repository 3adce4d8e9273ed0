// A chunk on its way through a slot: its pages are opened, a worker gets what lies in them, and
// they are closed.
#include <algorithm>
#include <utility>

#include "engine/updates.hpp"
#include "memory/check.hpp"

namespace strata {

bool Updates::admit() {
  bool moved = false;
  for (Slot& slot : slots_) {
    if (slot.stage != Stage::free) continue;
    const auto next = std::find_if(queue_.begin(), queue_.end(),
                                   [this](std::uint32_t id) { return may_open(id); });
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

bool Updates::may_open(std::uint32_t id) {
  const ChunkState& chunk = chunks_[id];
  if (chunk.open || chunk.deferrals != 0 || is_held(id)) return false;
  return captures_.may_update(id, chunk.oldest);
}

void Updates::open_slot(Slot& slot, std::uint32_t id) {
  ChunkState& chunk = chunks_[id];
  slot.stage = Stage::loading;
  slot.chunk = id;
  frames_held_ += chunk.staging_need;
  ++open_;
  // 1. The gradient: what lands from here on is the next one.
  if (gradients_ != nullptr) slot.gradient = gradients_->take(id);
  for (ChunkPiece& piece : chunk.pieces) {
    if (!std::exchange(piece.waiting, false)) continue;
    slot.pieces.push_back(piece);
    piece.lent.reset();
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
      const PageId page{index(run.first) + i};
      if (role == Role::grad && !is_read(slot, page)) continue;
      slot.pages.push_back({.page = page, .intent = only_read ? Intent::read : Intent::modify});
    }
  }
}

// Whether one of the gradients to be used lies in the page.
bool Updates::is_read(const Slot& slot, PageId page) const {
  const Chunk& chunk = layout_.chunks[slot.chunk];
  return std::ranges::any_of(slot.pieces, [&](const ChunkPiece& piece) {
    return piece.lent == nullptr && layout_.spot(chunk, Role::grad, piece.in_chunk).page == page;
  });
}

// Opens the page where it rests. False: not yet.
bool Updates::open(OpenPage& page) {
  if (table_.tier(page.page) != Tier::device) {
    // Who updates it clears it, beside the lock.
    if (page.intent == Intent::modify && table_.newest(page.page) == 0) {
      page.intent = Intent::overwrite;
    }
    page.pin = cache_.open(page.page, page.intent);
    page.bytes = page.pin ? page.pin.bytes() : nullptr;
    return page.pin ? true : false;
  }
  // Gradients on the device are nobody else's. Parameters may be read there by what was submitted
  // before the unit was left.
  if (layout_.role_of[index(page.page)] != Role::grad) {
    if (!prefetcher_.passed(table_.unit(page.page))) return false;
    page.pin = cache_.open_on_device(page.page);
    if (!page.pin) return false;
  }
  page.bytes = device_.address(table_.placement(page.page).device_frame());
  return true;
}

void Updates::close(OpenPage& page) {
  const bool spent = page.pin && page.intent == Intent::read;
  page.pin.close(WriteBack::now);
  if (spent) spent_.push_back(page.page);
}

// Opens what can be opened; hands the chunk to a worker when all of it is there.
bool Updates::load(Slot& slot) {
  bool moved = false;
  bool complete = true;
  for (OpenPage& page : slot.pages) {
    if (page.bytes != nullptr) continue;
    const bool opened = open(page);
    moved |= opened;
    complete &= opened;
  }
  if (!complete) return moved;
  make_spans(slot);
  keep_others(slot);
  slot.unwritten.clear();
  for (const OpenPage& page : slot.pages) {
    if (page.intent == Intent::overwrite)
      slot.unwritten.emplace_back(page.bytes, layout_.page_bytes);
  }
  const auto tag = static_cast<std::uint64_t>(&slot - slots_.data());
  const UpdateJob job{.spans = slot.spans,
                      .tag = tag,
                      .on_device = on_device(slot.chunk),
                      .kept = slot.kept,
                      .unwritten = slot.unwritten};
  if (!workers_->submit(job)) return moved;
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

std::uint16_t* Updates::scales_at(std::uint32_t chunk, Role moment, std::size_t element) const {
  STRATA_ASSERT(owns_.mine(chunk));
  if (!layout_.has_scales(moment)) return nullptr;
  const std::size_t at = owns_.scale_offset(layout_, chunk, moment, element);
  return reinterpret_cast<std::uint16_t*>(scales_ + at);
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
    if (slot.fresh != kNoHostFrame) {
      span.new_param = gradients_->address(slot.fresh) + piece.in_chunk * size_of(segment.dtype);
    }
    span.master = at(slot, Role::master, piece.in_chunk);
    span.moment_dtype = layout_.moment_dtype;
    span.moment1 = at(slot, Role::moment1, piece.in_chunk);
    span.moment2 = at(slot, Role::moment2, piece.in_chunk);
    span.scales1 = scales_at(slot.chunk, Role::moment1, piece.in_chunk);
    span.scales2 = scales_at(slot.chunk, Role::moment2, piece.in_chunk);
    span.grad = piece.lent != nullptr ? piece.lent.get() + piece.in_param * size_of(span.grad_dtype)
                                      : at(slot, Role::grad, piece.in_chunk);
    span.hyper = &released_groups_.of(piece.release, config_.params[piece.param].group);
    span.step = piece.step;
    span.scaling = piece.scaling;
    span.grad_scale = piece.scale;
    span.param_id = piece.param;
    span.first = piece.in_param;
    slot.spans.push_back(span);
  }
}

// The fresh frame replaces a page that has parameters without a gradient as well.
void Updates::keep_others(Slot& slot) const {
  slot.kept.clear();
  if (slot.fresh == kNoHostFrame) return;
  const Chunk& chunk = layout_.chunks[slot.chunk];
  const std::size_t bytes = size_of(layout_.segments[chunk.segment].dtype);
  auto updated = slot.pieces.begin();  // of the chunk's pieces, in their order
  for (const ChunkPiece& piece : chunks_[slot.chunk].pieces) {
    if (updated != slot.pieces.end() && updated->in_chunk == piece.in_chunk) {
      ++updated;
      continue;
    }
    slot.kept.push_back({.from = at(slot, Role::param, piece.in_chunk),
                         .to = gradients_->address(slot.fresh) + piece.in_chunk * bytes,
                         .bytes = piece.count * bytes});
  }
  STRATA_ASSERT(updated == slot.pieces.end());
}

// Closes the chunk's pages. False: somebody still reads its old parameters, and all is as it was.
bool Updates::publish(Slot& slot) {
  if (slot.fresh != kNoHostFrame) {
    const PageId param = layout_.chunks[slot.chunk].run(Role::param).first;
    const auto open = std::find_if(slot.pages.begin(), slot.pages.end(),
                                   [param](const OpenPage& page) { return page.page == param; });
    STRATA_ASSERT(open != slot.pages.end());
    const auto old = open->pin.replace(slot.fresh, WriteBack::now);
    if (!old) return false;
    slot.gradient.push_back(*old);
    slot.fresh = kNoHostFrame;
    slot.pages.erase(open);
  }
  for (OpenPage& page : slot.pages) close(page);
  finish(slot);
  return true;
}

void Updates::finish(Slot& slot) {
  ChunkState& chunk = chunks_[slot.chunk];
  for (const ChunkPiece& piece : slot.pieces) released_groups_.drop(piece.release);
  slot.pieces.clear();  // with what was lent
  if (gradients_ != nullptr) gradients_->give_back(std::exchange(slot.gradient, {}));
  frames_held_ -= chunk.staging_need;
  chunk.open = false;
  block_or_not(slot.chunk);
  --open_;
  slot.stage = Stage::free;
  ++chunks_done_;
}

}  // namespace strata
