// Memory of one process that others map: a file in memory whose length is sealed, so that nobody
// who maps it can lose it under its feet. It lasts as long as anybody has the descriptor or a
// mapping, and has no name in any folder.
//
// Threads: the bytes belong to whoever the processes agree on; the objects, one caller at a time.
// A forked child has neither mapping.
//
//   SharedArea area("strata-rings", 64 * kKiB);   // all zero; throws StrataError (memory)
//   area.populate();                              // no touch faults from here on
//   send(area.descriptor());                      // memory/rendezvous.hpp
//
//   const MappedArea theirs(received.get(), 64 * kKiB, Access::read_write);  // the other process
//   theirs.writable()[0] = std::byte{1};
#pragma once

#include <cstddef>
#include <span>

#include "memory/descriptor.hpp"
#include "memory/mapping.hpp"

namespace strata {

// A file in memory, `bytes` long for ever, all holes. `name` is what /proc shows of it.
// Throws StrataError (memory). REQUIRES: bytes is a positive multiple of 4096.
Descriptor make_sealed_file(const char* name, std::size_t bytes);

class SharedArea final {
 public:
  // Maps a new sealed file, aligned to 2 MiB. REQUIRES: as make_sealed_file().
  SharedArea(const char* name, std::size_t bytes);

  // Memory behind every page. Throws StrataError (memory).
  void populate();

  std::span<std::byte> bytes() const { return mapped_.bytes(); }
  // What other processes map it by.
  int descriptor() const { return file_.get(); }

 private:
  Descriptor file_;
  Addresses mapped_;
};

enum class Access : bool { read_only, read_write };

class MappedArea final {
 public:
  // Maps what another process made as a SharedArea, or a shared Slab, of exactly `bytes`, aligned
  // to 2 MiB. Throws StrataError: config where `file` is anything else, of which a touch could kill
  // this process, and memory. The mapping lasts when `file` is closed.
  MappedArea(int file, std::size_t bytes, Access access);

  std::span<const std::byte> bytes() const { return mapped_.bytes(); }
  // REQUIRES: Access::read_write.
  std::span<std::byte> writable() const;

 private:
  Addresses mapped_;
  Access access_;
};

}  // namespace strata
