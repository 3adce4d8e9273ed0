#include "memory/cuda/counts.hpp"

namespace strata {

template <auto kEntry, CountedDriver::Count kCount, typename Result, typename... Params>
void CountedDriver::forward_as(CudaDriver& table, Result (*CudaDriver::*)(void*, Params...)) {
  table.*kEntry = [](void* self, Params... params) -> Result {
    CountedDriver& counted = *static_cast<CountedDriver*>(self);
    const Result result = (counted.driver_.*kEntry)(counted.driver_.self, params...);
    if constexpr (kCount != nullptr) counted.add(kCount);
    if constexpr (kCount == &DriverCounts::event_query) {
      if (result == kCudaNotReady) counted.add(&DriverCounts::event_not_ready);
    }
    return result;
  };
}

template <auto kEntry, CountedDriver::Count kCount>
void CountedDriver::forward(CudaDriver& table) {
  forward_as<kEntry, kCount>(table, kEntry);
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
  forward<&CudaDriver::map, &DriverCounts::map>(table);
  forward<&CudaDriver::unmap, &DriverCounts::unmap>(table);
  forward<&CudaDriver::set_access, &DriverCounts::set_access>(table);
  forward<&CudaDriver::host_register>(table);
  forward<&CudaDriver::host_unregister>(table);
  forward<&CudaDriver::stream_create>(table);
  forward<&CudaDriver::stream_destroy>(table);
  forward<&CudaDriver::stream_synchronize, &DriverCounts::stream_synchronize>(table);
  forward<&CudaDriver::stream_wait, &DriverCounts::stream_wait>(table);
  forward<&CudaDriver::event_create>(table);
  forward<&CudaDriver::event_destroy>(table);
  forward<&CudaDriver::event_record>(table);
  forward<&CudaDriver::event_query, &DriverCounts::event_query>(table);
  forward<&CudaDriver::event_synchronize, &DriverCounts::event_synchronize>(table);
  forward<&CudaDriver::copy_in>(table);
  forward<&CudaDriver::copy_out>(table);
  return table;
}

DriverCounts CountedDriver::counts() const {
  using D = DriverCounts;
  DriverCounts counts;
  for (const Count count :
       {&D::stream_wait, &D::event_query, &D::event_not_ready, &D::event_synchronize,
        &D::stream_synchronize, &D::map, &D::unmap, &D::set_access}) {
    counts.*count = std::atomic_ref(counts_.*count).load(kRelaxed);
  }
  return counts;
}

}  // namespace strata
