#include "offload/storage/memory_engine.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "memory/check.hpp"

namespace strata {

MemoryEngine::MemoryEngine(Doorbell* bell, std::uint32_t depth) : bell_(bell), depth_(depth) {
  STRATA_ASSERT(depth > 0);
}

int MemoryEngine::attach(int, std::uint64_t file_bytes) {
  files_.emplace_back(file_bytes);
  return static_cast<int>(files_.size()) - 1;
}

void MemoryEngine::grew(int file, std::uint64_t file_bytes) {
  STRATA_ASSERT(file >= 0 && static_cast<std::size_t>(file) < files_.size());
  files_[static_cast<std::size_t>(file)].resize(file_bytes);
}

bool MemoryEngine::submit(const IoRequest& request) {
  STRATA_ASSERT(request.file >= 0 && static_cast<std::size_t>(request.file) < files_.size());
  if (queue_.size() == depth_) return false;
  queue_.push_back(request);
  return true;
}

void MemoryEngine::flush() {
  if (flushed_ < queue_.size() && bell_ != nullptr) bell_->ring();
  STRATA_ASSERT(flushed_ <= queue_.size());
  flushed_ = queue_.size();
}

std::size_t MemoryEngine::reap(std::span<IoCompletion> out) {
  std::size_t count = 0;
  for (; count < out.size() && flushed_ > 0; --flushed_) {
    STRATA_ASSERT(flushed_ <= queue_.size());
    const IoRequest request = queue_.front();
    queue_.pop_front();
    out[count++] = {.tag = request.tag, .result = move(request)};
  }
  return count;
}

// Moves the bytes as a disk of a fixed size would: reads end, and writes find no space, at its end.
std::int64_t MemoryEngine::move(const IoRequest& request) {
  STRATA_ASSERT(request.buffer != nullptr);
  std::vector<std::byte>& file = files_[static_cast<std::size_t>(request.file)];
  const std::uint64_t size = file.size();
  const std::uint64_t left = request.offset < size ? size - request.offset : 0;
  const std::size_t bytes = std::min<std::size_t>(request.bytes, left);
  if (request.op == IoOp::write) {
    if (bytes == 0) return -ENOSPC;
    std::memcpy(file.data() + request.offset, request.buffer, bytes);
  } else if (bytes > 0) {
    std::memcpy(request.buffer, file.data() + request.offset, bytes);
  }
  return static_cast<std::int64_t>(bytes);
}

std::span<std::byte> MemoryEngine::contents(int file) {
  STRATA_ASSERT(file >= 0 && static_cast<std::size_t>(file) < files_.size());
  return files_[static_cast<std::size_t>(file)];
}

}  // namespace strata
