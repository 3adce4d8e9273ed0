// What others may have written where strata reads: lock files, and places of pages in files.
// Whatever they say, there is one error or none, and no file is touched but those with names of
// ours. STRATA_SEEDS=20000 runs more; STRATA_SEED=7 replays one.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <random>

#include "io_fixtures.hpp"
#include "memory/result.hpp"
#include "offload/storage/directory_lock.hpp"
#include "offload/storage/saved_pages.hpp"
#include "seeds.hpp"

namespace strata::strangers_test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMade = "strata-0123456789abcdef.pages";

// Cut, flipped, doubled, or with something else in it.
std::string mutated(std::string text, std::mt19937_64& random) {
  const std::vector<std::string> strange = {"../precious",
                                            "/etc/passwd",
                                            std::string(5'000, 'a'),
                                            std::string(3, '\0'),
                                            "\n\n",
                                            "-1",
                                            "99999999999999999999",
                                            "strata-final.pages",
                                            "..",
                                            "folder",
                                            kMade,
                                            "\xff\xfe"};
  for (std::uint64_t i = 1 + random() % 4; i > 0; --i) {
    const std::size_t at = text.empty() ? 0 : random() % text.size();
    switch (random() % 5) {
      case 0:
        text.resize(at);
        break;
      case 1:
        if (!text.empty()) text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
        break;
      case 2:
        text += text.substr(at);
        break;
      default:
        text.insert(at, "\n" + strange[random() % strange.size()] + "\n");
        break;
    }
  }
  return text;
}

std::map<std::string, std::string> files_below(const fs::path& folder) {
  std::map<std::string, std::string> found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path());
    found[entry.path()] = {std::istreambuf_iterator<char>(file), {}};
  }
  return found;
}

TEST(Strangers, LockFilesRemoveNothingButFilesThatWeNamed) {
  const TempFolder root;
  const std::string drive = root.path() + "/drive";
  fs::create_directories(drive + "/folder");
  for (const std::string name :
       {"/precious", "/drive/letter.pages", "/drive/folder/", "/drive/strata-final.pages"}) {
    if (name.back() != '/') std::ofstream(root.path() + name) << "x";
  }
  std::ofstream(drive + "/folder/" + kMade) << "not in the drive's own folder";
  const auto before = files_below(root.path());
  std::uint64_t removed = 0;
  for_seeds(300, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::ofstream(drive + "/" + kMade) << "x";
    std::ofstream(drive + "/strata.lock", std::ios::binary)
        << mutated(std::string("999999999 pid:[1]\n") + kMade + "\n", random);
    try {
      const DirectoryLock lock(drive);
      removed += lock.removed().empty() ? 0 : 1;
    } catch (const StrataError& error) {
      EXPECT_FALSE(error.error().text().empty());
    }
    fs::remove(drive + "/" + kMade);
    fs::remove(drive + "/strata.lock");
    if (seed % 50 == 0) {
      EXPECT_EQ(files_below(root.path()), before);
    }
  });
  EXPECT_EQ(files_below(root.path()), before);
  if (std::getenv("STRATA_SEED") == nullptr) {
    EXPECT_GT(removed, 0U);
  }
}

// Of a holder on another machine, whose lock may not be seen here, nothing is removed.
TEST(Strangers, FilesOfAnotherMachineStay) {
  const TempFolder folder;
  const std::string file = folder.path() + "/" + kMade;
  for (const bool here : {false, true}) {
    std::ofstream(file) << "x";
    std::string host = "elsewhere";
    std::array<char, 256> name{};
    if (here && gethostname(name.data(), name.size() - 1) == 0) host = name.data();
    std::ofstream(folder.path() + "/strata.lock")
        << "1 pid:[1] " << host << " 00000000-0000-0000-0000-000000000000\n"
        << kMade << "\n";
    const DirectoryLock lock(folder.path());
    ASSERT_EQ(lock.removed().size(), 1U);
    EXPECT_EQ(fs::exists(file), !here) << lock.removed()[0];
    EXPECT_NE(lock.removed()[0].find(here ? "removed" : "elsewhere"), std::string::npos);
  }
}

// Files of any length, and slots anywhere: no page that was not written so is ever given out.
TEST(Strangers, PlacesInPageFilesAreReadOrRefused) {
  constexpr std::size_t kPage = 64 * kKiB;
  const TempFolder folder;
  std::uint64_t refused = 0, runs = 0;
  for_seeds(60, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const std::string name = random() % 8 == 0 ? "missing" : "pages";
    const std::size_t bytes = random() % 4 == 0 ? random() % 7 : random() % (4 * kPage);
    std::ofstream(folder.path() + "/pages") << std::string(bytes, 'a');
    std::vector<SavedFiles::Slot> kept;
    std::vector<SlotId> slots;
    for (std::uint64_t i = random() % 4; i > 0; --i) {
      const std::uint64_t wide = random() % 5 == 0 ? random() : random() % 6;
      const SlotId slot{static_cast<std::uint32_t>(wide)};
      if (std::ranges::find(slots, slot) != slots.end()) continue;
      slots.push_back(slot);
      const std::uint64_t held = random() % 3 == 0 ? random() : kPage;
      kept.push_back(
          {.slot = slot, .contents = {random(), random(), static_cast<std::uint32_t>(held)}});
    }
    const SlotId other{static_cast<std::uint32_t>(random() % 9)};
    const bool has = std::ranges::find(slots, other) != slots.end();
    if (!has && random() % 3 == 0) slots.push_back(other);
    ++runs;
    AlignedBuffer to(kPage * std::max<std::size_t>(slots.size(), 1));
    try {
      PageFiles files = open_page_files({folder.path()}, {name}, Existing::to_read);
      SavedPages pages({.files = std::move(files), .slots = kept}, kPage, "threads");
      pages.read(slots, to.data());
      EXPECT_TRUE(slots.empty()) << "a page that nobody wrote";
    } catch (const StrataError&) {
      ++refused;
    }
  });
  if (std::getenv("STRATA_SEED") == nullptr) {
    EXPECT_GT(refused, runs / 4);
  }
}

}  // namespace
}  // namespace strata::strangers_test
