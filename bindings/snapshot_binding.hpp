// The class of sessions in Python, and what of it is bound beside module.cpp.
#pragma once

#include "bindings/foreign_call.hpp"
#include "bindings/python.hpp"
#include "engine/session.hpp"

namespace strata {

// Its last reference may go at any time, with a worker in the middle of a call into Python.
using SessionHolder = Threaded<Session>;
using SessionClass = py::class_<Session, SessionHolder>;

void bind_snapshots(py::module_& module, SessionClass& session);
void bind_codes(SessionClass& session);

}  // namespace strata
