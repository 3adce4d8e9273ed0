#include "engine/ranks/hello.hpp"

#include <cstring>
#include <string>

#include "engine/fingerprint.hpp"
#include "memory/result.hpp"

namespace strata {
namespace {

constexpr std::array<const char*, Hello::kFacts> kFactNames = {
    "another version of strata",
    "a model with other parameters (names, sizes, dtypes, or which are trained)",
    "another number of parameters or units",
    "other units or parameter groups: units= must be the same",
    "parameters that rest as other codes: frozen= must be the same",
    "another kind of device: all compute on GPUs, or none does",
    "other optimizers",
    "other pages or another way to store moments: budgets and page_size must be the same",
    "another way to update",
};
constexpr std::uint64_t kFormat = 12;

std::uint64_t model_of(const Config& config) {
  Fingerprint of;
  for (const ParamSpec& param : config.params) {
    of.add(param.name);
    of.add(std::uint64_t{param.numel});
    of.add(static_cast<std::uint64_t>(param.dtype) << 1 | std::uint64_t{param.trainable});
  }
  return of.value();
}

std::uint64_t units_of(const Config& config) {
  Fingerprint of;
  for (const ParamSpec& param : config.params) {
    of.add(std::uint64_t{index(param.unit)} << 32 | param.group);
  }
  return of.value();
}

std::uint64_t codes_of(const Config& config) {
  Fingerprint of;
  for (const ParamSpec& param : config.params) {
    const StoredForm form = param.stored.value_or(StoredForm{});
    of.add(std::uint64_t{param.stored.has_value()} << 24 |
           static_cast<std::uint64_t>(form.codes) << 16 |
           static_cast<std::uint64_t>(form.arithmetic) << 8 |
           static_cast<std::uint64_t>(form.dtype));
  }
  return of.value();
}

std::uint64_t rules_of(const Config& config) {
  Fingerprint of;
  for (const Hyper& group : config.groups) {
    of.add(static_cast<std::uint64_t>(group.rule) << 8 |
           static_cast<std::uint64_t>(moment_count(group)));
  }
  return of.value();
}

}  // namespace

Hello hello_of(const Config& config, const SeatOffer& offer, std::size_t area_bytes) {
  return {
      .facts = {kFormat, model_of(config),
                std::uint64_t{config.params.size()} << 32 | config.units.size(), units_of(config),
                codes_of(config), std::uint64_t{config.device != "host"}, rules_of(config),
                std::uint64_t{offer.page_bytes} << 8 |
                    static_cast<std::uint64_t>(config.moment_dtype),
                std::uint64_t{config.max_staleness} << 8 |
                    static_cast<std::uint64_t>(config.update) << 1 |
                    std::uint64_t{config.sums_ranks}},
      .memory_bytes = offer.memory.size(),
      .claimed_bytes = offer.claimed_bytes,
      .area_bytes = area_bytes};
}

Hello checked(std::span<const std::byte> said, std::uint32_t other, const Hello& mine,
              std::uint32_t rank) {
  Hello theirs;
  if (said.size() != sizeof theirs) {
    refuse("rank " + std::to_string(other) + " runs another version of strata");
  }
  std::memcpy(&theirs, said.data(), sizeof theirs);
  for (std::size_t i = 0; i < Hello::kFacts; ++i) {
    if (theirs.facts[i] == mine.facts[i]) continue;
    refuse("rank " + std::to_string(other) + " and rank " + std::to_string(rank) +
           " cannot train together: one has " + kFactNames[i]);
  }
  return theirs;
}

}  // namespace strata
