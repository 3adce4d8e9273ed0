#include "bindings/lent_memory.hpp"

#include <atomic>
#include <mutex>
#include <vector>

namespace strata {
namespace {

struct GivenBack {
  std::mutex mutex;
  std::vector<PyObject*> objects;
  std::atomic<bool> any = false;  // cheaper to ask, after every call
};

// For as long as the process: threads of a session that nobody closed may outlive everything else.
GivenBack& given_back() {
  static auto* const only = new GivenBack;
  return *only;
}

void give_back(PyObject* object) {
  GivenBack& to = given_back();
  const std::lock_guard lock(to.mutex);
  to.objects.push_back(object);
  to.any = true;
}

}  // namespace

std::shared_ptr<const std::byte> lend(const py::object& owner, std::uintptr_t address) {
  const auto* const memory = pointer<const std::byte>(address);
  if (owner.is_none()) return {std::shared_ptr<void>(), memory};
  return {memory, [object = owner.inc_ref().ptr()](const std::byte*) { give_back(object); }};
}

void drop_given_back() {
  GivenBack& from = given_back();
  if (!from.any.load(std::memory_order_relaxed)) return;
  std::vector<PyObject*> objects;
  {
    // In a forked child somebody who is not there may have the lock.
    const std::unique_lock lock(from.mutex, std::try_to_lock);
    if (!lock.owns_lock()) return;
    objects.swap(from.objects);
    from.any = false;
  }
  for (PyObject* const object : objects) Py_DECREF(object);  // may run anything
}

}  // namespace strata
