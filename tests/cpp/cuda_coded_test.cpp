// Parameters that rest as codes, over the double of a GPU: its kernels run as late as they like,
// and read codes where they lie in host memory.
#include <gtest/gtest.h>

#include <string>

#include "coded_fixtures.hpp"
#include "gpu_session.hpp"
#include "seeds.hpp"
#include "temp_folder.hpp"

namespace strata::cuda_coded_test {
namespace {

// Kernels run as late as they like, and read what nobody has written over meanwhile.
TEST(CudaCoded, LateKernelsOfAGpuAreWaitedFor) {
  for_seeds(8, [](std::uint64_t seed) {
    TempFolder folder;
    RecordingDriver driver({.host_tensors = true, .late = true, .seed = seed});
    Config config = coded_config(kForms[seed % 3], folder.path());
    config.device = "cuda:0";
    config.host_bytes += kLandingFrames * kPageBytesMin;
    {
      Session session(config, parts_over(driver));
      fill_coded(session);
      for (std::uint32_t u = 0; u < 4 * kCodedUnits; ++u) {
        const std::uint32_t unit = u % kCodedUnits;
        session.enter(UnitId{unit}, false);
        CallersWork caller(driver.table());
        session.leave(UnitId{unit});
      }
    }
    EXPECT_EQ(left(driver), "");
  });
}

// One error that says where, and no hang.
TEST(CudaCoded, AKernelThatFailsEndsTheSession) {
  for (const std::uint64_t nth : {1U, 2U, 7U}) {
    RecordingDriver driver({.host_tensors = true});
    {
      Config config = coded_config(Codes::nf4, "");
      config.device = "cuda:0";
      Session session(config, parts_over(driver));
      fill_coded(session);
      KernelsOfDouble::nth_decoding_fails = nth;
      const std::string said = refusal_of([&] {
        for (std::uint32_t u = 0; u < kCodedUnits; ++u) {
          session.enter(UnitId{u}, false);
          session.leave(UnitId{u});
        }
      });
      EXPECT_NE(said.find("compute values"), std::string::npos) << said;
    }
    EXPECT_EQ(left(driver), "");
  }
}

// Kernels would read codes where a device cannot reach them.
TEST(CudaCoded, HostMemoryThatAGpuDoesNotReachIsRefused) {
  const auto said_over = [](const RecordingOptions& options) {
    RecordingDriver driver(options);
    Config config = coded_config(Codes::nf4, "");
    config.device = "cuda:0";
    return refusal_of([&] {
      const Session session(config,
                            parts_over(driver, false, {.pinned_piece_bytes = 2 * kPageBytesMin}));
    });
  };
  EXPECT_NE(said_over({.reaches_host = false}).find("take frozen=\"as-is\""), std::string::npos);
  const std::string said = said_over({.registered_bytes_max = 4 * kPageBytesMin});
  EXPECT_NE(said.find("256.0 KiB could be pinned"), std::string::npos) << said;
  EXPECT_NE(said.find("memory={\"host\": 262144}"), std::string::npos) << said;
}

}  // namespace
}  // namespace strata::cuda_coded_test
