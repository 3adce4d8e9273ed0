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

PageCopy::PageCopy(Backend& device, std::span<std::byte> host, std::size_t page_bytes)
    : device_(device), host_(host), page_bytes_(page_bytes), pinned_bytes_(device.pin_host(host)) {
  STRATA_ASSERT(host.size() % page_bytes == 0);
  STRATA_ASSERT(pages() >= 2);
  check(device_.claim(pages(), page_bytes));
  view_ = device_.reserve(host.size());
  show(0);
}

PageCopy::~PageCopy() {
  device_.release(view_, host_.size());
}

double PageCopy::copy(Ways ways) {
  std::optional<CopyTicket> last_in, last_out;
  const std::size_t in = ways == Ways::in ? pages() : ways == Ways::out ? 0 : pages() / 2;
  const std::size_t out = pages() - in;
  const Stopwatch watch;
  // In turns, so that neither way runs out of work while the other one is being told what to do.
  for (std::size_t page = 0; page < std::max(in, out); ++page) {
    const std::size_t back = in + page;
    if (page < in) {
      last_in = device_.copy_in(frame(page), &host_[page * page_bytes_], page_bytes_);
    }
    if (page < out) {
      last_out = device_.copy_out(&host_[back * page_bytes_], frame(back), page_bytes_);
    }
  }
  // The copies of one way are done in their order.
  for (const auto& last : {last_in, last_out}) {
    if (last) device_.wait(*last);
  }
  const double seconds = watch.seconds();
  for (const auto& last : {last_in, last_out}) {
    if (last) check(device_.take_error(*last));
  }
  return seconds;
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
  check(device_.map_pages(view_, shown));
}

}  // namespace strata
