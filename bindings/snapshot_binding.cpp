// Snapshots in Python: what a session holds in its slots, as plain values, and reading it again.
#include "bindings/snapshot_binding.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <tuple>

#include "bindings/foreign_call.hpp"
#include "bindings/parse.hpp"
#include "bindings/python.hpp"
#include "offload/storage/page_file.hpp"
#include "offload/storage/saved_pages.hpp"
#include "optimizers/cpu/kernel.hpp"

namespace strata {
namespace {

void make_pages_durable(Session& session) {
  session.with_page_files([](const std::vector<int>& files) {
    for (const int file : files) make_durable(file);
  });
}

bool link_pages(Session& session, const std::vector<std::string>& paths) {
  if (!session.keep_pages_linkable()) return false;
  bool linked = true;
  session.with_page_files([&](const std::vector<int>& files) {
    if (files.size() != paths.size()) refuse("each SSD path has one page file");
    for (std::size_t i = 0; i < paths.size() && linked; ++i) {
      linked = link_file(files[i], paths[i]);
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

// The pages of a role of a chunk: where its elements lie in them, and which slot has which.
py::object role_object(const Layout& layout, const Chunk& chunk, Role role,
                       const Snapshot& snapshot) {
  const Spot first = layout.spot(chunk, role, 0);
  if (first.page == kNoPage) return py::none();
  py::list pages;
  for (const PageId page : pages_of(layout, chunk, role)) {
    const auto saved = std::ranges::lower_bound(snapshot.pages, page, {}, &SavedPage::page);
    if (saved == snapshot.pages.end() || saved->page != page)
      pages.append(py::none());
    else
      pages.append(
          py::make_tuple(index(saved->slot), saved->contents.version, saved->contents.checksum));
  }
  return py::make_tuple(layout.elements_per_page(chunk, role), first.byte, pages);
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

py::list chunk_list(const Config& config, const Layout& layout, const Snapshot& snapshot) {
  py::list chunks;
  for (std::uint32_t c = 0; c < layout.chunks.size(); ++c) {
    chunks.append(chunk_dict(config, layout, c, snapshot));
  }
  return chunks;
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
  out["chunks"] = chunk_list(session.config(), layout, snapshot);
  return out;
}

py::dict page_layout(Session& session) {
  Layout layout;
  {
    const py::gil_scoped_release release;
    layout = session.residence().layout;
  }
  py::dict out;
  out["page_bytes"] = layout.page_bytes;
  out["chunks"] = chunk_list(session.config(), layout, {});
  return out;
}

using Slots = std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>>;

std::vector<SavedFiles::Slot> saved_slots(const Slots& slots) {
  std::vector<SavedFiles::Slot> saved;
  for (const auto& [slot, version, checksum] : slots) {
    saved.push_back({.slot = SlotId{slot}, .contents = {version, checksum}});
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

// `pages`: slots, or none where a page is zero, in the order of chunks, roles and pages.
std::vector<std::uint64_t> resume(Session& session, LeftFiles& files,
                                  const std::vector<Slots>& snapshots,
                                  const std::vector<std::optional<std::uint32_t>>& pages,
                                  const py::bytes& scales) {
  const std::string_view raw = scales;
  const auto* const begin = reinterpret_cast<const std::byte*>(raw.data());
  LeftState left{.files = std::move(files.files),
                 .snapshots = {},
                 .pages = {},
                 .scales = {begin, begin + raw.size()}};
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
  py::class_<SavedPages>(module, "SavedPages")
      .def(py::init([](const std::vector<std::string>& paths, const std::vector<std::string>& names,
                       std::size_t page_bytes, const Slots& slots, const std::string& io_engine) {
             if (page_bytes < kPageBytesMin || page_bytes > kPageBytesMax ||
                 page_bytes % kIoAlignment != 0) {
               throw py::value_error("no page has " + std::to_string(page_bytes) + " bytes");
             }
             const py::gil_scoped_release release;
             PageFiles files = open_page_files(paths, names, Existing::to_read);
             return std::make_unique<SavedPages>(SavedFiles{std::move(files), saved_slots(slots)},
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
  session.def("reserve_snapshots", &Session::reserve_snapshots, WithoutGil())
      .def("begin_snapshot", &Session::begin_snapshot, WithoutGil())
      .def("snapshot_complete", &Session::snapshot_complete, WithoutGil())
      .def("snapshot", &snapshot_dict)
      .def("drop_snapshot", &Session::drop_snapshot, WithoutGil())
      .def("make_pages_durable", &make_pages_durable, WithoutGil())
      .def("link_pages", &link_pages, WithoutGil())
      .def("page_files", &Session::page_files, WithoutGil())
      .def("page_layout", &page_layout)
      .def("resume", &resume, py::arg("files"), py::arg("held"), py::arg("pages"), py::arg("raw"))
      .def("go_back", &Session::go_back, WithoutGil());
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
