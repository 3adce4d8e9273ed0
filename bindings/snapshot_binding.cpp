// Snapshots in Python: what a session holds in its slots, as plain values, and reading it again.
#include "bindings/snapshot_binding.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <tuple>

#include "bindings/fields.hpp"
#include "bindings/foreign_call.hpp"
#include "bindings/lent_memory.hpp"
#include "bindings/python.hpp"
#include "offload/storage/page_file.hpp"
#include "offload/storage/saved_pages.hpp"
#include "optimizers/cpu/kernel.hpp"

namespace strata {
namespace {

void make_pages_durable(Session& session) {
  session.with_page_files([](const std::vector<Descriptor>& files) {
    for (const Descriptor& file : files) make_durable(file.get());
  });
}

bool link_pages(Session& session, const std::vector<std::string>& paths) {
  if (!session.keep_pages_linkable()) return false;
  bool linked = true;
  session.with_page_files([&](const std::vector<Descriptor>& files) {
    if (files.size() != paths.size()) refuse("each SSD path has one page file");
    for (std::size_t i = 0; i < paths.size() && linked; ++i) {
      linked = link_file(files[i].get(), paths[i]);
    }
  });
  return linked;
}

// Of a role of a chunk, in order; moments in 8 bits share theirs.
std::vector<PageId> pages_of(const Layout& layout, const Chunk& chunk, Role role) {
  std::vector<PageId> pages;
  if (layout.spot(chunk, role, 0).page == kNoPage) return pages;
  const std::size_t per_page = layout.elements_per_page(chunk, role);
  for (std::size_t element = 0; element < chunk.elements; element += per_page) {
    pages.push_back(layout.spot(chunk, role, element).page);
  }
  return pages;
}

// A complete snapshot, with what is needed to say where everything lies; where it has no runs of
// its own, the session's. Chunks are asked for one by one, so that other threads get the GIL
// between two.
class TakenSnapshot final {
 public:
  TakenSnapshot(Session& session, Snapshot snapshot)
      : snapshot_(std::move(snapshot)),
        layout_(session.residence().layout),
        config_(session.config()),
        owns_(ownership_of(config_, layout_)) {}

  std::size_t page_bytes() const { return layout_.page_bytes; }
  std::size_t scale_bytes() const { return owns_.scale_bytes; }  // of the session's scale area
  std::size_t chunk_count() const { return layout_.chunks.size(); }
  bool mine(std::uint32_t id) const { return id < chunk_count() && owns_.mine(id); }
  py::dict chunk(std::uint32_t id) const;
  // By parameter, the most of its elements.
  std::vector<std::int64_t> param_steps() const {
    std::vector<std::int64_t> steps(config_.params.size(), 0);
    for (const SavedRun& run : snapshot_.runs)
      steps[run.param] = std::max(steps[run.param], run.step);
    return steps;
  }
  // In the scale area: where those of each moment begin. REQUIRES: mine(id).
  py::list scale_places(std::uint32_t id) const { return scales_from(id, owns_.scales.at(id)); }

 private:
  // As the format has it: a page of which not all is used says how much.
  py::tuple slot_tuple(const SavedSlot& saved) const {
    const SlotContents& has = saved.contents;
    if (has.bytes == layout_.page_bytes) {
      return py::make_tuple(index(saved.slot), has.version, has.checksum);
    }
    return py::make_tuple(index(saved.slot), has.version, has.checksum, has.bytes);
  }
  py::object role(const Chunk& chunk, Role role) const;
  py::list scales_from(std::uint32_t id, std::size_t begin) const;

  Snapshot snapshot_;
  Layout layout_;
  const Config& config_;
  Ownership owns_;
};

// The pages of a role of a chunk: where its elements lie in them, and which slot has which.
py::object TakenSnapshot::role(const Chunk& chunk, Role role) const {
  const Spot first = layout_.spot(chunk, role, 0);
  if (first.page == kNoPage) return py::none();
  py::list pages;
  for (const PageId page : pages_of(layout_, chunk, role)) {
    const auto found = std::ranges::lower_bound(snapshot_.pages, page, {}, &SavedPage::page);
    const bool saved = found != snapshot_.pages.end() && found->page == page;
    pages.append(saved ? slot_tuple(*found) : py::object(py::none()));
  }
  return py::make_tuple(layout_.elements_per_page(chunk, role), first.byte, pages);
}

py::dict TakenSnapshot::chunk(std::uint32_t id) const {
  const Chunk& chunk = layout_.chunks.at(id);
  const Segment& segment = layout_.segments[chunk.segment];
  py::list runs;
  for (auto run = std::ranges::lower_bound(snapshot_.runs, id, {}, &SavedRun::chunk);
       run != snapshot_.runs.end() && run->chunk == id; ++run) {
    runs.append(py::make_tuple(run->param, run->in_param, run->count, run->in_chunk, run->step));
  }
  for (const std::uint32_t param : segment.params) {
    if (segment.trainable && !snapshot_.runs.empty()) break;
    const std::size_t begin = layout_.places[param].first;
    const std::size_t from = std::max(begin, chunk.first);
    const std::size_t to = std::min(begin + layout_.numel[param], chunk.first + chunk.elements);
    if (from < to) {
      runs.append(py::make_tuple(param, from - begin, to - from, from - chunk.first, 0));
    }
  }
  py::dict out;
  out["runs"] = runs;
  for (const Role each : kSavedRoles) out[name(each)] = role(chunk, each);
  const auto kept = std::ranges::lower_bound(snapshot_.scales_at, id, {}, &SavedScales::chunk);
  const bool has_scales = kept != snapshot_.scales_at.end() && kept->chunk == id;
  out["scales"] = has_scales ? scales_from(id, kept->byte) : py::list();
  out["scale_page"] =
      has_scales ? slot_tuple(snapshot_.scales[kept->page]) : py::object(py::none());
  return out;
}

// By moment, where those of a chunk begin at `begin`.
py::list TakenSnapshot::scales_from(std::uint32_t id, std::size_t begin) const {
  py::list scales;
  const Chunk& chunk = layout_.chunks.at(id);
  if (layout_.scale_bytes(chunk) == 0) return scales;
  for (int m = 1; m <= layout_.moments; ++m) {
    const Role moment = m == 1 ? Role::moment1 : Role::moment2;
    scales.append(begin + layout_.scale_offset(chunk, moment));
  }
  return scales;
}

using Slots = std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint32_t>>;

std::vector<SavedFiles::Slot> saved_slots(const Slots& slots) {
  std::vector<SavedFiles::Slot> saved;
  for (const auto& [slot, version, checksum, bytes] : slots) {
    saved.push_back({.slot = SlotId{slot}, .contents = {version, checksum, bytes}});
  }
  return saved;
}

// Page files of another session, opened to write.
struct LeftFiles {
  PageFiles files;
};

// Of each: device, inode, and how many names it has.
std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> identities(
    const LeftFiles& left) {
  std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> found;
  for (const auto& file : left.files) {
    struct stat status {};
    if (fstat(file->fd(), &status) != 0) refuse(file->place() + " cannot be looked at");
    found.emplace_back(status.st_dev, status.st_ino, status.st_nlink);
  }
  return found;
}

std::vector<std::byte> bytes_of(const py::bytes& bytes) {
  const std::string_view raw = bytes;
  const auto* const begin = reinterpret_cast<const std::byte*>(raw.data());
  return {begin, begin + raw.size()};
}

// `pages`: slots, or none where a page is zero, in the order of chunks, roles and pages.
std::vector<std::uint64_t> resume(Session& session, LeftFiles& files,
                                  const std::vector<Slots>& snapshots,
                                  const std::vector<std::optional<std::uint32_t>>& pages,
                                  const py::bytes& scales) {
  LeftState left{
      .files = std::move(files.files), .snapshots = {}, .pages = {}, .scales = bytes_of(scales)};
  const py::gil_scoped_release release;
  for (const Slots& slots : snapshots) left.snapshots.push_back(saved_slots(slots));
  const Layout layout = session.residence().layout;
  std::vector<PageId> order;
  for (const Chunk& chunk : layout.chunks) {
    for (const Role role : kSavedRoles)
      std::ranges::copy(pages_of(layout, chunk, role), std::back_inserter(order));
  }
  if (order.size() != pages.size()) refuse("a snapshot of another layout");
  std::vector<bool> seen(layout.page_count, false);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (!pages[i] || seen[index(order[i])]) continue;
    seen[index(order[i])] = true;
    left.pages.push_back({order[i], SlotId{*pages[i]}});
  }
  return session.resume(std::move(left));
}

void bind_saved_pages(py::module_& module) {
  py::class_<LeftFiles>(module, "PageFiles")
      .def(py::init(
               [](const std::vector<std::string>& folders, const std::vector<std::string>& names) {
                 return LeftFiles{open_page_files(folders, names, Existing::to_write)};
               }),
           py::arg("folders"), py::arg("names"), WithoutGil())
      .def("identities", &identities);
  py::class_<SavedPages, Threaded<SavedPages>>(module, "SavedPages")
      .def(py::init([](const std::vector<std::string>& paths, const std::vector<std::string>& names,
                       std::size_t page_bytes, const Slots& slots, const std::string& io_engine) {
             if (page_bytes < kPageBytesMin || page_bytes > kPageBytesMax ||
                 page_bytes % kIoAlignment != 0) {
               throw py::value_error("no page has " + std::to_string(page_bytes) + " bytes");
             }
             const py::gil_scoped_release release;
             PageFiles files = open_page_files(paths, names, Existing::to_read);
             return make_threaded<SavedPages>(SavedFiles{std::move(files), saved_slots(slots)},
                                              page_bytes, io_engine);
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
      .def_property_readonly("scale_bytes", &TakenSnapshot::scale_bytes)
      .def_property_readonly("chunk_count", &TakenSnapshot::chunk_count)
      .def_property_readonly("param_steps", &TakenSnapshot::param_steps)
      .def("mine", &TakenSnapshot::mine)
      .def("scale_places", &TakenSnapshot::scale_places)
      .def("chunk", &TakenSnapshot::chunk);
  session.def("reserve_snapshots", &Session::reserve_snapshots, WithoutGil())
      .def("begin_snapshot", &Session::begin_snapshot, WithoutGil())
      .def("snapshots_begun", &Session::snapshots_begun, WithoutGil())
      .def("restore_run", &Session::restore_run, WithoutGil())
      .def(
          "snapshot",
          [](Session& s, std::uint64_t id) {
            const GilReleased released;
            return std::make_unique<TakenSnapshot>(s, s.snapshot(id));
          },
          py::keep_alive<0, 1>())
      .def("drop_snapshot", &Session::drop_snapshot, WithoutGil())
      .def("make_pages_durable", &make_pages_durable, WithoutGil())
      .def("link_pages", &link_pages, WithoutGil())
      .def("page_files", &Session::page_files, WithoutGil())
      .def(
          "page_layout",
          [](Session& s) {
            const GilReleased released;
            return std::make_unique<TakenSnapshot>(s, Snapshot{});
          },
          py::keep_alive<0, 1>())
      .def("resume", &resume, py::arg("files"), py::arg("held"), py::arg("pages"), py::arg("raw"))
      .def("go_back", [](Session& s, std::uint64_t id, const py::bytes& raw) {
        const std::vector<std::byte> scales = bytes_of(raw);
        const GilReleased released;
        s.go_back(id, scales);
      });
  bind_saved_pages(module);
  module.def("join_master", [](Dtype dtype, std::uintptr_t param, std::uintptr_t master,
                               std::size_t count, std::uintptr_t to) {
    const Kernels& best = kernels(best_isa());
    if (master != 0)
      best.join(pointer<const void>(param), pointer<const void>(master), count, dtype,
                pointer<float>(to));
    else
      best.land_gradient(pointer<void>(to), Dtype::float32, pointer<const void>(param), dtype,
                         count, GradMode::copy, {});
  });
  module.def("load_moments", [](MomentDtype dtype, Rule rule, int number, std::uintptr_t from,
                                std::uintptr_t scales, std::size_t count, std::uintptr_t to) {
    kernels(best_isa())
        .load_moments(pointer<const void>(from), pointer<const std::uint16_t>(scales), dtype,
                      moment_kind(rule, number), count, pointer<float>(to));
  });
}

}  // namespace strata
