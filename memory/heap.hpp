// Heap: malloc inside given ranges of host frames, for what is smaller than a page. A private
// jemalloc arena finds the places; not a byte of it comes from anywhere else, so the host budget
// holds, and the process's own malloc is left alone.
//
// Threads: one caller at a time (the core's lock).
//
//   Heap heap(slab.bytes().first(4 * kMiB));
//   std::byte* bias = heap.allocate(2048, 64);       // nullptr: full
//   heap.add(another_frame);                         // and then it is not
//   heap.deallocate(bias);
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace strata {

class Heap final {
 public:
  // The frames belong to the heap until it is gone. Throws StrataError (memory) when jemalloc has
  // no arena left. REQUIRES: `frames` is aligned to 4096, and a positive multiple of it.
  explicit Heap(std::span<std::byte> frames);
  // More frames. A block lies in one range: what is larger than each of them has no place.
  // REQUIRES: as the constructor.
  void add(std::span<std::byte> frames);
  // What is still allocated goes with it.
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // Uninitialised bytes, or nullptr when no place is large enough.
  // REQUIRES: bytes > 0; align is a power of two.
  std::byte* allocate(std::size_t bytes, std::size_t align);
  // REQUIRES: what allocate() returned, once.
  void deallocate(std::byte* bytes);

  // Bytes handed out, each rounded up to jemalloc's size class.
  std::size_t used() const;
  // Bytes of all ranges.
  std::size_t capacity() const;

 private:
  struct Arena;

  void claim_frames(std::size_t bytes);

  std::unique_ptr<Arena> arena_;
};

}  // namespace strata
