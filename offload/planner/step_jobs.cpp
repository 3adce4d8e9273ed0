#include "offload/planner/step_jobs.hpp"

#include <algorithm>

#include "memory/check.hpp"
#include "offload/planner/step_compute.hpp"

namespace strata {
namespace {

// Pieces of a unit let its reads, updates and writes overlap. Many units overlap as well as many
// pieces do, so that all of them together stay few.
constexpr std::uint32_t kPiecesPerUnit = 8;
constexpr std::uint32_t kPiecesPerStep = 1024;

constexpr std::uint32_t kNone = UINT32_MAX;

class Builder final {
 public:
  Builder(const Trace& trace, const Plan& plan, const Costs& costs)
      : trace_(trace),
        plan_(plan),
        costs_(costs),
        uses_(add_computation(trace, plan, costs, lifetimes(trace), out_)),
        end_(out_.compute.back()),
        used_(trace.units.size(), false),
        first_use_(trace.units.size(), kNone),
        last_back_(trace.units.size(), kNone),
        landed_(trace.units.size(), kNoJob),
        pieces_(trace.units.size()) {
    STRATA_ASSERT(plan.units.size() == trace.units.size());
    STRATA_ASSERT(plan.frames.frames.size() == trace.units.size());
    for (std::uint32_t i = 0; i < trace.uses.size(); ++i) {
      const std::size_t unit = index(trace.uses[i].unit);
      if (!used_[unit]) first_use_[unit] = i;
      used_[unit] = true;
      if (trace.uses[i].backward) last_back_[unit] = i;
    }
  }

  StepJobs build() {
    gradients();
    updates();
    bring_params();
    swap_activations();
    STRATA_ASSERT(out_.notes.size() >= out_.compute.size());
    return std::move(out_);
  }

 private:
  struct Piece {
    JobId update = kNoJob;
    JobId written = kNoJob;  // kNoJob: it is not
    bool in_order = false;   // opened behind those before it
  };
  // One piece's share of what belongs to a whole unit.
  struct Share {
    std::uint32_t piece = 0;
    std::uint32_t count = 1;
    std::uint64_t of(std::uint64_t bytes) const {
      return bytes * (piece + 1) / count - bytes * piece / count;
    }
  };

  bool trained(UnitId unit) const { return used_[index(unit)] && of(unit).grad_bytes != 0; }
  const TracedUnit& of(UnitId unit) const { return trace_.units[index(unit)]; }
  const UnitPlan& plan_of(UnitId unit) const { return plan_.units[index(unit)]; }
  std::uint32_t pieces_of(UnitId unit) const {
    const auto units = static_cast<std::uint32_t>(trace_.units.size());
    const std::uint32_t most = std::clamp(kPiecesPerStep / units, 1U, kPiecesPerUnit);
    return std::clamp(of(unit).chunks, 1U, most);
  }

  // Every chunk is a transfer of its own.
  double transfers_of(UnitId unit, std::uint32_t pieces) const {
    return static_cast<double>(std::max(of(unit).chunks, 1U)) / pieces;
  }

  JobId move(Lane lane, std::uint64_t bytes, double transfers, Purpose purpose, UnitId unit) {
    const double speed = lane == Lane::upload     ? costs_.upload_bytes_s
                         : lane == Lane::download ? costs_.download_bytes_s
                         : lane == Lane::read     ? costs_.read_bytes_s
                                                  : costs_.write_bytes_s;
    STRATA_ASSERT(transfers >= 0.0);
    double seconds = static_cast<double>(bytes) / speed;
    if (lane == Lane::upload && purpose == Purpose::param) {
      seconds = std::max(seconds, decode_seconds(of(unit), bytes));
    }
    seconds += transfers * costs_.transfer_seconds;
    return out_.add(lane, seconds, {bytes, unit, kNone, purpose});
  }

  // Until so much of what rests of a unit has become values.
  double decode_seconds(const TracedUnit& unit, std::uint64_t bytes) const {
    if (!unit.codes()) return 0.0;
    const auto shown = static_cast<double>(unit.param_bytes);
    const double share = static_cast<double>(bytes) / static_cast<double>(unit.code_bytes);
    return costs_.decode_bytes_s > 0.0 ? share * shown / costs_.decode_bytes_s : 0.0;
  }

  void wait_for_enter(JobId job, std::uint32_t use) {
    STRATA_ASSERT(use < uses_.size());
    if (uses_[use].before == kNoJob) return out_.graph.wait_across(job, end_);
    out_.graph.wait(job, uses_[use].before);
  }

  // Those that train, in the order of the next forward.
  std::vector<UnitId> forward_order() const {
    std::vector<UnitId> order;
    for (const std::uint32_t u : units_in_order(trace_, [](const Use&) { return true; })) {
      if (trained(UnitId{u})) order.push_back(UnitId{u});
    }
    return order;
  }

  void updates() {
    std::vector<UnitId> order = forward_order();
    std::vector<std::uint32_t> rank(trace_.units.size(), 0);
    for (std::uint32_t i = 0; i < order.size(); ++i) rank[index(order[i])] = i;
    if (plan_.updates_early) {  // in the order in which gradients land
      std::stable_sort(order.begin(), order.end(), [this](UnitId a, UnitId b) {
        return last_back_[index(a)] < last_back_[index(b)];
      });
    }
    const bool first = costs_.updates_first && !plan_.updates_early && !any_on_ssd();
    std::vector<JobId> done;  // of the pieces that are opened in order: the last job of each
    for (const UnitId unit : order) {
      const std::uint32_t count = pieces_of(unit);
      for (std::uint32_t p = 0; p < count; ++p) {
        const JobId opened = done.size() < kPiecesOpen ? kNoJob : done[done.size() - kPiecesOpen];
        const Piece piece = update_piece(unit, {p, count}, opened);
        out_.graph.set_rank(piece.update, rank[index(unit)]);
        pieces_[index(unit)].push_back(piece);
        if (piece.in_order) done.push_back(piece.written == kNoJob ? piece.update : piece.written);
        if (first) {
          out_.graph.wait_across(uses_.front().first, piece.update);
        } else if (plan_of(unit).on_device) {
          out_.graph.wait_across(uses_[first_use_[index(unit)]].first, piece.update);
        }
      }
    }
  }

  // Whether what updates need comes from there.
  bool any_on_ssd() const {
    return std::ranges::any_of(plan_.units, [](const UnitPlan& unit) {
      return unit.state_ssd_bytes + unit.param_ssd_bytes + unit.grad_ssd_bytes != 0;
    });
  }

  Piece update_piece(UnitId unit, Share share, JobId opened) {
    const UnitPlan& plan = plan_of(unit);
    STRATA_ASSERT(share.piece < share.count);
    const double transfers = transfers_of(unit, share.count);
    const std::uint64_t kept = share.of(plan.state_ssd_bytes) + share.of(plan.param_ssd_bytes);
    const std::uint64_t read_bytes = kept + share.of(plan.grad_ssd_bytes);
    const double seconds =
        static_cast<double>(share.of(of(unit).held_elements())) / costs_.update_elements_s;
    Piece piece;
    piece.update = out_.add(Lane::update, seconds, {0, unit, kNone, Purpose::state});
    JobId start = piece.update;
    if (read_bytes != 0) {
      start = move(Lane::read, read_bytes, transfers, Purpose::state, unit);
      out_.graph.wait(piece.update, start);
    }
    piece.in_order = read_bytes != 0 || !plan_.updates_early;
    if (piece.in_order && opened != kNoJob) out_.graph.wait(start, opened);
    if (!plan_.updates_early) out_.graph.wait(start, end_);
    out_.graph.wait(start, landed_[index(unit)]);
    if (kept != 0) {
      piece.written = move(Lane::write, kept, transfers, Purpose::state, unit);
      out_.graph.wait(piece.written, piece.update);
      out_.graph.wait_across(start, piece.written);
    }
    return piece;
  }

  void gradients() {
    for (std::uint32_t u = 0; u < trace_.units.size(); ++u) {
      const UnitId unit{u};
      if (!trained(unit)) continue;
      const double transfers = transfers_of(unit, 1);
      // Who was not seen in the backward has its gradient at the end of it.
      const JobId backward = uses_[std::min<std::size_t>(last_back_[u], uses_.size() - 1)].left;
      if (plan_of(unit).on_device) {
        landed_[u] = backward;
        continue;
      }
      landed_[u] = move(Lane::download, of(unit).grad_bytes, transfers, Purpose::grad, unit);
      out_.graph.wait(landed_[u], backward);
      if (costs_.landing_waits) {
        const auto next = std::upper_bound(out_.compute.begin(), out_.compute.end(), backward);
        out_.graph.wait(*next, landed_[u]);
      }
      const std::uint64_t on_ssd = plan_of(unit).grad_ssd_bytes;
      if (on_ssd == 0) continue;
      const double part = static_cast<double>(on_ssd) / static_cast<double>(of(unit).grad_bytes);
      const JobId write = move(Lane::write, on_ssd, transfers * part, Purpose::grad, unit);
      out_.graph.wait(write, landed_[u]);
      landed_[u] = write;
    }
  }

  // Replays who has which frame, as in a step that follows its like.
  void bring_params() {
    std::vector<UnitId> holder(plan_.frames.frames_used, kNoUnit);
    std::vector<std::uint32_t> last_use(trace_.units.size(), kNone);
    for (const bool steady : {false, true}) {
      std::fill(last_use.begin(), last_use.end(), kNone);
      for (UnitId& unit : holder) {
        if (unit != kNoUnit && trained(unit)) unit = kNoUnit;
      }
      for (std::uint32_t i = 0; i < trace_.uses.size(); ++i) {
        const UnitId unit = trace_.uses[i].unit;
        const auto& frames = plan_.frames.frames[index(unit)];
        std::uint64_t missing = 0;
        JobId frames_left = kNoJob;  // the latest: later computation has a later number
        for (const FrameId frame : frames) {
          UnitId& held_by = holder[index(frame)];
          if (held_by == unit) continue;
          const std::uint32_t held_in = held_by == kNoUnit ? kNone : last_use[index(held_by)];
          if (held_in != kNone) {
            const JobId left = uses_[held_in].left;
            STRATA_ASSERT(left < uses_[i].first);  // alias sets never overlap in time
            frames_left = frames_left == kNoJob ? left : std::max(frames_left, left);
          }
          held_by = unit;
          ++missing;
        }
        last_use[index(unit)] = i;
        if (!steady || missing == 0) continue;
        const std::uint64_t bytes = of(unit).resting_param_bytes() * missing / frames.size();
        bring(i, bytes, frames_left, first_use_[index(unit)] == i);
      }
    }
  }

  void bring(std::uint32_t i, std::uint64_t bytes, JobId frames_left, bool first) {
    const UnitId unit = trace_.uses[i].unit;
    const std::vector<Piece>& updated = pieces_[index(unit)];
    const std::uint64_t on_ssd = plan_of(unit).param_ssd_bytes;
    const auto count = on_ssd != 0 || first ? pieces_of(unit) : 1;
    const double share_moved =
        static_cast<double>(bytes) / static_cast<double>(of(unit).resting_param_bytes());
    const double transfers = transfers_of(unit, count) * share_moved;
    for (std::uint32_t p = 0; p < count; ++p) {
      const Share share{p, count};
      const JobId upload = move(Lane::upload, share.of(bytes), transfers, Purpose::param, unit);
      out_.graph.wait(uses_[i].first, upload);
      JobId start = upload;
      if (on_ssd != 0) {
        const auto read_bytes =
            static_cast<std::uint64_t>(static_cast<double>(share.of(on_ssd)) * share_moved);
        start = move(Lane::read, read_bytes, transfers, Purpose::param, unit);
        out_.graph.wait(upload, start);
      }
      if (i < plan_.frames.lookahead) {
        out_.graph.wait_across(start, end_);
      } else {
        wait_for_enter(start, i - plan_.frames.lookahead);
      }
      if (frames_left != kNoJob) out_.graph.wait(start, frames_left);
      if (!first || updated.empty()) continue;
      STRATA_ASSERT(p < updated.size());
      const Piece& piece = updated[p];
      out_.graph.wait_across(start,
                             piece.written != kNoJob && on_ssd != 0 ? piece.written : piece.update);
    }
  }

  void swap_activations() {
    std::vector<std::uint64_t> bytes(trace_.uses.size(), 0);
    std::vector<double> tensors(trace_.uses.size(), 0.0);
    std::vector<std::uint32_t> needed(trace_.uses.size(), kNone);  // kNone: never
    for (const SavedTensor& tensor : trace_.tensors) {
      if (!leaves(plan_of(tensor.unit).activation, tensor.input) || tensor.bytes == 0) continue;
      bytes[tensor.born] += tensor.bytes;
      tensors[tensor.born] += 1.0;
      if (tensor.last_used == tensor.born) continue;
      needed[tensor.born] = std::min(needed[tensor.born], tensor.last_used);
    }
    for (std::uint32_t i = 0; i < trace_.uses.size(); ++i) {
      if (bytes[i] != 0) swap(i, bytes[i], tensors[i], needed[i]);
    }
  }

  void swap(std::uint32_t born, std::uint64_t bytes, double tensors, std::uint32_t needed) {
    STRATA_ASSERT(bytes > 0 && (needed == kNone || needed > born));
    const UnitId unit = trace_.uses[born].unit;
    const Activation activation = plan_of(unit).activation;
    const bool to_ssd = swaps_to_ssd(activation);
    const JobId left = uses_[born].left;
    // Recomputing begins with what left.
    const auto wants = [&](std::uint32_t use) {
      return recomputes(activation) ? uses_[use].first : uses_[use].body;
    };
    if (needed != kNone && wants(needed) <= left) return;  // before it could go
    const JobId out = move(Lane::download, bytes, tensors, Purpose::activation, unit);
    out_.graph.wait(out, left);
    const std::uint32_t gone = uses_[born].next + 1;
    if (gone < uses_.size()) out_.graph.wait(uses_[gone].first, out);
    JobId away = out;
    if (to_ssd) {
      away = move(Lane::write, bytes, tensors, Purpose::activation, unit);
      out_.graph.wait(away, out);
    }
    if (needed == kNone) return;
    const JobId in = move(Lane::upload, bytes, tensors, Purpose::activation, unit);
    out_.graph.wait(wants(needed), in);
    wait_for_enter(in, swap_in_at(needed, plan_.activation_lookahead));
    if (!to_ssd) return out_.graph.wait(in, away);
    const JobId read = move(Lane::read, bytes, tensors, Purpose::activation, unit);
    out_.graph.wait(in, read);
    out_.graph.wait(read, away);
    wait_for_enter(read, swap_in_at(needed, plan_.activation_lookahead + 1));
  }

  // The use so many before, or the first backward use.
  std::uint32_t swap_in_at(std::uint32_t needed, std::uint32_t ahead) const {
    std::uint32_t at = needed;
    for (; ahead > 0 && at > 0 && trace_.uses[at - 1].backward; --ahead) --at;
    return at;
  }

  const Trace& trace_;
  const Plan& plan_;
  const Costs& costs_;
  StepJobs out_;
  std::vector<UseJobs> uses_;                         // by use
  JobId end_;                                         // the last computation
  std::vector<bool> used_;                            // by unit
  std::vector<std::uint32_t> first_use_, last_back_;  // by unit
  std::vector<JobId> landed_;                         // by unit: its gradient rests where it should
  std::vector<std::vector<Piece>> pieces_;            // by unit
};

}  // namespace

StepJobs step_jobs(const Trace& trace, const Plan& plan, const Costs& costs) {
  return Builder(trace, plan, costs).build();
}

}  // namespace strata
