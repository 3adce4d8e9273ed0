#include "engine/update_slots.hpp"

#include <algorithm>
#include <utility>

#include "engine/residence.hpp"
#include "memory/check.hpp"

namespace strata {

UpdateSlots::UpdateSlots(Parts parts, ChunkPieces& pieces)
    : layout_(parts.layout),
      owns_(parts.owns),
      config_(parts.config),
      table_(parts.table),
      cache_(parts.cache),
      device_(parts.device),
      prefetcher_(parts.prefetcher),
      timeline_(parts.timeline),
      gradients_(parts.gradients),
      scales_(parts.scales),
      worker_is_done_(std::move(parts.worker_is_done)),
      pieces_(pieces),
      slots_(update_slots(parts.workers->thread_count())),
      workers_(std::move(parts.workers)) {}

void UpdateSlots::set_frames(std::uint32_t frames_max) {
  STRATA_ASSERT(idle());
  frames_max_ = frames_max;
}

bool UpdateSlots::on_device(std::uint32_t chunk) const {
  return table_.tier(layout_.chunks[chunk].run(Role::param).first) == Tier::device;
}

bool UpdateSlots::has_room(std::uint32_t frames) const {
  STRATA_ASSERT(frames <= frames_max_);
  return frames_held_ + frames <= frames_max_;
}

void UpdateSlots::open(std::uint32_t chunk, std::uint32_t frames, std::vector<ChunkPiece> pieces,
                       bool beside) {
  STRATA_ASSERT(has_free() && has_room(frames));
  Slot& slot = *std::ranges::find(slots_, Stage::free, &Slot::stage);
  slot.stage = Stage::loading;
  slot.chunk = chunk;
  slot.frames = frames;
  frames_held_ += frames;
  ++open_;
  // 1. The gradient.
  if (gradients_ != nullptr) slot.gradient = gradients_->take(chunk);
  slot.pieces = std::move(pieces);
  // 2. Its pages.
  if (beside) slot.fresh = gradients_->borrow();
  slot.pages.clear();
  for (std::size_t r = 0; r < kRoleCount; ++r) {
    const PageRun& run = layout_.chunks[chunk].roles[r];
    const auto role = static_cast<Role>(r);
    const bool only_read = role == Role::grad || (role == Role::param && beside);
    for (std::uint32_t i = 0; i < run.count; ++i) {
      const PageId page{index(run.first) + i};
      if (role == Role::grad && !is_read(slot, page)) continue;
      slot.pages.push_back({.page = page, .intent = only_read ? Intent::read : Intent::modify});
    }
  }
}

bool UpdateSlots::collect() {
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
  return moved;
}

std::vector<std::uint32_t> UpdateSlots::publish() {
  std::vector<std::uint32_t> over;
  for (Slot& slot : slots_) {
    if (slot.stage == Stage::publishing && publish(slot)) over.push_back(slot.chunk);
  }
  return over;
}

bool UpdateSlots::load() {
  bool moved = false;
  for (Slot& slot : slots_) {
    if (slot.stage == Stage::loading) moved |= load(slot);
  }
  return moved;
}

bool UpdateSlots::has_spent(std::uint32_t chunk) const {
  return std::ranges::any_of(spent_,
                             [&](PageId page) { return layout_.chunk_of[index(page)] == chunk; });
}

bool UpdateSlots::discard_spent() {
  return std::erase_if(spent_, [this](PageId page) { return cache_.discard(page); }) != 0;
}

// Whether one of the gradients to be used lies in the page.
bool UpdateSlots::is_read(const Slot& slot, PageId page) const {
  const Chunk& chunk = layout_.chunks[slot.chunk];
  return std::ranges::any_of(slot.pieces, [&](const ChunkPiece& piece) {
    return piece.lent == nullptr && layout_.spot(chunk, Role::grad, piece.in_chunk).page == page;
  });
}

// Opens the page where it rests. False: not yet.
bool UpdateSlots::open(OpenPage& page) {
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

void UpdateSlots::close(OpenPage& page) {
  const bool spent = page.pin && page.intent == Intent::read;
  page.pin.close(WriteBack::now);
  if (spent) spent_.push_back(page.page);
}

// Opens what can be opened; hands the chunk to a worker when all of it is there.
bool UpdateSlots::load(Slot& slot) {
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

std::byte* UpdateSlots::at(const Slot& slot, Role role, std::size_t element) const {
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

std::uint16_t* UpdateSlots::scales_at(std::uint32_t chunk, Role moment, std::size_t element) const {
  STRATA_ASSERT(owns_.mine(chunk));
  if (!layout_.has_scales(moment)) return nullptr;
  const std::size_t at = owns_.scale_offset(layout_, chunk, moment, element);
  return reinterpret_cast<std::uint16_t*>(scales_ + at);
}

void UpdateSlots::make_spans(Slot& slot) const {
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
    span.hyper = &pieces_.hyper(piece);
    span.step = piece.step;
    span.scaling = piece.scaling;
    span.grad_scale = piece.scale;
    span.param_id = piece.param;
    span.first = piece.in_param;
    slot.spans.push_back(span);
  }
}

// The fresh frame replaces a page that has parameters without a gradient as well.
void UpdateSlots::keep_others(Slot& slot) const {
  slot.kept.clear();
  if (slot.fresh == kNoHostFrame) return;
  const Chunk& chunk = layout_.chunks[slot.chunk];
  const std::size_t bytes = size_of(layout_.segments[chunk.segment].dtype);
  auto updated = slot.pieces.begin();  // of the chunk's pieces, in their order
  for (const ChunkPiece& piece : pieces_.of(slot.chunk)) {
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
bool UpdateSlots::publish(Slot& slot) {
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

void UpdateSlots::finish(Slot& slot) {
  pieces_.drop(slot.pieces);
  if (gradients_ != nullptr) gradients_->give_back(std::exchange(slot.gradient, {}));
  frames_held_ -= slot.frames;
  --open_;
  slot.stage = Stage::free;
  ++chunks_done_;
}

void UpdateSlots::fail(UnitId unit, const std::string& what) {
  if (failure_) return;
  failure_ = Error{.fault = Fault::cancelled,
                   .what = "an update failed, and its parameters are half old, half new: " + what,
                   .unit = config_.units[index(unit)]};
}

}  // namespace strata
