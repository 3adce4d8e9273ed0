// The probes of calibration as Python objects; _core.pyi says what each means. Every run() releases
// the GIL, so that several can run at once.
#include <optional>

#include "bindings/fields.hpp"
#include "bindings/foreign_call.hpp"
#include "engine/calibrate.hpp"
#include "engine/devices.hpp"
#include "offload/storage/calibrate.hpp"

namespace strata {
namespace {

constexpr std::size_t kProbeBytesMax = 1024 * kGiB;
constexpr std::uint32_t kDepthMax = 4096;
constexpr int kWorkersMax = 1024;
constexpr double kSecondsMax = 3600.0;

Ways parse_ways(const std::string& text) {
  if (text == "in") return Ways::in;
  if (text == "out") return Ways::out;
  if (text == "both") return Ways::both;
  throw py::value_error("ways is in, out or both, not " + text);
}

// Throws ValueError for what no probe can be made with.
void check_probe(std::size_t page_bytes, std::size_t bytes, int workers = 1) {
  const bool power = (page_bytes & (page_bytes - 1)) == 0;
  if (!power || page_bytes < kPageBytesMin || page_bytes > kPageBytesMax) {
    throw py::value_error("no page has " + std::to_string(page_bytes) + " bytes");
  }
  if (bytes > kProbeBytesMax) throw py::value_error("a probe of more than a TiB");
  if (workers < 1 || workers > kWorkersMax) {
    throw py::value_error(std::to_string(workers) + " workers");
  }
}

// Likewise; for how long it runs.
double check_seconds(double seconds) {
  if (seconds >= 0.0 && seconds <= kSecondsMax) return seconds;
  throw py::value_error("a probe runs for a number of seconds, at most " +
                        std::to_string(static_cast<int>(kSecondsMax)));
}

template <typename Probe>
py::tuple run_ways(Probe& probe, const std::string& ways, double seconds) {
  const Ways parsed = parse_ways(ways);
  check_seconds(seconds);
  LinkSpeed speed;
  {
    const py::gil_scoped_release release;
    speed = probe.run(parsed, seconds);
  }
  return py::make_tuple(speed.in_bytes_s, speed.out_bytes_s);
}

}  // namespace

void bind_calibration(py::module_& module) {
  py::class_<SsdProbe, Threaded<SsdProbe>>(module, "SsdProbe")
      .def(
          py::init([](const std::vector<std::string>& paths, std::size_t page_bytes,
                      const std::string& io_engine, std::uint64_t file_bytes, std::uint32_t depth) {
            check_probe(page_bytes, file_bytes);
            if (depth == 1 || depth > kDepthMax) throw py::value_error("a probe of such a depth");
            if (paths.empty()) throw py::value_error("a probe of no folder");
            const py::gil_scoped_release release;
            return make_threaded<SsdProbe>(SsdProbeOptions{paths, page_bytes, file_bytes, depth},
                                           io_engine);
          }),
          py::arg("paths"), py::arg("page_bytes"), py::arg("io_engine"), py::arg("file_bytes"),
          py::arg("depth") = 0)
      .def("run", &run_ways<SsdProbe>, py::arg("ways"), py::arg("seconds"))
      .def_property_readonly("io_engine", &SsdProbe::engine_name)
      .def_property_readonly("depth", &SsdProbe::depth);
  py::class_<CopyProbe, Threaded<CopyProbe>>(module, "CopyProbe")
      .def(py::init([](std::size_t page_bytes, std::size_t bytes, const std::string& device) {
             check_probe(page_bytes, bytes);
             const py::gil_scoped_release release;
             return make_threaded<CopyProbe>(open_bare_device(device, nullptr), page_bytes, bytes);
           }),
           py::arg("page_bytes"), py::arg("bytes"), py::arg("device"))
      .def("run", &run_ways<CopyProbe>, py::arg("ways"), py::arg("seconds"))
      .def(
          "decode_bytes_s",
          [](CopyProbe& probe, StoredForm form, Dtype dtype, double seconds) {
            form.dtype = dtype;
            check_seconds(seconds);
            const py::gil_scoped_release release;
            return decode_bytes_s(probe, form, seconds);
          },
          py::arg("stored"), py::arg("dtype"), py::arg("seconds"))
      .def("transfer_seconds", &CopyProbe::transfer_seconds,
           py::call_guard<py::gil_scoped_release>());
  py::class_<UpdateProbe, Threaded<UpdateProbe>>(module, "UpdateProbe")
      .def(py::init([](int workers, Dtype dtype, std::size_t page_bytes, std::size_t bytes,
                       std::optional<int> beside) {
             check_probe(page_bytes, bytes, workers);
             if (beside && *beside < 0) throw py::value_error("fewer than no threads beside it");
             WorkerPlacement placement;
             if (beside) {
               placement = choose_placement(read_topology(), allowed_cpus(), *beside, workers);
             }
             return make_threaded<UpdateProbe>(
                 UpdateProbeOptions{workers, dtype, page_bytes, bytes, placement});
           }),
           py::arg("workers"), py::arg("dtype"), py::arg("page_bytes"), py::arg("bytes"),
           py::arg("beside") = py::none())
      .def(
          "run",
          [](UpdateProbe& probe, double seconds) {
            check_seconds(seconds);
            const py::gil_scoped_release release;
            return probe.run(seconds);
          },
          py::arg("seconds"));
}

}  // namespace strata
