// Where workers run. On a machine with more cores than the computation needs, each worker has one
// of its own, away from the computation's; on a small one they share, and give way to it.
//
// Threads: all but place_this_thread() are free of side effects.
//
//   const Topology machine = read_topology();
//   const WorkerPlacement where = choose_placement(machine, allowed_cpus(), compute_threads,
//   workers); place_this_thread(where, worker);       // on each worker's own thread
//   log(describe(where));                   // "workers: pinned to cores 14, 15"
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace strata {

// A hardware thread, as the operating system numbers them.
struct Cpu {
  int number = 0;
  int core = 0;  // the smallest number among those that share its physical core
  int node = 0;  // of memory
};

struct Topology {
  std::vector<Cpu> cpus;  // in order of number
};

// What the kernel tells under `root`. Where it tells nothing, every hardware thread is a core of
// its own, and all memory is one node.
Topology read_topology(const std::filesystem::path& root = "/sys/devices/system");

// Hardware threads that this process may use, in order.
std::vector<int> allowed_cpus();

// Which hardware threads workers get, in order of preference; at most `workers`, and at most what
// the computation leaves. Empty: nothing is left. See Note [Spare cores].
std::vector<int> choose_cores(const Topology& machine, std::span<const int> allowed,
                              int compute_threads, int workers);

struct WorkerPlacement {
  std::vector<int> cpus;  // worker i runs on cpus[i % size]; empty: anywhere
  bool give_way = false;  // the computation goes first
};

WorkerPlacement choose_placement(const Topology& machine, std::span<const int> allowed,
                                 int compute_threads, int workers);

// A thread that cannot be placed stays where it is.
void place_this_thread(const WorkerPlacement& placement, int worker);

std::string describe(const WorkerPlacement& placement);

}  // namespace strata
