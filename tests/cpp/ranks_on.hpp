// Where ranks of a test compute: on a device of theirs, which all of them share.
//
// Threads: those of the ranks.
//
//   TestDevice gpu(TestedOn::gpu_double, {.late = true, .seed = seed});
//   trained(2, 3, config, options, {}, batches, ranks_on(gpu));
#pragma once

#include <cstring>
#include <vector>

#include "rank_training.hpp"
#include "test_device.hpp"

namespace strata {

inline RanksDevice ranks_on(TestDevice& device) {
  return {.fit = [&device](const Config& config) { return device.fit(config); },
          .parts = [&device] { return device.parts(); },
          .shown =
              [&device](Session& session, std::uint32_t param) {
                Bfloat16s shown(session.config().params[param].numel);
                device.read(shown.data(), session.device_address(param),
                            shown.size() * sizeof shown[0]);
                return shown;
              },
          .land =
              [&device](Session& session, std::uint32_t param, const Bfloat16s& gradient) {
                std::vector<std::byte> bytes(gradient.size() * sizeof gradient[0]);
                std::memcpy(bytes.data(), gradient.data(), bytes.size());
                const DeviceTensor tensor(device, bytes);
                session.land_gradient(param, tensor.data(), Dtype::bfloat16);
              }};
}

}  // namespace strata
