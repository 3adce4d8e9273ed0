#include "offload/storage/make_engine.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "memory/check.hpp"
#include "offload/storage/memory_engine.hpp"

namespace strata {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"auto", "io_uring", "libaio", "threads",
                                                    "memory"};

// Levenshtein: insertions, deletions and substitutions that turn one word into the other.
std::size_t edit_distance(std::string_view from, std::string_view to) {
  std::vector<std::size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < to.size(); ++j) {
      const std::size_t replaced = diagonal + (from[i] == to[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

[[noreturn]] void refuse_name(std::string_view name) {
  const auto nearest = std::min_element(kNames.begin(), kNames.end(), [&](auto a, auto b) {
    return edit_distance(name, a) < edit_distance(name, b);
  });
  refuse("there is no I/O engine \"" + std::string(name) + "\"; did you mean \"" +
         std::string(*nearest) + "\"? There are auto, io_uring, libaio, threads and memory");
}

// Null with `error` filled in where the machine cannot run it.
std::unique_ptr<IoEngine> try_engine(std::string_view name, Doorbell* bell, std::uint32_t depth,
                                     Error* error) {
  if (name == "io_uring") return make_uring_engine(bell, depth, error);
  if (name == "libaio") return make_aio_engine(bell, depth, error);
  if (name == "threads") return make_thread_engine(bell, depth);
  return std::make_unique<MemoryEngine>(bell, depth);
}

}  // namespace

std::unique_ptr<IoEngine> make_io_engine(std::string_view name, Doorbell* bell, std::uint32_t depth,
                                         std::string* why) {
  STRATA_ASSERT(depth > 0);
  if (std::find(kNames.begin(), kNames.end(), name) == kNames.end()) refuse_name(name);

  Error error;
  if (name != "auto") {
    auto engine = try_engine(name, bell, depth, &error);
    if (!engine) throw StrataError(std::move(error));
    if (why != nullptr) *why = "I/O engine " + std::string(name) + ": asked for";
    return engine;
  }

  std::string refused;
  for (std::string_view candidate : {"io_uring", "libaio", "threads"}) {
    auto engine = try_engine(candidate, bell, depth, &error);
    if (engine) {
      if (why == nullptr) return engine;
      *why = "I/O engine " + std::string(candidate) + ": " +
             (refused.empty() ? "the fastest, and this machine has it" : "because " + refused);
      return engine;
    }
    refused += (refused.empty() ? "" : ", and ") + error.text();
  }
  STRATA_ASSERT(false && "threads run everywhere");
  return nullptr;
}

}  // namespace strata
