// A program of seeded runs, as packing.cpp, simulators.cpp and snapshots.cpp are.
//
// Usage: PROGRAM FIRST_SEED SEEDS [spoil]     one JSON object of counts, or the first failure
//
// With `spoil`, a result of each seed is made wrong, which must be noticed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <string>

#include "packing/random.hpp"

namespace seeded {

inline std::map<std::string, unsigned long long> counts;
inline unsigned long long seed_now = 0;

[[noreturn]] inline void fail(const char* part, const char* what) {
  std::fprintf(stderr, "FAILED: seed %llu: %s: %s\n", seed_now, part, what);
  std::fflush(stderr);
  std::_Exit(1);
}

// `events`: those that must all happen, for which the counts begin at 0.
template <class Run>
int main_of(int argc, char** argv, Run run, std::initializer_list<const char*> events) {
  if (argc < 3) return 2;
  const unsigned long long first = std::strtoull(argv[1], nullptr, 10), seeds = std::strtoull(argv[2], nullptr, 10);
  const bool spoil = argc > 3 && std::strcmp(argv[3], "spoil") == 0;
  for (const char* const event : events) counts[event] = 0;
  for (seed_now = first; seed_now < first + seeds; ++seed_now) {
    packing::Random random(seed_now * 0x9e3779b97f4a7c15ULL);
    run(random, spoil);
  }
  std::printf("{");
  for (const auto& [name, count] : counts) std::printf("\"%s\": %llu, ", name.c_str(), count);
  std::printf("\"seeds\": %llu}\n", seeds);
  return 0;
}

}  // namespace seeded
