#include "doubles/faulty_engine.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "memory/check.hpp"

namespace strata {
namespace {

// What the fault answers without asking the inner engine; nullopt where it is asked.
std::optional<std::int64_t> answer(IoFault fault, const IoRequest& request) {
  switch (fault) {
    case IoFault::eio:
    case IoFault::passing_eio:
      return -EIO;
    case IoFault::no_space:
      return -ENOSPC;
    case IoFault::interrupted:
      return -EINTR;
    case IoFault::again:
      return -EAGAIN;
    case IoFault::no_memory:
      return -ENOMEM;
    case IoFault::lost_write:
      return request.bytes;
    case IoFault::none:
    case IoFault::shortened:
    case IoFault::corrupt:
    case IoFault::misdirected:
      return std::nullopt;
  }
  return std::nullopt;
}

// The same on every standard library, unlike std::uniform_real_distribution.
double unit_interval(std::uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace

FaultyEngine::FaultyEngine(std::unique_ptr<IoEngine> inner, const FaultPlan& plan,
                           const VirtualClock* clock, Doorbell* bell)
    : clock_(clock), bell_(bell), inner_(std::move(inner)) {
  STRATA_ASSERT(inner_ != nullptr);
  set_plan(plan);
}

void FaultyEngine::set_plan(const FaultPlan& plan) {
  STRATA_ASSERT(plan.delay_ns_max == 0 || clock_ != nullptr);
  plan_ = plan;
  random_.seed(plan.seed);
  requests_ = 0;
  broken_.clear();
}

std::optional<std::int64_t> FaultyEngine::next_due_ns() const {
  if (held_.empty()) return std::nullopt;
  return held_.front().due_ns;
}

int FaultyEngine::attach(int fd, std::uint64_t file_bytes) {
  const int file = inner_->attach(fd, file_bytes);
  STRATA_ASSERT(file == static_cast<int>(file_bytes_.size()));
  file_bytes_.push_back(file_bytes);
  return file;
}

void FaultyEngine::grew(int file, std::uint64_t file_bytes) {
  inner_->grew(file, file_bytes);
  file_bytes_[static_cast<std::size_t>(file)] = file_bytes;
}

std::optional<Error> FaultyEngine::register_memory(std::span<std::byte> memory) {
  return inner_->register_memory(memory);
}

bool FaultyEngine::applies(IoFault fault, const IoRequest& request) const {
  switch (fault) {
    case IoFault::no_space:
    case IoFault::lost_write:
      return request.op == IoOp::write;
    case IoFault::shortened:
      return request.bytes > kIoAlignment;
    case IoFault::misdirected:
      return file_bytes_[static_cast<std::size_t>(request.file)] >= 2 * request.bytes;
    case IoFault::none:
    case IoFault::eio:
    case IoFault::passing_eio:
    case IoFault::interrupted:
    case IoFault::again:
    case IoFault::no_memory:
    case IoFault::corrupt:
      return true;
  }
  return true;
}

IoFault FaultyEngine::draw(const IoRequest& request) {
  double left = unit_interval(random_());
  IoFault fault = IoFault::none;
  for (std::size_t i = 1; i < kIoFaultCount && fault == IoFault::none; ++i) {
    if (left < plan_.chance[i]) fault = static_cast<IoFault>(i);
    left -= plan_.chance[i];
  }
  if (++requests_ == plan_.nth) fault = plan_.nth_fault;
  if (is_broken(request)) return IoFault::eio;
  if (fault == IoFault::eio) broken_.push_back(request);
  return applies(fault, request) ? fault : IoFault::none;
}

bool FaultyEngine::is_broken(const IoRequest& request) const {
  return std::ranges::any_of(broken_, [&](const IoRequest& place) {
    return place.file == request.file && place.offset < request.offset + request.bytes &&
           request.offset < place.offset + place.bytes;
  });
}

// The request that the inner engine gets instead.
IoRequest FaultyEngine::distort(Operation& operation) const {
  IoRequest request = operation.asked;
  if (operation.fault == IoFault::shortened) {
    const std::uint64_t sectors = request.bytes / kIoAlignment;
    request.bytes = static_cast<std::uint32_t>((1 + operation.dice % (sectors - 1)) * kIoAlignment);
  }
  if (operation.fault == IoFault::misdirected) {
    const std::uint64_t places =
        file_bytes_[static_cast<std::size_t>(request.file)] / request.bytes;
    const std::uint64_t place = request.offset / request.bytes + 1 + operation.dice % (places - 1);
    request.offset = place % places * request.bytes;
  }
  if (operation.fault == IoFault::corrupt && request.op == IoOp::write) {
    auto* copy = static_cast<std::byte*>(std::aligned_alloc(kIoAlignment, request.bytes));
    STRATA_ASSERT(copy != nullptr);
    std::memcpy(copy, request.buffer, request.bytes);
    copy[operation.dice % request.bytes] ^= std::byte{1};
    operation.damaged.reset(copy);
    request.buffer = copy;
  }
  return request;
}

// What the caller is told of the inner engine's result.
std::int64_t FaultyEngine::settle(Operation& operation, std::int64_t result) const {
  operation.damaged.reset();
  if (result <= 0) return result;
  if (operation.fault == IoFault::corrupt && operation.asked.op == IoOp::read) {
    operation.asked.buffer[operation.dice % static_cast<std::uint64_t>(result)] ^= std::byte{1};
  }
  // Now and then the short count ends inside a sector.
  if (operation.fault == IoFault::shortened && operation.dice % 3 == 0) return result - 512;
  return result;
}

std::size_t FaultyEngine::free_operation() {
  const auto found = std::find_if(operations_.begin(), operations_.end(),
                                  [](const Operation& operation) { return !operation.live; });
  if (found != operations_.end()) return static_cast<std::size_t>(found - operations_.begin());
  operations_.emplace_back();
  return operations_.size() - 1;
}

void FaultyEngine::hold(const Operation& operation, std::int64_t result) {
  const Held held{.due_ns = operation.due_ns,
                  .completion = {.tag = operation.asked.tag, .result = result}};
  const auto later = std::upper_bound(
      held_.begin(), held_.end(), held,
      [](const Held& left, const Held& right) { return left.due_ns < right.due_ns; });
  held_.insert(later, held);
}

bool FaultyEngine::submit(const IoRequest& request) {
  // Drawn only for requests that are taken, so that a full queue does not change the plan.
  const std::mt19937_64 random_before = random_;
  const std::uint64_t requests_before = requests_;
  const std::size_t broken_before = broken_.size();
  const std::size_t which = free_operation();
  Operation& operation = operations_[which];
  operation.asked = request;
  operation.fault = draw(request);
  operation.dice = random_();
  operation.due_ns = now_ns();
  if (plan_.delay_ns_max > 0) {
    operation.due_ns += static_cast<std::int64_t>(unit_interval(random_()) *
                                                  static_cast<double>(plan_.delay_ns_max));
  }

  if (const auto result = answer(operation.fault, request)) {
    hold(operation, *result);
  } else {
    IoRequest distorted = distort(operation);
    distorted.tag = which;
    if (!inner_->submit(distorted)) {
      random_ = random_before;
      requests_ = requests_before;
      broken_.resize(broken_before);
      return false;
    }
    operation.live = true;
  }
  ++injected_[static_cast<std::size_t>(operation.fault)];
  return true;
}

void FaultyEngine::flush() {
  inner_->flush();
  if (!held_.empty() && bell_ != nullptr) bell_->ring();
}

std::size_t FaultyEngine::reap(std::span<IoCompletion> out) {
  std::array<IoCompletion, 32> seen;
  std::size_t count = 0;
  while ((count = inner_->reap(seen)) > 0) {
    for (std::size_t i = 0; i < count; ++i) {
      Operation& operation = operations_[seen[i].tag];
      STRATA_ASSERT(operation.live);
      operation.live = false;
      hold(operation, settle(operation, seen[i].result));
    }
  }
  std::size_t given = 0;
  while (given < out.size() && given < held_.size() && held_[given].due_ns <= now_ns()) {
    out[given] = held_[given].completion;
    ++given;
  }
  held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(given));
  return given;
}

}  // namespace strata
