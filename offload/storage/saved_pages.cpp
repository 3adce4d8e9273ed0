#include "offload/storage/saved_pages.hpp"

#include <chrono>
#include <utility>

#include "memory/check.hpp"
#include "offload/storage/make_engine.hpp"

namespace strata {
namespace {

constexpr std::uint32_t kDepth = 64;
// Against a ring that was lost on the way.
constexpr std::chrono::milliseconds kLook{10};

StoreOptions options_of(const SavedFiles& saved, std::size_t page_bytes) {
  StoreOptions options;
  for (const auto& file : saved.files) options.paths.push_back(file->place());
  options.slot_bytes = page_bytes;
  options.slot_count = 1;
  options.in_flight_max = kDepth;
  options.hash_threads = hash_threads_here();
  return options;
}

}  // namespace

SavedPages::SavedPages(SavedFiles saved, std::size_t page_bytes, const std::string& io_engine)
    : page_bytes_(page_bytes),
      store_(options_of(saved, page_bytes), make_io_engine(io_engine, &bell_, kDepth),
             std::move(saved), &bell_) {}

void SavedPages::read(std::span<const SlotId> slots, std::byte* to) {
  STRATA_ASSERT(to != nullptr || slots.empty());
  // All of them first: what was started would go on behind an exception.
  for (const SlotId slot : slots) {
    if (slot >= SlotId{store_.slot_count()} || !store_.held(slot)) {
      refuse("slot " + std::to_string(index(slot)) + " is not one of the saved");
    }
  }
  std::vector<StoreCompletion> done;
  std::size_t started = 0, left = slots.size();
  std::optional<Error> error;
  while (left > 0) {
    while (started < slots.size()) {
      const SlotId slot = slots[started];
      const std::uint64_t version = store_.contents(slot).value().version;
      if (!store_.read(slot, to + started * page_bytes_, version, started)) break;
      ++started;
    }
    const bool moved = store_.turn(done);
    for (StoreCompletion& completion : done) {
      STRATA_ASSERT(left > 0 && completion.tag < started);
      --left;
      if (completion.error && !error) error = std::move(completion.error);
    }
    done.clear();
    if (!moved) bell_.wait(kLook);
  }
  if (error) throw StrataError(std::move(*error));
}

}  // namespace strata
