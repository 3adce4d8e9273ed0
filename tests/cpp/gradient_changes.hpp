// What users do to a gradient between a backward and a step: the same in a session and in a plain
// run.
//
// Threads: none.
//
//   EXPECT_TRUE(change_gradient(session, device, param, plain, random));
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "engine/session.hpp"
#include "plain_param.hpp"
#include "test_device.hpp"

namespace strata {

// Scales, drops, replaces or reads it. False: it was read, and is not what the plain run has.
// REQUIRES: one has landed.
inline bool change_gradient(Session& session, TestDevice& device, std::uint32_t param,
                            PlainParam& plain, std::mt19937_64& random) {
  const ParamSpec& spec = session.config().params[param];
  const bool divides = random() % 2 == 0;
  switch (random() % 6) {
    case 0: {
      session.drop_gradients_of({param});
      plain.forget_gradient();
      return true;
    }
    case 1: {
      const std::vector<std::byte> zeros(spec.numel * size_of(spec.dtype));
      const DeviceTensor tensor(device, zeros);
      session.replace_gradient(param, tensor.data(), spec.dtype);
      plain.forget_gradient();
      plain.land(zeros);
      return true;
    }
    case 2: {
      std::vector<float> read(spec.numel);
      session.read(param, Kind::grad, 0, read.data(), read.size());
      return read == plain.gradient();
    }
    default: {
      const float factor = 0.1f + 0.3f * static_cast<float>(random() % 5);
      if (session.scale_gradient(param, factor, divides)) plain.scale_gradient(factor, divides);
      return true;
    }
  }
}

}  // namespace strata
