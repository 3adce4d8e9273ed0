#include "memory/cuda/library.hpp"

#include <dlfcn.h>

#include <filesystem>

#include "memory/check.hpp"
#include "memory/result.hpp"

namespace strata {
namespace {

constexpr const char* kFileName = "libstrata_cuda.so";
constexpr const char* kOnHost = "; without device=\"cuda\" the same program runs on the CPU";

}  // namespace

std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string cuda_library_path() {
  Dl_info here{};
  const bool found = ::dladdr(reinterpret_cast<const void*>(&cuda_library_path), &here) != 0;
  STRATA_ASSERT(found && here.dli_fname != nullptr);
  // Links are resolved: a checkout has one to the extension in its build folder.
  std::error_code failed;
  std::filesystem::path file = std::filesystem::canonical(here.dli_fname, failed);
  if (failed) file = here.dli_fname;
  return file.replace_filename(kFileName);
}

std::string cuda_refusal(CudaStatus status, int driver_version, int built_version) {
  STRATA_ASSERT(status != CudaStatus::ready);
  const std::string built = cuda_version_text(built_version);
  switch (status) {
    case CudaStatus::ready:
    case CudaStatus::no_driver:
      return "there is no NVIDIA driver on this machine: install one that supports CUDA " + built +
             " (nvidia-smi shows it), or, in a container, start it with the GPUs" + kOnHost;
    case CudaStatus::old_driver:
      return "the NVIDIA driver supports CUDA " + cuda_version_text(driver_version) +
             ", and strata was built with CUDA " + built +
             ": update the driver, or build strata with an older toolkit" + kOnHost;
    case CudaStatus::no_device:
      return std::string("the NVIDIA driver shows no GPU: look at nvidia-smi and at ") +
             "CUDA_VISIBLE_DEVICES" + kOnHost;
    case CudaStatus::other_table:
      return "the CUDA library is of another build than strata: build and install both again";
  }
  return "the CUDA library answers what strata does not know: build and install both again";
}

CudaLibrary::CudaLibrary(const std::string& path) {
  const std::string file = path.empty() ? cuda_library_path() : path;
  // It stays: the driver's threads may be running in it.
  handle_ = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle_ == nullptr) {
    const char* why = ::dlerror();
    if (!std::filesystem::exists(file)) {
      refuse("strata was built without CUDA (" + file +
             " is not there): build it again where nvcc 12.4 or newer is found" + kOnHost);
    }
    refuse(std::string("the CUDA library cannot be opened: ") + (why == nullptr ? file : why) +
           "; build and install strata again");
  }
  void* found = find(kCudaFillName);
  if (found == nullptr) refuse(cuda_refusal(CudaStatus::other_table, 0, 0));
  int built_version = 0;
  const CudaStatus status =
      reinterpret_cast<CudaFill>(found)(&driver_, sizeof driver_, &driver_version_, &built_version);
  if (status != CudaStatus::ready) refuse(cuda_refusal(status, driver_version_, built_version));
}

void* CudaLibrary::find(const char* symbol) const {
  STRATA_ASSERT(symbol != nullptr);
  return ::dlsym(handle_, symbol);
}

}  // namespace strata
