#include "engine/activations.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"
#include "offload/planner/swapped_size.hpp"

namespace strata {
namespace {

// As PyTorch aligns its own memory on the host.
constexpr std::size_t kHeapAlign = 64;

constexpr std::uint64_t tag_of(SaveId id, std::uint32_t piece) {
  return std::uint64_t{static_cast<std::uint32_t>(id)} << 32 | piece;
}

}  // namespace

Activations::Activations(PageTable& table, PageCache& cache, Transfers& transfers,
                         CopyEngine& copies, std::size_t page_bytes)
    : table_(table),
      cache_(cache),
      transfers_(transfers),
      copies_(copies),
      page_bytes_(page_bytes) {}

const Activations::Save& Activations::at(SaveId id) const {
  STRATA_ASSERT(lives(id));
  return saves_[static_cast<std::size_t>(id)];
}

Activations::Save& Activations::at(SaveId id) {
  STRATA_ASSERT(lives(id));
  return saves_[static_cast<std::size_t>(id)];
}

bool Activations::lives(SaveId id) const {
  const auto which = static_cast<std::size_t>(id);
  return which < saves_.size() && saves_[which].live;
}

bool Activations::holds(SaveId id) const {
  return lives(id) && !at(id).stopped;
}

std::uint32_t Activations::piece_count(const Save& save) {
  return static_cast<std::uint32_t>(save.pages.size()) + (save.end == nullptr ? 0 : 1);
}

std::size_t Activations::piece_bytes(const Save& save, std::uint32_t piece) const {
  return std::min(page_bytes_, save.bytes - piece * page_bytes_);
}

bool Activations::on_ssd(const Save& save, std::uint32_t piece) {
  return save.tier == Tier::ssd && piece < save.pages.size();
}

void Activations::reserve(ActivationRoom room) {
  STRATA_ASSERT(empty() && spent_.empty() && heap_pages_.empty());
  STRATA_ASSERT(room.frames_max > 0);
  room_ = std::move(room);
}

bool Activations::vacate() {
  STRATA_ASSERT(empty());
  release_heap();
  recycle();
  return spent_.empty();
}

// Gives the heap's pages back, if nothing lies in them.
bool Activations::release_heap() {
  if (!heap_ || heap_->used() != 0) return false;
  heap_.reset();
  for (const Pin& pin : heap_pages_) spent_.push_back({pin.page(), Tier::host});
  heap_pages_.clear();
  recycle();
  return true;
}

bool Activations::recycle() {
  return std::erase_if(spent_, [this](const Spent& spent) {
           if (!cache_.discard(spent.page)) return false;
           free_pages(spent.tier).push_back(spent.page);
           return true;
         }) != 0;
}

// A place in the heap, which may grow by pages of host memory as long as `pages_kept` are left.
std::byte* Activations::allocate(std::size_t bytes, std::size_t pages_kept) {
  std::byte* place = heap_ ? heap_->allocate(bytes, kHeapAlign) : nullptr;
  if (place != nullptr || room_.host.size() <= pages_kept) return place;
  Pin pin = cache_.open(room_.host.back(), Intent::overwrite);
  STRATA_ASSERT(pin);  // it rests in host memory, and nobody else knows it
  room_.host.pop_back();
  const std::span<std::byte> frame(pin.bytes(), page_bytes_);
  heap_pages_.push_back(std::move(pin));
  if (heap_)
    heap_->add(frame);
  else
    heap_.emplace(frame);
  return heap_->allocate(bytes, kHeapAlign);
}

std::optional<SaveId> Activations::save(std::byte* device, std::size_t bytes, Tier tier,
                                        UnitId unit, Stream stream) {
  STRATA_ASSERT(bytes > 0);
  STRATA_ASSERT(tier != Tier::device);
  // 1. Whole pages, and an end, which takes a page as well where the heap has no place for it.
  std::vector<PageId>& free = free_pages(tier);
  const SwappedSize size = swapped_size(bytes, page_bytes_, tier);
  std::size_t pages = size.pages;
  if (free.size() < pages + 1) recycle();
  if (free.size() < pages + 1 && tier == Tier::host) release_heap();
  if (free.size() < pages) return std::nullopt;
  std::byte* end = nullptr;
  if (size.heap_bytes > 0) {
    end = allocate(size.heap_bytes, tier == Tier::host ? pages : 0);
    if (end == nullptr) ++pages;
  }
  if (free.size() < pages) return std::nullopt;
  // 2. They are its own now.
  if (free_ids_.empty()) {
    free_ids_.push_back(SaveId{static_cast<std::uint32_t>(saves_.size())});
    saves_.emplace_back();
  }
  const SaveId id = free_ids_.back();
  free_ids_.pop_back();
  Save& save = saves_[static_cast<std::size_t>(id)];
  save.live = true;
  save.tier = tier;
  save.unit = unit;
  save.bytes = bytes;
  save.end = end;
  save.pages.assign(free.end() - static_cast<std::ptrdiff_t>(pages), free.end());
  free.resize(free.size() - pages);
  for (std::size_t i = 0; i < pages; ++i) {
    table_.set_unit(save.pages[i], unit);
    const std::size_t left = bytes - i * page_bytes_;
    table_.set_bytes(save.pages[i], static_cast<std::uint32_t>(std::min(left, page_bytes_)));
  }
  ++live_;
  begin(id, Direction::out, device, stream);
  return id;
}

void Activations::begin(SaveId id, Direction direction, std::byte* device, Stream stream) {
  STRATA_ASSERT(device != nullptr);
  Save& save = at(id);
  save.direction = direction;
  save.device = device;
  save.after = copies_.record(stream);
  save.left = save.to_start = piece_count(save);
  save.started.assign(save.left, false);
  save.pins.resize(save.left);
  save.first = 0;
  save.demanded = false;
  queue_.push_back(id);
}

void Activations::fetch(SaveId id, std::byte* device, Stream stream) {
  STRATA_ASSERT(fetched(id));
  stop_staging(id);
  begin(id, Direction::in, device, stream);
}

// Copies of one stream complete in the order of their tickets, so the last of them is all of them.
void Activations::order(SaveId id, Stream stream) {
  STRATA_ASSERT(submitted(id));
  if (at(id).in_flight != 0) copies_.stream_waits(stream, at(id).last_copy);
}

void Activations::stage(SaveId id) {
  Save& save = at(id);
  if (save.tier != Tier::ssd || save.staging || !fetched(id)) return;
  save.staging = true;
  save.staged = 0;
  ahead_.push_back(id);
}

void Activations::stop_staging(SaveId id) {
  Save& save = at(id);
  if (!save.staging) return;
  save.staging = false;
  STRATA_ASSERT(staged_ >= save.staged);
  staged_ -= save.staged;
  std::erase(ahead_, id);
}

void Activations::stop(SaveId id) {
  at(id).stopped = true;
  std::erase(queue_, id);
  stop_staging(id);
}

void Activations::drop(SaveId id) {
  // 1. What is not yet in flight never will be.
  stop(id);
  // 2. What is in flight arrives.
  Save& save = at(id);
  if (save.in_flight != 0) {
    transfers_.finish(save.last_copy);
    reap();
  }
  STRATA_ASSERT(save.in_flight == 0);
  // 3. Its places are for others.
  if (save.end != nullptr) heap_->deallocate(save.end);
  for (const PageId page : save.pages) spent_.push_back({page, save.tier});
  save = Save{};
  free_ids_.push_back(id);
  --live_;
  recycle();
}

// Whoever waits until it is saved wants the device's memory back.
Cause Activations::missing(SaveId id) const {
  const Save& save = at(id);
  if (save.left == 0) return Cause::none;
  if (save.direction == Direction::out) return Cause::frame;
  for (std::uint32_t piece = save.first; piece < save.started.size(); ++piece) {
    if (!save.started[piece] && on_ssd(save, piece)) return Cause::ssd;
  }
  return Cause::copy;
}

bool Activations::start_copy(SaveId id, std::uint32_t piece) {
  Save& save = at(id);
  const bool out = save.direction == Direction::out;
  std::byte* host = save.end;
  if (piece < save.pages.size()) {
    save.pins[piece] = cache_.open(save.pages[piece], out ? Intent::overwrite : Intent::read);
    if (!save.pins[piece]) return false;
    host = save.pins[piece].bytes();
  }
  save.last_copy = transfers_.copy(out ? Link::download : Link::upload,
                                   {.device = save.device + piece * page_bytes_,
                                    .host = host,
                                    .bytes = piece_bytes(save, piece),
                                    .after = save.after,
                                    .unit = save.unit,
                                    .tag = tag_of(id, piece)},
                                   Requester::activations);
  ++save.in_flight;
  ++in_flight_[static_cast<std::size_t>(save.direction)];
  save.started[piece] = true;
  --save.to_start;
  if (on_ssd(save, piece)) ++ssd_open_;
  return true;
}

bool Activations::start_copies() {
  bool moved = false;
  // Pages on the SSD that may hold a staging frame: the first so many, in an order that stays.
  std::uint32_t frames = room_.frames_max - std::min(room_.frames_max, ssd_open_);
  for (const SaveId id : queue_) {
    Save& save = at(id);
    if (save.to_start == 0) continue;
    const std::uint32_t& copies = in_flight_[static_cast<std::size_t>(save.direction)];
    const std::uint32_t copies_max = save.demanded ? kDemandedMax : kCopiesMax;
    if (save.tier == Tier::host && copies >= copies_max) continue;
    while (save.started[save.first]) ++save.first;
    for (std::uint32_t piece = save.first; piece < save.started.size(); ++piece) {
      if (save.started[piece]) continue;
      if (on_ssd(save, piece)) {
        if (frames == 0) continue;
        --frames;
      }
      if (copies < copies_max) moved |= start_copy(id, piece);
    }
  }
  return moved;
}

// Pages of saves that will be fetched.
bool Activations::stage_ahead() {
  bool moved = false;
  std::uint32_t frames = room_.frames_max - std::min(room_.frames_max, staged_);
  for (const SaveId id : ahead_) {
    Save& save = at(id);
    bool in_order = true;
    for (std::size_t i = save.staged; i < save.pages.size(); ++i) {
      if (frames == 0) return moved;
      --frames;
      in_order &= cache_.stage(save.pages[i]);
      if (!in_order) continue;  // asked for; counted when it is its turn
      ++save.staged;
      ++staged_;
      moved = true;
    }
  }
  return moved;
}

bool Activations::reap() {
  const std::vector<Completion> completions = transfers_.take(Requester::activations);
  for (const Completion& done : completions) {
    finish(SaveId{static_cast<std::uint32_t>(done.tag >> 32)}, static_cast<std::uint32_t>(done.tag),
           done.link == Link::download ? Direction::out : Direction::in);
  }
  return !completions.empty();
}

void Activations::finish(SaveId id, std::uint32_t piece, Direction direction) {
  Save& save = at(id);
  STRATA_ASSERT(save.direction == direction && save.in_flight > 0 && save.left > 0);
  --save.in_flight;
  --in_flight_[static_cast<std::size_t>(direction)];
  if (on_ssd(save, piece)) --ssd_open_;
  const bool written = direction == Direction::out && save.tier == Tier::ssd;
  save.pins[piece].close(written ? WriteBack::now : WriteBack::later);
  if (--save.left != 0) return;
  save.saved = true;
  std::erase(queue_, id);
}

bool Activations::turn() {
  bool moved = reap();
  moved |= recycle();
  moved |= start_copies();
  moved |= stage_ahead();
  return moved;
}

}  // namespace strata
