// What the simulated world says: the failure that ends a run, and, when asked, what happens step by step.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace world {

extern bool telling;  // print what happens

#define WORLD_TELL(...)                            \
  do {                                             \
    if (::world::telling) ::world::tell(__VA_ARGS__); \
  } while (false)

[[gnu::format(printf, 1, 2)]] inline void tell(const char* text, ...) {
  std::va_list arguments;
  va_start(arguments, text);
  std::vfprintf(stdout, text, arguments);
  va_end(arguments);
  std::fputc('\n', stdout);
}

// A promise is broken: `kind` says which, in words that a smaller run is compared by.
[[noreturn, gnu::format(printf, 2, 3)]] inline void fail(const char* kind, const char* text, ...) {
  std::fflush(stdout);
  std::fprintf(stderr, "FAILED: %s: ", kind);
  std::va_list arguments;
  va_start(arguments, text);
  std::vfprintf(stderr, text, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::fflush(stderr);
  if (std::getenv("WORLD_ABORT") != nullptr) std::abort();  // for a debugger
  std::_Exit(1);
}

}  // namespace world
