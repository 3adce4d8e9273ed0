// Memory of Python objects that is lent to the core. The core gives it back on any thread, with its
// lock held, where nobody may wait for the GIL: so what comes back waits here for the next thread
// that has the GIL anyway.
//
// Threads: any gives back; lend() and drop_given_back() need the GIL.
//
//   session.lend_gradient(param, lend(owner, address), dtype);
//   drop_given_back();                     // behind every call into the core
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "bindings/python.hpp"

namespace strata {

// Owns nothing where `owner` is None.
std::shared_ptr<const std::byte> lend(const py::object& owner, std::uintptr_t address);
void drop_given_back();

}  // namespace strata
