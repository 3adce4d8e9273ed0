// LateCopies: wraps a copy engine, and says later than it could that a copy is done. Where the
// engine copies when it is asked, the bytes are read as late: whoever gives them away ahead of that
// is found out.
//
// Threads: as CopyEngine says.
//
//   device.copies = std::make_unique<LateCopies>(std::move(device.copies), [&] { return draw(); });
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "memory/copy_engine.hpp"

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

}  // namespace strata
