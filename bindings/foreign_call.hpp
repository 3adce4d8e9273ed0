// Python that the core's own threads call. In the place of an update rule, a callable: what a
// session calls for groups of rule "foreign". And what ranks agree upon before they meet, and the
// column of ranks on other machines. Arguments are those that bindings/strata/_core.pyi names at
// Session.
//
// Threads: called by workers and who makes the session; takes the GIL for the call.
// Whoever closes the session must have released it, or waits for a thread that waits for the GIL.
//
//   parts.foreign = foreign_call(callable);     // REQUIRES: callable lives as long as the session
//   parts.claimed = foreign_notice(callable);   // REQUIRES: until the session is made
//   parts.column = foreign_column(object);      // REQUIRES: as long as the session
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <utility>

#include "bindings/lent_memory.hpp"
#include "bindings/python.hpp"
#include "engine/ranks/column.hpp"
#include "optimizers/foreign.hpp"

namespace strata {

// All are empty for None. What the object raises comes out as std::runtime_error.
Foreign foreign_call(py::handle callable);
std::function<void()> foreign_notice(py::handle callable);
std::unique_ptr<Column> foreign_column(py::handle object);

// From the interpreter's exit on, calls fail. Call once, when the module is made.
void shut_door_at_exit();

// Ends an object with threads of its own that Python forgets: a session, files that are read. A
// forked child only forgets it: the threads that it would wait for are the parent's, and so are the
// files.
struct DeleteWithoutGil {
  pid_t owner = getpid();

  template <class T>
  void operator()(T* object) const {
    if (getpid() != owner) return;
    const GilReleased released;
    delete object;
  }
};
template <class T>
using Threaded = std::unique_ptr<T, DeleteWithoutGil>;

template <class T, class... Args>
Threaded<T> make_threaded(Args&&... args) {
  return Threaded<T>(new T(std::forward<Args>(args)...));
}

}  // namespace strata
