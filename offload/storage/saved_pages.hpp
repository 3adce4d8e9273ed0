// SavedPages: what slots of another session's files hold, read and verified. Nobody waits for it
// but its caller; the session that wrote them may go on meanwhile.
//
// Threads: one caller at a time.
//
//   PageFiles files = open_page_files({"/mnt/nvme"}, {"links/a.pages"}, Existing::to_read);
//   SavedPages pages({std::move(files), slots}, 4 * kMiB, "auto");
//   pages.read(slots_of_a_chunk, buffer);                 // throws StrataError: corrupt, io
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "memory/doorbell.hpp"
#include "offload/storage/store.hpp"

namespace strata {

class SavedPages final {
 public:
  // Throws StrataError where a file is too short for the slots.
  SavedPages(SavedFiles saved, std::size_t page_bytes, const std::string& io_engine);

  std::size_t page_bytes() const { return page_bytes_; }
  // What the slots hold, one every page_bytes; what lies behind it stays as it is. `to` is aligned
  // to 4096. REQUIRES: no slot is there twice.
  void read(std::span<const SlotId> slots, std::byte* to);

 private:
  std::size_t page_bytes_;
  Doorbell bell_;
  Store store_;
};

}  // namespace strata
