#include "memory/host_device.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>

#include "memory/check.hpp"
#include "memory/mapping.hpp"

namespace strata {

HostCopies::HostCopies(Doorbell* bell, CopyMode mode)
    : bell_(bell),
      crew_(mode == CopyMode::threaded ? 1 : 0, bell != nullptr ? bell : &unheard_,
            {.name = "strata-copy", .run = [this](const Job& job, int) { return run(job); }}) {}

std::uint64_t HostCopies::run(const Job& job) {
  STRATA_ASSERT(job.ticket == done_ + 1);
  const CopyRequest& request = job.request;
  if (!request.compute.empty())
    request.compute.run(request.compute.how, request.from, request.to);
  else
    std::memcpy(request.to, request.from, request.bytes);
  // The bytes first, then word of them.
  done_.store(job.ticket, std::memory_order_release);
  done_.notify_all();
  return job.ticket;
}

CopyTicket HostCopies::copy(const CopyRequest& request) {
  STRATA_ASSERT(request.to != nullptr);
  STRATA_ASSERT(request.from != nullptr);
  STRATA_ASSERT(done(request.after));
  while (!crew_.submit({request, last_ + 1})) {
    wait(CopyTicket{last_ + 1 - kCopiesMax});
    for (std::uint64_t over = 0; crew_.collect(over) && crew_.thread_count() != 0;) continue;
  }
  ++last_;
  // Where nobody runs it by itself, the caller's loop does, by its next done().
  if (crew_.thread_count() == 0 && bell_ != nullptr) bell_->ring();
  return CopyTicket{last_};
}

bool HostCopies::done(CopyTicket ticket) {
  const auto wanted = static_cast<std::uint64_t>(ticket);
  STRATA_ASSERT(wanted <= last_);
  // To collect is to run the next one, where there is no thread.
  for (std::uint64_t over = 0; done_ < wanted && crew_.collect(over);) continue;
  return done_.load(std::memory_order_acquire) >= wanted;
}

std::optional<Error> HostCopies::wait(CopyTicket ticket) {
  const auto wanted = static_cast<std::uint64_t>(ticket);
  if (done(ticket)) return std::nullopt;
  for (std::uint64_t seen = done_; seen < wanted; seen = done_.load(std::memory_order_acquire)) {
    done_.wait(seen, std::memory_order_acquire);
  }
  return std::nullopt;
}

void HostCopies::stream_waits(Stream stream, CopyTicket ticket) {
  STRATA_ASSERT(stream == nullptr);
  wait(ticket);
}

CopyTicket HostCopies::record(Stream stream) {
  STRATA_ASSERT(stream == nullptr);
  return CopyTicket{0};
}

HostFrames::~HostFrames() {
  copies_.finish_all();
  if (base_ != nullptr) ::munmap(base_, frame_count_ * page_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

std::optional<Error> HostFrames::claim(std::size_t frame_count, std::size_t page_bytes) {
  STRATA_ASSERT(fd_ < 0);
  STRATA_ASSERT(frame_count > 0);
  STRATA_ASSERT(page_bytes > 0 && page_bytes % kKernelPageBytes == 0);
  page_bytes_ = page_bytes;
  fd_ = ::memfd_create("strata-device", MFD_CLOEXEC);
  if (fd_ < 0) {
    const int errno_value = errno;
    return memory_error("could not create the memory file", Tier::device, frame_count * page_bytes,
                        errno_value);
  }
  return resize(frame_count);
}

std::optional<Error> HostFrames::resize(std::size_t frame_count) {
  STRATA_ASSERT(fd_ >= 0);
  STRATA_ASSERT(copies_.idle());
  const std::size_t bytes = frame_count * page_bytes_;
  const std::size_t before = frame_count_ * page_bytes_;
  const std::size_t more = bytes - std::min(bytes, before);
  const auto failed = [&](const char* what, int errno_value) {
    if (more != 0) std::ignore = ::ftruncate(fd_, static_cast<off_t>(before));
    return memory_error(what, Tier::device, more, errno_value);
  };
  if (more > host_bytes_available()) return failed("could not claim the memory", ENOMEM);
  // 1. A file in memory of exactly the size of all frames.
  if (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) {
    return failed("could not size the memory file", errno);
  }
  // 2. One mapping of all of it, for the copy engine and for computation.
  std::byte* base = bytes == 0 ? nullptr : reserve_addresses(bytes);
  const auto map_all = [&] {
    return ::mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, 0);
  };
  if (base != nullptr && map_all() == MAP_FAILED) {
    const int errno_value = errno;
    ::munmap(base, bytes);
    return failed("could not map the memory file", errno_value);
  }
  // 3. Memory behind it, through the mapping and not by fallocate(): only a mapping can ask
  //    for huge pages, and views then show the same ones.
  if (more != 0) {
    ::madvise(base, bytes, MADV_HUGEPAGE);
    if (const int errno_value = populate(base + before, more); errno_value != 0) {
      ::munmap(base, bytes);
      return failed("could not claim the memory", errno_value);
    }
  }
  if (base_ != nullptr) ::munmap(base_, before);
  base_ = base;
  frame_count_ = frame_count;
  return std::nullopt;
}

std::byte* HostFrames::reserve(std::size_t bytes) {
  STRATA_ASSERT(page_bytes_ > 0);
  STRATA_ASSERT(bytes % page_bytes_ == 0);
  return reserve_addresses(bytes);
}

void HostFrames::release(std::byte* view, std::size_t bytes) {
  STRATA_ASSERT(view != nullptr);
  STRATA_ASSERT(bytes % page_bytes_ == 0);
  ::munmap(view, bytes);
}

std::optional<Error> HostFrames::map_pages(std::byte* view, std::span<const ViewPage> pages) {
  STRATA_ASSERT(view != nullptr);
  STRATA_ASSERT(in_order_of_view(pages));
  for (const ViewPage& page : pages) {
    if (auto error = map_page(view + page.page_index * page_bytes_, page.frame)) return error;
  }
  return std::nullopt;
}

std::optional<Error> HostFrames::map_page(std::byte* at, FrameId frame) {
  STRATA_ASSERT(index(frame) < frame_count_);
  const auto offset = static_cast<off_t>(index(frame) * page_bytes_);
  int failed = 0;
  if (::mmap(at, page_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, offset) ==
      MAP_FAILED) {
    failed = errno;
  } else {
    // Now, so that no touch in the middle of a step faults.
    if (page_bytes_ >= kHugePageBytes) ::madvise(at, page_bytes_, MADV_HUGEPAGE);
    failed = populate(at, page_bytes_);
  }
  if (failed == 0) return std::nullopt;
  Error error = memory_error("could not map a page of a view", Tier::device, page_bytes_, failed);
  error.what += ", or take larger pages, or raise vm.max_map_count";
  return error;
}

std::byte* HostFrames::address(FrameId frame) const {
  STRATA_ASSERT(index(frame) < frame_count_);
  return base_ + index(frame) * page_bytes_;
}

Device host_device(Doorbell* bell, CopyMode mode) {
  auto copies = std::make_unique<HostCopies>(bell, mode);
  auto frames = std::make_unique<HostFrames>(*copies);
  return {std::move(copies), std::move(frames)};
}

}  // namespace strata
