#include "bindings/foreign_call.hpp"

#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>

namespace strata {
namespace {

// Note [The door]
// A thread that asks for the GIL when the interpreter is ending is ended itself, in the middle of
// frames that must not be unwound. So every call goes in by a door, and at exit, while there is
// still a GIL to have, the door is shut behind the last one that comes out. Whoever is inside when
// the process forks will not come out in the child, which gets a door of its own.
class Door final {
 public:
  // Throws std::runtime_error once it is shut.
  void go_in() {
    const std::lock_guard lock(mutex_);
    if (shut_) throw std::runtime_error("Python is shutting down");
    ++inside_;
  }
  void come_out() {
    const std::lock_guard lock(mutex_);
    --inside_;
    came_out_.notify_all();
  }
  void shut() {
    std::unique_lock lock(mutex_);
    shut_ = true;
    came_out_.wait(lock, [this] { return inside_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_out_;
  int inside_ = 0;
  bool shut_ = false;
};

Door*& only_door() {
  static Door* only = new Door;  // as there is one interpreter
  return only;
}

Door& door() {
  return *only_door();
}

class Inside final {
 public:
  Inside() { door().go_in(); }
  ~Inside() { door().come_out(); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

std::uintptr_t address(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory);  // 0: absent
}

std::string text_of(const py::error_already_set& error) {
  return py::str(error.type().attr("__name__")).cast<std::string>() + ": " +
         py::str(error.value()).cast<std::string>();
}

// Runs `body`, which calls Python, on a thread that has no GIL.
template <class Body>
void call_python(const Body& body) {
  const Inside inside;
  const py::gil_scoped_acquire acquire;
  try {
    body();
  } catch (const py::error_already_set& error) {
    throw std::runtime_error(text_of(error));  // what leaves here must not need the GIL
  }
}

void call(py::handle callable, const UpdateSpan& slice) {
  call_python([&] {
    callable(slice.hyper->options, slice.param_id, slice.step, slice.count,
             address(slice.new_param), address(slice.grad), address(slice.moment1),
             address(slice.moment2));
  });
}

class ForeignColumn final : public Column {
 public:
  explicit ForeignColumn(py::handle object) : object_(object) {}

  void meet() override { call("meet"); }
  void gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    call("gather", address(mine.data()), mine.size(), address(all.data()));
  }
  void exchange(std::span<const std::byte> parts, std::span<std::byte> mine) override {
    call("exchange", address(parts.data()), parts.size(), address(mine.data()));
  }

 private:
  // What Python raises is a sentence for users.
  template <class... Args>
  void call(const char* name, Args... args) {
    call_python([&] {
      try {
        object_.attr(name)(args...);
      } catch (const py::error_already_set& error) {
        throw std::runtime_error(py::str(error.value()).cast<std::string>());
      }
    });
  }

  py::handle object_;
};

}  // namespace

void shut_door_at_exit() {
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    const py::gil_scoped_release release;
    door().shut();
  }));
  py::module_::import("os").attr("register_at_fork")(
      py::arg("after_in_child") = py::cpp_function([] { only_door() = new Door; }));
}

Foreign foreign_call(py::handle callable) {
  if (callable.is_none()) return {};
  return [callable](const UpdateSpan& slice) { call(callable, slice); };
}

std::unique_ptr<Column> foreign_column(py::handle object) {
  if (object.is_none()) return nullptr;
  return std::make_unique<ForeignColumn>(object);
}

std::function<void()> foreign_notice(py::handle callable) {
  if (callable.is_none()) return {};
  return [callable] { call_python([&] { callable(); }); };
}

}  // namespace strata
