// What a snapshot has that is in no page: gradients in frames, on the device or lent, and scales.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "engine/snapshots.hpp"
#include "memory/check.hpp"

namespace strata {
namespace {

// One is filled with scales while another is written; gradients take any that is free.
constexpr std::size_t kScratchPages = 3;
// Of one turn: some 100 µs.
constexpr std::size_t kGatheredBytes = 512 * kKiB;

}  // namespace

Snapshots::~Snapshots() {
  for (const Scratch& scratch : scratch_) base_.tiers.copies().wait(scratch.copy);
}

Snapshots::Scratch* Snapshots::free_scratch() {
  const auto found = std::ranges::find_if(scratch_, [this](const Scratch& scratch) {
    return !scratch.taken && !scratch.gathers && base_.tiers.copies().done(scratch.copy);
  });
  if (found != scratch_.end()) return &*found;
  if (scratch_.size() == kScratchPages) return nullptr;
  scratch_.reserve(kScratchPages);  // they stay where they are
  Scratch& made = scratch_.emplace_back();
  made.memory = std::make_unique_for_overwrite<std::byte[]>(base_.layout.page_bytes + kIoAlignment);
  const auto address = reinterpret_cast<std::uintptr_t>(made.memory.get());
  made.bytes = made.memory.get() + (kIoAlignment - address % kIoAlignment) % kIoAlignment;
  return &made;
}

// The one in which this is being gathered, or a free one; null: there is none now.
Snapshots::Scratch* Snapshots::scratch_for(std::uint32_t chunk, std::uint32_t number) {
  const auto found =
      std::ranges::find(scratch_, std::optional(std::pair(chunk, number)), &Scratch::gathers);
  return found != scratch_.end() ? &*found : free_scratch();
}

// REQUIRES: a free slot. False: too many are on their way.
bool Snapshots::save_bytes(std::span<const std::byte> from, std::uint32_t chunk, Saving saving,
                           std::size_t saves_max) {
  if (saving_.size() >= saves_max || base_.transfers.full() || !find_room()) return false;
  saving.slot = store().acquire().value();
  saving.epoch = captures_.epoch();
  const UnitId unit = base_.layout.segments[base_.layout.chunks[chunk].segment].unit;
  base_.transfers.save(from, saving.slot, unit, Requester::snapshots);
  if (saving.scratch != nullptr) {
    saving.scratch->taken = true;
    saving.scratch->gathers.reset();
  }
  saving_.push_back(std::move(saving));
  return true;
}

Snapshots::Runs Snapshots::runs_of(std::uint32_t chunk) const {
  const Runs* const kept = captures_.kept_runs(chunk);
  return kept != nullptr ? *kept : updates_.runs_of(chunk, captures_.takes_gradients());
}

// The page holds the chunk's gradient as it is: nothing of it was lent, and it is in no frame.
bool Snapshots::lies_in_page(std::uint32_t chunk, const Runs& runs, PageId page) const {
  if (base_.gradient_frames || base_.table.tier(page) == Tier::device) return false;
  return !is_lent(chunk, runs);
}

// Any of it lies where autograd left it.
bool Snapshots::is_lent(std::uint32_t chunk, const Runs& runs) const {
  return std::ranges::any_of(runs, [&](const SavedRun& run) {
    return updates_.lent_gradient(chunk, run.param) != nullptr;
  });
}

Snapshots::Taken Snapshots::take_gradient(std::uint32_t id, const Runs& runs, std::uint32_t number,
                                          std::size_t saves_max) {
  const PageRun& pages = base_.layout.chunks[id].run(Role::grad);
  if (pages.count != 0) {
    const PageId page{index(pages.first) + number};
    if (lies_in_page(id, runs, page)) return take(page, saves_max);
  }
  Taken& taken = frames_.try_emplace({id, number}, Taken::not_yet).first->second;
  if (taken != Taken::not_yet) return taken == Taken::done ? taken : Taken::not_yet;
  if (saving_.size() >= saves_max || base_.transfers.full()) return taken;
  const std::size_t bytes = base_.layout.bytes_in(base_.layout.chunks[id], Role::grad, number);
  Saving saving{.frame = SavedFrame{{}, id, number}};
  const std::byte* from = nullptr;
  if (base_.gradient_frames && !is_lent(id, runs)) {
    const std::size_t first =
        number * base_.layout.elements_per_page(base_.layout.chunks[id], Role::grad);
    from = base_.gradient_frames->at(id, first);
  } else {
    Scratch* const scratch = scratch_for(id, number);
    if (scratch == nullptr) return taken;
    const std::size_t before = scratch->gathers ? scratch->gathered : 0;
    if (!gather(id, runs, number, *scratch)) {
      return scratch->gathered != before ? Taken::begun : Taken::not_yet;
    }
    from = scratch->bytes;
    saving.scratch = scratch;
  }
  if (save_bytes({from, bytes}, id, std::move(saving), saves_max)) return taken = Taken::begun;
  return Taken::not_yet;
}

// Page `number` of the chunk's gradient as it would lie there, some of it in each turn. It stays as
// it is until it is captured. True: all of it is there.
bool Snapshots::gather(std::uint32_t id, const Runs& runs, std::uint32_t number, Scratch& scratch) {
  const Layout& layout = base_.layout;
  const Chunk& chunk = layout.chunks[id];
  const std::size_t size = layout.element_bytes(chunk, Role::grad);
  const std::size_t begin = number * layout.elements_per_page(chunk, Role::grad);
  if (!scratch.gathers) {
    scratch.gathers = {id, number};
    scratch.gathered = 0;
    scratch.copy = {};
  }
  const std::size_t at = scratch.gathered;
  const std::size_t bytes = std::min(kGatheredBytes, layout.page_bytes - at);
  // 1. What lies in a place of its own.
  if (bytes != 0 && !gather_own(id, number, bytes, scratch)) return false;
  // 2. What was lent lies elsewhere.
  const std::size_t first = begin + at / size, last = begin + (at + bytes) / size;
  for (const SavedRun& run : runs) {
    const auto lent = updates_.lent_gradient(id, run.param);
    const std::size_t from = std::max(first, run.in_chunk);
    const std::size_t to = std::min(last, run.in_chunk + run.count);
    if (lent == nullptr || run.gradient == HeldGradient::none || from >= to) continue;
    std::memcpy(scratch.bytes + (from - begin) * size,
                lent.get() + (run.in_param + from - run.in_chunk) * size, (to - from) * size);
  }
  scratch.gathered += bytes;
  return scratch.gathered == layout.page_bytes;
}

// The next bytes of it, or zeros where nobody wrote any. False: they are still to come.
bool Snapshots::gather_own(std::uint32_t id, std::uint32_t number, std::size_t bytes,
                           Scratch& scratch) {
  const Layout& layout = base_.layout;
  const Chunk& chunk = layout.chunks[id];
  std::byte* const to = scratch.bytes + scratch.gathered;
  if (base_.gradient_frames) {
    const std::size_t first = number * layout.elements_per_page(chunk, Role::grad);
    std::memcpy(to, base_.gradient_frames->at(id, first) + scratch.gathered, bytes);
    return true;
  }
  const PageId page{index(chunk.run(Role::grad).first) + number};
  if (base_.table.tier(page) == Tier::device) {  // all of it by one copy
    if (scratch.copy == CopyTicket{}) {
      const FrameId frame = base_.table.placement(page).device_frame();
      scratch.copy = base_.begin_copy_out(scratch.bytes, frame, page);
    }
    base_.transfers.take(Requester::elements);
    return base_.tiers.copies().done(scratch.copy);
  }
  if (base_.table.newest(page) == 0) {
    std::memset(to, 0, bytes);
    return true;
  }
  const Pin pin = base_.cache.open(page, Intent::read);
  if (pin) std::memcpy(to, pin.bytes() + scratch.gathered, bytes);
  return static_cast<bool>(pin);
}

// False: not yet.
bool Snapshots::keep_scales(std::uint32_t id) {
  const std::size_t begin = base_.owns.scales[id];
  const std::size_t bytes = base_.layout.scale_bytes(base_.layout.chunks[id]);
  if (bytes == 0) return true;
  STRATA_ASSERT(bytes <= base_.layout.page_bytes);
  if (scales_ != nullptr && scale_bytes_ + bytes > base_.layout.page_bytes && !flush_scales()) {
    return false;
  }
  if (scales_ == nullptr) {
    scales_ = free_scratch();
    if (scales_ == nullptr) return false;
    scales_->taken = true;
    scale_bytes_ = 0;
    now_.scales.emplace_back();
  }
  std::memcpy(scales_->bytes + scale_bytes_, base_.scales + begin, bytes);
  const auto page = static_cast<std::uint32_t>(now_.scales.size() - 1);
  now_.scales_at.push_back({.chunk = id, .page = page, .byte = scale_bytes_});
  scale_bytes_ += bytes;
  return true;
}

// What was gathered goes to its slot. False: not yet.
bool Snapshots::flush_scales() {
  if (scales_ == nullptr) return true;
  const std::uint32_t chunk = now_.scales_at.back().chunk;
  Saving saving{.scratch = scales_, .frame = SavedFrame{}, .scales = true};
  saving.frame->number = static_cast<std::uint32_t>(now_.scales.size() - 1);
  const std::span<const std::byte> filled(scales_->bytes, scale_bytes_);
  // What is written behind them, up to a whole sector.
  std::memset(scales_->bytes + scale_bytes_, 0,
              round_up(scale_bytes_, kIoAlignment) - scale_bytes_);
  if (!save_bytes(filled, chunk, std::move(saving), kScratchPages)) return false;
  scales_ = nullptr;
  return true;
}

}  // namespace strata
