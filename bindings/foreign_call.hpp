// A Python callable in the place of an update rule: what a session calls for groups of rule
// "foreign". Its arguments are those that bindings/strata/_core.pyi names at Session.
//
// Threads: called by workers; takes the GIL for the call. Whoever closes the session must have
// released it, or waits for a worker that waits for the GIL.
//
//   parts.foreign = foreign_call(callable);     // REQUIRES: callable lives as long as the session
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include "bindings/lent_memory.hpp"
#include "bindings/python.hpp"
#include "optimizers/foreign.hpp"

namespace strata {

// Empty for None. What the callable raises comes out as std::runtime_error.
Foreign foreign_call(py::handle callable);

// From the interpreter's exit on, calls fail. Call once, when the module is made.
void shut_door_at_exit();

// Ends a session that Python forgets without closing it. A forked child only forgets it: the
// threads that it would wait for are the parent's, and so are the files.
struct DeleteWithoutGil {
  pid_t owner = getpid();

  template <class T>
  void operator()(T* object) const {
    if (getpid() != owner) return;
    const GilReleased released;
    delete object;
  }
};

}  // namespace strata
