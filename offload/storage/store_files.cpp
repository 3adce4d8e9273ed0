// The files of a Store: made, or found where another session left them, and made longer.
#include <algorithm>

#include "memory/check.hpp"
#include "offload/storage/store.hpp"

namespace strata {

std::uint32_t fit_slots(const SavedFiles& saved, std::size_t slot_bytes, std::uint32_t slots) {
  const std::size_t stripes = saved.files.size();
  STRATA_ASSERT(stripes != 0);
  const auto slots_there = [&] {
    std::uint64_t rows = UINT64_MAX;
    for (const auto& file : saved.files) rows = std::min(rows, file->bytes() / slot_bytes);
    return rows * stripes;
  };
  const std::uint32_t grown = saved.files.front()->writable() ? slots : 0;
  if (std::max<std::uint64_t>(slots_there(), grown) >= index(kNoSlot)) {
    refuse("these files have more slots than there are numbers");
  }
  for (const SavedFiles::Slot& kept : saved.slots) {
    const bool there = index(kept.slot) < slots_there();
    if (there && fits_slot(kept.contents.bytes, slot_bytes)) continue;
    refuse("slot " + std::to_string(index(kept.slot)) +
           (there ? " cannot hold " + std::to_string(kept.contents.bytes) + " bytes"
                  : " lies beyond the end of the files"));
  }
  lengthen(saved.files, ceil_div(grown, stripes) * slot_bytes);
  return static_cast<std::uint32_t>(slots_there());
}

void Store::make_files() {
  if (engine_->needs_files() && options_.paths.empty()) refuse("a store on SSD needs a path");
  for (auto path = options_.paths.begin(); path != options_.paths.end(); ++path) {
    if (std::find(options_.paths.begin(), path, *path) == path) continue;
    refuse("the SSD path " + *path + " is given twice");
  }
  const std::uint64_t bytes = stripe_bytes(options_.slot_count);
  if (engine_->needs_files()) {
    for (const std::string& path : options_.paths) {
      files_.push_back(std::make_unique<PageFile>(path, bytes, options_.naming));
    }
  }
  attach_files(bytes);
}

void Store::attach_files(std::uint64_t bytes) {
  const std::size_t stripes = std::max<std::size_t>(options_.paths.size(), 1);
  for (std::size_t i = 0; i < stripes; ++i) {
    numbers_.push_back(engine_->attach(files_.empty() ? -1 : files_[i]->fd(), bytes));
  }
  for (const auto& file : files_) {
    warnings_.insert(warnings_.end(), file->warnings().begin(), file->warnings().end());
  }
}

void Store::take_contents(const SavedFiles& saved) {
  for (const SavedFiles::Slot& kept : saved.slots) {
    Slot& slot = at(kept.slot);
    STRATA_ASSERT(slot.holders == 0 && kept.holders != 0);
    slot.sealed = true;
    slot.holders = kept.holders;
    slot.contents = kept.contents;
  }
  const bool only_read = !files_.front()->writable();
  std::erase_if(free_slots_, [&](SlotId slot) { return only_read || held(slot); });
}

void Store::change_files(SavedFiles saved) {
  STRATA_ASSERT(in_flight() == 0 && acquired_ == 0 && free_slots_.size() == slots_.size());
  STRATA_ASSERT(saved.files.size() == numbers_.size());
  // 1. The engine knows them, and not those that go.
  options_.slot_count = fit_slots(saved, options_.slot_bytes, 1);
  files_.swap(saved.files);
  for (std::size_t i = 0; i < numbers_.size(); ++i) {
    engine_->reattach(numbers_[i], files_[i]->fd());
    engine_->grew(numbers_[i], stripe_bytes(options_.slot_count));
  }
  // 2. Their slots.
  slots_.clear();
  free_slots_.clear();
  add_slots(options_.slot_count);
  take_contents(saved);
}

std::vector<Descriptor> Store::duplicate_files() const {
  std::vector<Descriptor> copies;
  for (const auto& file : files_) copies.push_back(Descriptor::duplicate(file->fd()));
  return copies;
}

std::uint64_t Store::stripe_bytes(std::size_t slots) const {
  return ceil_div(slots, std::max<std::size_t>(options_.paths.size(), 1)) * options_.slot_bytes;
}

void Store::add_slots(std::uint32_t count) {
  STRATA_ASSERT(count < index(kNoSlot) - slots_.size());
  const auto end = static_cast<std::uint32_t>(slots_.size()) + count;
  for (std::uint32_t i = end; i-- > slots_.size();) free_slots_.push_back(SlotId{i});
  slots_.resize(end);
}

void Store::lengthen(std::uint32_t count) {
  const std::uint64_t after = stripe_bytes(slots_.size() + count);
  strata::lengthen(files_, after);
}

void Store::extend(std::uint32_t count) {
  const std::uint64_t after = stripe_bytes(slots_.size() + count);
  for (const int number : numbers_) engine_->grew(number, after);
  add_slots(count);
}

bool Store::keep_linkable() {
  return !files_.empty() &&
         std::ranges::all_of(files_, [](const auto& file) { return file->keep_linkable(); });
}

}  // namespace strata
