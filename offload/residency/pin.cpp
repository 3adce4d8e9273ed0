#include <utility>

#include "memory/check.hpp"
#include "offload/residency/page_cache.hpp"

namespace strata {

Pin& Pin::operator=(Pin&& other) noexcept {
  if (this == &other) return *this;
  close();
  cache_ = std::exchange(other.cache_, nullptr);
  page_ = other.page_;
  tier_ = other.tier_;
  intent_ = other.intent_;
  bytes_ = other.bytes_;
  return *this;
}

void Pin::close(WriteBack write_back) {
  if (cache_ != nullptr) std::exchange(cache_, nullptr)->close(*this, write_back);
}

std::optional<HostFrameId> Pin::replace(HostFrameId fresh, WriteBack write_back) {
  STRATA_ASSERT(cache_ != nullptr);
  STRATA_ASSERT(intent_ == Intent::read && tier_ == Tier::host);
  STRATA_ASSERT(!cache_->writing_[index(page_)]);
  PageTable& table = cache_->table_;
  const Copy& copy = table.copy(page_, Tier::host);
  if (copy.state != CopyState::valid || copy.pins != 1) return std::nullopt;
  table.unpin(page_, Tier::host);
  const HostFrameId old = table.exchange(page_, fresh).host_frame();
  if (PageCache::Staged* place = cache_->staged(page_)) place->frame = fresh;
  std::exchange(cache_, nullptr)->publish(page_, write_back);
  return old;
}

}  // namespace strata
