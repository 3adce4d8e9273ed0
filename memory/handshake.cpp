#include "memory/handshake.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "memory/check.hpp"
#include "memory/peer_watch.hpp"
#include "memory/result.hpp"

namespace strata {
namespace {

constexpr std::uint64_t kMagic = 0x7265657061727473;  // "strapeer" in memory
constexpr std::uint32_t kFormat = 1;
constexpr std::byte kReceived{0xac};

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // since Linux 6.5
#endif

// Note [Whose pidfd]
// The socket tells the pid of the process that connected, or that listens. Where the kernel is too
// old to give that process's pidfd itself, the pid could by now be another's. But whoever answers
// what is sent after pidfd_open() was alive at that moment, and so had its pid: kReceived is that
// answer.
Descriptor pidfd_of(int socket, pid_t pid) {
  int pidfd = -1;
  socklen_t length = sizeof pidfd;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &length) == 0) {
    return Descriptor(pidfd);
  }
  return open_pidfd(pid);
}

std::span<std::byte> bytes_of(auto& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

// Room for descriptors beside a message, aligned as the kernel wants it.
struct alignas(cmsghdr) Control {
  std::array<char, CMSG_SPACE(sizeof(int) * kOfferedMax)> bytes{};
};

// Appends what came beside a message to `out`, whatever it is, so that it is closed in the end.
void take_descriptors(msghdr& message, std::vector<Descriptor>& out) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      out.emplace_back(fd);
    }
  }
}

bool peer_left(int errno_value) {
  return errno_value == ECONNRESET || errno_value == EPIPE;
}

}  // namespace

Handshake::Handshake(Descriptor socket, const Offer& offer, Ranks expected)
    : socket_(std::move(socket)), offer_(offer), expected_(expected) {
  STRATA_ASSERT(offer.hello.size() <= kHelloBytesMax);
  STRATA_ASSERT(offer.descriptors.size() <= kOfferedMax);
  STRATA_ASSERT(expected.last < offer.count);
  check_user();
  Header header{.magic = kMagic,
                .format = kFormat,
                .count = offer.count,
                .rank = offer.rank,
                .hello_bytes = static_cast<std::uint32_t>(offer.hello.size()),
                .descriptors = static_cast<std::uint32_t>(offer.descriptors.size()),
                .zero = 0};
  const auto bytes = bytes_of(header);
  out_.assign(bytes.begin(), bytes.end());
  out_.insert(out_.end(), offer.hello.begin(), offer.hello.end());
  in_.resize(sizeof(Header));
}

void Handshake::check_user() {
  ucred other{};
  socklen_t length = sizeof other;
  if (::getsockopt(fd(), SOL_SOCKET, SO_PEERCRED, &other, &length) != 0) {
    throw StrataError({.what = "could not ask who another process is", .errno_value = errno});
  }
  peer_.pid = other.pid;
  if (other.uid != ::geteuid()) {
    refuse("process " + std::to_string(other.pid) + " of user " + std::to_string(other.uid) +
           " wants to be a rank of user " + std::to_string(::geteuid()) +
           ": run all ranks as the same user");
  }
  if (other.pid == 0) refuse("a rank is in another pid namespace: run all in one container");
  peer_.pidfd = pidfd_of(fd(), other.pid);
  if (peer_.pidfd.open() || errno == ESRCH) return;  // without one: it has ended
  throw StrataError(
      {.what = "process " + std::to_string(other.pid) +
               " cannot be watched; that takes Linux 5.3, and a container that allows "
               "pidfd_open()",
       .errno_value = errno});
}

Handshake::State Handshake::step() {
  if (!peer_.pidfd.open()) return State::gone;
  // 1. What this side has to say. Where the other has left, its last words still say why.
  send_some();
  // 2. What the other has to say.
  const bool left = !receive_some();
  // 3. The word that all has come.
  if (has_all() && !acknowledged_) {
    acknowledged_ = true;
    out_.push_back(kReceived);
    send_some();
  }
  if (header_ && received_ == in_.size()) {
    if (in_.back() != kReceived) refuse(who() + " says something else than that it understood");
    if (sent_ == out_.size()) return State::done;
  }
  if (left && header_) refuse(who() + " ended while the ranks met; its own error says why");
  return left ? State::gone : State::under_way;
}

short Handshake::events() const {
  return static_cast<short>(sent_ == out_.size() ? POLLIN : POLLIN | POLLOUT);
}

std::optional<std::uint32_t> Handshake::rank() const {
  if (!header_) return std::nullopt;
  return header_->rank;
}

Peer Handshake::take() {
  STRATA_ASSERT(header_.has_value());
  STRATA_ASSERT(received_ == in_.size());
  peer_.rank = header_->rank;
  peer_.hello.assign(in_.begin() + sizeof(Header), in_.end() - 1);
  close();
  return std::move(peer_);
}

void Handshake::send_some() {
  Control control;
  while (sent_ < out_.size()) {
    iovec piece{.iov_base = out_.data() + sent_, .iov_len = out_.size() - sent_};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    // Descriptors go with the first bytes, however many of these there are.
    if (sent_ == 0 && !offer_.descriptors.empty()) {
      const std::size_t bytes = offer_.descriptors.size_bytes();
      message.msg_control = control.bytes.data();
      message.msg_controllen = CMSG_SPACE(bytes);
      cmsghdr* part = CMSG_FIRSTHDR(&message);
      part->cmsg_level = SOL_SOCKET;
      part->cmsg_type = SCM_RIGHTS;
      part->cmsg_len = CMSG_LEN(bytes);
      std::memcpy(CMSG_DATA(part), offer_.descriptors.data(), bytes);
    }
    const ssize_t sent = ::sendmsg(fd(), &message, MSG_NOSIGNAL);
    if (sent >= 0) {
      sent_ += static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN) {
      return;
    } else if (peer_left(errno)) {
      sent_ = out_.size();  // nobody is there to read it
    } else if (errno != EINTR) {
      throw StrataError({.what = "could not speak to " + who(), .errno_value = errno});
    }
  }
}

// False: the other side has left, and all that it said is here.
bool Handshake::receive_some() {
  while (received_ < in_.size()) {
    errno = 0;
    if (receive_piece()) {
      if (!header_ && received_ == sizeof(Header)) check_header();
    } else if (errno != EINTR) {
      return errno == EAGAIN;
    }
  }
  return true;
}

// True: some bytes more are here. Else errno says why not; 0: the other side has left.
bool Handshake::receive_piece() {
  Control control;
  iovec piece{.iov_base = in_.data() + received_, .iov_len = in_.size() - received_};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes.data();
  message.msg_controllen = control.bytes.size();
  const ssize_t got = ::recvmsg(fd(), &message, MSG_CMSG_CLOEXEC);
  if (got < 0) {
    if (errno == EAGAIN || errno == EINTR || peer_left(errno)) return false;
    throw StrataError({.what = "could not hear " + who(), .errno_value = errno});
  }
  // 1. Whatever came is closed in the end, also where it is refused.
  take_descriptors(message, peer_.descriptors);
  // 2. Some may have been dropped for want of room: there were too many, or this process may have
  // no more.
  if ((message.msg_flags & MSG_CTRUNC) != 0 || peer_.descriptors.size() > kOfferedMax) {
    refuse("not all that " + who() + " sent could be received: this process has too many files " +
           "open (ulimit -n), or it sent more than " + std::to_string(kOfferedMax));
  }
  received_ += static_cast<std::size_t>(got);
  return got > 0;
}

void Handshake::check_header() {
  Header header{};
  std::ranges::copy(in_, bytes_of(header).begin());
  if (header.magic != kMagic || header.zero != 0) {
    refuse(who() + " does not speak as strata does: is something else in that folder?");
  }
  if (header.format != kFormat) {
    refuse(who() + " meets by format " + std::to_string(header.format) + ", this one by " +
           std::to_string(kFormat) + ": run the same version of strata in all ranks");
  }
  if (header.count != offer_.count) {
    refuse(who() + " expects " + std::to_string(header.count) + " ranks, and rank " +
           std::to_string(offer_.rank) + " expects " + std::to_string(offer_.count));
  }
  if (header.rank < expected_.first || header.rank > expected_.last) {
    refuse(who() + " says that it is rank " + std::to_string(header.rank) + ", which rank " +
           std::to_string(offer_.rank) + " does not expect there");
  }
  if (header.hello_bytes > kHelloBytesMax || header.descriptors > kOfferedMax) {
    refuse(who() + " says too much: " + std::to_string(header.hello_bytes) + " bytes and " +
           std::to_string(header.descriptors) + " descriptors");
  }
  header_ = header;
  in_.resize(sizeof(Header) + header.hello_bytes + 1);
}

// Of what the other side says, all but that it has heard this one.
bool Handshake::has_all() const {
  if (!header_ || received_ + 1 < in_.size()) return false;
  if (peer_.descriptors.size() == header_->descriptors) return true;
  refuse(who() + " announced " + std::to_string(header_->descriptors) + " descriptors and sent " +
         std::to_string(peer_.descriptors.size()));
}

std::string Handshake::who() const {
  const std::string process = "process " + std::to_string(peer_.pid);
  return header_ ? "rank " + std::to_string(header_->rank) + " (" + process + ")" : process;
}

}  // namespace strata
