// What is said where a GPU cannot be used, and what to do about it: by the library, by a driver's
// double, and by the library that was built, on whatever machine this is.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "device_subjects.hpp"
#include "memory/cuda/contexts.hpp"
#include "memory/cuda/counts.hpp"
#include "memory/cuda/device.hpp"
#include "memory/cuda/library.hpp"

namespace strata::cuda_library_test {
namespace {

// The text of the configuration error that `open` throws; empty: it throws none.
template <typename Open>
std::string refusal(Open open) {
  try {
    open();
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::config) << error.what();
    return error.what();
  }
  return "";
}

std::string refusal_of(RecordingOptions options, int ordinal = 0) {
  RecordingDriver driver(options);
  std::string text = refusal([&] { const CudaDevice device(driver.table(), ordinal); });
  EXPECT_EQ(driver.complaint(), "");
  EXPECT_EQ(driver.leaks(), "");
  return text;
}

void expect_says(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not said: " << text;
  }
}

TEST(CudaLibrary, AFileThatIsNotThereWasNotBuilt) {
  expect_says(refusal([] { const CudaLibrary library("/nowhere/libstrata_cuda.so"); }),
              {"built without CUDA", "/nowhere/libstrata_cuda.so", "nvcc 12.4", "on the CPU"});
}

TEST(CudaLibrary, IsLookedForBesideTheCodeThatAsks) {
  const std::filesystem::path path = cuda_library_path();
  EXPECT_EQ(path.filename(), "libstrata_cuda.so");
  EXPECT_EQ(path.parent_path(), std::filesystem::canonical("/proc/self/exe").parent_path());
}

TEST(CudaLibrary, AFileThatIsNoLibraryIsSaidToBeNone) {
  const std::string path = testing::TempDir() + "libstrata_cuda.so";
  std::ofstream(path) << "no library";
  expect_says(refusal([&] { const CudaLibrary library(path); }),
              {"cannot be opened", path.c_str()});
}

TEST(CudaLibrary, ALibraryOfAnotherKindIsRefused) {
  expect_says(refusal([] { const CudaLibrary library("libc.so.6"); }), {"another build"});
}

TEST(CudaLibrary, RefusalsNameVersionsAndTheWayOut) {
  expect_says(cuda_refusal(CudaStatus::no_driver, 0, 13000), {"no NVIDIA driver", "CUDA 13.0"});
  expect_says(cuda_refusal(CudaStatus::old_driver, 12020, 13010),
              {"supports CUDA 12.2", "built with CUDA 13.1", "update the driver"});
  expect_says(cuda_refusal(CudaStatus::no_device, 13000, 13000),
              {"shows no GPU", "CUDA_VISIBLE_DEVICES"});
  expect_says(cuda_refusal(CudaStatus::other_table, 0, 0), {"another build", "again"});
}

// The library itself, opened as users open it: it says what is missing, or gives a driver.
TEST(CudaLibrary, TheBuiltOneOpensOnEveryMachine) {
  const std::string path = STRATA_CUDA_LIBRARY;
  if (path.empty()) GTEST_SKIP() << "nvcc was not found: the library is not built";
  const std::string text = refusal([&] {
    const CudaLibrary library(path);
    EXPECT_GE(library.driver().capability_min, 80);
    EXPECT_NE(library.find(kCudaFillName), nullptr);
    EXPECT_EQ(library.find("strata_cuda_nothing"), nullptr);
  });
  const bool has_driver = std::filesystem::exists("/proc/driver/nvidia/version");
  if (!has_driver) expect_says(text, {"no NVIDIA driver"});
}

TEST(CudaDevice, RefusesWhatItCannotUse) {
  expect_says(refusal_of({.device_count = 0}), {"shows no GPU"});
  expect_says(refusal_of({.device_count_result = kCudaNoDevice}), {"shows no GPU"});
  expect_says(refusal_of({.device_count_result = kCudaEccUncorrectable}),
              {"driver cannot be used", "ECC", "214"});
  expect_says(refusal_of({.device_count = 2}, 2), {"no GPU 2", "shows 2"});
  expect_says(refusal_of({}, -1), {"no GPU -1"});
  expect_says(refusal_of({.capability = 75}), {"GPU 0 (Double", "7.5", "8.0"});
  expect_says(refusal_of({.has_virtual_memory = false}), {"virtual memory management"});
  expect_says(refusal_of({.retain_result = kCudaUnavailable}), {"in use", "exclusive"});
  expect_says(refusal_of({.retain_result = kCudaOutOfMemory}), {"memory for a context"});
  expect_says(refusal_of({.retain_result = kCudaLaunchFailed}), {"cannot be used", "719"});
  EXPECT_EQ(refusal_of({}), "");
  EXPECT_EQ(refusal_of({.device_count = 3}, 2), "");
}

// Who only asks makes no context that goes with the answer, and then another one.
TEST(CudaDevice, ProbesAndWhatComesBehindThemHoldOneContext) {
  RecordingDriver driver({.device_count = 2});
  { const CudaDevice asked(driver.table(), 0); }
  EXPECT_EQ(driver.retained(), 1);
  { const Device calibrated = cuda_device(driver.table(), 0, nullptr); }
  {
    Device device = cuda_device(driver.table(), 0, nullptr);
    EXPECT_FALSE(device.memory->claim(1, 64 * kKiB));
    const CudaDevice meanwhile(driver.table(), 0);
  }
  EXPECT_EQ(driver.retained(), 1);
  { const CudaDevice other(driver.table(), 1); }
  EXPECT_EQ(driver.retained(), 2);
  EXPECT_EQ(driver.complaint() + driver.leaks(), "");
}

TEST(CudaContexts, OneThatCannotBeHadIsAskedForAgain) {
  CudaContexts contexts;
  CudaContext context = nullptr;
  int asked = 0;
  const auto busy = [&](int, CudaContext*) { return ++asked, kCudaUnavailable; };
  const auto free = [&](int, CudaContext* made) { return ++asked, *made = &asked, kCudaSuccess; };
  EXPECT_EQ(contexts.get(0, &context, busy), kCudaUnavailable);
  EXPECT_EQ(contexts.get(0, &context, free), kCudaSuccess);
  EXPECT_EQ(contexts.get(0, &context, busy), kCudaSuccess);
  EXPECT_EQ(context, &asked);
  EXPECT_EQ(asked, 2);
}

TEST(CountedDriver, CountsWhatIsWaitedForAndForwardsEveryEntry) {
  RecordingDriver driver({.late = true});
  CountedDriver counted(driver.table());
  const CudaDriver table = counted.table();
  // Nothing but entries behind the two numbers: one that was forgotten is null.
  const auto* const entries = reinterpret_cast<void* const*>(&table);
  for (std::size_t i = 2; i < sizeof table / sizeof(void*); ++i) EXPECT_NE(entries[i], nullptr);
  {
    Device device = cuda_device(table, 0, nullptr);
    ASSERT_FALSE(device.memory->claim(2, 64 * kKiB));
    std::vector<std::byte> bytes(64 * kKiB);
    copy_in(device, FrameId{0}, bytes.data(), bytes.size());
    const CopyTicket out = copy_out(device, bytes.data(), FrameId{0}, bytes.size());
    device.copies->poll();
    device.copies->wait(out);
  }
  const DriverCounts counts = counted.counts();
  EXPECT_EQ(counts.stream_wait, driver.count("stream_wait"));
  EXPECT_EQ(counts.event_query, driver.count("event_query"));
  EXPECT_EQ(counts.event_synchronize, driver.count("event_synchronize"));
  EXPECT_EQ(counts.stream_synchronize, driver.count("stream_synchronize"));
  EXPECT_EQ(counts.map, driver.count("map"));
  EXPECT_EQ(counts.unmap, driver.count("unmap"));
  EXPECT_EQ(counts.set_access, driver.count("set_access"));
  EXPECT_EQ(counts.stream_wait, 1U);
  EXPECT_GT(counts.event_not_ready, 0U);
  EXPECT_LE(counts.event_not_ready, counts.event_query);
  EXPECT_EQ(driver.complaint() + driver.leaks(), "");
}

}  // namespace
}  // namespace strata::cuda_library_test
