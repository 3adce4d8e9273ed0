// The conformance suite of the IoEngine port: what Store relies on, asked of every engine.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <optional>

#include "doubles/faulty_engine.hpp"
#include "io_fixtures.hpp"
#include "memory/doorbell.hpp"
#include "offload/storage/make_engine.hpp"
#include "offload/storage/memory_engine.hpp"

namespace strata::io_engine_test {
namespace {

constexpr std::uint32_t kBlock = 16 * kKiB;
constexpr std::uint32_t kDepth = 8;
constexpr int kPatienceMs = 10'000;

class IoEngineTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string name = GetParam();
    if (name == "faulty") {
      engine_ = std::make_unique<FaultyEngine>(std::make_unique<MemoryEngine>(&bell_, kDepth),
                                               FaultPlan{});
      return;
    }
    try {
      std::string why;
      engine_ = make_io_engine(name, &bell_, kDepth, &why);
    } catch (const StrataError& error) {
      GTEST_SKIP() << error.what();
    }
  }
  void TearDown() override {
    engine_.reset();
    for (int fd : descriptors_) close(fd);
  }

  int make_file(std::uint64_t bytes, int flags = O_RDWR) {
    int fd = -1;
    if (engine_->needs_files()) {
      const std::string path = folder_.path() + "/" + std::to_string(descriptors_.size());
      const int made = open(path.c_str(), O_RDWR | O_CREAT, 0600);
      EXPECT_EQ(ftruncate(made, static_cast<off_t>(bytes)), 0);
      close(made);
      fd = open(path.c_str(), flags | O_DIRECT);
      if (fd < 0) fd = open(path.c_str(), flags);  // a filesystem without direct I/O
      descriptors_.push_back(fd);
    }
    return engine_->attach(fd, bytes);
  }

  // Sleeps on the doorbell until `count` requests are finished: an engine that does not ring fails.
  std::map<std::uint64_t, std::int64_t> finish(std::size_t count) {
    std::map<std::uint64_t, std::int64_t> results;
    engine_->flush();
    std::array<IoCompletion, 3> seen;
    while (results.size() < count) {
      EXPECT_TRUE(bell_.wait(kPatienceMs)) << "the doorbell was not rung";
      std::size_t reaped = 0;
      do {
        reaped = engine_->reap(seen);
        for (std::size_t i = 0; i < reaped; ++i) {
          EXPECT_TRUE(results.emplace(seen[i].tag, seen[i].result).second) << "completed twice";
        }
      } while (reaped == seen.size());
      if (::testing::Test::HasFailure()) break;
    }
    return results;
  }

  std::int64_t move(IoOp op, int file, std::uint64_t offset, AlignedBuffer& buffer) {
    EXPECT_TRUE(engine_->submit({.op = op,
                                 .file = file,
                                 .offset = offset,
                                 .buffer = buffer.data(),
                                 .bytes = static_cast<std::uint32_t>(buffer.size()),
                                 .tag = 1}));
    return finish(1)[1];
  }

  Doorbell bell_;
  TempFolder folder_;
  std::vector<int> descriptors_;
  std::unique_ptr<IoEngine> engine_;
};

TEST_P(IoEngineTest, ANumberMayStandForAnotherFile) {
  if (!engine_->needs_files()) GTEST_SKIP() << "it has no descriptors";
  const int file = make_file(kBlock), other = make_file(kBlock);
  AlignedBuffer buffer(kBlock);
  for (const int to : {file, other}) {
    buffer.fill(static_cast<std::uint64_t>(to) + 1);
    ASSERT_EQ(move(IoOp::write, to, 0, buffer), kBlock);
  }
  engine_->reattach(file, descriptors_[1]);
  ASSERT_EQ(move(IoOp::read, file, 0, buffer), kBlock);
  AlignedBuffer expected(kBlock);
  expected.fill(static_cast<std::uint64_t>(other) + 1);
  EXPECT_TRUE(std::equal(buffer.data(), buffer.data() + kBlock, expected.data()));
  engine_->reattach(file, descriptors_[0]);
  ASSERT_EQ(move(IoOp::write, file, 0, expected), kBlock);
}

TEST_P(IoEngineTest, BytesComeBackWhateverTheOrder) {
  const int file = make_file(kDepth * kBlock);
  std::vector<AlignedBuffer> written;
  for (std::uint32_t i = 0; i < kDepth; ++i) {
    written.emplace_back(kBlock);
    written[i].fill(i + 1);
    ASSERT_TRUE(engine_->submit({.op = IoOp::write,
                                 .file = file,
                                 .offset = std::uint64_t{kDepth - 1 - i} * kBlock,
                                 .buffer = written[i].data(),
                                 .bytes = kBlock,
                                 .tag = (std::uint64_t{1} << 63) + i}));
  }
  for (const auto& [tag, result] : finish(kDepth)) {
    EXPECT_GE(tag, std::uint64_t{1} << 63);
    EXPECT_EQ(result, kBlock);
  }

  std::vector<AlignedBuffer> back;
  for (std::uint32_t i = 0; i < kDepth; ++i) {
    back.emplace_back(kBlock);
    ASSERT_TRUE(engine_->submit({.op = IoOp::read,
                                 .file = file,
                                 .offset = std::uint64_t{kDepth - 1 - i} * kBlock,
                                 .buffer = back[i].data(),
                                 .bytes = kBlock,
                                 .tag = i}));
  }
  for (const auto& [tag, result] : finish(kDepth)) {
    EXPECT_EQ(result, kBlock);
    EXPECT_TRUE(back[tag] == written[tag]) << tag;
  }
}

TEST_P(IoEngineTest, TakesManyMoreRequestsThanItHolds) {
  constexpr std::uint32_t kCount = 5 * kDepth + 3;
  const int file = make_file(kCount * kBlock);
  AlignedBuffer buffer(kBlock);
  std::uint32_t submitted = 0;
  std::uint32_t seen = 0;
  bool was_full = false;
  while (seen < kCount && !HasFailure()) {
    bool full = false;
    while (submitted < kCount && !full) {
      full = !engine_->submit({.op = IoOp::write,
                               .file = file,
                               .offset = std::uint64_t{submitted} * kBlock,
                               .buffer = buffer.data(),
                               .bytes = kBlock,
                               .tag = submitted});
      if (!full) ++submitted;
    }
    was_full |= full;
    EXPECT_LE(submitted - seen, kDepth);
    for (const auto& [tag, result] : finish(1)) {
      EXPECT_EQ(result, kBlock) << tag;
      ++seen;
    }
  }
  EXPECT_TRUE(was_full);
  EXPECT_EQ(submitted, kCount);
}

TEST_P(IoEngineTest, FilesAreApart) {
  const int one = make_file(kBlock);
  const int two = make_file(kBlock);
  ASSERT_NE(one, two);
  AlignedBuffer first(kBlock), second(kBlock), back(kBlock);
  first.fill(1);
  second.fill(2);
  EXPECT_EQ(move(IoOp::write, one, 0, first), kBlock);
  EXPECT_EQ(move(IoOp::write, two, 0, second), kBlock);
  EXPECT_EQ(move(IoOp::read, one, 0, back), kBlock);
  EXPECT_TRUE(back == first);
  EXPECT_EQ(move(IoOp::read, two, 0, back), kBlock);
  EXPECT_TRUE(back == second);
}

TEST_P(IoEngineTest, ReadsEndWithTheFile) {
  const int file = make_file(kBlock + 4096);
  AlignedBuffer buffer(kBlock);
  EXPECT_EQ(move(IoOp::read, file, kBlock, buffer), 4096);
  EXPECT_EQ(move(IoOp::read, file, 4 * kBlock, buffer), 0);
}

TEST_P(IoEngineTest, ReportsWhatTheKernelRefuses) {
  if (!engine_->needs_files()) GTEST_SKIP() << "has no descriptors that could be bad";
  const int read_only = make_file(kBlock, O_RDONLY);
  const int write_only = make_file(kBlock, O_WRONLY);
  AlignedBuffer buffer(kBlock);
  EXPECT_EQ(move(IoOp::write, read_only, 0, buffer), -EBADF);
  EXPECT_EQ(move(IoOp::read, write_only, 0, buffer), -EBADF);
  const int closed = engine_->attach(1'000'000, kBlock);
  EXPECT_EQ(move(IoOp::read, closed, 0, buffer), -EBADF);
  // The others go on.
  EXPECT_EQ(move(IoOp::read, read_only, 0, buffer), kBlock);
}

TEST_P(IoEngineTest, OneBadRequestHarmsNoOther) {
  if (!engine_->needs_files()) GTEST_SKIP() << "has no descriptors that could be bad";
  const int good = make_file(2 * kBlock);
  const int bad = make_file(kBlock, O_RDONLY);
  AlignedBuffer buffer(kBlock);
  const std::array<int, 3> files = {good, bad, good};
  for (std::uint32_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(engine_->submit({.op = IoOp::write,
                                 .file = files[i],
                                 .offset = i == 2 ? kBlock : 0,
                                 .buffer = buffer.data(),
                                 .bytes = kBlock,
                                 .tag = i}));
  }
  auto results = finish(3);
  EXPECT_EQ(results[0], kBlock);
  EXPECT_EQ(results[1], -EBADF);
  EXPECT_EQ(results[2], kBlock);
}

TEST_P(IoEngineTest, RingsOnlyForWhatItDid) {
  const int file = make_file(kBlock);
  EXPECT_FALSE(bell_.wait(0));
  AlignedBuffer buffer(kBlock);
  EXPECT_EQ(move(IoOp::write, file, 0, buffer), kBlock);  // finish() sleeps on the bell
  std::array<IoCompletion, 4> seen;
  EXPECT_EQ(engine_->reap(seen), 0u);
  bell_.wait(0);
  EXPECT_FALSE(bell_.wait(0));
}

TEST_P(IoEngineTest, RegisteredMemoryIsOnlyAMatterOfSpeed) {
  AlignedBuffer first(4 * kBlock), second(2 * kBlock), outside(kBlock), back(kBlock);
  const int file = make_file(8 * kBlock);
  // Refused or not (RLIMIT_MEMLOCK), every buffer works; a second region does not undo the first.
  engine_->register_memory(first.span());
  engine_->register_memory(second.span());
  first.fill(1);
  second.fill(2);
  outside.fill(3);
  const std::array<std::byte*, 4> from = {first.data(), first.data() + 3 * kBlock,
                                          second.data() + kBlock, outside.data()};
  for (std::uint32_t i = 0; i < from.size(); ++i) {
    ASSERT_TRUE(engine_->submit({.op = IoOp::write,
                                 .file = file,
                                 .offset = std::uint64_t{i} * kBlock,
                                 .buffer = from[i],
                                 .bytes = kBlock,
                                 .tag = i}));
  }
  for (const auto& [tag, result] : finish(from.size())) EXPECT_EQ(result, kBlock) << tag;
  for (std::uint32_t i = 0; i < from.size(); ++i) {
    EXPECT_EQ(move(IoOp::read, file, std::uint64_t{i} * kBlock, back), kBlock);
    EXPECT_TRUE(std::equal(from[i], from[i] + kBlock, back.data())) << i;
  }
}

TEST_P(IoEngineTest, EndsWithRequestsInFlight) {
  const int file = make_file(kDepth * kBlock);
  AlignedBuffer buffer(kDepth * kBlock);
  for (std::uint32_t i = 0; i < kDepth; ++i) {
    ASSERT_TRUE(engine_->submit({.op = IoOp::read,
                                 .file = file,
                                 .offset = std::uint64_t{i} * kBlock,
                                 .buffer = buffer.data() + std::size_t{i} * kBlock,
                                 .bytes = kBlock,
                                 .tag = i}));
    if (i == kDepth / 2) engine_->flush();
  }
  engine_.reset();
  buffer.fill(9);
  AlignedBuffer same(kDepth * kBlock);
  same.fill(9);
  EXPECT_TRUE(buffer == same) << "somebody still writes into the buffer";
}

// Memory that cannot be pinned (here: not readable) is reported; what was pinned before stays so.
TEST_P(IoEngineTest, MemoryThatCannotBePinnedDoesNoHarm) {
  AlignedBuffer pinned(kBlock), back(kBlock);
  pinned.fill(1);
  const int file = make_file(kBlock);
  engine_->register_memory(pinned.span());
  void* hole = mmap(nullptr, kBlock, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(hole, MAP_FAILED);
  const auto error = engine_->register_memory({static_cast<std::byte*>(hole), kBlock});
  EXPECT_EQ(error.has_value(), GetParam() == "io_uring");
  EXPECT_EQ(move(IoOp::write, file, 0, pinned), kBlock);
  EXPECT_EQ(move(IoOp::read, file, 0, back), kBlock);
  EXPECT_TRUE(back == pinned);
  munmap(hole, kBlock);
}

// The kernel would copy it all, at once, into every worker of a data loader.
TEST(UringEngineTest, PinnedMemoryIsNotCopiedIntoChildren) {
  Error refused;
  auto engine = make_uring_engine(nullptr, kDepth, &refused);
  if (engine == nullptr) GTEST_SKIP() << refused.text();
  AlignedBuffer pinned(kBlock);
  if (auto error = engine->register_memory(pinned.span())) GTEST_SKIP() << error->text();
  const auto is_mapped_in_a_child = [&] {
    const pid_t child = fork();
    if (child == 0) {
      std::array<unsigned char, kBlock / 4096> resident;
      _exit(mincore(pinned.data(), kBlock, resident.data()) == 0 ? 1 : 0);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WEXITSTATUS(status) == 1;
  };
  EXPECT_FALSE(is_mapped_in_a_child());
  engine.reset();
  EXPECT_TRUE(is_mapped_in_a_child());
}

INSTANTIATE_TEST_SUITE_P(All, IoEngineTest,
                         ::testing::Values("io_uring", "libaio", "threads", "memory", "faulty"),
                         [](const auto& suite) { return suite.param; });

TEST(MakeIoEngineTest, AnUnknownNameIsAnsweredWithTheNearest) {
  std::string why;
  try {
    make_io_engine("iouring", nullptr, 4, &why);
    FAIL() << "was not refused";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::config);
    EXPECT_NE(std::string(error.what()).find("did you mean \"io_uring\""), std::string::npos)
        << error.what();
  }
}

TEST(MakeIoEngineTest, AutoTakesOneThatRunsAndSaysWhy) {
  std::string why;
  auto engine = make_io_engine("auto", nullptr, 4, &why);
  ASSERT_NE(engine, nullptr);
  EXPECT_NE(why.find(engine->name()), std::string::npos) << why;
  EXPECT_STRNE(engine->name(), "memory");
}

}  // namespace
}  // namespace strata::io_engine_test
