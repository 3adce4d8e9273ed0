#include "offload/planner/costs.hpp"

namespace strata {

const char* name(Lane lane) {
  switch (lane) {
    case Lane::compute:
      return "compute";
    case Lane::upload:
      return "upload";
    case Lane::download:
      return "download";
    case Lane::read:
      return "read";
    case Lane::write:
      return "write";
    case Lane::update:
      return "update";
  }
  return "?";
}

}  // namespace strata
