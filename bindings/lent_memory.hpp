// Memory of Python objects that is lent to the core. The core gives it back on any thread, with its
// lock held, where nobody may wait for the GIL: so what comes back waits here for the next thread
// that has the GIL anyway.
//
// Threads: any gives back; lend() and drop_given_back() need the GIL.
//
//   auto from = lend(owner, address);
//   const GilReleased released;            // around every call of a session
//   session.lend_gradient(param, std::move(from), dtype);
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "bindings/python.hpp"

namespace strata {

// Owns nothing where `owner` is None.
std::shared_ptr<const std::byte> lend(const py::object& owner, std::uintptr_t address);
void drop_given_back();

// While it lives, its thread is without the GIL, since whoever has the core's lock may wait for it.
// Once the thread has the GIL again, it drops what the core gave back meanwhile.
class GilReleased final {
  struct Dropping {
    ~Dropping() { drop_given_back(); }
  };
  Dropping dropping_;
  py::gil_scoped_release released_;  // ends first
};
using WithoutGil = py::call_guard<GilReleased>;

}  // namespace strata
