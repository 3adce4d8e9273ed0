#include "memory/thread.hpp"

#include <pthread.h>

#include <csignal>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

constexpr std::size_t kNameMax = 15;  // the kernel's

// Threads inherit the mask they are born under, so that there is no moment without it.
class SignalsBlocked final {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Thread::Thread(std::string name, std::function<void()> work) {
  STRATA_ASSERT(!name.empty() && work != nullptr);
  const SignalsBlocked blocked;
  thread_ = std::jthread([name = name.substr(0, kNameMax), work = std::move(work)]() noexcept {
    pthread_setname_np(pthread_self(), name.c_str());
    work();
  });
}

}  // namespace strata
