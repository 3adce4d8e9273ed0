// What a snapshot has that is in no page: gradients in frames, on the device or lent, and scales.
#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/snapshots.hpp"
#include "memory/check.hpp"

namespace strata {
namespace {

// One is filled with scales while another is written; gradients take any that is free.
constexpr std::size_t kScratchPages = 3;

}  // namespace

Snapshots::Scratch* Snapshots::free_scratch() {
  const auto found = std::ranges::find(scratch_, false, &Scratch::taken);
  if (found != scratch_.end()) return &*found;
  if (scratch_.size() == kScratchPages) return nullptr;
  scratch_.reserve(kScratchPages);  // they stay where they are
  Scratch& made = scratch_.emplace_back();
  made.memory.resize(base_.layout.page_bytes + kIoAlignment);
  const auto address = reinterpret_cast<std::uintptr_t>(made.memory.data());
  made.bytes = made.memory.data() + (kIoAlignment - address % kIoAlignment) % kIoAlignment;
  return &made;
}

// REQUIRES: a free slot. False: too many are on their way.
bool Snapshots::save_bytes(std::span<const std::byte> from, std::uint32_t chunk, Saving saving,
                           std::size_t saves_max) {
  if (saving_.size() >= saves_max || base_.transfers.full() || !find_room()) return false;
  saving.slot = store().acquire().value();
  saving.epoch = captures_.epoch();
  const UnitId unit = base_.layout.segments[base_.layout.chunks[chunk].segment].unit;
  base_.transfers.save(from, saving.slot, unit, Requester::snapshots);
  if (saving.scratch != nullptr) saving.scratch->taken = true;
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
  return std::ranges::none_of(runs, [&](const SavedRun& run) {
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
  Scratch* const scratch = free_scratch();
  if (scratch == nullptr || saving_.size() >= saves_max || base_.transfers.full()) return taken;
  const std::byte* const from = gather(id, runs, number, *scratch);
  if (from == nullptr) return taken;
  Saving saving{.frame = SavedFrame{{}, id, number}};
  if (from == scratch->bytes) saving.scratch = scratch;
  const std::size_t bytes = base_.layout.bytes_in(base_.layout.chunks[id], Role::grad, number);
  if (save_bytes({from, bytes}, id, std::move(saving), saves_max)) return taken = Taken::begun;
  return Taken::not_yet;
}

// Page `number` of the chunk's gradient as it would lie there; null: not yet.
const std::byte* Snapshots::gather(std::uint32_t id, const Runs& runs, std::uint32_t number,
                                   Scratch& scratch) {
  const Layout& layout = base_.layout;
  const Chunk& chunk = layout.chunks[id];
  const std::size_t per_page = layout.elements_per_page(chunk, Role::grad);
  const std::size_t size = layout.element_bytes(chunk, Role::grad);
  const std::size_t begin = number * per_page;
  const auto is_lent = [&](const SavedRun& run) {
    return updates_.lent_gradient(id, run.param) != nullptr;
  };
  // 1. Where it has a place of its own.
  if (base_.gradient_frames) {
    const std::byte* const frame = base_.gradient_frames->at(id, begin);
    if (std::ranges::none_of(runs, is_lent)) return frame;
    std::memcpy(scratch.bytes, frame, layout.page_bytes);
  } else {
    const PageId page{index(chunk.run(Role::grad).first) + number};
    if (base_.table.tier(page) == Tier::device) {
      base_.copy_out_now(scratch.bytes, base_.table.placement(page).device_frame(), page);
    } else if (base_.table.newest(page) == 0) {
      std::memset(scratch.bytes, 0, layout.page_bytes);
    } else {
      const Pin pin = base_.cache.open(page, Intent::read);
      if (!pin) return nullptr;
      std::memcpy(scratch.bytes, pin.bytes(), layout.page_bytes);
    }
  }
  // 2. What was lent lies elsewhere.
  for (const SavedRun& run : runs) {
    const auto lent = updates_.lent_gradient(id, run.param);
    const std::size_t from = std::max(begin, run.in_chunk);
    const std::size_t to = std::min(begin + per_page, run.in_chunk + run.count);
    if (lent == nullptr || run.gradient == HeldGradient::none || from >= to) continue;
    std::memcpy(scratch.bytes + (from - begin) * size,
                lent.get() + (run.in_param + from - run.in_chunk) * size, (to - from) * size);
  }
  return scratch.bytes;
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
    std::memset(scales_->bytes, 0, base_.layout.page_bytes);
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
  if (!save_bytes(filled, chunk, std::move(saving), kScratchPages)) return false;
  scales_ = nullptr;
  return true;
}

}  // namespace strata
