// What sessions over the double of a GPU are made of, and what that double has to say behind them.
//
//   RecordingDriver driver({.hidden = true, .late = true, .seed = seed});
//   { Session session(config, parts_over(driver)); ... }
//   EXPECT_EQ(left(driver), "");
#pragma once

#include <memory>
#include <string>

#include "doubles/gpu.hpp"
#include "engine/session.hpp"
#include "offload/storage/memory_engine.hpp"

namespace strata {

// Without a pump whoever waits takes the turns, so a seed is a run.
inline SessionParts parts_over(RecordingDriver& driver, bool pump = false,
                               GpuOptions options = {}) {
  SessionParts parts;
  if (pump) driver.forbid_locked_sleeps();
  parts.open_device = [&driver, pump, options](Doorbell* bell) {
    return gpu(driver, pump ? bell : nullptr, options);
  };
  parts.io_engine = std::make_unique<MemoryEngine>(nullptr, 64);
  if (!pump) parts.idle = [] {};
  return parts;
}

// The first misuse, and what was not given back.
inline std::string left(const RecordingDriver& driver) {
  return driver.complaint() + driver.leaks();
}

}  // namespace strata
