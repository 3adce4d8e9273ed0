// Courier: carries what this rank and one of another machine say to each other, so that each is at
// the other a Seat like those of its own machine. What a message is about goes along with it, and
// is there when the message comes: pages that are lent, pieces of gradients, a part of a board.
//
// Threads: two of its own, one for each way; the core makes it, asks it and ends it.
//
//   Courier courier(wire, 3, here, there, {});
//   seats[3] = courier.seat();
//   if (auto how = courier.lost()) ...           // once
//   courier.part();                              // what was said is sent; nobody reads `here`
//   again
//
// Note [Frames]
// A frame is a head, with a few messages, and the bytes that they are about, in their order. Heads
// are counted, and messages have numbers and checks of their own (memory/peers.hpp): one that was
// lost, changed or came twice is noticed. A rank with nothing to say sends a head without messages
// every now and then. One that is silent for longer is lost, as is one whose connection breaks;
// what it said before is heard first. Who parts says so behind all else, and goes on to take what
// comes until the other one has said the same, which it does at once: neither waits for one who
// does not listen any more.
//
// Note [Heads ahead]
// Bytes travel when they are expected, and who receives learns from a head what to expect. So the
// bytes of a frame come behind the next frame's head: H0 H1 B0 H2 B1 H3 B2. Two heads are expected
// at any time, and when the one comes that is ahead of some bytes, its own are expected while those
// are on their way. So nobody waits for a round trip that is shorter than a frame takes. A head
// that goes ahead takes the messages that wait at that moment, or none. Frames are delivered in
// their order, each when its bytes have come.
//
// Note [Places]
// Bytes land in a mirror of the sender's memory, at the place that they have there. A holder leaves
// a page where it is until it is given back, and an outbox a piece until it is taken, so a place
// has new bytes only when who read the old ones has said that it is through. The memory behind a
// page goes when it is given back; pieces share pages of the kernel's, and keep theirs: as much as
// an outbox has. A page that this rank relays was asked for at a place in its own memory, and lands
// there: its frame, counted from 1, is the `window` of the ask, the grant, and what gives it back.
//
// Note [Codes]
// A grant whose `dtype` says so crosses as codes of the page's values: the sender makes them when
// the frame goes, and the receiver has the values where the page would have come to. They lie in
// buffers of the two threads, which are as large as the codes of a frame have ever been; who
// receives has them for the two frames that may be on their way. Both ends know from the grant how
// many bytes follow.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/ranks/wire.hpp"
#include "memory/doorbell.hpp"
#include "memory/mirror.hpp"
#include "memory/peers.hpp"
#include "memory/thread.hpp"
#include "optimizers/codes/sent_values.hpp"

namespace strata {

class Courier final {
 public:
  // What it reads of this rank, and where it puts what comes.
  struct Here {
    std::span<const std::byte> board{};
    std::span<const std::byte> memory{};
    std::size_t page_bytes = 0;
    std::span<std::byte> relayed{};  // frames for pages that this rank relays
    MessageRing* inbox = nullptr;    // for what the other one says
    Doorbell* bell = nullptr;
  };
  struct Times {
    std::chrono::milliseconds beat{1'000};      // at most so long without a frame
    std::chrono::milliseconds patience{8'000};  // then it is lost
  };

  // `memory_bytes`: of the other rank; a positive multiple of 4096. Throws StrataError (memory).
  Courier(Wire& wire, std::uint32_t other, const Here& here, std::size_t memory_bytes, Times times);
  ~Courier() { part(); }
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  // From here on both ways are open.
  void start();
  // The other rank, as this one sees it, for as long as the courier lives.
  Seat seat();
  // Once: nothing more comes, and why; empty: it has parted.
  std::optional<std::string> lost();
  // Sends what was said, and ends both ways. Waits for the other one's end; for one that says
  // nothing at most as long as it has patience.
  void part();

  static constexpr std::uint32_t kMessagesMax = 4;
  // As it crosses.
  struct Head {
    std::uint64_t number = 0;  // of the frame
    std::uint32_t count = 0;   // of messages
    std::uint32_t ends = 0;    // 1: nothing comes behind it
    std::array<PeerMessage, kMessagesMax> messages{};

    std::span<const PeerMessage> said() const { return std::span(messages).first(count); }
    bool has_bytes() const {
      return std::ranges::any_of(said(), [](const PeerMessage& said) { return said.bytes != 0; });
    }
  };
  static_assert(sizeof(Head) == 16 + kMessagesMax * sizeof(PeerMessage));

 private:
  // Room for the codes of one message.
  class Codes final {
   public:
    std::span<std::byte> room(std::size_t bytes) {
      if (lines_.size() * sizeof(Line) < bytes) lines_.resize(ceil_div(bytes, sizeof(Line)));
      return std::as_writable_bytes(std::span(lines_)).first(bytes);
    }

   private:
    struct alignas(kPartAlignment) Line {
      std::array<std::byte, kPartAlignment> bytes{};
    };
    std::vector<Line> lines_;
  };
  using CodesOfFrame = std::array<Codes, kMessagesMax>;

  // Codes that come, and the values that they become.
  struct Coded {
    std::span<const std::byte> codes;
    Dtype dtype;
    std::span<std::byte> values;
  };
  // A frame on its way here.
  struct Coming {
    Head head;
    std::vector<Coded> coded_pages;
    std::unique_ptr<Wire::Arrival> head_arrival;
    std::unique_ptr<Wire::Arrival> bytes_arrival;  // empty: there are none
  };
  // Of the frame that is delivered next, of the one whose bytes are on their way behind it, and of
  // two that are expected.
  static constexpr std::size_t kHeads = 4;
  using ComingFrames = std::array<Coming, kHeads>;  // by number

  void send_frames();
  void receive_frames();
  bool is_lost() const { return gone_ && !how_.empty(); }
  void send_head(const Head& head);
  void send_bytes(const Head& head, const Head& ahead);
  std::span<const std::byte> sent_for(const PeerMessage& message, std::size_t& coded_so_far);
  void fill(Head& head);
  Head next();
  void take_frames();
  void expect_head(ComingFrames& frames, std::uint64_t number);
  void await_head(ComingFrames& frames, std::uint64_t number);
  void expect_bytes(Coming& frame, CodesOfFrame& codes);
  void deliver(const Coming& frame);
  std::span<std::byte> room_for(const PeerMessage& message);
  void push(const PeerMessage& message);

  Wire& wire_;
  const std::uint32_t other_;
  const Here here_;
  const Times times_;
  const CodeKernels& kernels_;
  MessageRing way_;                         // what this rank says
  Mirror mirror_;                           // of the other one's memory
  std::vector<std::max_align_t> come_;      // of its board, as it was sent
  std::vector<std::max_align_t> seen_;      // as the core has it
  CodesOfFrame sent_codes_;                 // of the thread that sends,
  std::array<CodesOfFrame, 2> come_codes_;  // and of the one that receives
  Doorbell bell_;                           // something is to be sent
  std::string how_;                         // it was lost; before gone_ is set
  std::atomic<bool> parting_ = false, gone_ = false, deaf_ = false;
  bool told_ = false;
  Thread sender_, receiver_;  // last: they use what is above
};

}  // namespace strata
