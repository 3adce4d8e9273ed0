#include "offload/planner/refusal.hpp"

#include <cmath>
#include <cstdio>

#include "memory/check.hpp"

namespace strata {
namespace {

// Bytes for people, rounded up, so that the number will do when it is typed in again.
struct Enough {
  explicit Enough(std::uint64_t bytes) : value(static_cast<double>(bytes) / scale) {
    if (value >= 1024) value /= 1024, scale *= 1024, suffix = "MiB";
    if (value >= 1024) value /= 1024, scale *= 1024, suffix = "GiB";
    digits = value < 10 ? 2 : 1;
    const double parts = value < 10 ? 100 : 10;
    value = std::ceil(value * parts) / parts;
  }
  std::string text() const {
    char text[32];
    std::snprintf(text, sizeof text, "%.*f %s", digits, value, suffix);
    return text;
  }

  double scale = static_cast<double>(kKiB);
  const char* suffix = "KiB";
  double value = 0.0;
  int digits = 0;
};

// The keyword of wrap() that would do, in whole units of `grain`.
std::string advice(const Refusal& refusal, std::size_t grain) {
  return std::string(name(refusal.tier)) + "=\"" +
         std::to_string(ceil_div(refusal.would_do_bytes, grain)) + (grain == kKiB ? "KiB" : "MiB") +
         "\" would do";
}

std::string late_gradients(const Refusal& refusal) {
  if (refusal.gradient_bytes == 0) return "";
  std::string needed = "; gradients need " + bytes_text(refusal.gradient_bytes) + " of host memory";
  if (refusal.gradient_bytes_in_backward == 0) return needed;
  return needed + ", update='in_backward' would need " +
         bytes_text(refusal.gradient_bytes_in_backward);
}

std::string of_activations(const Refusal& refusal) {
  return "activations need " + bytes_text(refusal.activation_host_bytes) + " of host memory and " +
         bytes_text(refusal.activation_ssd_bytes) + " of SSD, and ";
}

std::string reason(const Refusal& refusal) {
  const std::string needed = bytes_text(refusal.needed_bytes);
  const std::string budget = bytes_text(refusal.budget_bytes);
  const char* or_ssd = refusal.has_ssd ? "" : ", or give ssd_path=";
  switch (refusal.lack) {
    case Lack::step:
      return std::string(name(refusal.tier)) + " " + needed + " > " + budget + " " +
             (refusal.moment.empty() ? refusal.purpose : refusal.moment) +
             (refusal.would_do_bytes == 0
                  ? ""
                  : "; " + Enough(refusal.would_do_bytes).text() + " would do");
    case Lack::unit:
      return "the device budget of " + budget + " is less than the " + needed +
             " that this unit's parameters need when it is entered; " + advice(refusal, kKiB);
    case Lack::nested:
      return "the device budget is " + budget + " (" + std::to_string(refusal.budget_bytes) +
             " bytes), and " + refusal.moment + " needs " + needed +
             ", with the modules around it that own parameters; device=" +
             std::to_string(refusal.would_do_bytes) + " would do";
    case Lack::everything:
      return "parameters, gradients and optimizer state take " + needed +
             " of host memory and the budget is " + budget + "; " + advice(refusal, kKiB) + or_ssd +
             late_gradients(refusal);
    case Lack::staging:
      return "the host budget of " + budget + " is less than the staging area for one chunk" +
             (refusal.sets_aside ? " and what must always be in host memory" : "") + "; " +
             advice(refusal, kKiB) + late_gradients(refusal);
    case Lack::slots:
      return needed + " must rest on the SSD and the budget is " + budget + "; " +
             advice(refusal, kMiB) + ", or a larger host=";
    case Lack::snapshots:
      return "snapshots need " + bytes_text(refusal.snapshot_bytes) + " of the SSD beside " +
             bytes_text(refusal.needed_bytes - refusal.snapshot_bytes) +
             " for what rests there, and ssd= is " + budget + "; " + advice(refusal, kMiB) +
             ", or fewer snapshots=" + (refusal.has_ssd ? "" : ", and ssd_path= is needed");
    case Lack::activations:
      return of_activations(refusal) + "the host budget is " + budget + "; " +
             advice(refusal, kKiB) + or_ssd;
    case Lack::activation_slots:
      return needed + " must rest on the SSD with activations, and the budget is " + budget + "; " +
             advice(refusal, kMiB);
    case Lack::activation_path:
      return of_activations(refusal) + "there is no ssd_path=";
  }
  STRATA_ASSERT(false && "every lack has its words");
  return "";
}

}  // namespace

std::string text(const Refusal& refusal) {
  const std::string pages =
      refusal.gpu_page_bytes == 0
          ? ""
          : "; pages of a GPU are " + bytes_text(refusal.gpu_page_bytes) + " at least";
  return "infeasible: " + reason(refusal) + pages;
}

Error to_error(const Refusal& refusal) {
  Error error;
  error.fault = Fault::config;
  error.tier = refusal.tier;
  error.what = text(refusal);
  if (refusal.lack == Lack::unit) error.unit = refusal.units.front();
  error.moment = refusal.moment;
  error.units = refusal.units;
  error.needed_bytes = refusal.needed_bytes;
  error.budget_bytes = refusal.budget_bytes;
  error.snapshot_bytes = refusal.lack == Lack::snapshots ? refusal.snapshot_bytes : 0;
  error.would_do_bytes = refusal.would_do_bytes;
  return error;
}

std::uint64_t bytes_as_read(std::uint64_t bytes) {
  const Enough enough(bytes);
  return static_cast<std::uint64_t>(enough.value * enough.scale);
}

}  // namespace strata
