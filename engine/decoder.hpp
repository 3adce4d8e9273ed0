// Decoder: how what rests as codes becomes what views show. It tells the residency of which pages
// of codes each computed page is made, and computes values for who reads them from outside. A
// device that the processor does not reach computes them itself, from pinned host memory.
//
// Threads: constant once it is made; decode() may run in several.
//
//   const Decoder decoder(layout, nullptr);
//   decoder.pages();                                        // for Loads
//   decoder.decode(segment, first, 128, codes_page, values, Dtype::float32);
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "engine/layout.hpp"
#include "offload/residency/computed_pages.hpp"
#include "optimizers/codes/codes.hpp"
#include "optimizers/cuda/kernels.hpp"

namespace strata {

class Decoder final {
 public:
  // `device`: its kernels, which outlive this; null: the processor reaches its memory.
  Decoder(const Layout& layout, const DeviceKernels* device);
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  const ComputedPages& pages() const { return pages_; }
  const CodeKernels& kernels() const { return kernels_; }
  // The values of elements [first, first + count) of a chunk, whose page of codes this is.
  // REQUIRES: the segment rests as codes; both are whole blocks.
  void decode(const Segment& segment, std::size_t first, std::size_t count, const std::byte* page,
              void* values, Dtype dtype) const;
  CodeSpan span(const Segment& segment, std::size_t first, std::size_t count) const;

 private:
  struct Work {
    const Decoder* of = nullptr;
    CodeSpan span{};
    Dtype dtype = Dtype::bfloat16;
  };

  static void run(const void* work, const std::byte* from, std::byte* to);
  static int submit(const void* work, const std::byte* from, std::byte* to, Stream stream);
  std::vector<ComputedPart> parts_of(const Layout& layout, const Segment& segment,
                                     std::size_t first, std::size_t end);

  std::size_t page_bytes_;
  const CodeKernels& kernels_;
  const DeviceKernels* device_;
  std::deque<Work> works_;  // computations point to them
  ComputedPages pages_;
};

}  // namespace strata
