// ComputedPages: the pages of views that hold what is computed from pages of codes. They rest
// nowhere and are never written: the device has them, or nobody does. Each is made of one part, or
// of two where what it shows lies in two pages of codes.
//
// Threads: constant once it is made.
//
//   ComputedPages computed(first, std::move(parts));
//   for (const ComputedPart& part : computed.parts(page)) ... part.source, part.to_byte ...
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "memory/check.hpp"
#include "memory/copy_engine.hpp"
#include "memory/units.hpp"

namespace strata {

// What one page of codes gives to a computed page.
struct ComputedPart {
  PageId source = kNoPage;
  std::size_t to_byte = 0;     // where it begins in the computed page
  std::size_t bytes = 0;       // of values
  std::size_t from_bytes = 0;  // of codes and scales, for the counters
  Computation how{};
};

class ComputedPages final {
 public:
  ComputedPages() = default;
  // `parts`: of pages `first`, `first` + 1, ..., each in the order of its bytes.
  ComputedPages(PageId first, std::vector<std::vector<ComputedPart>> parts)
      : first_(index(first)), parts_(std::move(parts)) {}

  bool contains(PageId page) const {
    return index(page) >= first_ && index(page) - first_ < parts_.size();
  }
  // REQUIRES: it is one.
  std::span<const ComputedPart> parts(PageId page) const {
    STRATA_ASSERT(contains(page));
    return parts_[index(page) - first_];
  }

 private:
  std::uint32_t first_ = 0;
  std::vector<std::vector<ComputedPart>> parts_;
};

}  // namespace strata
