#include "page_copy.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/check.hpp"
#include "memory/result.hpp"
#include "stopwatch.hpp"

namespace strata {
namespace {

void check(std::optional<Error> error) {
  if (error) throw StrataError(*error);
}

FrameId frame(std::size_t number) {
  return FrameId{static_cast<std::uint32_t>(number)};
}

}  // namespace

PageCopy::PageCopy(Device& device, std::span<std::byte> host, std::size_t page_bytes)
    : memory_(*device.memory),
      copies_(*device.copies),
      host_(host),
      page_bytes_(page_bytes),
      pinned_bytes_(copies_.pin_host(host).bytes) {
  STRATA_ASSERT(host.size() % page_bytes == 0);
  STRATA_ASSERT(pages() >= 2);
  check(memory_.claim(pages(), page_bytes));
  view_ = memory_.reserve(host.size());
  show(0);
}

PageCopy::~PageCopy() {
  memory_.release(view_, host_.size());
}

double PageCopy::copy(Ways ways) {
  std::optional<CopyTicket> last_in, last_out;
  const std::size_t in = ways == Ways::in ? pages() : ways == Ways::out ? 0 : pages() / 2;
  const std::size_t out = pages() - in;
  const Stopwatch watch;
  // In turns, so that neither way runs out of work while the other one is being told what to do.
  for (std::size_t page = 0; page < std::max(in, out); ++page) {
    if (page < in) last_in = copy_page(CopyStream::pages_in, page);
    if (page < out) last_out = copy_page(CopyStream::out, in + page);
  }
  // The copies of one way are done in their order.
  for (const auto& last : {last_in, last_out}) {
    if (last) check(copies_.wait(*last));
  }
  return watch.seconds();
}

CopyTicket PageCopy::copy_page(CopyStream stream, std::size_t page) {
  std::byte* const here = &host_[page * page_bytes_];
  std::byte* const there = memory_.address(frame(page));
  const bool out = stream == CopyStream::out;
  return copies_.copy({.to = out ? here : there,
                       .from = out ? there : here,
                       .bytes = page_bytes_,
                       .stream = stream});
}

double PageCopy::remap() {
  turns_ = (turns_ + 1) % pages();
  const Stopwatch watch;
  show(turns_);
  return watch.seconds() / static_cast<double>(pages());
}

void PageCopy::show(std::size_t first) {
  std::vector<ViewPage> shown;
  for (std::size_t page = 0; page < pages(); ++page) {
    shown.push_back({page, frame((page + first) % pages())});
  }
  check(memory_.map_pages(view_, shown));
}

}  // namespace strata
