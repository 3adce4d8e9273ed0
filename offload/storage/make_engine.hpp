// Chooses an I/O engine by name, or the fastest one this machine can run.
//
// Threads: none of its own; the engine made follows the rules of IoEngine.
//
//   std::string why;
//   auto engine = make_io_engine("auto", &bell, 64, &why);
//   log(why);                                   // "I/O engine io_uring: a ring could be set up"
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "memory/doorbell.hpp"
#include "memory/result.hpp"
#include "offload/storage/io_engine.hpp"

namespace strata {

// `name` is auto, io_uring, libaio, threads or memory; anything else is refused by naming the
// nearest. An engine asked for by name that cannot run here is refused with the reason; auto goes
// on to the next. `bell` may be null (nobody sleeps), `depth` is the number of requests the engine
// holds, `why` gets a sentence on what was taken.
std::unique_ptr<IoEngine> make_io_engine(std::string_view name, Doorbell* bell, std::uint32_t depth,
                                         std::string* why = nullptr);

// The engines by themselves; MemoryEngine has a header of its own. Null, with the reason in
// `error`, where the kernel or a sandbox refuses it.
std::unique_ptr<IoEngine> make_uring_engine(Doorbell* bell, std::uint32_t depth, Error* error);
std::unique_ptr<IoEngine> make_aio_engine(Doorbell* bell, std::uint32_t depth, Error* error);
std::unique_ptr<IoEngine> make_thread_engine(Doorbell* bell, std::uint32_t depth);

}  // namespace strata
