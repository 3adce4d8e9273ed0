// The devices that a configuration can name: "host", where the processor computes, and "cuda:N".
//
// Threads: any.
//
//   if (const std::string why = device_error("cuda:0"); !why.empty()) log(why);
//   std::unique_ptr<Backend> device = open_device(config.device, &bell);   // throws StrataError
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "memory/backend.hpp"
#include "memory/doorbell.hpp"

namespace strata {

// The GPU's number; nullopt: the host. Throws StrataError (config) where it is neither.
std::optional<int> cuda_ordinal(const std::string& device);

// Why the device cannot be used here, and what to do about it; empty: it can. Opens it to see.
std::string device_error(const std::string& device);

// Throws StrataError (config) with what device_error() says. REQUIRES: bell outlives it.
std::unique_ptr<Backend> open_device(const std::string& device, Doorbell* bell);

}  // namespace strata
