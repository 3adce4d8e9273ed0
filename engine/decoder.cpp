#include "engine/decoder.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

// What of a page of codes values of so many elements need.
std::size_t stored_bytes(Codes codes, std::size_t elements) {
  return code_bytes(codes, elements) + scale_bytes(codes, elements);
}

}  // namespace

Decoder::Decoder(const Layout& layout, const DeviceKernels* device)
    : page_bytes_(layout.page_bytes), kernels_(code_kernels(best_isa())), device_(device) {
  std::vector<std::vector<ComputedPart>> parts;
  parts.reserve(layout.computed_count);
  for (const Segment& segment : layout.segments) {
    if (!segment.stored) continue;
    const std::size_t shown = layout.page_bytes / size_of(segment.dtype);
    for (std::size_t first = 0; first < segment.elements; first += shown) {
      parts.push_back(parts_of(layout, segment, first, std::min(first + shown, segment.elements)));
    }
  }
  STRATA_ASSERT(parts.size() == layout.computed_count);
  pages_ = ComputedPages(PageId{layout.page_count}, std::move(parts));
}

// Of the computed page with elements [first, end) of the segment.
std::vector<ComputedPart> Decoder::parts_of(const Layout& layout, const Segment& segment,
                                            std::size_t first, std::size_t end) {
  STRATA_ASSERT(first < end && end <= segment.elements);
  const std::size_t full = segment.chunk_elements;
  std::vector<ComputedPart> parts;
  for (std::size_t at = first; at < end;) {
    const std::size_t in_chunk = at % full;
    const std::size_t elements = std::min(end - at, full - in_chunk);
    works_.push_back({this, span(segment, in_chunk, elements), segment.dtype});
    parts.push_back(
        {.source = layout.chunks[segment.first_chunk + at / full].run(Role::param).first,
         .to_byte = (at - first) * size_of(segment.dtype),
         .bytes = elements * size_of(segment.dtype),
         .from_bytes = stored_bytes(segment.stored->codes, elements),
         .how = {.run = &Decoder::run, .submit = &Decoder::submit, .how = &works_.back()}});
    at += elements;
  }
  return parts;
}

CodeSpan Decoder::span(const Segment& segment, std::size_t first, std::size_t count) const {
  STRATA_ASSERT(segment.stored.has_value());
  return {.form = *segment.stored, .page_bytes = page_bytes_, .first = first, .count = count};
}

void Decoder::decode(const Segment& segment, std::size_t first, std::size_t count,
                     const std::byte* page, void* values, Dtype dtype) const {
  kernels_.dequantise(span(segment, first, count), page, values, dtype);
}

void Decoder::run(const void* work, const std::byte* from, std::byte* to) {
  const auto& what = *static_cast<const Work*>(work);
  what.of->kernels_.dequantise(what.span, from, to, what.dtype);
}

int Decoder::submit(const void* work, const std::byte* from, std::byte* to, Stream stream) {
  const auto& what = *static_cast<const Work*>(work);
  STRATA_ASSERT(what.of->device_ != nullptr);
  const DecodeSpan span{what.span, from, to, what.dtype};
  return what.of->device_->decode(&span, 1, stream);
}

}  // namespace strata
