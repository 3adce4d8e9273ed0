#include "memory/cuda/counts.hpp"

namespace strata {

template <auto kEntry, CountedDriver::Slot kSlot, typename Result, typename... Params>
void CountedDriver::forward_as(CudaDriver& table, Result (*CudaDriver::*)(void*, Params...)) {
  table.*kEntry = [](void* self, Params... params) -> Result {
    CountedDriver& counted = *static_cast<CountedDriver*>(self);
    const Result result = (counted.driver_.*kEntry)(counted.driver_.self, params...);
    if constexpr (kSlot != Slot::none) counted.note(kSlot);
    if constexpr (kSlot == Slot::event_query) {
      if (result == kCudaNotReady) counted.note(Slot::event_not_ready);
    }
    return result;
  };
}

template <auto kEntry, CountedDriver::Slot kSlot>
void CountedDriver::forward(CudaDriver& table) {
  forward_as<kEntry, kSlot>(table, kEntry);
}

CudaDriver CountedDriver::table() {
  CudaDriver table{};
  table.self = this;
  table.capability_min = driver_.capability_min;
  forward<&CudaDriver::describe>(table);
  forward<&CudaDriver::device_count>(table);
  forward<&CudaDriver::device_facts>(table);
  forward<&CudaDriver::context>(table);
  forward<&CudaDriver::context_push>(table);
  forward<&CudaDriver::context_pop>(table);
  forward<&CudaDriver::capture_mode>(table);
  forward<&CudaDriver::memory_info>(table);
  forward<&CudaDriver::address_reserve>(table);
  forward<&CudaDriver::address_free>(table);
  forward<&CudaDriver::memory_create>(table);
  forward<&CudaDriver::memory_release>(table);
  forward<&CudaDriver::map, Slot::map>(table);
  forward<&CudaDriver::unmap, Slot::unmap>(table);
  forward<&CudaDriver::set_access, Slot::set_access>(table);
  forward<&CudaDriver::host_register>(table);
  forward<&CudaDriver::host_unregister>(table);
  forward<&CudaDriver::stream_create>(table);
  forward<&CudaDriver::stream_destroy>(table);
  forward<&CudaDriver::stream_synchronize, Slot::stream_synchronize>(table);
  forward<&CudaDriver::stream_wait, Slot::stream_wait>(table);
  forward<&CudaDriver::event_create>(table);
  forward<&CudaDriver::event_destroy>(table);
  forward<&CudaDriver::event_record>(table);
  forward<&CudaDriver::event_query, Slot::event_query>(table);
  forward<&CudaDriver::event_synchronize, Slot::event_synchronize>(table);
  forward<&CudaDriver::copy_in>(table);
  forward<&CudaDriver::copy_out>(table);
  return table;
}

DriverCounts CountedDriver::counts() const {
  return {.stream_wait = calls(Slot::stream_wait),
          .event_query = calls(Slot::event_query),
          .event_not_ready = calls(Slot::event_not_ready),
          .event_synchronize = calls(Slot::event_synchronize),
          .stream_synchronize = calls(Slot::stream_synchronize),
          .map = calls(Slot::map),
          .unmap = calls(Slot::unmap),
          .set_access = calls(Slot::set_access)};
}

}  // namespace strata
