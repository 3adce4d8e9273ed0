// Whether a sanitizer watches: programs are many times slower then, and memory is theirs to
// replace. STRATA_SANITIZED says the same to the preprocessor, of either compiler.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STRATA_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define STRATA_SANITIZED 1
#endif
#endif
#ifndef STRATA_SANITIZED
#define STRATA_SANITIZED 0
#endif

namespace strata {
inline constexpr bool kSanitized = STRATA_SANITIZED != 0;
}  // namespace strata
