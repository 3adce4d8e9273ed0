// LateCopies: wraps a copy engine, and says later than it could that a copy is done. Where the
// engine copies when it is asked, the bytes are read as late: whoever gives them away ahead of that
// is found out.
//
// Threads: as CopyEngine says.
//
//   parts.device = with_late_copies(std::move(device), [&] { return draw(); });
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "memory/copy_engine.hpp"
#include "memory/device.hpp"

namespace strata {

// REQUIRES of the engine: copies complete in the order of their tickets, whatever their streams.
class LateCopies final : public CopyEngine {
 public:
  // `says`: whether one that is done may be said to be.
  LateCopies(std::unique_ptr<CopyEngine> inner, std::function<bool()> says)
      : inner_(std::move(inner)), says_(std::move(says)) {}

  CopyTicket copy(const CopyRequest& request) override { return inner_->copy(request); }
  bool done(CopyTicket ticket) override {
    if (ticket <= said_) return true;
    if (!says_() || !inner_->done(ticket)) return false;
    said_ = ticket;
    return true;
  }
  std::optional<Error> wait(CopyTicket ticket) override {
    auto error = inner_->wait(ticket);
    said_ = std::max(said_, ticket);
    return error;
  }
  void stream_waits(Stream stream, CopyTicket ticket) override {
    inner_->stream_waits(stream, ticket);
  }
  CopyTicket record(Stream stream) override { return inner_->record(stream); }

 private:
  std::unique_ptr<CopyEngine> inner_;
  std::function<bool()> says_;
  CopyTicket said_{};
};

inline Device with_late_copies(Device device, std::function<bool()> says) {
  return {std::make_unique<LateCopies>(std::move(device.copies), std::move(says)),
          std::move(device.memory)};
}

}  // namespace strata
