#include "memory/mapping.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "memory/check.hpp"
#include "memory/thread.hpp"

namespace strata {
namespace {

// Where each version of cgroups keeps what: v2 has one tree, v1 one for every controller.
struct CgroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  // What memory.stat calls the cache of files, which the kernel gives back before it kills.
  std::string_view cache_old;
  std::string_view cache_new;
};
constexpr CgroupFiles kCgroupV1{"sys/fs/cgroup/memory", "/memory.limit_in_bytes",
                                "/memory.usage_in_bytes", "total_inactive_file",
                                "total_active_file"};
constexpr CgroupFiles kCgroupV2{"sys/fs/cgroup", "/memory.max", "/memory.current", "inactive_file",
                                "active_file"};

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

// A file of the kernel's; empty where there is none that may be read. Throws where the process has
// run out of something: from an empty file its caller would conclude that no memory is left, or
// that no limit holds.
std::string read_text(const std::string& path) {
  std::string text;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ssize_t length = fd < 0 ? -1 : 1;
  for (std::array<char, 4096> block; length > 0;) {
    length = ::read(fd, block.data(), block.size());
    if (length > 0) text.append(block.data(), static_cast<std::size_t>(length));
  }
  const int failed = errno;
  if (fd >= 0) ::close(fd);
  if (length == 0) return text;
  if (failed != EMFILE && failed != ENFILE && failed != ENOMEM) return "";
  throw StrataError(
      {.what = "could not read what memory there is", .errno_value = failed, .path = path});
}

// The number in a file that holds one number; kUnlimited for "max" or no such file.
std::size_t read_number(const std::string& path) {
  std::istringstream text(read_text(path));
  std::size_t value = 0;
  return text >> value ? value : kUnlimited;
}

// The number that follows `key` in a file of keys and numbers; 0 where there is none.
std::size_t read_entry(const std::string& path, std::string_view key) {
  std::istringstream text(read_text(path));
  std::string line;
  while (std::getline(text, line)) {
    std::istringstream words(line);
    std::string word;
    std::size_t value = 0;
    if (words >> word >> value && word == key) return value;
  }
  return 0;
}

// What is left of the group at `group` and of each one around it, up to the root of the mount.
std::size_t cgroup_bytes_left(const std::string& root, const CgroupFiles& files,
                              std::string group) {
  std::size_t left = kUnlimited;
  while (true) {
    const std::string folder = root + files.mount + group;
    const std::size_t limit = read_number(folder + files.limit);
    const std::size_t usage = read_number(folder + files.usage);
    if (limit != kUnlimited && usage != kUnlimited) {
      const std::string stat = folder + "/memory.stat";
      const std::size_t cache =
          read_entry(stat, files.cache_old) + read_entry(stat, files.cache_new);
      const std::size_t kept = usage - std::min(usage, cache);
      left = std::min(left, limit - std::min(limit, kept));
    }
    if (group.empty()) return left;
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
}

// Memory behind one piece, by the thread that calls. Returns 0 or an errno.
int populate_piece(std::byte* range, std::size_t bytes) {
  if (::madvise(range, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno == EFAULT ? ENOMEM : errno;
  // A kernel before 5.14: touch each page, without changing what another thread may be writing.
  for (std::size_t at = 0; at < bytes; at += kKernelPageBytes) {
    auto& first = reinterpret_cast<unsigned char&>(range[at]);
    std::atomic_ref<unsigned char>(first).fetch_or(0, std::memory_order_relaxed);
  }
  return 0;
}

}  // namespace

Addresses::~Addresses() {
  if (!range_.empty()) ::munmap(range_.data(), range_.size());  // unlocks, too
}

void advise_claimed(std::byte* range, std::size_t bytes) {
  // Huge pages are a wish: a kernel without them says EINVAL, and small ones do.
  if (bytes >= kHugePageBytes) ::madvise(range, bytes, MADV_HUGEPAGE);
  // A forked child (a DataLoader's worker) has no business here; without it, every page that either
  // side writes, and every pinned one at once, would be copied and break the budget.
  ::madvise(range, bytes, MADV_DONTFORK);
}

std::byte* reserve_addresses(std::size_t bytes) {
  STRATA_ASSERT(bytes > 0);
  STRATA_ASSERT(bytes % kKernelPageBytes == 0);
  // The kernel aligns to small pages only, so ask for more and give the ends back.
  const std::size_t reserved = bytes + kHugePageBytes;
  void* got =
      ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) {
    throw StrataError(memory_error("could not reserve addresses", Tier::host, bytes, errno));
  }
  auto* start = static_cast<std::byte*>(got);
  const std::size_t past = reinterpret_cast<std::uintptr_t>(start) % kHugePageBytes;
  const std::size_t before = past == 0 ? 0 : kHugePageBytes - past;
  if (before > 0) ::munmap(start, before);
  ::munmap(start + before + bytes, reserved - before - bytes);
  return start + before;
}

int populate(std::byte* range, std::size_t bytes, const PopulateRange& populate_one) {
  STRATA_ASSERT(range != nullptr || bytes == 0);
  STRATA_ASSERT(populate_one != nullptr);
  const std::size_t ranges = ceil_div(bytes, kPopulateRangeBytes);
  std::atomic<std::size_t> next{0};
  std::atomic<int> failed{0};
  const auto work = [&] {
    while (failed == 0) {
      const std::size_t at = next++ * kPopulateRangeBytes;
      if (at >= bytes) return;
      const int errno_value = populate_one(range + at, std::min(kPopulateRangeBytes, bytes - at));
      if (errno_value != 0) failed = errno_value;
    }
  };
  // This thread, and one for each other processor that it may use and that finds a range.
  const std::size_t threads = std::min<std::size_t>(std::thread::hardware_concurrency(), ranges);
  std::vector<Thread> others;
  try {
    while (others.size() + 1 < threads) others.emplace_back("strata-populate", work);
  } catch (const std::system_error&) {
    // Without a thread more, those that there are take longer.
  }
  work();
  others.clear();  // waits for them
  return failed;
}

int populate(std::byte* range, std::size_t bytes) {
  return populate(range, bytes, populate_piece);
}

std::size_t host_bytes_available(const std::string& root) {
  std::size_t left = read_entry(root + "proc/meminfo", "MemAvailable:") * kKiB;
  // Lines are "number:controllers:/path".
  std::istringstream groups(read_text(root + "proc/self/cgroup"));
  std::string line;
  while (std::getline(groups, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (controllers.empty()) left = std::min(left, cgroup_bytes_left(root, kCgroupV2, group));
    if (controllers == "memory") left = std::min(left, cgroup_bytes_left(root, kCgroupV1, group));
  }
  return left;
}

Error memory_error(const char* what, Tier tier, std::size_t bytes, int errno_value) {
  Error error{.fault = Fault::memory,
              .what = std::string(what) + " of the " + name(tier) + " tier",
              .errno_value = errno_value,
              .tier = tier};
  // Of other things that run out, such as files, less memory would need as many.
  if (errno_value == ENOMEM) {
    error.what += ": " + std::to_string(bytes) + " bytes asked, " +
                  std::to_string(host_bytes_available()) + " available; ask for a smaller budget";
  }
  return error;
}

}  // namespace strata
