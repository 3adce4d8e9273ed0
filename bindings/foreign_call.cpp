#include "bindings/foreign_call.hpp"

#include <condition_variable>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>

namespace strata {
namespace {

// Note [The door]
// A thread that asks for the GIL when the interpreter is ending is ended itself, in the middle of
// frames that must not be unwound. So every call goes in by a door, and at exit, while there is
// still a GIL to have, the door is shut behind the last one that comes out. What Python is to
// write to memory of the core's is dropped then, and whoever has that memory waits for it. Whoever
// is inside when the process forks will not come out in the child, which gets a door of its own.
class Posted {
 public:
  // REQUIRES: the GIL.
  virtual void drop() = 0;

 protected:
  ~Posted() = default;
};

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

  void add(Posted* posted) {
    const std::lock_guard lock(mutex_);
    posted_.insert(posted);
  }
  // Once it has been dropped: behind a door that is shut, by drop_all().
  void remove(Posted* posted) {
    std::unique_lock lock(mutex_);
    dropped_all_.wait(lock, [this] { return !shut_ || dropped_; });
    posted_.erase(posted);
  }
  // REQUIRES: shut; the GIL.
  void drop_all() {
    const std::lock_guard lock(mutex_);
    for (Posted* posted : posted_) posted->drop();
    dropped_ = true;
    dropped_all_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_out_, dropped_all_;
  std::set<Posted*> posted_;
  int inside_ = 0;
  bool shut_ = false, dropped_ = false;
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

py::list places_of(const auto& pieces) {
  py::list places;
  for (const auto& piece : pieces) {
    places.append(py::make_tuple(address(piece.data()), piece.size()));
  }
  return places;
}

double seconds_of(std::chrono::milliseconds patience) {
  return static_cast<double>(patience.count()) * 1e-3;
}

class ForeignArrival final : public Wire::Arrival, public Posted {
 public:
  // REQUIRES: the GIL.
  explicit ForeignArrival(py::object object) : object_(std::move(object)) { door().add(this); }
  ~ForeignArrival() override {
    try {
      call_python([this] { drop(); });
    } catch (const std::exception&) {  // the door is shut
    }
    door().remove(this);
  }
  ForeignArrival(const ForeignArrival&) = delete;
  ForeignArrival& operator=(const ForeignArrival&) = delete;

  void wait(std::chrono::milliseconds patience) override {
    call_python([&] {
      object_.attr("wait")(seconds_of(patience));
      drop();
    });
  }

  void drop() override {
    if (object_) object_.attr("drop")();
    object_ = py::object();
  }

 private:
  py::object object_;  // empty: all has come, or nothing more does
};

class ForeignWire final : public Wire {
 public:
  explicit ForeignWire(py::handle object) : object_(object) {}

  void send(std::uint32_t to, std::span<const std::span<const std::byte>> pieces,
            std::chrono::milliseconds patience) override {
    call_python([&] { object_.attr("send")(to, places_of(pieces), seconds_of(patience)); });
  }
  std::unique_ptr<Arrival> expect(std::uint32_t from,
                                  std::span<const std::span<std::byte>> pieces) override {
    std::unique_ptr<Arrival> arrival;
    call_python([&] {
      arrival = std::make_unique<ForeignArrival>(object_.attr("expect")(from, places_of(pieces)));
    });
    return arrival;
  }

 private:
  py::handle object_;
};

}  // namespace

void shut_door_at_exit() {
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    {
      const py::gil_scoped_release release;
      door().shut();
    }
    door().drop_all();
  }));
  py::module_::import("os").attr("register_at_fork")(
      py::arg("after_in_child") = py::cpp_function([] { only_door() = new Door; }));
}

Foreign foreign_call(py::handle callable) {
  if (callable.is_none()) return {};
  return [callable](const UpdateSpan& slice) { call(callable, slice); };
}

std::unique_ptr<Wire> foreign_wire(py::handle object) {
  if (object.is_none()) return nullptr;
  return std::make_unique<ForeignWire>(object);
}

std::function<void()> foreign_notice(py::handle callable) {
  if (callable.is_none()) return {};
  return [callable] { call_python([&] { callable(); }); };
}

}  // namespace strata
