// A machine whose first rank relays pages, as its other ranks and the holder of the pages see it:
// whatever is read is what was asked for, and stays as it is.
//
// Threads: one.
//
//   OneMachine machine(ranks, page_count, frames);
//   machine.ask(1, 0, step, writes);
//   machine.grant(0);                        // by the holder: the oldest of machine.asks
//   machine.give_back(1, 0);
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "offload/residency/relay.hpp"

namespace strata::relay_test {

using Word = PeerMessage::Kind;

inline constexpr std::size_t kBytes = 4096;
inline constexpr std::uint32_t kHolder = 7;

// Ranks of one machine, of which the first relays all pages, and a holder elsewhere. Every second
// rank is not told what came for it, and looks.
struct OneMachine {
  struct Content {
    std::uint32_t page = 0;
    std::int64_t step = -1;
    std::uint32_t writes = 0;
    bool operator==(const Content&) const = default;
  };
  struct Reader {
    PeerMessage ask{};
    bool waits = false;
    std::optional<std::uint32_t> frame{};  // that it reads
    Content read{};
  };

  OneMachine(std::uint32_t ranks, std::uint32_t page_count, std::uint32_t frames)
      : contents(frames),
        readers(ranks, std::vector<Reader>(page_count)),
        due(page_count, Relay::kNotDue) {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) pages.here.push_back(rank);
    pages.holders.assign(page_count, kHolder);
    pages.sources.assign(page_count, 0);
    relay.emplace(RelayRoom{.at = kBytes, .page_bytes = kBytes, .frames = frames}, pages,
                  [this](std::uint32_t to, const PeerMessage& message) { hear(to, message); });
  }

  void hear(std::uint32_t to, const PeerMessage& message) {
    if (to == kHolder) {
      ASSERT_TRUE(message.kind == Word::ask || message.kind == Word::give_back);
      if (message.kind == Word::ask) {
        ASSERT_EQ(users_of(message.window - 1), 0) << "somebody reads what will be there";
        asks.push_back(message);
        ++asked;
      } else {
        --lent;
      }
      return;
    }
    Reader& reader = readers.at(to).at(message.what);
    ASSERT_EQ(message.kind, Word::grant);
    ASSERT_TRUE(reader.waits) << "nobody asked";
    reader.waits = false;
    if (message.bytes == 0) {
      ++sent_on;
      needed_by_sent.push_back(to == 0 ? due[message.what] : 0);
      return;
    }
    ASSERT_TRUE(is_told(to));
    const auto frame = static_cast<std::uint32_t>(message.at / kBytes - 1);
    take(reader, frame, message.step, contents.at(frame));
  }

  static bool is_told(std::uint32_t rank) { return rank % 2 == 0; }
  static void take(Reader& reader, std::uint32_t frame, std::int64_t step, const Content& content) {
    reader.frame = frame;
    reader.read = content;
    ASSERT_EQ(reader.read.page, reader.ask.what);
    ASSERT_EQ(reader.read.step, step);
    ASSERT_GE(reader.read.step, reader.ask.step);
    ASSERT_GE(reader.read.writes, reader.ask.count);
  }
  // Behind each call: takes what came for those who are not told, and finds no room for those who
  // were sent on.
  void look() {
    take_untold();
    for (const std::uint64_t needed : std::exchange(needed_by_sent, {})) {
      for (std::uint32_t frame = 0; frame < contents.size(); ++frame) {
        const std::uint64_t when = due[contents[frame].page];
        const bool due_first = when != Relay::kNotDue && when <= needed;
        ASSERT_TRUE(users_of(frame) != 0 || is_expected(frame) || due_first) << "there was room";
      }
    }
  }
  void take_untold() {
    for (std::uint32_t rank = 1; rank < readers.size(); rank += 2) {
      for (Reader& reader : readers[rank]) {
        const PageId page{reader.ask.what};
        if (!reader.waits) continue;
        ASSERT_TRUE(relay->serves(rank, page));
        const auto came = relay->came_for(rank, page);
        if (!came) continue;
        reader.waits = false;
        take(reader, came->frame, came->step, contents.at(came->frame));
      }
    }
  }

  int users_of(std::uint32_t frame) const {
    int users = 0;
    for (const auto& of : readers) {
      users += static_cast<int>(std::ranges::count(of, std::optional(frame), &Reader::frame));
    }
    return users;
  }
  bool is_expected(std::uint32_t frame) const {
    const auto to = [frame](const PeerMessage& ask) { return ask.window == frame + 1; };
    return std::ranges::any_of(asks, to);
  }

  void ask(std::uint32_t rank, std::uint32_t page, std::int64_t step, std::uint32_t writes) {
    Reader& reader = readers[rank][page];
    if (reader.waits || reader.frame) return;
    reader = {.ask = {.what = page, .count = writes, .step = step}, .waits = true};
    ASSERT_TRUE(relay->asked(rank, PageId{page}, step, writes, is_told(rank)));
    look();
  }
  bool expect(std::uint32_t page, std::int64_t step = 0, std::uint32_t writes = 0) {
    return relay->expect(PageId{page}, step, writes);
  }
  void set_due(std::uint32_t page, std::uint64_t when) {
    due[page] = when;
    relay->set_due(PageId{page}, when);
  }
  // The holder has what was asked for, or newer.
  void grant(std::size_t which, std::int64_t newer = 0) {
    const PeerMessage ask = asks.at(which);
    asks.erase(asks.begin() + static_cast<std::ptrdiff_t>(which));
    ASSERT_EQ(users_of(ask.window - 1), 0) << "somebody reads what was there";
    contents.at(ask.window - 1) = {ask.what, ask.step + newer, ask.count};
    ++lent;
    const PeerMessage given{.kind = Word::grant,
                            .what = ask.what,
                            .window = ask.window,
                            .bytes = kBytes,
                            .step = ask.step + newer};
    ASSERT_FALSE(relay->came(kHolder + 1, given)) << "not its holder";
    ASSERT_TRUE(relay->came(kHolder, given));
    ASSERT_FALSE(relay->came(kHolder, given)) << "twice";
    look();
  }
  void give_back(std::uint32_t rank, std::uint32_t page) {
    Reader& reader = readers[rank][page];
    if (!reader.frame) return;
    ASSERT_EQ(contents[*reader.frame], reader.read) << "it has changed";
    reader.frame.reset();
    ASSERT_TRUE(relay->given_back(rank, PageId{page}));
    ASSERT_FALSE(relay->given_back(rank, PageId{page})) << "twice";
  }
  // Asks, and reads at once what is there.
  void read(std::uint32_t rank, std::uint32_t page, std::int64_t step = 0) {
    ask(rank, page, step, 0);
    while (!asks.empty()) grant(0);
    ASSERT_TRUE(readers[rank][page].frame);
    give_back(rank, page);
  }

  PageRanks pages{};
  std::vector<Content> contents;             // by frame
  std::vector<std::vector<Reader>> readers;  // by rank and page
  std::vector<std::uint64_t> due;            // by page
  std::deque<PeerMessage> asks;              // that the holder has still to answer
  std::uint64_t asked = 0, sent_on = 0;
  std::vector<std::uint64_t> needed_by_sent;  // when, by those who were sent on just now
  std::int64_t lent = 0;                      // by the holder
  std::optional<Relay> relay;
};

}  // namespace strata::relay_test
