// A one-dimensional tensor over foreign memory, as DLPack 0.x describes it: enough for a parameter
// on its view. The structs follow the public ABI of dlpack.h; torch.from_dlpack() takes the
// capsule.
//
// The memory outlives the tensor or the tensor is invalid: whoever closes the session says so.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory/dtype.hpp"

namespace strata::dlpack {

// Types of devices.
inline constexpr std::int32_t kHost = 1;
inline constexpr std::int32_t kCuda = 2;

struct Device {
  std::int32_t type = kHost;
  std::int32_t id = 0;
};

struct DataType {
  std::uint8_t code = 2;  // 2: IEEE float, 4: bfloat16
  std::uint8_t bits = 32;
  std::uint16_t lanes = 1;
};

struct Tensor {
  void* data = nullptr;
  Device device;
  std::int32_t ndim = 1;
  DataType dtype;
  std::int64_t* shape = nullptr;
  std::int64_t* strides = nullptr;
  std::uint64_t byte_offset = 0;
};

struct ManagedTensor {
  Tensor tensor;
  void* manager_context = nullptr;
  void (*deleter)(ManagedTensor* self) = nullptr;
};

inline constexpr const char* kCapsuleName = "dltensor";

inline DataType data_type(Dtype dtype) {
  const auto bits = static_cast<std::uint8_t>(8 * size_of(dtype));
  return {static_cast<std::uint8_t>(dtype == Dtype::bfloat16 ? 4 : 2), bits, 1};
}

// A managed tensor of shape (count,), freed by its own deleter.
inline ManagedTensor* make(void* data, std::size_t count, Dtype dtype, Device device) {
  struct Owned {
    ManagedTensor managed;
    std::int64_t shape;
    std::int64_t stride = 1;
  };
  auto* owned = new Owned{};
  owned->shape = static_cast<std::int64_t>(count);
  owned->managed.tensor.data = data;
  owned->managed.tensor.device = device;
  owned->managed.tensor.dtype = data_type(dtype);
  owned->managed.tensor.shape = &owned->shape;
  owned->managed.tensor.strides = &owned->stride;
  owned->managed.manager_context = owned;
  owned->managed.deleter = [](ManagedTensor* self) {
    delete static_cast<Owned*>(self->manager_context);
  };
  return &owned->managed;
}

}  // namespace strata::dlpack
