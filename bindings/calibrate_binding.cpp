// The probes of calibration as Python objects; _core.pyi says what each means. Every run() releases
// the GIL, so that several can run at once.
#include <optional>

#include "bindings/python.hpp"
#include "engine/calibrate.hpp"
#include "engine/devices.hpp"
#include "offload/calibrate.hpp"

namespace strata {
namespace {

Ways parse_ways(const std::string& text) {
  if (text == "in") return Ways::in;
  if (text == "out") return Ways::out;
  if (text == "both") return Ways::both;
  throw py::value_error("ways is in, out or both, not " + text);
}

template <typename Probe>
py::tuple run_ways(Probe& probe, const std::string& ways, double seconds) {
  const Ways parsed = parse_ways(ways);
  LinkSpeed speed;
  {
    const py::gil_scoped_release release;
    speed = probe.run(parsed, seconds);
  }
  return py::make_tuple(speed.in_bytes_s, speed.out_bytes_s);
}

}  // namespace

void bind_calibration(py::module_& module) {
  py::class_<SsdProbe>(module, "SsdProbe")
      .def(
          py::init([](const std::vector<std::string>& paths, std::size_t page_bytes,
                      const std::string& io_engine, std::uint64_t file_bytes, std::uint32_t depth) {
            const py::gil_scoped_release release;
            return std::make_unique<SsdProbe>(SsdProbeOptions{paths, page_bytes, file_bytes, depth},
                                              io_engine);
          }),
          py::arg("paths"), py::arg("page_bytes"), py::arg("io_engine"), py::arg("file_bytes"),
          py::arg("depth") = 0)
      .def("run", &run_ways<SsdProbe>, py::arg("ways"), py::arg("seconds"))
      .def_property_readonly("io_engine", &SsdProbe::engine_name)
      .def_property_readonly("depth", &SsdProbe::depth);
  py::class_<CopyProbe>(module, "CopyProbe")
      .def(py::init([](std::size_t page_bytes, std::size_t bytes, const std::string& device) {
             const py::gil_scoped_release release;
             return std::make_unique<CopyProbe>(open_backend(device, nullptr), page_bytes, bytes);
           }),
           py::arg("page_bytes"), py::arg("bytes"), py::arg("device"))
      .def("run", &run_ways<CopyProbe>, py::arg("ways"), py::arg("seconds"))
      .def("transfer_seconds", &CopyProbe::transfer_seconds,
           py::call_guard<py::gil_scoped_release>());
  py::class_<UpdateProbe>(module, "UpdateProbe")
      .def(py::init([](int workers, const std::string& dtype, std::size_t page_bytes,
                       std::size_t bytes, std::optional<int> beside) {
             const Dtype parsed = parse_dtype(dtype);
             Placement placement;
             if (beside) {
               placement = choose_placement(read_topology(), allowed_cpus(), *beside, workers);
             }
             return std::make_unique<UpdateProbe>(
                 UpdateProbeOptions{workers, parsed, page_bytes, bytes, placement});
           }),
           py::arg("workers"), py::arg("dtype"), py::arg("page_bytes"), py::arg("bytes"),
           py::arg("beside") = py::none())
      .def("run", &UpdateProbe::run, py::arg("seconds"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace strata
