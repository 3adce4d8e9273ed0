// Host memory that a GPU reaches by itself, over the recording driver: this process's, and that of
// others which is mapped here.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <span>
#include <vector>

#include "device_subjects.hpp"
#include "memory/mapping.hpp"

namespace strata::cuda_pinning_test {
namespace {

constexpr std::size_t kPage = 64 * kKiB;

TEST(CudaPorts, LockedMemoryIsPinnedInPiecesAsFarAsTheLimitAllows) {
  // Nothing touches it: only its addresses are registered.
  const std::size_t all = 600 * kMiB;
  std::byte* memory = reserve_addresses(all);
  struct Case {
    std::size_t limit, pinned, pieces;
  };
  for (const Case& one : {Case{SIZE_MAX, all, 3}, Case{520 * kMiB, 512 * kMiB, 2}, Case{0, 0, 0}}) {
    Rig rig = make_cuda(nullptr, {.registered_bytes_max = one.limit});
    EXPECT_EQ(rig.device.copies->pin_host({memory, all}).bytes, one.pinned);
    EXPECT_EQ(rig.driver->complaint(), "");
    // Less of it: what lies beyond is given back before it goes.
    const std::size_t unpinned = rig.driver->count("host_unregister");
    EXPECT_EQ(rig.device.copies->pin_host({memory, 256 * kMiB}).bytes,
              std::min(one.pinned, 256 * kMiB));
    EXPECT_EQ(rig.driver->count("host_unregister") - unpinned,
              one.pieces == 0 ? 0 : one.pieces - 1);
    EXPECT_EQ(rig.close(), "");
  }
  ::munmap(memory, all);
}

// Memory of two other processes, of which the first grows: only what is new is registered.
TEST(CudaPorts, MemoryOfOthersIsPinnedAsItGrows) {
  std::vector<std::byte> memory(7 * kPage);
  const std::span<const std::byte> first = std::span(memory).first(4 * kPage);
  const std::span<const std::byte> second = std::span(memory).subspan(4 * kPage);
  Rig rig = make_cuda(nullptr, {.registered_bytes_max = 6 * kPage});
  CopyEngine& copies = *rig.device.copies;
  EXPECT_EQ(copies.pin_others(first.first(2 * kPage)).bytes, 2 * kPage);
  EXPECT_EQ(copies.pin_others(second).bytes, 3 * kPage);
  EXPECT_EQ(copies.pin_others(first.first(3 * kPage)).bytes, 3 * kPage);
  EXPECT_EQ(rig.driver->count("host_register"), 3U);
  // There is no room for the rest.
  EXPECT_EQ(copies.pin_others(first.first(4 * kPage)).bytes, 3 * kPage);
  EXPECT_EQ(rig.close(), "");
}

TEST(CudaPorts, CopiesGoOnWhereNothingCanBePinned) {
  Rig rig = make_cuda(nullptr, {.registered_bytes_max = 0});
  ASSERT_FALSE(rig.device.memory->claim(1, kPage));
  std::vector<std::byte> sent(kPage, std::byte{3}), got(kPage);
  EXPECT_EQ(rig.device.copies->pin_host(sent).bytes, 0U);
  copy_in(rig.device, FrameId{0}, sent.data(), kPage);
  rig.device.copies->wait(copy_out(rig.device, got.data(), FrameId{0}, kPage));
  EXPECT_EQ(got, sent);
  EXPECT_EQ(rig.close(), "");
}

}  // namespace
}  // namespace strata::cuda_pinning_test
