// XXH3 of Python's buffers, for the files of checkpoints. _core.pyi says what each name means.
#include <array>
#include <cstdio>
#include <span>
#include <string>

#include "bindings/python.hpp"
#include "offload/storage/checksum.hpp"

namespace strata {
namespace {

// The bytes of a Python object, for as long as this lives. Throws BufferError where they are not
// in one piece, TypeError where there are none.
class Borrowed final {
 public:
  explicit Borrowed(const py::handle& object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  }
  ~Borrowed() { PyBuffer_Release(&view_); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

void take(Hasher& hasher, const py::object& buffer) {
  const Borrowed borrowed(buffer);
  const py::gil_scoped_release release;
  hasher.update(borrowed.bytes());
}

std::string hex_digest(const Hasher& hasher) {
  std::array<char, 2 * sizeof(std::uint64_t) + 1> text{};
  std::snprintf(text.data(), text.size(), "%016lx", hasher.digest());
  return text.data();
}

}  // namespace

void bind_hasher(py::module_& module) {
  py::class_<Hasher>(module, "Hasher")
      .def(py::init())
      .def("update", &take, py::arg("buffer").none(false))
      .def("hexdigest", &hex_digest);
}

}  // namespace strata
