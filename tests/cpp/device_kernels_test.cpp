// The device's kernels: every byte they leave is the byte that the CPU's kernels leave, and the
// sums of squares are theirs bit for bit. Runs over the host, over the twin, which is the bodies of
// the CUDA kernels in loops, and with STRATA_TEST_DEVICE=cuda over the GPU. A failure prints its
// seed.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device_copies.hpp"
#include "device_fixtures.hpp"
#include "memory/check.hpp"
#include "memory/cuda/frames.hpp"
#include "memory/cuda/library.hpp"
#include "memory/doorbell.hpp"
#include "memory/host_device.hpp"
#include "memory/units.hpp"
#include "optimizers/codes/codes.hpp"
#include "optimizers/cuda/kernels.hpp"

#ifndef STRATA_CUDA_LIBRARY
#define STRATA_CUDA_LIBRARY ""
#endif

namespace strata::device_kernels_test {
namespace {

constexpr FrameId kFrame{0};
constexpr std::size_t kFrameBytes = 4 * kMiB;

// Pages begin at a multiple of its size.
struct alignas(kPartAlignment) Line {
  std::byte bytes[kPartAlignment];
};

// A device and the kernels that are to be held against the CPU's.
struct Subject {
  const char* name;
  const DeviceKernels& (*kernels)();
  Device (*open)(Doorbell*);
};

Device open_host(Doorbell* bell) {
  return host_device(bell, CopyMode::polled);
}
Device open_cuda(Doorbell* bell) {
  return open_cuda_device(0, bell, STRATA_CUDA_LIBRARY);
}
const DeviceKernels& cuda_kernels() {
  const CudaLibrary library(STRATA_CUDA_LIBRARY);
  void* const found = library.find(kFindDeviceKernelsName);
  STRATA_ASSERT(found != nullptr);
  return *reinterpret_cast<FindDeviceKernels>(found)();
}

const Subject kSubjects[] = {{"host", host_device_kernels, open_host},
                             {"twin", twin_device_kernels, open_host},
                             {"cuda", cuda_kernels, open_cuda}};

// The spans of some Streams, or Coded, that lie in this memory.
template <class Offsets>
auto spans_in(const std::vector<Offsets>& all, std::byte* memory) {
  std::vector<decltype(all.front().in(memory))> spans;
  spans.reserve(all.size());
  for (const Offsets& one : all) spans.push_back(one.in(memory));
  return spans;
}

class DeviceKernelsTest : public testing::TestWithParam<Subject> {
 protected:
  void SetUp() override {
    const char* const asked = std::getenv("STRATA_TEST_DEVICE");
    const bool cuda = std::string(GetParam().name) == "cuda";
    if (cuda && (asked == nullptr || std::string(asked) != "cuda")) {
      GTEST_SKIP() << "STRATA_TEST_DEVICE is not cuda";
    }
    opened_ = GetParam().open(&bell_);
    device_ = &GetParam().kernels();
    const auto error = opened_.memory->claim(1, kFrameBytes);
    ASSERT_FALSE(error) << error->text();
    const int failed = device_->prepare();
    ASSERT_EQ(failed, 0) << device_->text(failed);
  }

  std::byte* memory() const { return opened_.memory->address(kFrame); }
  void to_device(Bytes& bytes) {
    ASSERT_LE(bytes.size(), kFrameBytes);
    if (bytes.size() == 0) return;
    finish(copy_in(opened_, kFrame, bytes.data(), bytes.size()));
  }
  // As it is when all that was submitted is done.
  void from_device(Bytes& bytes) {
    if (bytes.size() == 0) return;
    const CopyTicket ready = opened_.copies->record(nullptr);
    finish(copy_from(*opened_.copies, bytes.data(), memory(), bytes.size(), ready));
  }
  void update(const std::vector<UpdateSpan>& spans) {
    const int error = device_->update(spans.data(), spans.size(), nullptr);
    ASSERT_EQ(error, 0) << device_->text(error);
  }
  void land(const std::vector<LandSpan>& spans) {
    const int error = device_->land(spans.data(), spans.size(), nullptr);
    ASSERT_EQ(error, 0) << device_->text(error);
  }

  void decode(const std::vector<DecodeSpan>& spans) {
    const int error = device_->decode(spans.data(), spans.size(), nullptr);
    ASSERT_EQ(error, 0) << device_->text(error);
  }

  // Updates `start` on the device and by every instruction set, and compares all bytes.
  void expect_same_updates(const Bytes& start, const std::vector<Streams>& streams) {
    Bytes actual = start;
    to_device(actual);
    update(spans_in(streams, memory()));
    from_device(actual);
    for (const Isa isa : isas()) {
      Bytes expected = start;
      for (const UpdateSpan& span : spans_in(streams, expected.data())) kernels(isa).update(span);
      ASSERT_TRUE(actual == expected) << name(isa);
    }
  }

 private:
  void finish(CopyTicket ticket) {
    const auto error = opened_.copies->wait(ticket);
    ASSERT_FALSE(error) << error->text();
  }

  Doorbell bell_;
  Device opened_;
  const DeviceKernels* device_ = nullptr;
};

TEST_P(DeviceKernelsTest, EveryRuleAndFormGivesTheBitsOfTheCpu) {
  for (const Rule rule : {Rule::adamw, Rule::adam, Rule::sgd, Rule::lion, Rule::adagrad}) {
    for (const double momentum : {0.0, 0.9}) {
      for (const Dtype dtype : kDtypes) {
        for (const Dtype grad_dtype : {dtype, Dtype::float32}) {
          for (const MomentDtype moments : kMomentDtypes) {
            const Form form{{.rule = rule, .lr = 0.01, .weight_decay = 0.1, .momentum = momentum},
                            dtype,
                            grad_dtype,
                            moments};
            SCOPED_TRACE(text(form));
            std::mt19937_64 random(17);
            Bytes bytes;
            const Streams streams = any_span(form, 15 * kMomentBlock + 7, bytes, random);
            expect_same_updates(bytes, {streams});
          }
        }
      }
    }
  }
}

// Spans of one call: any sizes, none among them, forms that change or stay.
TEST_P(DeviceKernelsTest, AnySpansGiveTheBitsOfTheCpu) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    std::mt19937_64 random(seed);
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::vector<Form> forms(1 + random() % 3);
    for (Form& form : forms) form = any_form(random);
    Bytes bytes;
    std::vector<Streams> streams(random() % 4 == 0 ? random() % 60 : random() % 4);
    std::size_t form = 0;
    for (Streams& one : streams) {
      if (random() % 8 == 0) form = random() % forms.size();
      one = any_span(forms[form], any_count(random), bytes, random);
    }
    expect_same_updates(bytes, streams);
  }
}

// Each in its turn: whatever tells two forms apart takes a kernel of its own.
TEST_P(DeviceKernelsTest, NeighboursMayDifferInOneThing) {
  const Form base{{.rule = Rule::sgd, .lr = 0.01, .momentum = 0.9},
                  Dtype::bfloat16,
                  Dtype::float32,
                  MomentDtype::float32};
  std::vector<Form> others(5, base);
  others[0].hyper.rule = Rule::lion;
  others[1].hyper.momentum = 0.0;
  others[2].dtype = Dtype::float16;
  others[3].grad_dtype = Dtype::bfloat16;
  others[4].moment_dtype = MomentDtype::block8;
  for (const Form& other : others) {
    SCOPED_TRACE(text(other));
    std::mt19937_64 random(3);
    Bytes bytes;
    std::vector<Streams> streams(4);
    for (std::size_t i = 0; i < streams.size(); ++i) {
      streams[i] = any_span(i % 2 == 0 ? base : other, 100, bytes, random);
    }
    expect_same_updates(bytes, streams);
  }
}

// Every form from every dtype to every other one; spans of one call may be of one form, or of some.
TEST_P(DeviceKernelsTest, CodesHaveTheValuesOfTheCpu) {
  std::uint64_t seed = 0;
  for (const char* const named : {"int8", "nf4", "nf4-double", "nf4-torchao"}) {
    for (const Dtype dtype : kDtypes) {
      for (const Dtype to : kDtypes) {
        StoredForm form = form_named(named).value();
        form.dtype = dtype;
        SCOPED_TRACE(std::string(named) + " of " + name(dtype) + " to " + name(to));
        std::mt19937_64 random(++seed);
        Bytes start;
        std::vector<Coded> all;
        for (int i = 0; i < 5; ++i) {
          StoredForm other = form;
          if (random() % 4 == 0) other.codes = Codes::nf4_double;
          all.push_back(any_coded(other, to, start, random));
        }
        Bytes actual = start;
        to_device(actual);
        decode(spans_in(all, memory()));
        from_device(actual);
        for (const Isa isa : isas()) {
          std::vector<Line> expected(1 + start.size() / sizeof(Line));
          std::copy_n(start.data(), start.size(), expected[0].bytes);
          for (const DecodeSpan& span : spans_in(all, expected[0].bytes)) {
            code_kernels(isa).dequantise(span, span.page, span.to, span.to_dtype);
          }
          ASSERT_EQ(std::memcmp(actual.data(), expected.data(), start.size()), 0) << name(isa);
        }
      }
    }
  }
}

// Which NaN a sum becomes is nobody's promise.
bool same_sum(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

TEST_P(DeviceKernelsTest, GradientsLandWithTheBytesAndTheSumOfTheCpu) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    std::mt19937_64 random(seed);
    SCOPED_TRACE("seed " + std::to_string(seed));
    Bytes start;
    std::vector<LandingAt> landings(random() % 4 == 0 ? random() % 100 : random() % 4);
    for (LandingAt& one : landings) {
      one = any_landing(any_count(random), random() % 2 == 0, start, random);
    }
    std::vector<LandSpan> spans;
    spans.reserve(landings.size());
    for (const LandingAt& one : landings) spans.push_back(one.in(memory()));
    Bytes actual = start;
    to_device(actual);
    land(spans);
    from_device(actual);
    for (const Isa isa : isas()) {
      Bytes expected = start;
      for (const LandingAt& one : landings) {
        const std::size_t blocks = norm_blocks(one.span.count);
        const auto* const sums = actual.at<double>(one.sums);
        const double sum = one.by_cpu(expected.data(), isa);
        ASSERT_TRUE(same_sum(sum_in_order(sums, blocks), sum)) << name(isa);
        std::memcpy(expected.at<double>(one.sums), sums, blocks * sizeof(double));
      }
      ASSERT_TRUE(actual == expected) << name(isa);
    }
  }
}

// A run that landed as one has the sums of its pieces.
TEST_P(DeviceKernelsTest, PiecesOfALandingHaveSumsOfTheirOwn) {
  constexpr std::size_t kPiece = 2 * kNormBlock;
  constexpr std::size_t kCount = 3 * kPiece + 123;
  std::mt19937_64 random(5);
  Bytes bytes;
  const LandingAt whole = any_landing(kCount, false, bytes, random);
  to_device(bytes);
  land({whole.in(memory())});
  Bytes landed = bytes;
  from_device(landed);
  for (std::size_t begin = 0; begin < kCount; begin += kPiece) {
    LandingAt piece = whole;
    piece.span.count = std::min(kPiece, kCount - begin);
    piece.from += begin * size_of(whole.span.from_dtype);
    piece.to += begin * size_of(whole.span.to_dtype);
    const double expected = piece.by_cpu(bytes.data(), best_isa());
    const auto* const sums = landed.at<double>(whole.sums) + norm_blocks(begin);
    EXPECT_EQ(sum_in_order(sums, norm_blocks(piece.span.count)), expected);
  }
}

TEST_P(DeviceKernelsTest, OnlyNonFiniteElementsMakeASumNonFinite) {
  constexpr std::size_t kCount = kNormBlock + 100;
  constexpr std::size_t kBytes = kCount * sizeof(float);
  Bytes bytes;
  const std::size_t from = bytes.take(kBytes, 4);
  const std::size_t to = bytes.take(kBytes, 4);
  const std::size_t sums = bytes.take(2 * sizeof(double), sizeof(double));
  const LandingAt landing{
      .to = to,
      .from = from,
      .sums = sums,
      .span = {.count = kCount, .to_dtype = Dtype::float32, .from_dtype = Dtype::float32}};
  const auto sum_with = [&](std::size_t at, float value) {
    Bytes now = bytes;
    for (std::size_t i = 0; i < kCount; ++i) now.at<float>(from)[i] = 0x1.fffffep127f;
    now.at<float>(from)[at] = value;
    to_device(now);
    land({landing.in(memory())});
    from_device(now);
    return sum_in_order(now.at<double>(sums), 2);
  };
  EXPECT_TRUE(std::isfinite(sum_with(0, 1.0f)));
  for (const std::size_t at : {std::size_t{0}, kNormBlock - 1, kNormBlock, kCount - 1}) {
    EXPECT_FALSE(std::isfinite(sum_with(at, -HUGE_VALF))) << at;
    EXPECT_TRUE(std::isnan(sum_with(at, std::nanf("")))) << at;
  }
}

TEST_P(DeviceKernelsTest, WhatTheCpuRefusesIsRefused) {
  std::mt19937_64 random(1);
  const Form form{{}, Dtype::bfloat16, Dtype::bfloat16, MomentDtype::block8};
  Bytes bytes;
  UpdateSpan span = any_span(form, 100, bytes, random).in(memory());
  span.first = 32;
  EXPECT_DEATH(update({span}), "kMomentBlock");
  span.first = 0;
  span.scales2 = nullptr;
  EXPECT_DEATH(update({span}), "scales");
  const Hyper foreign{.rule = Rule::foreign};
  span = {.hyper = &foreign};
  EXPECT_DEATH(update({span}), "foreign");
  LandSpan landing;
  landing.count = 1;
  landing.to_dtype = Dtype::float16;
  EXPECT_DEATH(land({landing}), "float32") << "only sums are of another dtype";
  landing.to_dtype = Dtype::float32;
  landing.of_older = {.factor = 2.0f};
  EXPECT_DEATH(land({landing}), "nullptr");
  std::byte older[4] = {};
  landing.to = older;
  EXPECT_DEATH(land({landing}), "of_older") << "it is of what is added to";
  landing.to = nullptr;
  landing.mode = GradMode::add;
  EXPECT_DEATH(land({landing}), "nullptr") << "there is nothing to add to";
}

// Without a driver, too: a table is all that opening the library takes.
TEST(DeviceLibrary, GivesItsTable) {
  if (std::string(STRATA_CUDA_LIBRARY).empty()) GTEST_SKIP() << "strata is built without CUDA";
  void* const library = ::dlopen(STRATA_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << ::dlerror();
  void* const found = ::dlsym(library, kFindDeviceKernelsName);
  ASSERT_NE(found, nullptr) << ::dlerror();
  const DeviceKernels& table = *reinterpret_cast<FindDeviceKernels>(found)();
  EXPECT_EQ(table.update(nullptr, 0, nullptr), 0);
  EXPECT_EQ(table.land(nullptr, 0, nullptr), 0);
  EXPECT_STRNE(table.text(1), table.text(0));
  const int prepared = table.prepare();
  try {
    const CudaLibrary there(STRATA_CUDA_LIBRARY);
  } catch (const StrataError&) {
    EXPECT_NE(prepared, 0) << "no driver loads kernels";
    EXPECT_STRNE(table.text(prepared), table.text(0));
  }
  ::dlclose(library);
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceKernelsTest, testing::ValuesIn(kSubjects),
                         [](const auto& subject) { return std::string(subject.param.name); });

}  // namespace
}  // namespace strata::device_kernels_test
