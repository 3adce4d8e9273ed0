// When the doorbell of a GPU's backend rings: for what is over, whatever else is not.
#include <gtest/gtest.h>

#include <vector>

#include "backend_subjects.hpp"
#include "memory/cuda_backend.hpp"

namespace strata {
namespace {

constexpr std::size_t kPage = 64 * kKiB;

TEST(CudaBells, TheBellRingsForCopiesAndForRecordedWork) {
  Doorbell bell;
  Rig rig = make_cuda(&bell, {});
  ASSERT_FALSE(rig.device->claim(1, kPage));
  std::vector<std::byte> bytes(kPage);
  EXPECT_FALSE(bell.wait(0));
  rig.device->copy_in(FrameId{0}, bytes.data(), kPage);
  EXPECT_TRUE(bell.wait(0));
  rig.device->copy_out(bytes.data(), FrameId{0}, kPage);
  EXPECT_TRUE(bell.wait(0));
  rig.device->record(nullptr);
  EXPECT_TRUE(bell.wait(0));
  EXPECT_EQ(rig.close(), "");
}

// The caller's streams: as many as are asked for.
class Streams final {
 public:
  Streams(RecordingDriver& driver, std::size_t count)
      : table_(driver.table()), device_(table_, 0), current_(device_), streams_(count) {
    for (CudaStream& stream : streams_) table_.stream_create(table_.self, &stream);
  }
  ~Streams() {
    for (CudaStream stream : streams_) {
      table_.stream_synchronize(table_.self, stream);
      table_.stream_destroy(table_.self, stream);
    }
  }
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  CudaStream operator[](std::size_t i) const { return streams_[i]; }

 private:
  CudaDriver table_;
  CudaDevice device_;
  CudaDevice::Current current_;
  std::vector<CudaStream> streams_;
};

// A landing is over while kernels that were launched before it have yet to run.
TEST(CudaBells, AStreamThatComesAlongRingsAheadOfOneThatDoesNot) {
  Doorbell bell;
  Rig rig = make_cuda(&bell, {});
  ASSERT_FALSE(rig.device->claim(1, kPage));
  {
    const Streams streams(*rig.driver, 2);
    rig.driver->hold(streams[0]);
    const CopyTicket late = rig.device->record(streams[0]);
    EXPECT_FALSE(bell.wait(0));
    const CopyTicket early = rig.device->record(streams[1]);
    EXPECT_TRUE(bell.wait(0)) << "it waits for the other stream";
    EXPECT_TRUE(rig.device->done(early));
    EXPECT_FALSE(rig.device->done(late));
    rig.driver->let_go(streams[0]);
    EXPECT_TRUE(bell.wait(0));
    EXPECT_TRUE(rig.device->done(late));
  }
  EXPECT_EQ(rig.close(), "");
}

TEST(CudaBells, MoreStreamsThanBellsTakeThatWhichWasUsedLongestAgo) {
  Doorbell bell;
  Rig rig = make_cuda(&bell, {});
  ASSERT_FALSE(rig.device->claim(1, kPage));
  {
    const Streams streams(*rig.driver, kMarkBells + 1);
    const CudaStream last = streams[kMarkBells];
    rig.driver->begin_steady();  // no bell is made any more
    const auto rings = [&](CudaStream stream) {
      rig.device->record(stream);
      return bell.wait(0);
    };
    for (std::size_t i = 0; i < kMarkBells; ++i) EXPECT_TRUE(rings(streams[i])) << i;
    EXPECT_TRUE(rings(streams[0]));
    rig.driver->hold(last);
    EXPECT_FALSE(rings(last)) << "it has the second one's";
    // The others keep theirs, and the second one takes the third one's.
    EXPECT_TRUE(rings(streams[0]));
    for (std::size_t i = 3; i < kMarkBells; ++i) EXPECT_TRUE(rings(streams[i])) << i;
    EXPECT_TRUE(rings(streams[1]));
    // Nobody else is left to take from than who is held: it rings late, and is done in time.
    const CopyTicket ticket = rig.device->record(streams[2]);
    EXPECT_FALSE(bell.wait(0));
    EXPECT_TRUE(rig.device->done(ticket));
    rig.driver->let_go(last);
    EXPECT_TRUE(bell.wait(0));
    rig.driver->end_steady();
  }
  EXPECT_EQ(rig.close(), "");
}

}  // namespace
}  // namespace strata
