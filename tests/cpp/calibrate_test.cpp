// Probes of calibration: they move what they say, leave nothing behind, and fail as values do.
#include "offload/storage/calibrate.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>

#include "doubles/recording_driver.hpp"
#include "engine/calibrate.hpp"
#include "io_fixtures.hpp"
#include "memory/cuda/frames.hpp"
#include "memory/host_device.hpp"

namespace strata::calibrate_test {
namespace {

constexpr std::size_t kPage = 64 * kKiB;
constexpr double kSeconds = 0.02;

SsdProbeOptions small(std::vector<std::string> paths) {
  return {.paths = std::move(paths), .page_bytes = kPage, .file_bytes = 32 * kPage, .depth = 4};
}

TEST(SsdProbe, TellsBothWaysAloneAndTogether) {
  TempFolder root;
  std::vector<std::string> paths;
  for (const char* name : {"/a", "/b"}) {
    paths.push_back(root.path() + name);
    std::filesystem::create_directory(paths.back());
  }
  {
    SsdProbe probe(small(paths), "threads");
    EXPECT_STREQ(probe.engine_name(), "threads");
    for (const std::string& path : paths) EXPECT_FALSE(std::filesystem::is_empty(path));
    const LinkSpeed reads = probe.run(Ways::in, kSeconds);
    EXPECT_GT(reads.in_bytes_s, 0.0);
    EXPECT_EQ(reads.out_bytes_s, 0.0);
    const LinkSpeed writes = probe.run(Ways::out, kSeconds);
    EXPECT_EQ(writes.in_bytes_s, 0.0);
    EXPECT_GT(writes.out_bytes_s, 0.0);
    const LinkSpeed both = probe.run(Ways::both, kSeconds);
    EXPECT_GT(both.in_bytes_s, 0.0);
    EXPECT_GT(both.out_bytes_s, 0.0);
  }
  for (const std::string& path : paths) EXPECT_TRUE(std::filesystem::is_empty(path));
}

TEST(SsdProbe, StaysWithinTheTimeItWasGiven) {
  SsdProbe probe(small({}), "memory");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_GT(probe.run(Ways::both, kSeconds).in_bytes_s, 0.0);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took.count(), kSeconds);
  EXPECT_LT(took.count(), 100 * kSeconds);
}

TEST(SsdProbe, LargePagesTakeFewerRequestsAtATime) {
  SsdProbeOptions options = small({});
  options.depth = 0;
  EXPECT_EQ(SsdProbe(options, "memory").depth(), 64u);
  options.page_bytes = 4 * kMiB;
  EXPECT_EQ(SsdProbe(options, "memory").depth(), 16u);
}

TEST(SsdProbe, AFileThatWasCutOffIsAnErrorAndIsRemovedAllTheSame) {
  TempFolder folder;
  {
    SsdProbe probe(small({folder.path()}), "threads");
    for (const std::string& file : swap_files(folder.path())) std::filesystem::resize_file(file, 0);
    try {
      probe.run(Ways::in, kSeconds);
      FAIL() << "read from an empty file";
    } catch (const StrataError& error) {
      EXPECT_EQ(error.error().fault, Fault::short_read);
    }
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SsdProbe, AMissingFolderIsRefused) {
  EXPECT_THROW(SsdProbe(small({"/nowhere/at/all"}), "threads"), StrataError);
}

// Every device there is a double of: both ways alone and together.
void expect_speeds(CopyProbe& probe) {
  const LinkSpeed up = probe.run(Ways::in, kSeconds);
  EXPECT_GT(up.in_bytes_s, 0.0);
  EXPECT_EQ(up.out_bytes_s, 0.0);
  const LinkSpeed down = probe.run(Ways::out, kSeconds);
  EXPECT_EQ(down.in_bytes_s, 0.0);
  EXPECT_GT(down.out_bytes_s, 0.0);
  const LinkSpeed both = probe.run(Ways::both, kSeconds);
  EXPECT_GT(both.in_bytes_s, 0.0);
  EXPECT_NEAR(both.in_bytes_s, both.out_bytes_s, kPage / kSeconds);  // they take turns
  const LinkSpeed shortest = probe.run(Ways::both, 0.0);
  EXPECT_GT(shortest.in_bytes_s, 0.0);
  EXPECT_GT(shortest.out_bytes_s, 0.0);
  EXPECT_GT(probe.transfer_seconds(), 0.0);
  EXPECT_LT(probe.transfer_seconds(), 0.1);
}

TEST(CopyProbe, TellsBothWaysOfTheHost) {
  CopyProbe probe(host_device(nullptr), kPage, 16 * kPage);
  expect_speeds(probe);
}

TEST(CopyProbe, TellsHowFastCodesBecomeValues) {
  CopyProbe probe(host_device(nullptr), kPage, 16 * kPage);
  for (const Codes codes : {Codes::int8, Codes::nf4, Codes::nf4_double}) {
    for (const Dtype dtype : {Dtype::bfloat16, Dtype::float32}) {
      EXPECT_GT(decode_bytes_s(probe, {.codes = codes, .dtype = dtype}, kSeconds), 0.0);
    }
  }
}

// Pinned as in a session, and without one copy that waits for another.
TEST(CopyProbe, TellsBothWaysOfAGpu) {
  for (const bool late : {false, true}) {
    RecordingDriver driver({.hidden = true, .late = late});
    {
      CopyProbe probe(cuda_device(driver.table(), 0, nullptr), kPage, 16 * kPage);
      EXPECT_GT(driver.count("host_register"), 0U);
      driver.begin_steady();
      expect_speeds(probe);
      driver.end_steady();
      EXPECT_EQ(driver.count("stream_wait"), 0U);
    }
    EXPECT_EQ(driver.complaint() + driver.leaks(), "") << (late ? "late" : "at once");
  }
}

TEST(CopyProbe, AGpuThatIsFullIsRefusedWithItsFigures) {
  RecordingDriver driver({.device_bytes = 16 * kPage, .taken_bytes = 13 * kPage});
  try {
    const CopyProbe probe(cuda_device(driver.table(), 0, nullptr), kPage, 16 * kPage);
    FAIL() << "four pages fit into three";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::memory);
    EXPECT_EQ(error.error().tier, Tier::device);
  }
  EXPECT_EQ(driver.complaint() + driver.leaks(), "");
}

// The 1st, 2nd, 3rd … call fails, until a probe passes untouched: an exception or figures, and
// nothing left.
TEST(CopyProbe, EveryCallMayFail) {
  for (const int result : {kCudaOutOfMemory, kCudaLaunchFailed}) {
    std::size_t failures = 0;
    bool fired = true;
    for (std::uint64_t nth = 1; fired; nth += 1 + nth / 16) {
      RecordingDriver driver({.late = true, .seed = nth, .nth = nth, .nth_result = result});
      try {
        CopyProbe probe(cuda_device(driver.table(), 0, nullptr), kPage, 8 * kPage);
        EXPECT_GT(probe.run(Ways::both, 0.0).in_bytes_s, 0.0);
        EXPECT_GT(probe.transfer_seconds(), 0.0);
      } catch (const StrataError& error) {
        EXPECT_TRUE(error.error().tier == Tier::device || error.error().fault == Fault::config)
            << error.what();
        ++failures;
      }
      fired = driver.fired();
      ASSERT_EQ(driver.complaint() + driver.leaks(), "")
          << "call " << nth << " failed with " << result;
    }
    EXPECT_GT(failures, 20U);
  }
}

TEST(UpdateProbe, CountsElementsOfEveryDtype) {
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    UpdateProbe probe({.workers = 2, .dtype = dtype, .page_bytes = kPage, .bytes = 1});
    EXPECT_GT(probe.run(kSeconds), 0.0);
    EXPECT_GT(probe.run(kSeconds), 0.0) << "a probe can be run again";
  }
}

}  // namespace
}  // namespace strata::calibrate_test
