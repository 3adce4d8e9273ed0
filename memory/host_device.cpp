#include "memory/host_device.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <utility>

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
  for (const Claimed& claimed : claimed_) drop(claimed, 0);
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

std::size_t HostFrames::claimed_frames() const {
  std::size_t frames = 0;
  for (const Claimed& claimed : claimed_) frames += claimed.frames;
  return frames;
}

// What is mapped of it behind so many frames goes; without any, so do its addresses.
void HostFrames::drop(const Claimed& claimed, std::size_t left) const {
  STRATA_ASSERT(left <= claimed.frames);
  std::byte* const end = claimed.first + claimed.frames * page_bytes_;
  std::byte* const from = left == 0 ? claimed.reserved : claimed.first + left * page_bytes_;
  if (from != end) ::munmap(from, static_cast<std::size_t>(end - from));
}

std::optional<Error> HostFrames::claim_memory(std::size_t frame_count) {
  STRATA_ASSERT(fd_ >= 0);
  const std::size_t before = claimed_frames() * page_bytes_;
  const std::size_t bytes = frame_count * page_bytes_;
  if (bytes <= before) return std::nullopt;
  const std::size_t more = bytes - before;
  if (more > host_bytes_available()) {
    return memory_error("could not claim the memory", Tier::device, more, ENOMEM);
  }
  // 1. Addresses: as far behind the beginning of a huge page as the frames are in the file.
  const std::size_t ahead = before % kHugePageBytes;
  Claimed made{.frames = more / page_bytes_};
  made.reserved = reserve_addresses(ahead + more);
  made.first = made.reserved + ahead;
  const auto failed = [&](const char* what, int errno_value) {
    drop(made, 0);
    std::ignore = ::ftruncate(fd_, static_cast<off_t>(before));
    return memory_error(what, Tier::device, more, errno_value);
  };
  // 2. A file in memory of exactly the size of all frames, and one mapping of what is new, for the
  //    copy engine and for computation.
  if (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) {
    return failed("could not size the memory file", errno);
  }
  if (::mmap(made.first, more, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_,
             static_cast<off_t>(before)) == MAP_FAILED) {
    return failed("could not map the memory file", errno);
  }
  // 3. Memory behind it, through the mapping and not by fallocate(): only a mapping can ask
  //    for huge pages, and views then show the same ones.
  ::madvise(made.first, more, MADV_HUGEPAGE);
  if (const int errno_value = populate(made.first, more); errno_value != 0) {
    return failed("could not claim the memory", errno_value);
  }
  claimed_.push_back(made);
  return std::nullopt;
}

void HostFrames::set_frames(std::size_t frame_count) {
  STRATA_ASSERT(frame_count <= claimed_frames());
  addresses_.clear();
  for (const Claimed& claimed : claimed_) {
    for (std::size_t i = 0; i < claimed.frames && addresses_.size() < frame_count; ++i) {
      addresses_.push_back(claimed.first + i * page_bytes_);
    }
  }
}

void HostFrames::give_back_memory() {
  std::size_t frames = claimed_frames();
  while (frames > addresses_.size()) {
    Claimed& last = claimed_.back();
    const std::size_t go = std::min(last.frames, frames - addresses_.size());
    drop(last, last.frames - go);
    last.frames -= go;
    frames -= go;
    if (last.frames == 0) claimed_.pop_back();
  }
  const int failed = ::ftruncate(fd_, static_cast<off_t>(frames * page_bytes_));
  STRATA_ASSERT(failed == 0);
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
  STRATA_ASSERT(index(frame) < addresses_.size());
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
  STRATA_ASSERT(index(frame) < addresses_.size());
  return addresses_[index(frame)];
}

Device host_device(Doorbell* bell, CopyMode mode) {
  auto copies = std::make_unique<HostCopies>(bell, mode);
  auto frames = std::make_unique<HostFrames>(*copies);
  return {std::move(copies), std::move(frames)};
}

}  // namespace strata
