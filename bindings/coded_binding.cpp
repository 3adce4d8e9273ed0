// Parameters that rest as codes, written and read as they rest. _core.pyi says what each is.
#include <span>

#include "bindings/fields.hpp"
#include "bindings/snapshot_binding.hpp"

namespace strata {
namespace {

using Buffers = std::tuple<py::buffer, py::buffer, py::buffer>;

// Codes, scales and groups of scales, which the caller keeps. `Byte`: const where they are read.
template <class Byte>
struct Lent {
  explicit Lent(const Buffers& buffers)
      : codes(request(std::get<0>(buffers))),
        scales(request(std::get<1>(buffers))),
        groups(request(std::get<2>(buffers))) {}

  Stored<Byte> stored() const { return {bytes(codes), bytes(scales), bytes(groups)}; }

  static py::buffer_info request(const py::buffer& buffer) {
    return buffer.request(!std::is_const_v<Byte>);
  }
  static std::span<Byte> bytes(const py::buffer_info& info) {
    return {static_cast<Byte*>(info.ptr), static_cast<std::size_t>(info.size * info.itemsize)};
  }

  py::buffer_info codes, scales, groups;
};

}  // namespace

void bind_codes(SessionClass& session) {
  session
      .def("quantise",
           [](Session& s, std::uint32_t param, std::uintptr_t address, Dtype dtype,
              std::size_t row_elements, std::optional<float> offset) {
             const PlainValues from{.values = pointer<const void>(address),
                                    .dtype = dtype,
                                    .row_elements = row_elements,
                                    .offset = offset};
             const GilReleased released;
             s.quantise(param, from);
           })
      .def("write_codes",
           [](Session& s, std::uint32_t param, std::size_t first, const Buffers& buffers) {
             const Lent<const std::byte> from(buffers);
             const GilReleased released;
             s.write_codes(param, first, from.stored());
           })
      .def("read_codes",
           [](Session& s, std::uint32_t param, std::size_t first, const Buffers& buffers) {
             const Lent<std::byte> to(buffers);
             const GilReleased released;
             s.read_codes(param, first, to.stored());
           });
}

}  // namespace strata
