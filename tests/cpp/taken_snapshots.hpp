// The simulator's snapshots, each with the plain run as it was behind its step: what their slots
// hold is compared with that, however long ago it was, while training goes on.
//
// Threads: none.
//
//   taken.take(session, plain);
//   taken.look(session, disk, false);
//   EXPECT_EQ(taken.wrong(), "");
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine/session.hpp"
#include "offload/storage/checksum.hpp"
#include "offload/storage/memory_engine.hpp"
#include "plain_param.hpp"

namespace strata {

class TakenSnapshots final {
 public:
  bool may_be_damaged = false;  // the disk does not keep what is written

  // Another one behind this step, where the budget has room for it and none is under way.
  void take(Session& session, const std::vector<PlainParam>& plain) {
    if (taken_.size() > kKeep) return;
    try {
      session.reserve_snapshots(kKeep);
      taken_.push_back({session.begin_snapshot(kKeep), plain});
    } catch (const StrataError& error) {
      const Fault fault = error.error().fault;
      if (error.error().page != kNoPage || (fault != Fault::config && fault != Fault::busy)) throw;
    }
  }
  std::uint64_t looked_at() const { return looked_at_; }

  // The run goes on from the oldest one, if that is complete, and no other is under way; `plain`
  // too.
  bool go_back(Session& session, std::vector<PlainParam>& plain) {
    if (taken_.empty()) return false;
    try {
      for (const Taken& taken : taken_) {
        if (!session.snapshot_complete(taken.id)) return false;
      }
    } catch (const StrataError& error) {
      if (error.error().page != kNoPage) throw;
      return false;  // look() will see why
    }
    session.go_back(taken_[0].id);
    plain = taken_[0].plain;
    for (std::uint32_t p = 0; p < plain.size(); ++p) session.set_step(p, plain[p].steps());
    return true;
  }

  // Looks at those that are complete, or at all, once they are. One may stay.
  void look(Session& session, MemoryEngine& memory, bool wait) {
    for (std::size_t i = 0; i < taken_.size();) {
      const Taken& taken = taken_[i];
      bool spoiled = false;
      try {
        if (!wait && !session.snapshot_complete(taken.id)) break;
        if (wrong_.empty())
          wrong_ = compare(session, session.snapshot(taken.id), taken.plain, memory.contents(0));
        ++looked_at_;
      } catch (const StrataError& error) {
        const Fault fault = error.error().fault;
        spoiled = fault == Fault::cancelled;
        if (!spoiled || error.error().page != kNoPage) throw;
      }
      if (!spoiled && i == 0 && random_() % 2 == 0) {
        ++i;
        continue;
      }
      session.drop_snapshot(taken.id);
      taken_.erase(taken_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  // The first that was not as it had been; empty: all were.
  const std::string& wrong() const { return wrong_; }

 private:
  static constexpr std::uint32_t kKeep = 1;  // complete ones beside one under way

  struct Taken {
    std::uint64_t id;
    std::vector<PlainParam> plain;  // behind its step
  };

  std::string compare(Session& session, const Snapshot& snapshot,
                      const std::vector<PlainParam>& plain, std::span<const std::byte> disk) const {
    const Layout layout = session.residence().layout;
    for (std::uint32_t p = 0; p < plain.size(); ++p) {
      const std::string of = " of " + session.config().params[p].name;
      const std::string differs = compare_steps(snapshot, p, plain[p]);
      if (!differs.empty()) return differs + of;
      const std::vector<std::pair<Role, const void*>> roles = {
          {Role::param, plain[p].bytes().data()},
          {Role::master, plain[p].master_bytes().data()},
          {Role::moment1, plain[p].moment(1).data()},
          {Role::moment2, plain[p].moment(2).data()}};
      for (const Piece& piece : layout.pieces(p)) {
        for (const auto& [role, expected] : roles) {
          const auto* const from = static_cast<const std::byte*>(expected);
          const std::string wrong = compare(layout, piece, role, from, snapshot, disk);
          if (!wrong.empty()) return wrong + name(role) + of;
        }
      }
    }
    return "";
  }

  static std::string compare_steps(const Snapshot& snapshot, std::uint32_t p,
                                   const PlainParam& plain) {
    for (const SavedRun& run : snapshot.runs) {
      if (run.param == p && run.step != plain.steps()) return "a snapshot counted other steps";
    }
    return "";
  }

  std::string compare(const Layout& layout, const Piece& piece, Role role,
                      const std::byte* expected, const Snapshot& snapshot,
                      std::span<const std::byte> disk) const {
    const Chunk& chunk = layout.chunks[piece.chunk];
    const Spot spot = layout.spot(chunk, role, piece.in_chunk);
    if (spot.page == kNoPage) return "";
    std::vector<std::byte> page(layout.page_bytes);
    const auto saved = std::ranges::lower_bound(snapshot.pages, spot.page, {}, &SavedPage::page);
    if (saved != snapshot.pages.end() && saved->page == spot.page) {
      const auto bytes = disk.subspan(index(saved->slot) * page.size(), saved->contents.bytes);
      if (checksum(bytes, saved->slot, saved->contents.version) != saved->contents.checksum) {
        return may_be_damaged ? "" : "overwritten: ";  // a loader notices
      }
      std::ranges::copy(bytes, page.begin());
    }
    const std::size_t bytes = layout.element_bytes(chunk, role);
    const bool same = std::memcmp(page.data() + spot.byte, expected + piece.in_param * bytes,
                                  piece.count * bytes) == 0;
    return same ? "" : "a snapshot has another ";
  }

  std::vector<Taken> taken_;
  std::mt19937 random_;
  std::uint64_t looked_at_ = 0;
  std::string wrong_;
};

}  // namespace strata
