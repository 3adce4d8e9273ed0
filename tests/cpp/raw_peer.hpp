// What the tests of processes that meet share, and processes that do not speak as they should.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "forked.hpp"
#include "memory/rendezvous.hpp"

namespace strata {

// Long enough for a machine that does a lot else.
inline constexpr std::chrono::milliseconds kLong{60'000};

// Of this process.
inline std::size_t open_files() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

// What meet() says where it refuses.
inline std::string meeting_refused(
    const std::string& folder, std::uint32_t rank, std::uint32_t count,
    std::chrono::milliseconds timeout = std::chrono::milliseconds(50)) {
  return refusal_of(
      [&] { meet({.folder = folder, .rank = rank, .count = count, .timeout = timeout}); });
}

inline Descriptor raw_socket() {
  return Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
}
inline sockaddr_un raw_address(const std::string& folder, std::uint32_t rank) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = folder + "/rank-" + std::to_string(rank);
  EXPECT_LT(path.size(), sizeof address.sun_path);
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof address.sun_path - 1));
  return address;
}
inline Descriptor raw_listener(const std::string& folder, std::uint32_t rank) {
  Descriptor socket = raw_socket();
  const sockaddr_un address = raw_address(folder, rank);
  EXPECT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::listen(socket.get(), 8), 0);
  return socket;
}
inline Descriptor raw_call(const std::string& folder, std::uint32_t rank) {
  const sockaddr_un address = raw_address(folder, rank);
  while (true) {
    Descriptor socket = raw_socket();
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
      return socket;
    }
    ::usleep(1000);
  }
}

// The header as it goes over the socket.
struct RawHeader {
  std::uint64_t magic = 0x7265657061727473;
  std::uint32_t format = 1, count = 2, rank = 1, hello_bytes = 0, descriptors = 0, zero = 0;
};

// Sends the header with `files` copies of a descriptor.
inline void raw_send(int socket, RawHeader header, std::size_t files) {
  std::vector<int> sent(files, socket);
  std::vector<char> control(CMSG_SPACE(sizeof(int) * files));
  iovec piece{.iov_base = &header, .iov_len = sizeof header};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (files > 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int) * files);
    std::memcpy(CMSG_DATA(part), sent.data(), sizeof(int) * files);
  }
  EXPECT_EQ(::sendmsg(socket, &message, MSG_NOSIGNAL), ssize_t{sizeof header});
}

}  // namespace strata
