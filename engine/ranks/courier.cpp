#include "engine/ranks/courier.hpp"

#include <stdexcept>
#include <string>
#include <thread>

#include "memory/check.hpp"

namespace strata {
namespace {

// A frame with so much behind it takes no further message: small pages share a frame, and large
// ones are there as soon as they have come.
constexpr std::size_t kFrameBytes = 4 * kMiB;
// Who has patience has it for so many bytes at a time: a slow network is no silent rank.
constexpr std::size_t kPieceBytes = 8 * kMiB;
constexpr auto kFullAgain = std::chrono::microseconds(100);
// Boards have counts that are read as one word.
constexpr std::size_t kBoardAlign = 64;

std::span<std::byte> board_in(std::vector<std::max_align_t>& memory, std::size_t bytes) {
  auto* const first = reinterpret_cast<std::byte*>(memory.data());
  const std::size_t past = reinterpret_cast<std::uintptr_t>(first) % kBoardAlign;
  return {first + (kBoardAlign - past) % kBoardAlign, bytes};
}

std::size_t words_of(std::size_t board_bytes) {
  return ceil_div(board_bytes + kBoardAlign, sizeof(std::max_align_t));
}

// Of what values codes cross for it; none: bytes cross as they are.
std::optional<Dtype> coded(const PeerMessage& message) {
  if (message.kind != PeerMessage::Kind::grant || message.bytes == 0) return std::nullopt;
  if (message.dtype == 0 || message.dtype > coded_as(Dtype::bfloat16)) return std::nullopt;
  return static_cast<Dtype>(message.dtype - coded_as(Dtype{}));
}

// A grant of codes that cannot be. REQUIRES: it has bytes.
bool is_odd(const PeerMessage& message) {
  if (message.kind != PeerMessage::Kind::grant || message.dtype == 0) return false;
  const auto dtype = coded(message);
  return !dtype || message.bytes % size_of(*dtype) != 0 || message.at % kKernelPageBytes != 0;
}

template <typename Byte>
void add_pieces(std::vector<std::span<Byte>>& pieces, std::span<Byte> bytes) {
  for (; bytes.size() > kPieceBytes; bytes = bytes.subspan(kPieceBytes)) {
    pieces.push_back(bytes.first(kPieceBytes));
  }
  pieces.push_back(bytes);
}

std::size_t codes_bytes(const PeerMessage& message, Dtype dtype) {
  return sent_bytes(message.bytes / size_of(dtype));
}

}  // namespace

Courier::Courier(Wire& wire, std::uint32_t other, const Here& here, std::size_t memory_bytes,
                 Times times)
    : wire_(wire),
      other_(other),
      here_(here),
      times_(times),
      kernels_(code_kernels(best_isa())),
      mirror_(memory_bytes),
      come_(words_of(here.board.size())),
      seen_(words_of(here.board.size())) {
  STRATA_ASSERT(here_.inbox != nullptr && here_.bell != nullptr && here_.page_bytes > 0);
  STRATA_ASSERT(times_.beat < times_.patience);
}

void Courier::start() {
  STRATA_ASSERT(!sender_.joinable() && !parting_);
  sender_ = Thread("strata-send-" + std::to_string(other_), [this] { send_frames(); });
  receiver_ = Thread("strata-recv-" + std::to_string(other_), [this] { receive_frames(); });
}

Seat Courier::seat() {
  return {.board = board_in(seen_, here_.board.size()),
          .memory = mirror_.bytes(),
          .ring = [this] { bell_.ring(); },
          .way = &way_,
          .board_come = board_in(come_, here_.board.size())};
}

std::optional<std::string> Courier::lost() {
  if (told_ || !gone_) return std::nullopt;
  told_ = true;
  return how_;
}

void Courier::part() {
  parting_ = true;
  bell_.ring();
  if (sender_.joinable()) sender_.join();
  if (receiver_.joinable()) receiver_.join();
}

// Takes messages that wait. A page that is given back needs no memory here from then on.
void Courier::fill(Head& head) {
  for (std::size_t bytes = 0; head.count < kMessagesMax && bytes < kFrameBytes;) {
    PeerMessage& message = head.messages[head.count];
    if (way_.pop(message) != RingAnswer::done) return;
    ++head.count;
    bytes += message.bytes;
    if (message.kind != PeerMessage::Kind::give_back || message.window != 0) continue;
    mirror_.give_back(message.at, here_.page_bytes);
  }
}

Courier::Head Courier::next() {
  using Clock = std::chrono::steady_clock;
  Head head;
  for (const auto end = Clock::now() + times_.beat;;) {
    // Ahead of a look at what waits: all that was said goes.
    const bool parting = parting_ || gone_;
    fill(head);
    if (head.count != 0) return head;
    head.ends = parting ? 1 : 0;
    const auto left = end - Clock::now();
    if (parting || left <= Clock::duration::zero()) return head;
    bell_.wait(left);
  }
}

// See Note [Heads ahead].
void Courier::send_frames() {
  try {
    for (std::uint64_t number = 0;;) {
      Head head = next();
      if (is_lost()) return;
      head.number = number++;
      send_head(head);
      if (head.ends != 0) return;
      while (head.has_bytes()) {
        Head ahead;
        fill(ahead);
        ahead.number = number++;
        send_bytes(head, ahead);
        if (is_lost()) return;
        head = ahead;
      }
    }
  } catch (const std::exception&) {
    deaf_ = true;  // what the other one has said is heard to its end, which says why
  }
}

void Courier::send_head(const Head& head) {
  const std::array<std::span<const std::byte>, 1> piece = {std::as_bytes(std::span(&head, 1))};
  wire_.send(other_, piece, times_.patience);
}

// Those of `head`, whose frame is complete with them.
void Courier::send_bytes(const Head& head, const Head& ahead) {
  std::vector<std::span<const std::byte>> pieces = {std::as_bytes(std::span(&ahead, 1))};
  std::size_t coded_so_far = 0;
  for (const PeerMessage& message : head.said()) {
    if (message.bytes != 0) add_pieces(pieces, sent_for(message, coded_so_far));
  }
  wire_.send(other_, pieces, times_.patience);
}

// What crosses for a message of some bytes. `coded_so_far`: of the messages of its frame.
std::span<const std::byte> Courier::sent_for(const PeerMessage& message,
                                             std::size_t& coded_so_far) {
  const bool board = message.kind == PeerMessage::Kind::board;
  const auto bytes = (board ? here_.board : here_.memory).subspan(message.at, message.bytes);
  const auto dtype = coded(message);
  if (!dtype) return bytes;
  const auto codes = sent_codes_[coded_so_far++].room(codes_bytes(message, *dtype));
  encode_values(kernels_, bytes, *dtype, codes);
  return codes;
}

void Courier::receive_frames() {
  try {
    take_frames();
  } catch (const std::exception& error) {
    how_ = error.what();
  }
  gone_ = true;
  bell_.ring();
  here_.bell->ring();
}

// See Note [Heads ahead].
void Courier::take_frames() {
  ComingFrames frames;
  expect_head(frames, 0);
  expect_head(frames, 1);
  await_head(frames, 0);
  bool ahead = false;  // this head went ahead of other bytes
  for (std::uint64_t number = 0;; ++number) {
    const Coming& frame = frames[number % kHeads];
    if (frame.head.ends != 0) return;
    const bool with_bytes = frame.bytes_arrival != nullptr;
    if (with_bytes) {
      await_head(frames, number + 1);
      frame.bytes_arrival->wait(times_.patience);
    }
    deliver(frame);
    if (frame.head.count == 0 && !ahead && deaf_) {
      throw std::runtime_error("it does not take what is sent to it");
    }
    if (!with_bytes) await_head(frames, number + 1);
    ahead = with_bytes;
  }
}

void Courier::expect_head(ComingFrames& frames, std::uint64_t number) {
  Coming& frame = frames[number % kHeads];
  const std::array<std::span<std::byte>, 1> room = {
      std::as_writable_bytes(std::span(&frame.head, 1))};
  frame.head_arrival = wire_.expect(other_, room);
}

// Then expects what comes behind the head after it.
void Courier::await_head(ComingFrames& frames, std::uint64_t number) {
  Coming& frame = frames[number % kHeads];
  frame.head_arrival->wait(times_.patience);
  const Head& head = frame.head;
  if (head.number != number || head.count > kMessagesMax || head.ends > 1) {
    throw std::runtime_error("what it sent is damaged");
  }
  if (head.ends != 0) return;
  expect_bytes(frame, come_codes_[number % come_codes_.size()]);
  expect_head(frames, number + 2);
}

void Courier::expect_bytes(Coming& frame, CodesOfFrame& codes) {
  std::vector<std::span<std::byte>> rooms;
  frame.coded_pages.clear();
  for (const PeerMessage& message : frame.head.said()) {
    if (message.bytes == 0) continue;
    std::span<std::byte> room = room_for(message);
    if (const auto dtype = coded(message)) {
      const auto come = codes[frame.coded_pages.size()].room(codes_bytes(message, *dtype));
      frame.coded_pages.push_back({come, *dtype, room});
      room = come;
    }
    add_pieces(rooms, room);
  }
  frame.bytes_arrival = rooms.empty() ? nullptr : wire_.expect(other_, rooms);
}

void Courier::deliver(const Coming& frame) {
  for (const Coded& page : frame.coded_pages) {
    decode_values(kernels_, page.codes, page.dtype, page.values);
  }
  for (const PeerMessage& message : frame.head.said()) push(message);
  if (frame.head.count != 0) here_.bell->ring();
}

std::span<std::byte> Courier::room_for(const PeerMessage& message) {
  const bool board = message.kind == PeerMessage::Kind::board;
  const bool relayed = message.kind == PeerMessage::Kind::grant && message.window != 0;
  const std::span<std::byte> all = board     ? board_in(come_, here_.board.size())
                                   : relayed ? here_.relayed
                                             : mirror_.bytes();
  const std::size_t at = relayed ? std::size_t{message.window - 1} * here_.page_bytes : message.at;
  if (at > all.size() || message.bytes > all.size() - at ||
      (relayed && message.bytes > here_.page_bytes) || is_odd(message)) {
    throw std::runtime_error("what it sent is damaged");
  }
  return all.subspan(at, message.bytes);
}

// Waits for room, as long as somebody here takes what comes.
void Courier::push(const PeerMessage& message) {
  while (!parting_) {
    const RingAnswer answer = here_.inbox->push(message);
    if (answer == RingAnswer::done) return;
    if (answer == RingAnswer::corrupt) throw std::runtime_error("its ring here is damaged");
    here_.bell->ring();
    std::this_thread::sleep_for(kFullAgain);
  }
}

}  // namespace strata
