// Names: what people call units and pages, for errors.
//
// Threads: one caller at a time (the core's lock).
//
//   error.unit = names.of(unit);                       // "model.layers.3"
//   gate.fail(names.explained(*transfers.failure()));  // "model.layers.3 (exp_avg)"
#pragma once

#include <string>

#include "engine/config.hpp"
#include "engine/layout.hpp"
#include "memory/page_table.hpp"
#include "offload/residency/transfers.hpp"

namespace strata {

class Names final {
 public:
  Names(const Config& config, const Layout& layout, const PageTable& table)
      : config_(config), layout_(layout), table_(table) {}

  std::string of(UnitId unit) const {
    return index(unit) < config_.units.size() ? config_.units[index(unit)] : "no unit";
  }
  std::string of(PageId page) const {
    if (index(page) < layout_.page_count)
      return of(table_.unit(page)) + " (" + name(layout_.role_of[index(page)]) + ")";
    const bool computed = index(page) < layout_.page_count + layout_.computed_count;
    const char* role = computed ? name(Role::param) : "activation";
    return of(table_.unit(page)) + " (" + role + ")";
  }
  // The error, with whose page it was.
  Error explained(const TransferFailure& failure) const {
    Error error = failure.error;
    if (error.page != kNoPage)
      error.unit = of(error.page);
    else
      error.unit =
          of(failure.unit) + (failure.requester == Requester::activations ? " (activation)" : "");
    return error;
  }

 private:
  const Config& config_;
  const Layout& layout_;
  const PageTable& table_;
};

}  // namespace strata
