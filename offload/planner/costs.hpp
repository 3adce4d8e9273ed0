// What a machine can do: the measured speed of every lane alone, and how much lanes slow each other
// down when they run together. Plain values, from calibration or made up for a paper machine.
//
//   costs.slow[index(Lane::compute)][index(Lane::update)]   // 0.8: computation runs at 80 % beside
//   an update
#pragma once

#include <array>
#include <cstdint>

namespace strata {

// What can be busy at the same time. One job at a time each, in the order in which they were
// issued.
enum class Lane : std::uint8_t { compute, upload, download, read, write, update };
inline constexpr std::array kLaneNames = {"compute", "upload", "download",
                                          "read",    "write",  "update"};
inline constexpr std::size_t kLaneCount = kLaneNames.size();
constexpr std::size_t index(Lane lane) {
  return static_cast<std::size_t>(lane);
}
constexpr const char* name(Lane lane) {
  return kLaneNames[index(lane)];
}
template <typename T>
using PerLane = std::array<T, kLaneCount>;

struct Costs {
  double compute_scale = 1.0;      // seconds of computation here per second in the trace
  double upload_bytes_s = 0.0;     // host → device
  double download_bytes_s = 0.0;   // device → host: swapped activations, and gradients
  double read_bytes_s = 0.0;       // SSD → host
  double write_bytes_s = 0.0;      // host → SSD
  double update_elements_s = 0.0;  // the optimizer, all workers together
  double transfer_seconds = 0.0;   // a transfer costs this beside its bytes
  double decode_bytes_s = 0.0;     // values of codes that come up, of which a link moves the codes;
                                   // 0: the link is what takes time
  double slice_seconds = 0.0;      // a further slice of a unit's batch costs this, each way
  bool landing_waits = false;      // computation stands still while a gradient goes down, because
                                   // its own thread copies it
  bool updates_first = false;      // computation waits for updates that wait for no disk: they have
                                   // its processors
  // [a][b]: the speed of lane a, of what it does alone, while lane b is busy; 1 where they share
  // nothing. Of several busy lanes the one that hurts most decides: they share what they take.
  PerLane<PerLane<double>> slow = unhindered();

  static constexpr PerLane<PerLane<double>> unhindered() {
    PerLane<PerLane<double>> all{};
    for (auto& row : all) row.fill(1.0);
    return all;
  }
};

// Of a transfer at this speed; nothing where the machine has no such link.
inline double transfer_seconds(std::uint64_t bytes, double bytes_s) {
  return bytes_s > 0 ? static_cast<double>(bytes) / bytes_s : 0.0;
}

}  // namespace strata
