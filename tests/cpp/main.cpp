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

// GoogleTest chooses tests ahead of this event, and prints its filter behind it: people see the one
// that they gave.
class ShortFilter final : public testing::EmptyTestEventListener {
 public:
  void OnTestProgramStart(const testing::UnitTest&) override { GTEST_FLAG_SET(filter, given_); }

 private:
  const std::string given_ = GTEST_FLAG_GET(filter);
};

int refuse(const std::string& why) {
  std::cerr << why << "\n";
  return 2;
}

// Nothing that ran is nothing that passed.
int run() {
  const int status = RUN_ALL_TESTS();
  const bool none = testing::UnitTest::GetInstance()->test_to_run_count() == 0;
  return none && !GTEST_FLAG_GET(list_tests) ? refuse("no test is chosen") : status;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc == 1) return run();
  std::set<std::string> suites, names;
  std::string others;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& tests = *all.GetTestSuite(i);
    for (int j = 0; j < tests.total_test_count(); ++j) {
      const testing::TestInfo& test = *tests.GetTestInfo(j);
      const std::string suite = suite_of(test),
                        name = std::string(tests.name()) + "." + test.name();
      suites.insert(suite);
      if (!names.insert(name).second) return refuse("two files have " + name);
      if (suite != argv[1]) others += ":" + name;
    }
  }
  if (argc > 2 || !suites.contains(argv[1])) {
    std::string usage = std::string("usage: ") + argv[0] + " [SUITE] [--gtest_filter=...]; suites:";
    for (const std::string& suite : suites) usage += " " + suite;
    return refuse(usage);
  }
  testing::UnitTest::GetInstance()->listeners().Append(new ShortFilter);
  const std::string given = GTEST_FLAG_GET(filter);
  GTEST_FLAG_SET(filter, given + (given.find('-') == std::string::npos ? "-" : "") + others);
  return run();
}
