// One connection between two processes that meet: proves that the other one is of this user, and
// exchanges what both have to say. It never waits: its owner polls, with all the others.
//
// Threads: one at a time.
//
//   Handshake shaking(std::move(socket), offer, {.first = 2, .last = 2});
//   while (shaking.step() == Handshake::State::under_way) poll(shaking.fd(), shaking.events());
//   Peer peer = shaking.take();
//
// What goes over a Unix stream socket, each way, in the byte order of the machine:
//
//   bytes  what
//      32  Header: magic, format, count, rank, bytes of the hello, number of descriptors, zero;
//          with it all the descriptors (SCM_RIGHTS)
//  0-4096  the hello
//       1  kReceived, when all of the above has come from the other side
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/descriptor.hpp"

namespace strata {

inline constexpr std::uint32_t kPeersMax = 256;  // ranks on one machine
inline constexpr std::size_t kHelloBytesMax = 4096;
inline constexpr std::size_t kOfferedMax = 8;  // descriptors

// What a process says of itself. REQUIRES: within the limits above; lasts as long as its use.
struct Offer {
  std::uint32_t rank = 0;
  std::uint32_t count = 0;             // of ranks
  std::span<const std::byte> hello{};  // means what the processes agree on
  std::span<const int> descriptors{};  // stay the caller's; the others get copies
};

// Another process, and what it gave. Both are its word: to be checked like any input.
struct Peer {
  std::uint32_t rank = 0;
  pid_t pid = 0;
  std::vector<std::byte> hello{};
  std::vector<Descriptor> descriptors{};  // in the order they were offered
  Descriptor pidfd{};                     // memory/peer_watch.hpp
};

// Those that may be on the other side; none where first > last.
struct Ranks {
  std::uint32_t first = 0, last = 0;
};

class Handshake final {
 public:
  // gone: the other side left before it said who it is. That is no error: it only looked, or died.
  enum class State : std::uint8_t { under_way, done, gone };

  // Throws StrataError (config) where another user is on the other side, or a process that this one
  // cannot watch. REQUIRES: a connected socket that does not block.
  Handshake(Descriptor socket, const Offer& offer, Ranks expected);

  // Goes as far as it can without waiting. Throws StrataError: config where the other side says
  // what cannot be or belongs to another meeting, io.
  State step();

  int fd() const { return socket_.get(); }
  short events() const;
  pid_t pid() const { return peer_.pid; }
  Ranks expected() const { return expected_; }
  // Known once its header has come and was found good.
  std::optional<std::uint32_t> rank() const;
  // The other process, and hangs up. REQUIRES: done.
  Peer take();
  // Hangs up; what is known of the other side stays.
  void close() { socket_ = Descriptor(); }
  bool closed() const { return !socket_.open(); }

 private:
  struct Header {
    std::uint64_t magic;
    std::uint32_t format, count, rank, hello_bytes, descriptors, zero;
  };
  static_assert(sizeof(Header) == 32);

  void check_user();
  void send_some();
  bool receive_some();
  bool receive_piece();
  void check_header();
  bool has_all() const;
  std::string who() const;

  Descriptor socket_;
  Offer offer_;
  Ranks expected_;
  std::vector<std::byte> out_, in_;
  std::size_t sent_ = 0, received_ = 0;
  std::optional<Header> header_;  // of the other side, checked
  bool acknowledged_ = false;     // by this side
  Peer peer_;
};

}  // namespace strata
