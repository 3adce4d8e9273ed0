// Codes and values for code_bits.py, in a file that both processes map. A line of input is a job, a
// line of JSON its answer: where each part of the page lies in the file, in bytes.
//
//   code_values FILE BYTES
//   place FORM COUNT                                  only the answer
//   quantise FORM DTYPE COUNT ROW OFFSET ISA          values at 0, codes to the page
//   dequantise FORM ARITHMETIC DTYPE COUNT TO ISA     values at 0, from the page
//
// FORM, DTYPE and ISA by name; ARITHMETIC: bitsandbytes or torchao. OFFSET: a float32.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "memory/check.hpp"
#include "memory/units.hpp"
#include "optimizers/codes/codes.hpp"

namespace strata {
namespace {

template <class Enum, class Names>
Enum named(const Names& names, const std::string& name) {
  const auto found = std::find(names.begin(), names.end(), name);
  STRATA_ASSERT(found != names.end());
  return static_cast<Enum>(found - names.begin());
}

struct Job {
  std::string verb{};
  StoredForm form{};
  std::size_t count = 0;
  std::size_t row = kCodeBlock;
  float offset = 0.0f;
  Dtype dtype = Dtype::float32;  // of the values at 0
  Isa isa = Isa::scalar;
};

Job read(const std::string& line) {
  std::istringstream words(line);
  Job job;
  std::string form, arithmetic, dtype, to, isa = "scalar";
  words >> job.verb >> form;
  job.form.codes = form_named(form).value().codes;
  if (job.verb == "place") {
    words >> job.count;
  } else if (job.verb == "quantise") {
    words >> dtype >> job.count >> job.row >> job.offset >> isa;
    job.dtype = named<Dtype>(kDtypeNames, dtype);
  } else {
    words >> arithmetic >> dtype >> job.count >> to >> isa;
    const bool torchao = arithmetic == "torchao";
    job.form.arithmetic = torchao ? Arithmetic::torchao : Arithmetic::bitsandbytes;
    job.form.dtype = named<Dtype>(kDtypeNames, dtype);
    job.dtype = named<Dtype>(kDtypeNames, to);
  }
  STRATA_ASSERT(!words.fail());
  job.isa = named<Isa>(kIsaNames, isa);
  return job;
}

// The page begins in the middle of the file.
bool run(const Job& job, std::byte* file, std::size_t bytes) {
  std::byte* const page = file + bytes / 2;
  const CodeSpan span{.form = job.form, .page_bytes = bytes / 2, .count = job.count};
  const CodeKernels& kernels = code_kernels(job.isa);
  bool finite = true;
  if (job.verb == "quantise") {
    std::vector<float> absmax(job.count / kCodeBlock);
    finite = kernels.absmax(file, job.dtype, job.count, absmax.data());
    if (job.form.codes == Codes::int8) share_in_rows(absmax, job.row);
    if (finite) kernels.quantise(span, file, job.dtype, absmax.data(), job.offset, page);
  } else if (job.verb == "dequantise") {
    kernels.dequantise(span, page, file, job.dtype);
  }
  return finite;
}

void serve(std::byte* file, std::size_t bytes) {
  std::printf("{\"ready\":true}\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    const Job job = read(line);
    const bool finite = run(job, file, bytes);
    const Packing packing = packing_of(job.form.codes, bytes / 2);
    std::printf("{\"finite\":%s,\"codes\":%zu,\"scales\":%zu,\"groups\":%zu}\n",
                finite ? "true" : "false", bytes / 2, bytes / 2 + packing.scales_at,
                bytes / 2 + packing.groups_at);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace strata

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: code_values FILE BYTES\n");
    return 2;
  }
  const auto bytes = static_cast<std::size_t>(std::atoll(argv[2]));
  const int file = open(argv[1], O_RDWR | O_CLOEXEC);
  STRATA_ASSERT(file >= 0);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  STRATA_ASSERT(memory != MAP_FAILED);
  try {
    strata::serve(static_cast<std::byte*>(memory), bytes);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
