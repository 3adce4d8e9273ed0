// Where workers run, on machines that are made up: as topologies, and as folders that look like
// /sys/devices/system.
#include "optimizers/affinity.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <thread>

namespace strata::affinity_test {
namespace {

using Numbers = std::vector<int>;

Numbers first(int count) {
  Numbers numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// Cores are numbered node after node; second hardware threads follow after all the first ones.
Topology machine(int nodes, int cores_each, int threads_each) {
  Topology made;
  const int cores = nodes * cores_each;
  for (int number = 0; number < cores * threads_each; ++number) {
    const int core = number % cores;
    made.cpus.push_back({.number = number, .core = core, .node = core / cores_each});
  }
  return made;
}

TEST(ChooseCores, TakesTheHighestOfThoseLeftOver) {
  EXPECT_EQ(choose_cores(machine(1, 8, 1), first(8), 4, 2), (Numbers{7, 6}));
  EXPECT_EQ(choose_cores(machine(1, 8, 1), first(8), 7, 1), (Numbers{7}));
}

TEST(ChooseCores, GivesNoMoreThanIsLeft) {
  EXPECT_EQ(choose_cores(machine(1, 8, 1), first(8), 6, 4), (Numbers{7, 6}));
  EXPECT_EQ(choose_cores(machine(1, 2, 1), first(2), 2, 1), Numbers{});
  EXPECT_EQ(choose_cores(machine(1, 2, 1), first(2), 9, 1), Numbers{});
  EXPECT_EQ(choose_cores(machine(1, 4, 1), first(4), 1, 0), Numbers{});
}

TEST(ChooseCores, KeepsToWhatIsAllowed) {
  EXPECT_EQ(choose_cores(machine(1, 16, 1), Numbers{2, 3, 5, 9}, 2, 2), (Numbers{9, 5}));
  EXPECT_EQ(choose_cores(machine(1, 16, 1), Numbers{2, 3}, 2, 1), Numbers{});
  EXPECT_EQ(choose_cores(machine(1, 16, 1), Numbers{}, 1, 1), Numbers{});
}

TEST(ChooseCores, PrefersPhysicalCores) {
  // 4 cores with two threads each: 0 and 4, 1 and 5, 2 and 6, 3 and 7.
  const Topology made = machine(1, 4, 2);
  EXPECT_EQ(choose_cores(made, first(8), 2, 2), (Numbers{3, 2}));
  EXPECT_EQ(choose_cores(made, first(8), 2, 4), (Numbers{3, 2, 7, 6})) << "their other threads";
  EXPECT_EQ(choose_cores(made, first(8), 2, 6), (Numbers{3, 2, 7, 6, 5, 4}));
  EXPECT_EQ(choose_cores(made, first(8), 4, 2), (Numbers{7, 6})) << "beside the computation";
  EXPECT_EQ(choose_cores(made, first(8), 6, 4), (Numbers{7, 6})) << "which needs some of them too";
}

TEST(ChooseCores, SpreadsOverNodes) {
  // Node 0: cores 0 to 3; node 1: 4 to 7.
  const Topology made = machine(2, 4, 1);
  EXPECT_EQ(choose_cores(made, first(8), 2, 4), (Numbers{7, 3, 6, 2}));
  EXPECT_EQ(choose_cores(made, Numbers{0, 1, 2, 7}, 1, 3), (Numbers{7, 2, 1})) << "an uneven rest";
}

// On every small machine: nobody gets a thread twice, or one that is not allowed, and the
// computation keeps as many as it asked for.
TEST(ChooseCores, LeavesTheComputationWhatItNeeds) {
  for (int nodes = 1; nodes <= 3; ++nodes) {
    for (int threads = 1; threads <= 2; ++threads) {
      const Topology made = machine(nodes, 2, threads);
      const int all = nodes * 2 * threads;
      for (int compute = 0; compute <= all + 1; ++compute) {
        for (int workers = 0; workers <= all + 1; ++workers) {
          Numbers chosen = choose_cores(made, first(all), compute, workers);
          EXPECT_EQ(chosen.size(),
                    static_cast<std::size_t>(std::min(workers, std::max(0, all - compute))));
          std::sort(chosen.begin(), chosen.end());
          EXPECT_EQ(std::adjacent_find(chosen.begin(), chosen.end()), chosen.end());
        }
      }
    }
  }
}

// A folder with the files that the kernel would show.
class Sysfs : public testing::Test {
 protected:
  Sysfs() : root_(testing::TempDir() + "sysfs-" + std::to_string(getpid())) {}
  ~Sysfs() override { std::filesystem::remove_all(root_); }

  void put(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << '\n';
  }

  std::filesystem::path root_;
};

TEST_F(Sysfs, TellsSiblingsAndNodes) {
  put("cpu/online", "0-3");
  for (int cpu = 0; cpu < 4; ++cpu) {
    put("cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list",
        cpu % 2 == 0 ? "0,2" : "1,3");
  }
  put("node/online", "0-1");
  put("node/node0/cpulist", "0,2");
  put("node/node1/cpulist", "1,3");
  const Topology read = read_topology(root_);
  ASSERT_EQ(read.cpus.size(), 4u);
  for (int cpu = 0; cpu < 4; ++cpu) {
    const Cpu& got = read.cpus[static_cast<std::size_t>(cpu)];
    EXPECT_EQ(got.number, cpu);
    EXPECT_EQ(got.core, cpu % 2);
    EXPECT_EQ(got.node, cpu % 2);
  }
}

TEST_F(Sysfs, MissingFilesMeanPlainCores) {
  put("cpu/online", "0,2-3,7\n");
  const Topology read = read_topology(root_);
  ASSERT_EQ(read.cpus.size(), 4u);
  EXPECT_EQ(read.cpus.back().number, 7);
  EXPECT_EQ(read.cpus.back().core, 7);
  EXPECT_EQ(read.cpus.back().node, 0);
}

TEST_F(Sysfs, NothingAtAllMeansThatWorkersGiveWay) {
  const Topology read = read_topology(root_);
  EXPECT_TRUE(read.cpus.empty());
  EXPECT_TRUE(choose_placement(read, first(8), 1, 1).give_way);
}

TEST(WorkerPlacement, SaysWhatWasChosen) {
  EXPECT_EQ(describe({}), "where the system puts them");
  EXPECT_EQ(describe({.cpus = {3}}), "pinned to core 3");
  EXPECT_EQ(describe({.cpus = {7, 3}}), "pinned to cores 7, 3");
  EXPECT_EQ(describe({.cpus = {}, .give_way = true}),
            "on the computation's cores, giving way to it");
}

TEST(WorkerPlacement, MovesTheThreadThatAsks) {
  const Numbers allowed = allowed_cpus();
  ASSERT_FALSE(allowed.empty());
  std::thread pinned([&] {
    place_this_thread({.cpus = {allowed.back()}}, 3);  // more workers than cores share them
    EXPECT_EQ(allowed_cpus(), Numbers{allowed.back()});
    EXPECT_EQ(sched_getcpu(), allowed.back());
  });
  pinned.join();
  EXPECT_EQ(allowed_cpus(), allowed) << "no other thread is moved";
}

TEST(WorkerPlacement, GivesWayOnTheThreadThatAsks) {
  const auto niceness = [] { return getpriority(PRIO_PROCESS, static_cast<id_t>(gettid())); };
  const int before = niceness();
  std::thread polite([&] {
    place_this_thread({.cpus = {}, .give_way = true}, 0);
    EXPECT_EQ(niceness(), std::max(before, 10)) << "a process that is nice already stays so";
  });
  polite.join();
  EXPECT_EQ(niceness(), before);
}

}  // namespace
}  // namespace strata::affinity_test
