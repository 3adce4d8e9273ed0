// How the processes of one machine that train together find each other: each names a folder that
// only their user may enter, and gets from every other its hello, the descriptors that it offers
// (shared memory, doorbells) and a pidfd. Whoever returns has exchanged with all.
//
// Threads: any; the calling thread sleeps until all have come. One call for each rank.
//
//   // mkdir -m 700 /run/user/1000/job-17, once, before the ranks start
//   const std::array offered = {area.descriptor(), bell.fd()};
//   std::vector<Peer> peers = meet({.folder = "/run/user/1000/job-17", .rank = 2, .count = 4,
//                                   .timeout = 60s, .hello = hello, .descriptors = offered});
//   const MappedArea theirs(peers[0].descriptors.at(0).get(), bytes, Access::read_write);
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory/handshake.hpp"

namespace strata {

struct MeetOptions {
  // Of this user, mode 0700, and not a link. Sockets "rank-0", "rank-1" ... are made in it and
  // removed again; those of a run that was killed are replaced.
  std::string folder{};
  std::uint32_t rank = 0;
  std::uint32_t count = 1;  // of all ranks, at most kPeersMax
  std::chrono::milliseconds timeout{60'000};
  std::span<const std::byte> hello{};  // at most kHelloBytesMax
  std::span<const int> descriptors{};  // at most kOfferedMax; stay the caller's
  std::span<const pid_t> pids{};       // by rank, where they are known: who ends is not waited for
};

// All other ranks, in their order. Throws StrataError, and leaves nothing in the folder: config
// where the folder is not safe, two processes claim one rank, they do not fit together, or one ends
// meanwhile; io, with ETIMEDOUT and the ranks that are missing, where not all came in time.
std::vector<Peer> meet(const MeetOptions& options);

}  // namespace strata
