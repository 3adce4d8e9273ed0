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

// The pages of a role of a chunk: where its elements lie in them, and which slot has which.
py::object role_object(const Layout& layout, const Chunk& chunk, Role role,
                       const Snapshot& snapshot) {
  const Spot first = layout.spot(chunk, role, 0);
  if (first.page == kNoPage) return py::none();
  const std::size_t per_page = layout.elements_per_page(chunk, role);
  py::list pages;
  for (std::size_t element = 0; element < chunk.elements; element += per_page) {
    const PageId page = layout.spot(chunk, role, element).page;
    const auto saved = std::ranges::lower_bound(snapshot.pages, page, {}, &SavedPage::page);
    if (saved == snapshot.pages.end() || saved->page != page)
      pages.append(py::none());
    else
      pages.append(
          py::make_tuple(index(saved->slot), saved->contents.version, saved->contents.checksum));
  }
  return py::make_tuple(per_page, first.byte, pages);
}

py::dict chunk_dict(const Config& config, const Layout& layout, std::uint32_t id,
                    const Snapshot& snapshot) {
  const Chunk& chunk = layout.chunks[id];
  const Segment& segment = layout.segments[chunk.segment];
  py::list runs;
  for (const std::uint32_t param : segment.params) {
    const std::size_t begin = layout.places[param].first, end = begin + config.params[param].numel;
    const std::size_t from = std::max(begin, chunk.first);
    const std::size_t to = std::min(end, chunk.first + chunk.elements);
    if (from < to) runs.append(py::make_tuple(param, from - begin, to - from, from - chunk.first));
  }
  py::dict out;
  out["runs"] = runs;
  for (const Role role : kSavedRoles) out[name(role)] = role_object(layout, chunk, role, snapshot);
  const bool scaled = layout.moment_dtype == MomentDtype::block8 && segment.trainable;
  py::list scales;
  for (int m = 1; scaled && m <= layout.moments; ++m) {
    scales.append(layout.scale_offset(chunk, m == 1 ? Role::moment1 : Role::moment2));
  }
  out["scales"] = scales;
  return out;
}

py::dict snapshot_dict(Session& session, std::uint64_t id) {
  Snapshot snapshot;
  Layout layout;
  {
    const GilReleased released;
    snapshot = session.snapshot(id);
    layout = session.residence().layout;
  }
  py::dict out;
  out["page_bytes"] = layout.page_bytes;
  out["param_steps"] = snapshot.steps;
  out["scales"] =
      py::bytes(reinterpret_cast<const char*>(snapshot.scales.data()), snapshot.scales.size());
  py::list chunks;
  for (std::uint32_t c = 0; c < layout.chunks.size(); ++c) {
    chunks.append(chunk_dict(session.config(), layout, c, snapshot));
  }
  out["chunks"] = chunks;
  return out;
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
  session.def("reserve_snapshots", &Session::reserve_snapshots, WithoutGil())
      .def("begin_snapshot", &Session::begin_snapshot, WithoutGil())
      .def("snapshot_complete", &Session::snapshot_complete, WithoutGil())
      .def("snapshot", &snapshot_dict)
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
