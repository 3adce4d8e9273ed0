#include "optimizers/affinity.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include "memory/check.hpp"

namespace strata {

namespace {

// How far workers step back where they share cores. Beside matrix products with a barrier after
// each, on all cores, a worker at nice 10 cost them 5 to 11 %, which is what its bytes explain;
// without it 55 to 187 %; at nice 19 the worker hardly moved.
constexpr int kGiveWayNice = 10;

// "0-3,8,10-11" as the kernel writes it. Stops where it reads anything else.
std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> numbers;
  std::istringstream in(text);
  for (int first = 0; in >> first;) {
    int last = first;
    if (in.peek() == '-') {
      in.get();
      if (!(in >> last)) break;
    }
    for (int number = first; number <= last; ++number) numbers.push_back(number);
    if (in.peek() != ',') break;
    in.get();
  }
  return numbers;
}

std::vector<int> read_cpu_list(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return parse_cpu_list(line);
}

using Threads = std::vector<int>;

// The physical cores, each with its hardware threads that may be used: turn by turn from each
// node, and of a node the one with the highest number first.
std::vector<Threads> ranked_cores(const Topology& machine, std::span<const int> allowed) {
  std::map<int, std::map<int, Threads>> nodes;  // node, core
  for (const Cpu& cpu : machine.cpus) {
    if (std::find(allowed.begin(), allowed.end(), cpu.number) == allowed.end()) continue;
    nodes[cpu.node][cpu.core].push_back(cpu.number);
  }
  std::vector<Threads> ranked;
  for (bool any = true; any;) {
    any = false;
    for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
      if (node->second.empty()) continue;
      const auto highest = std::prev(node->second.end());
      ranked.push_back(std::move(highest->second));
      node->second.erase(highest);
      any = true;
    }
  }
  return ranked;
}

}  // namespace

Topology read_topology(const std::filesystem::path& root) {
  // 1. Which there are, and which share a core.
  Topology machine;
  for (const int number : read_cpu_list(root / "cpu" / "online")) {
    const auto mates = read_cpu_list(root / "cpu" / ("cpu" + std::to_string(number)) / "topology" /
                                     "thread_siblings_list");
    const int core = mates.empty() ? number : *std::min_element(mates.begin(), mates.end());
    machine.cpus.push_back({.number = number, .core = core});
  }
  // 2. Which node each is close to.
  for (const int node : read_cpu_list(root / "node" / "online")) {
    const auto near = read_cpu_list(root / "node" / ("node" + std::to_string(node)) / "cpulist");
    for (Cpu& cpu : machine.cpus) {
      if (std::find(near.begin(), near.end(), cpu.number) != near.end()) cpu.node = node;
    }
  }
  return machine;
}

std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> numbers;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return numbers;
  for (int number = 0; number < CPU_SETSIZE; ++number) {
    if (CPU_ISSET(static_cast<unsigned>(number), &set)) numbers.push_back(number);
  }
  return numbers;
}

// Note [Spare cores]
// Nobody tells which cores the computation's threads run on, only how many they are: the system
// moves them away from a core that a pinned worker keeps busy. So what counts is how much is left.
//   1. Physical cores beyond one for each thread of computation: the workers', the highest-numbered
//      first, because programs that pin themselves begin with the lowest, and from all nodes, so
//      that workers share the bandwidth of all of memory.
//   2. The other hardware threads of those cores.
//   3. The second hardware threads of the computation's cores. A worker waits for memory most of
//      the time and takes little from the thread beside it.
// Limit: a control group may grant less time than its cores could give; that cannot be seen here.
std::vector<int> choose_cores(const Topology& machine, std::span<const int> allowed,
                              int compute_threads, int workers) {
  STRATA_ASSERT(compute_threads >= 0);
  STRATA_ASSERT(workers >= 0);
  const std::vector<Threads> cores = ranked_cores(machine, allowed);
  std::size_t usable = 0;
  for (const Threads& core : cores) usable += core.size();
  const auto needed = static_cast<std::size_t>(compute_threads);
  if (usable <= needed) return {};
  STRATA_ASSERT(usable <= allowed.size());
  const std::size_t whole = cores.size() > needed ? cores.size() - needed : 0;
  std::vector<int> chosen;
  for (std::size_t i = 0; i < whole; ++i) chosen.push_back(cores[i].front());
  for (const Threads& core : cores) {  // the workers' own come first in the ranking
    chosen.insert(chosen.end(), std::next(core.begin()), core.end());
  }
  chosen.resize(std::min({chosen.size(), usable - needed, static_cast<std::size_t>(workers)}));
  return chosen;
}

WorkerPlacement choose_placement(const Topology& machine, std::span<const int> allowed,
                                 int compute_threads, int workers) {
  WorkerPlacement placement{.cpus = choose_cores(machine, allowed, compute_threads, workers)};
  placement.give_way = placement.cpus.empty();
  return placement;
}

void place_this_thread(const WorkerPlacement& placement, int worker) {
  STRATA_ASSERT(worker >= 0);
  if (!placement.cpus.empty()) {
    const int cpu = placement.cpus[static_cast<std::size_t>(worker) % placement.cpus.size()];
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<unsigned>(cpu), &set);
    sched_setaffinity(0, sizeof set, &set);  // 0: the thread that calls
  }
  const auto thread = static_cast<id_t>(gettid());
  if (placement.give_way && getpriority(PRIO_PROCESS, thread) < kGiveWayNice) {
    setpriority(PRIO_PROCESS, thread, kGiveWayNice);
  }
}

std::string describe(const WorkerPlacement& placement) {
  if (!placement.cpus.empty()) {
    std::string text = placement.cpus.size() == 1 ? "pinned to core" : "pinned to cores";
    const char* separator = " ";
    for (const int cpu : placement.cpus) {
      text += separator + std::to_string(cpu);
      separator = ", ";
    }
    return text;
  }
  return placement.give_way ? "on the computation's cores, giving way to it"
                            : "where the system puts them";
}

}  // namespace strata
