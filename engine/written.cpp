// The session's way from the device back: what the user changed there, in place, becomes the value
// of the parameter in every tier.
#include <algorithm>
#include <cstring>

#include "engine/session.hpp"
#include "memory/check.hpp"

namespace strata {

// Note [Writes in place]
// The core hears of a write when it has happened, and takes the device's page for the newest. Three
// things must hold for that.
//   - The page showed the newest parameters before. In the exact modes it does while the unit is
//     entered. Where readers may lag it may not: then the write was made to values that an update
//     has replaced, both cannot be had, and it is refused. Nothing is lost, for the page on the
//     device counts as stale, and goes. From the next step on the unit's readers wait for updates
//     as in the exact modes, so what writes in every forward is refused in none but, at worst, the
//     first one.
//   - No update of the chunk is under way, and none begins: one that is queued comes after the
//     write, and adds to what was written.
//   - What the master holds beyond 16 bits is kept wherever these are what they were. For that the
//     old ones are needed. Host memory has them, unless the unit rests on the device: there a visit
//     that may write begins with a copy of them: every visit of the first step, and those of a unit
//     that was ever written or announced by expect_write(). Limit: a forward that never wrote
//     before rounds what rests there, the bfloat16 parameter, to 16 bits, once.

// Chunks of a parameter that the user wrote; no update of them begins.
class Session::WrittenChunks final {
 public:
  WrittenChunks(Session& session, Lock& lock, std::uint32_t param) : session_(session) {
    session.for_pieces(param, 0, session.home_.layout.numel[param], [&](const Piece& piece) {
      if (!chunks_.empty() && chunks_.back() == piece.chunk) return;
      session.wait(lock, [&] { return !session.updates_->is_open(piece.chunk); });
      session.updates_->begin_write(piece.chunk);
      chunks_.push_back(piece.chunk);
    });
  }
  ~WrittenChunks() {
    for (const std::uint32_t chunk : chunks_) session_.updates_->end_write(chunk);
    session_.bell_.ring();
  }
  WrittenChunks(const WrittenChunks&) = delete;
  WrittenChunks& operator=(const WrittenChunks&) = delete;

  const std::vector<std::uint32_t>& chunks() const { return chunks_; }

 private:
  Session& session_;
  std::vector<std::uint32_t> chunks_;
};

void Session::device_written(std::uint32_t param, Stream stream) {
  Lock lock(mutex_);
  throw_if_failed();
  check_param(param);
  const UnitId unit = config_.params[param].unit;
  if (!executor_->is_pinned(unit)) refuse(name_of(unit) + " was written and is not entered");
  wait_for(lock, backend_->record(stream), unit);
  written_[index(unit)] = true;
  updates_->keep_exact(unit);
  const WrittenChunks written(*this, lock, param);
  for (const std::uint32_t chunk : written.chunks()) check_newest(param, chunk);
  std::vector<Piece> pieces;
  for (const std::uint32_t chunk : written.chunks()) {
    pieces.clear();
    for_pieces(param, 0, home_.layout.numel[param], [&](const Piece& piece) {
      if (piece.chunk == chunk) pieces.push_back(piece);
    });
    take_written(lock, chunk, pieces);
  }
}

// Throws StrataError (config) where the device shows older parameters.
void Session::check_newest(std::uint32_t param, std::uint32_t chunk) const {
  const PageId page = home_.layout.chunks[chunk].run(Role::param).first;
  const auto last = written_version_.find(index(page));
  const bool ours = last != written_version_.end() && last->second == table_.newest(page);
  if (ours || table_.is_current(page, Tier::device)) return;
  refuse("parameter " + config_.params[param].name +
         " was changed in place in a forward that saw it " +
         "before its last update, which the change would undo; it keeps the update and loses the " +
         "change. Forwards of " + name_of(config_.params[param].unit) +
         " wait for updates from the next step on; update=\"on_step\" lets all of them wait");
}

// The chunk's page of parameters, as the device shows it, into host memory. Its other parameters
// are the same on both sides.
void Session::take_written(Lock& lock, std::uint32_t id, const std::vector<Piece>& pieces) {
  const Chunk& chunk = home_.layout.chunks[id];
  const PageId page = chunk.run(Role::param).first;
  const bool rests = on_device(chunk);
  // 1. The old bytes, and the new ones. Where the page rests on the device, what comes is a copy.
  std::vector<std::byte> before;
  std::byte* bytes = nullptr;
  if (rests) {
    wait(lock, [&] { return cache_->open_on_device(page); });
    cache_->close_on_device(page);
    if (const auto kept = before_.find(index(page)); kept != before_.end()) before = kept->second;
    bytes = open(lock, page, Intent::read);
    if (!before.empty()) std::memcpy(before_[index(page)].data(), bytes, before.size());
  } else {
    bytes = open(lock, page, Intent::modify);
    before.assign(bytes, bytes + home_.layout.page_bytes);
    copy_out_now(bytes, executor_->frame_of(page), page);
  }
  // 2. What the master holds beyond them.
  for (const Piece& piece : pieces) keep_masters(lock, piece, bytes, before);
  cache_->close(page, rests ? Intent::read : Intent::modify);
  written_version_[index(page)] = table_.newest(page);
}

// Masters of what changed become what was written; the others stay. `before` is empty where the old
// bytes are not known.
void Session::keep_masters(Lock& lock, const Piece& piece, const std::byte* bytes,
                           const std::vector<std::byte>& before) {
  const Chunk& chunk = home_.layout.chunks[piece.chunk];
  if (chunk.run(Role::master).count == 0) return;
  const Dtype dtype = home_.layout.segments[chunk.segment].dtype;
  const std::size_t at = byte_in_page(chunk, Role::param, piece.in_chunk);
  const auto* const now = reinterpret_cast<const std::uint16_t*>(bytes + at);
  const PageId page = page_of(chunk, Role::master, piece.in_chunk);
  std::byte* const rest =
      open(lock, page, Intent::modify) + byte_in_page(chunk, Role::master, piece.in_chunk);
  if (dtype == Dtype::float16) {
    // The master is whole, so it says itself what the old bits were.
    std::vector<float> values(piece.count), clean(piece.count);
    std::vector<std::uint16_t> old(piece.count);
    auto* const masters = reinterpret_cast<float*>(rest);
    kernels_.land_gradient(values.data(), Dtype::float32, now, dtype, piece.count, GradMode::copy);
    kernels_.split(masters, piece.count, dtype, old.data(), clean.data());
    for (std::size_t i = 0; i < piece.count; ++i) {
      if (now[i] != old[i]) masters[i] = values[i];
    }
  } else {
    auto* const residual = reinterpret_cast<std::uint16_t*>(rest);
    const auto* const old =
        before.empty() ? nullptr : reinterpret_cast<const std::uint16_t*>(before.data() + at);
    for (std::size_t i = 0; i < piece.count; ++i) {
      if (old == nullptr || now[i] != old[i]) residual[i] = 0;
    }
  }
  cache_->close(page, Intent::modify);
}

// A page of the device, waited for: a throw would leave the copy without its memory.
void Session::copy_out_now(std::byte* to, FrameId from, PageId page) {
  const CopyTicket out = backend_->copy_out(to, from, home_.layout.page_bytes);
  backend_->wait(out);
  if (auto error = backend_->take_error(out)) {
    error->page = page;
    fail(std::move(*error));
    throw_if_failed();
  }
}

void Session::expect_write(std::uint32_t param) {
  const Lock lock(mutex_);
  throw_if_failed();
  check_param(param);
  written_[index(config_.params[param].unit)] = true;
}

// A visit of the unit begins.
void Session::remember_before(UnitId unit) {
  if (!home_.on_device[index(unit)]) return;
  if (!written_[index(unit)] && steps_ != 0) return;
  for (const std::uint32_t id : home_.layout.units[index(unit)].chunks) {
    const Chunk& chunk = home_.layout.chunks[id];
    const Segment& segment = home_.layout.segments[chunk.segment];
    if (!segment.trainable || segment.dtype != Dtype::bfloat16) continue;
    const PageId page = chunk.run(Role::param).first;
    std::vector<std::byte>& bytes = before_[index(page)];
    bytes.resize(home_.layout.page_bytes);
    copy_out_now(bytes.data(), mover_->frame_of(page), page);
  }
}

void Session::forget_before(UnitId unit) {
  if (before_.empty()) return;
  for (const PageId page : home_.layout.units[index(unit)].pages) before_.erase(index(page));
}

}  // namespace strata
