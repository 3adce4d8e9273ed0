// What a configuration may name as its device, and what is said of one that is not there.
#include "engine/devices.hpp"

#include <gtest/gtest.h>

#include "doubles/recording_driver.hpp"
#include "engine/residence.hpp"
#include "memory/result.hpp"

namespace strata::devices_test {
namespace {

TEST(Devices, HaveNames) {
  EXPECT_FALSE(cuda_ordinal("host"));
  EXPECT_EQ(cuda_ordinal("cuda:0"), 0);
  EXPECT_EQ(cuda_ordinal("cuda:12"), 12);
  for (const char* other : {"", "cpu", "cuda", "cuda:", "cuda:-1", "cuda:1x", "cuda: 1", "CUDA:0",
                            "cuda:99999999999", "xpu:0"}) {
    EXPECT_THROW(cuda_ordinal(other), StrataError) << other;
    EXPECT_NE(device_error(other).find("there is no device"), std::string::npos) << other;
  }
}

TEST(Devices, TheHostIsThere) {
  EXPECT_EQ(device_error("host"), "");
  const OpenedDevice host = open_device("host", nullptr, 1);
  EXPECT_TRUE(host.device.memory->reachable());
  EXPECT_EQ(host.compute, nullptr);
  EXPECT_STREQ(open_bare_device("host", nullptr).memory->name(), "host");
  EXPECT_EQ(device_description("host"), "host");
}

TEST(Devices, WhatOpeningSaysIsWhatIsSaidBefore) {
  const std::string why = device_error("cuda:4000");
  EXPECT_NE(why, "") << "nobody has so many";
  const auto refused = [&why](const auto& open) {
    try {
      open();
      ADD_FAILURE() << "it opened";
    } catch (const StrataError& error) {
      EXPECT_EQ(error.error().what, why);
      EXPECT_EQ(error.error().fault, Fault::config);
    }
  };
  refused([] { open_device("cuda:4000", nullptr, 1); });
  refused([] { open_bare_device("cuda:4000", nullptr); });
  refused([] { device_description("cuda:4000"); });
}

// Kernels of a GPU, and a driver that may not be able to load them.
struct KernelsToLoad {
  static inline const RecordingDriver* driver = nullptr;
  static inline int result = 0;
  static inline bool addressed = false;  // the device was the thread's when they were loaded

  static DeviceKernels table() {
    DeviceKernels kernels = host_device_kernels();
    kernels.prepare = [] {
      addressed = driver->calls().back() == "context_push";
      return result;
    };
    kernels.text = [](int) { return "no kernel image is available for the device"; };
    return kernels;
  }
};

TEST(Devices, KernelsThatCannotBeLoadedAreRefusedBeforeTheFirstStep) {
  RecordingDriver driver;
  KernelsToLoad::driver = &driver;
  {
    CudaDevice device(driver.table(), 0);
    KernelsToLoad::result = 0;
    load_kernels(device, KernelsToLoad::table());
    EXPECT_TRUE(KernelsToLoad::addressed);
    KernelsToLoad::result = 209;
    try {
      load_kernels(device, KernelsToLoad::table());
      ADD_FAILURE() << "they were taken";
    } catch (const StrataError& error) {
      EXPECT_EQ(error.error().fault, Fault::config);
      for (const char* part : {"GPU 0 (Double", "no kernel image", "209", "update the driver"}) {
        EXPECT_NE(error.error().what.find(part), std::string::npos) << error.what();
      }
    }
    EXPECT_FALSE(device.lost());
    driver.lose(kCudaLaunchFailed);
    KernelsToLoad::result = 0;
    EXPECT_THROW(load_kernels(device, KernelsToLoad::table()), StrataError);
  }
  EXPECT_EQ(driver.complaint(), "");
  EXPECT_EQ(driver.leaks(), "");
}

// A GPU maps 2 MiB at a time: no smaller page is tried.
TEST(Devices, PagesOfAGpuAreLarge) {
  Config config;
  config.units = {"block"};
  config.params = {{.name = "w", .numel = 20'000, .unit = UnitId{0}}};
  config.groups = {Hyper{}};
  config.device_bytes = config.host_bytes = 64 * kMiB;
  EXPECT_LT(choose_residence(config).layout.page_bytes, 2 * kMiB);
  config.device = "cuda:0";
  const Residence home = choose_residence(config);
  EXPECT_EQ(home.layout.page_bytes, 2 * kMiB);
  EXPECT_EQ(home.landing_frames, kLandingFrames);
  config.device_bytes = kMiB;
  try {
    choose_residence(config);
    ADD_FAILURE() << "a page fits into half of one";
  } catch (const StrataError& error) {
    EXPECT_NE(error.error().what.find("pages of a GPU are 2.00 MiB at least"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace strata::devices_test
