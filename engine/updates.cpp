#include "engine/updates.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

// Chunks open at a time: enough for every worker to find the next one loaded and the last one being
// written; the staging area usually allows fewer.
std::size_t slots_for(const Workers& workers) {
  return 4 + 2 * static_cast<std::size_t>(workers.thread_count());
}

}  // namespace

Updates::Updates(const Layout& layout, HostCache& cache, Executor& executor, Workers& workers,
                 Timeline& timeline, std::uint32_t frames_max)
    : layout_(layout),
      cache_(cache),
      executor_(executor),
      workers_(workers),
      timeline_(timeline),
      frames_max_(frames_max),
      pieces_(layout.chunks.size()),
      staging_need_(layout.chunks.size(), 0),
      steps_(layout.places.size(), 0),
      pending_(layout.chunks.size(), false),
      slots_(slots_for(workers)),
      active_(layout.places.size(), false) {
  set_staging(frames_max);
}

void Updates::set_staging(std::uint32_t frames_max) {
  STRATA_ASSERT(!busy());
  frames_max_ = frames_max;
  std::fill(staging_need_.begin(), staging_need_.end(), 0U);
  for (std::uint32_t page = 0; page < layout_.page_count; ++page) {
    if (cache_.rests_on_ssd(PageId{page})) ++staging_need_[layout_.chunk_of[page]];
  }
}

void Updates::start(std::vector<Hyper> groups, std::span<const std::uint32_t> group_of,
                    std::span<const std::uint32_t> landed, float grad_scale,
                    std::span<const UnitId> order) {
  STRATA_ASSERT(!busy());
  STRATA_ASSERT(landed.size() == steps_.size());
  groups_ = std::move(groups);
  group_of_.assign(group_of.begin(), group_of.end());
  grad_scale_ = grad_scale;
  // 1. Which parameters, and which runs of each chunk.
  std::vector<bool> touched(layout_.chunks.size(), false);
  for (std::uint32_t param = 0; param < landed.size(); ++param) {
    active_[param] = landed[param] != 0;
    if (active_[param]) ++steps_[param];
  }
  for (const Segment& segment : layout_.segments) {
    for (std::uint32_t c = 0; c < segment.chunk_count; ++c)
      pieces_[segment.first_chunk + c].clear();
  }
  for (const Segment& segment : layout_.segments) {
    for (const std::uint32_t param : segment.params) {
      if (!active_[param]) continue;
      const std::size_t numel = layout_.numel[param];
      for (const Piece& piece :
           layout_.pieces(param, 0, numel, layout_.page_bytes / sizeof(float))) {
        pieces_[piece.chunk].push_back({param, piece.in_chunk, piece.count});
        touched[piece.chunk] = true;
      }
    }
  }
  // 2. In the order in which the next forward needs them.
  for (const UnitId unit : order) {
    for (const std::uint32_t chunk : layout_.units[index(unit)].chunks) {
      if (!touched[chunk]) continue;
      pending_[chunk] = true;
      executor_.block(layout_.chunks[chunk].run(Role::param).first);
      queue_.push_back(chunk);
    }
  }
}

bool Updates::settled(std::uint32_t chunk) const {
  return !pending_[chunk] && std::none_of(spent_.begin(), spent_.end(), [&](PageId page) {
    return layout_.chunk_of[index(page)] == chunk;
  });
}

bool Updates::admit() {
  bool moved = false;
  for (Slot& slot : slots_) {
    if (queue_.empty()) break;
    if (slot.stage != Stage::free) continue;
    const std::uint32_t need = staging_need_[queue_.front()];
    STRATA_ASSERT(need <= frames_max_);
    if (frames_held_ + need > frames_max_) break;
    open_slot(slot, queue_.front());
    queue_.pop_front();
    moved = true;
  }
  return moved;
}

void Updates::open_slot(Slot& slot, std::uint32_t chunk) {
  slot.stage = Stage::loading;
  slot.chunk = chunk;
  slot.frames = staging_need_[chunk];
  frames_held_ += slot.frames;
  ++open_;
  slot.pages.clear();
  for (std::size_t r = 0; r < kRoleCount; ++r) {
    const PageRun& run = layout_.chunks[chunk].roles[r];
    const Intent intent = static_cast<Role>(r) == Role::grad ? Intent::read : Intent::modify;
    for (std::uint32_t i = 0; i < run.count; ++i) {
      slot.pages.push_back({PageId{index(run.first) + i}, intent, nullptr});
    }
  }
}

// Opens what can be opened; hands the chunk to a worker when all of it is there.
bool Updates::load(Slot& slot) {
  bool moved = false;
  bool complete = true;
  for (OpenPage& page : slot.pages) {
    if (page.bytes != nullptr) continue;
    page.bytes = cache_.open(page.page, page.intent);
    moved |= page.bytes != nullptr;
    complete &= page.bytes != nullptr;
  }
  if (!complete) return moved;
  make_spans(slot);
  const auto tag = static_cast<std::uint64_t>(&slot - slots_.data());
  if (!workers_.submit({slot.spans, tag})) return moved;
  slot.stage = Stage::updating;
  return true;
}

std::byte* Updates::at(const Slot& slot, Role role, std::size_t element) const {
  const Chunk& chunk = layout_.chunks[slot.chunk];
  const PageRun& run = chunk.run(role);
  if (run.count == 0) return nullptr;
  const std::size_t per_page = layout_.elements_per_page(chunk, role);
  const std::uint32_t page = index(run.first) + static_cast<std::uint32_t>(element / per_page);
  const auto open = std::find_if(slot.pages.begin(), slot.pages.end(),
                                 [page](const OpenPage& p) { return index(p.page) == page; });
  STRATA_ASSERT(open != slot.pages.end());
  return open->bytes + (element % per_page) * layout_.element_bytes(chunk, role);
}

void Updates::make_spans(Slot& slot) const {
  slot.spans.clear();
  const Segment& segment = layout_.segments[layout_.chunks[slot.chunk].segment];
  for (const ChunkPiece& piece : pieces_[slot.chunk]) {
    UpdateSpan span;
    span.dtype = segment.dtype;
    span.grad_dtype = layout_.accumulate ? Dtype::float32 : segment.dtype;
    span.count = piece.count;
    span.new_param = at(slot, Role::param, piece.in_chunk);
    span.param = span.new_param;
    span.master = at(slot, Role::master, piece.in_chunk);
    span.moment1 = at(slot, Role::moment1, piece.in_chunk);
    span.moment2 = at(slot, Role::moment2, piece.in_chunk);
    span.grad = at(slot, Role::grad, piece.in_chunk);
    span.hyper = &groups_[group_of_[piece.param]];
    span.step = steps_[piece.param];
    span.grad_scale = grad_scale_;
    slot.spans.push_back(span);
  }
}

void Updates::finish(const UpdateDone& done) {
  Slot& slot = slots_[done.tag];
  STRATA_ASSERT(slot.stage == Stage::updating);
  timeline_.add({.track = Track::update,
                 .lane = done.worker,
                 .unit = layout_.segments[layout_.chunks[slot.chunk].segment].unit,
                 .begin_ns = done.begin_ns,
                 .end_ns = done.end_ns,
                 .bytes = slot.pages.size() * layout_.page_bytes});
  for (const OpenPage& page : slot.pages) {
    cache_.close(page.page, page.intent, WriteBack::now);
    if (page.intent == Intent::read) spent_.push_back(page.page);
  }
  executor_.unblock(layout_.chunks[slot.chunk].run(Role::param).first);
  pending_[slot.chunk] = false;
  frames_held_ -= slot.frames;
  --open_;
  slot.stage = Stage::free;
  ++chunks_done_;
}

bool Updates::turn() {
  bool moved = false;
  for (UpdateDone done; workers_.collect(done);) {
    finish(done);
    moved = true;
  }
  moved |= std::erase_if(spent_, [this](PageId page) { return cache_.discard(page); }) != 0;
  moved |= admit();
  for (Slot& slot : slots_) {
    if (slot.stage == Stage::loading) moved |= load(slot);
  }
  return moved;
}

}  // namespace strata
