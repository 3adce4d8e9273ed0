// The main function of each program of suites. `rank_suites ranks` runs the tests of
// ranks_test.cpp, and `rank_suites` all that it has; --gtest_filter chooses among them.
#include <gtest/gtest.h>

#include <filesystem>
#include <iostream>
#include <set>
#include <string>

namespace {

std::string suite_of(const testing::TestInfo& test) {
  const std::string file = std::filesystem::path(test.file()).stem().string();
  return file.substr(0, file.rfind("_test"));
}

// GoogleTest prints its filter when tests begin, and has read it before: what people see is theirs.
class ShortFilter final : public testing::EmptyTestEventListener {
 public:
  void OnTestProgramStart(const testing::UnitTest&) override { GTEST_FLAG_SET(filter, given_); }

 private:
  const std::string given_ = GTEST_FLAG_GET(filter);
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc == 1) return RUN_ALL_TESTS();
  std::set<std::string> suites;
  std::string others;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& tests = *all.GetTestSuite(i);
    for (int j = 0; j < tests.total_test_count(); ++j) {
      const testing::TestInfo& test = *tests.GetTestInfo(j);
      const std::string suite = suite_of(test);
      suites.insert(suite);
      if (suite != argv[1]) others += std::string(":") + tests.name() + "." + test.name();
    }
  }
  if (argc > 2 || !suites.contains(argv[1])) {
    std::cerr << "usage: " << argv[0] << " [SUITE] [--gtest_filter=...]; suites:";
    for (const std::string& suite : suites) std::cerr << " " << suite;
    std::cerr << "\n";
    return 2;
  }
  testing::UnitTest::GetInstance()->listeners().Append(new ShortFilter);
  const std::string given = GTEST_FLAG_GET(filter);
  GTEST_FLAG_SET(filter, given + (given.find('-') == std::string::npos ? "-" : "") + others);
  return RUN_ALL_TESTS();
}
