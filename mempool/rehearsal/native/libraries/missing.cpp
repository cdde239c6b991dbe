// Functions of CUDA's libraries that the stand-in does not have: generated libraries send their calls here.
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

#include "driver/call.hpp"

namespace {

struct Family {
  const char* prefix;
  int not_supported;
};
// Status by which each library says that a function is not supported; longer prefixes come first.
constexpr Family kFamilies[] = {{"cublasLt", 15}, {"cublas", 15}, {"cudnn", 3000}, {"cusolver", 9}, {"cusparseLt", 10},
                                {"cusparse", 10}, {"cufft", 16}, {"curand", 107}, {"nccl", 4}, {"nvrtc", 11},
                                {"nvml", 3}, {"cupti", 38}, {"cuda", 801}, {"cu", 801}};

}  // namespace

// Say once, in one line, which function is missing. Returns the library's status for unsupported functions; functions that
// return a text, by their names, get one.
EXPORTED std::intptr_t mempool_standin_missing(const char* function) {
  for (const char* const ending : {"String", "Name"}) {
    const std::size_t length = std::strlen(function), tail = std::strlen(ending);
    if (length > tail && std::strcmp(function + length - tail, ending) == 0) {
      return reinterpret_cast<std::intptr_t>("unsupported by the stand-in");
    }
  }
  static std::mutex mutex;
  static std::set<std::string> told;
  const std::lock_guard<std::mutex> guard(mutex);
  const bool profiles = std::strncmp(function, "cupti", 5) == 0;  // a profiler goes on without a word
  if (!profiles && told.insert(function).second) {
    std::fprintf(stderr, "mempool: the stand-in for CUDA lacks %s; the call fails as unsupported\n", function);
  }
  for (const Family& family : kFamilies) {
    if (std::strncmp(function, family.prefix, std::strlen(family.prefix)) == 0) return family.not_supported;
  }
  return 1;
}
