// Snapshots in Python: what a session holds in its slots, as plain values, and reading it again.
#include "bindings/snapshot_binding.hpp"

#include <unistd.h>

#include <algorithm>
#include <tuple>

#include "bindings/foreign_call.hpp"
#include "bindings/parse.hpp"
#include "bindings/python.hpp"
#include "offload/storage/page_file.hpp"
#include "offload/storage/saved_pages.hpp"
#include "optimizers/cpu/kernel.hpp"

namespace strata {
namespace {

using WithoutGil = py::call_guard<py::gil_scoped_release>;

// Descriptors that are closed in the end.
class Files final {
 public:
  explicit Files(Session& session) : descriptors_(session.page_files()) {}
  ~Files() {
    for (const int descriptor : descriptors_) close(descriptor);
  }
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;
  const std::vector<int>& descriptors() const { return descriptors_; }

 private:
  std::vector<int> descriptors_;
};

void make_pages_durable(Session& session) {
  const Files files(session);
  for (const int file : files.descriptors()) make_durable(file);
}

bool link_pages(Session& session, const std::vector<std::string>& paths) {
  if (!session.keep_pages_linkable()) return false;
  const Files files(session);
  if (files.descriptors().size() != paths.size()) refuse("each SSD path has one page file");
  for (std::size_t i = 0; i < paths.size(); ++i) {
    if (!link_file(files.descriptors()[i], paths[i])) return false;
  }
  return true;
}

// A complete snapshot, with what is needed to say where everything lies. Chunks are asked for one
// by one, so that other threads get the GIL between two.
class TakenSnapshot final {
 public:
  TakenSnapshot(Session& session, std::uint64_t id)
      : snapshot_(session.snapshot(id)),
        layout_(session.residence().layout),
        config_(session.config()) {}

  std::size_t page_bytes() const { return layout_.page_bytes; }
  std::size_t chunk_count() const { return layout_.chunks.size(); }
  py::dict chunk(std::uint32_t id) const;
  // By parameter, the most of its elements.
  std::vector<std::int64_t> param_steps() const {
    std::vector<std::int64_t> steps(config_.params.size(), 0);
    for (const SavedRun& run : snapshot_.runs)
      steps[run.param] = std::max(steps[run.param], run.step);
    return steps;
  }
  py::list scales() const {
    py::list pages;
    for (const SavedSlot& saved : snapshot_.scales) pages.append(slot_tuple(saved));
    return pages;
  }
  // None: they are no part of it.
  py::object gradients() const;
  py::list hypers() const;

 private:
  static py::tuple slot_tuple(const SavedSlot& saved) {
    return py::make_tuple(index(saved.slot), saved.contents.version, saved.contents.checksum);
  }
  template <typename Key, typename Of>
  static py::object slot_of(const std::vector<Key>& saved, Of of, const auto& wanted) {
    const auto found = std::ranges::lower_bound(saved, wanted, {}, of);
    if (found == saved.end() || of(*found) != wanted) return py::none();
    return slot_tuple(*found);
  }
  py::object role(const Chunk& chunk, Role role) const;
  py::object gradient(std::uint32_t id, bool holds) const;
  py::object kind(const SavedRun& run) const;

  Snapshot snapshot_;
  Layout layout_;
  const Config& config_;
};

// The pages of a role of a chunk: where its elements lie in them, and which slot has which.
py::object TakenSnapshot::role(const Chunk& chunk, Role role) const {
  const Spot first = layout_.spot(chunk, role, 0);
  if (first.page == kNoPage) return py::none();
  const std::size_t per_page = layout_.elements_per_page(chunk, role);
  py::list pages;
  for (std::size_t element = 0; element < chunk.elements; element += per_page) {
    const PageId page = layout_.spot(chunk, role, element).page;
    pages.append(slot_of(
        snapshot_.pages, [](const SavedPage& p) { return p.page; }, page));
  }
  return py::make_tuple(per_page, first.byte, pages);
}

// Likewise, of its gradient, whatever that lay in.
py::object TakenSnapshot::gradient(std::uint32_t id, bool holds) const {
  if (!holds) return py::none();
  const Chunk& chunk = layout_.chunks[id];
  py::list pages;
  for (std::uint32_t n = 0; n < layout_.grad_frames(chunk); ++n) {
    const auto key = [](const SavedFrame& frame) { return std::pair(frame.chunk, frame.number); };
    py::object page = slot_of(snapshot_.frames, key, std::pair(id, n));
    const PageRun& run = chunk.run(Role::grad);
    if (page.is_none() && run.count != 0) {
      page = slot_of(
          snapshot_.pages, [](const SavedPage& p) { return p.page; }, PageId{index(run.first) + n});
    }
    pages.append(page);
  }
  return py::make_tuple(layout_.elements_per_page(chunk, Role::grad), 0, pages);
}

// What a run holds of a gradient, as the format has it.
py::object TakenSnapshot::kind(const SavedRun& run) const {
  if (run.gradient != HeldGradient::waiting) return py::int_(static_cast<int>(run.gradient));
  return py::make_tuple(run.hyper, run.update_step, run.scale);
}

py::dict TakenSnapshot::chunk(std::uint32_t id) const {
  const Chunk& chunk = layout_.chunks.at(id);
  const Segment& segment = layout_.segments[chunk.segment];
  py::list runs;
  bool holds = false;
  for (auto run = std::ranges::lower_bound(snapshot_.runs, id, {}, &SavedRun::chunk);
       run != snapshot_.runs.end() && run->chunk == id; ++run) {
    holds |= run->gradient != HeldGradient::none;
    runs.append(py::make_tuple(run->param, run->in_param, run->count, run->in_chunk, run->step,
                               kind(*run)));
  }
  for (const std::uint32_t param : segment.params) {
    if (segment.trainable) break;
    const std::size_t begin = layout_.places[param].first;
    const std::size_t from = std::max(begin, chunk.first);
    const std::size_t to = std::min(begin + layout_.numel[param], chunk.first + chunk.elements);
    if (from < to) {
      runs.append(py::make_tuple(param, from - begin, to - from, from - chunk.first, 0, 0));
    }
  }
  py::dict out;
  out["runs"] = runs;
  for (const Role each : kSavedRoles) out[name(each)] = role(chunk, each);
  out[name(Role::grad)] = gradient(id, holds);
  py::list scales;
  const auto kept = std::ranges::lower_bound(snapshot_.scales_at, id, {}, &SavedScales::chunk);
  if (kept != snapshot_.scales_at.end() && kept->chunk == id) {
    for (int m = 1; m <= layout_.moments; ++m) {
      const Role moment = m == 1 ? Role::moment1 : Role::moment2;
      scales.append(kept->byte + layout_.scale_offset(chunk, moment) - chunk.scales);
    }
  }
  out["scales"] = scales;
  return out;
}

py::object TakenSnapshot::gradients() const {
  if (!snapshot_.has_gradients) return py::none();
  py::list out;
  for (const SavedGradient& saved : snapshot_.gradients) {
    const GradScaling& scaling = saved.scaling;
    py::list factors;
    for (int i = 0; i < scaling.count; ++i) factors.append(scaling.factors[i]);
    out.append(
        py::make_tuple(saved.param, saved.count, saved.sum_squares, factors, scaling.divisions));
  }
  return out;
}

py::list TakenSnapshot::hypers() const {
  py::list out;
  for (const Hyper& hyper : snapshot_.hypers) out.append(group_dict(hyper));
  return out;
}

SavedGradient saved_gradient(std::uint32_t param, std::uint32_t count, double sum_squares,
                             const std::vector<float>& factors, std::uint8_t divisions) {
  SavedGradient saved{.param = param, .count = count, .sum_squares = sum_squares, .scaling = {}};
  for (std::size_t i = 0; i < factors.size(); ++i) {
    if (!saved.scaling.add(factors[i], (divisions >> i & 1) != 0)) {
      throw py::value_error("a gradient is never scaled so often");
    }
  }
  return saved;
}

using Slots = std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>>;

SavedFiles saved_files(std::vector<std::string> names, const Slots& slots) {
  SavedFiles saved{.names = std::move(names), .slots = {}, .use = Existing::to_read};
  for (const auto& [slot, version, checksum] : slots) {
    saved.slots.push_back({.slot = SlotId{slot}, .contents = {version, checksum}});
  }
  return saved;
}

void bind_saved_pages(py::module_& module) {
  py::class_<SavedPages>(module, "SavedPages")
      .def(py::init([](std::vector<std::string> paths, std::vector<std::string> names,
                       std::size_t page_bytes, const Slots& slots, const std::string& io_engine) {
             if (page_bytes < kPageBytesMin || page_bytes > kPageBytesMax ||
                 page_bytes % kIoAlignment != 0) {
               throw py::value_error("no page has " + std::to_string(page_bytes) + " bytes");
             }
             const SavedFiles saved = saved_files(std::move(names), slots);
             const py::gil_scoped_release release;
             return std::make_unique<SavedPages>(std::move(paths), saved, page_bytes, io_engine);
           }),
           py::arg("paths"), py::arg("names"), py::arg("page_bytes"), py::arg("slots"),
           py::arg("io_engine") = "auto")
      .def(
          "read",
          [](SavedPages& pages, const std::vector<std::uint32_t>& slots, std::uintptr_t address) {
            std::vector<SlotId> ids;
            ids.reserve(slots.size());
            for (const std::uint32_t slot : slots) ids.push_back(SlotId{slot});
            pages.read(ids, pointer<std::byte>(address));
          },
          py::arg("slots"), py::arg("address"), WithoutGil());
}

}  // namespace

void bind_snapshots(py::module_& module, SessionClass& session) {
  py::class_<TakenSnapshot>(module, "TakenSnapshot")
      .def_property_readonly("page_bytes", &TakenSnapshot::page_bytes)
      .def_property_readonly("chunk_count", &TakenSnapshot::chunk_count)
      .def_property_readonly("param_steps", &TakenSnapshot::param_steps)
      .def_property_readonly("scales", &TakenSnapshot::scales)
      .def_property_readonly("gradients", &TakenSnapshot::gradients)
      .def_property_readonly("hypers", &TakenSnapshot::hypers)
      .def("chunk", &TakenSnapshot::chunk);
  session.def("reserve_snapshots", &Session::reserve_snapshots, WithoutGil())
      .def(
          "begin_snapshot",
          [](Session& s, std::uint32_t keep) {
            const std::uint64_t id = s.begin_snapshot(keep);
            return std::pair(id, s.snapshot_room_missing());
          },
          WithoutGil())
      .def("make_snapshot_room", &Session::make_snapshot_room, WithoutGil())
      .def("restore_run", &Session::restore_run, WithoutGil())
      .def("restore_gradient",
           [](Session& s, std::uint32_t param, std::uint32_t count, double sum_squares,
              const std::vector<float>& factors, std::uint8_t divisions) {
             const SavedGradient saved =
                 saved_gradient(param, count, sum_squares, factors, divisions);
             const py::gil_scoped_release release;
             s.restore_gradient(saved);
           })
      .def("snapshot_complete", &Session::snapshot_complete, WithoutGil())
      .def(
          "snapshot",
          [](Session& s, std::uint64_t id) {
            const py::gil_scoped_release release;
            return std::make_unique<TakenSnapshot>(s, id);
          },
          py::keep_alive<0, 1>())
      .def("drop_snapshot", &Session::drop_snapshot, WithoutGil())
      .def("make_pages_durable", &make_pages_durable, WithoutGil())
      .def("link_pages", &link_pages, WithoutGil())
      .def("page_files", &Session::page_files, WithoutGil());
  bind_saved_pages(module);
  module.def("join_master", [](const std::string& dtype, std::uintptr_t param,
                               std::uintptr_t master, std::size_t count, std::uintptr_t to) {
    const Kernels& best = kernels(best_isa());
    if (master != 0)
      best.join(pointer<const void>(param), pointer<const void>(master), count, parse_dtype(dtype),
                pointer<float>(to));
    else
      best.land_gradient(pointer<void>(to), Dtype::float32, pointer<const void>(param),
                         parse_dtype(dtype), count, GradMode::copy, {});
  });
  module.def("load_moments",
             [](const std::string& dtype, const std::string& rule, int number, std::uintptr_t from,
                std::uintptr_t scales, std::size_t count, std::uintptr_t to) {
               kernels(best_isa())
                   .load_moments(pointer<const void>(from), pointer<const std::uint16_t>(scales),
                                 parse_moment_dtype(dtype), moment_kind(parse_rule(rule), number),
                                 count, pointer<float>(to));
             });
}

}  // namespace strata
