// cuFFT, and NVRTC, which compiles to a program that nothing runs.
//
// NVIDIA publishes no sizes of work areas. The model takes one copy of the signals as complex numbers; along a dimension with a
// prime factor above 127, for which cuFFT uses Bluestein's algorithm, two convolutions of the next power of two above twice the
// length.
#include <cstring>

#include "driver/call.hpp"
#include "settings.hpp"

namespace {

std::size_t complex_bytes(int type) {  // a cudaDataType
  constexpr int kComplexDouble = 5, kComplexHalf = 6;
  return type == kComplexDouble ? 16 : type == kComplexHalf ? 4 : 8;
}
std::size_t worked_length(long long length) {
  constexpr long long kLargestPrime = 127;
  long long rest = length;
  for (long long factor = 2; factor <= kLargestPrime && rest > 1; ++factor) {
    while (rest % factor == 0) rest /= factor;
  }
  if (rest <= 1) return static_cast<std::size_t>(length);
  std::size_t convolved = 1;
  while (convolved < 2 * static_cast<std::size_t>(length)) convolved *= 2;
  return 2 * convolved;
}

}  // namespace

EXPORTED int cufftCreate(int* plan) {
  *plan = 1;
  return 0;
}
EXPORTED int cufftSetAutoAllocation(int, int) { return 0; }
EXPORTED int cufftXtMakePlanMany(int, int rank, const long long* lengths, void*, long long, long long, int, void*, long long,
                                 long long, int, long long batch, std::size_t* work_bytes, int execution_type) {
  *work_bytes = static_cast<std::size_t>(batch) * complex_bytes(execution_type);
  for (int i = 0; i < rank; ++i) *work_bytes *= worked_length(lengths[i]);
  return 0;
}

EXPORTED int nvrtcVersion(int* major, int* minor) {
  *major = standin::settings().runtime / 1000;
  *minor = standin::settings().runtime % 1000 / 10;
  return 0;
}
EXPORTED const char* nvrtcGetErrorString(int) { return "no error"; }
EXPORTED int nvrtcCreateProgram(void** program, ...) {
  static char one;
  *program = &one;
  return 0;
}
EXPORTED int nvrtcGetLoweredName(void*, const char* name, const char** lowered) {
  *lowered = name;
  return 0;
}

namespace {

int one_byte(std::size_t* bytes) {
  *bytes = 1;
  return 0;
}
int nothing(char* into) {
  *into = '\0';
  return 0;
}

}  // namespace

EXPORTED int nvrtcGetPTXSize(void*, std::size_t* bytes) { return one_byte(bytes); }
EXPORTED int nvrtcGetPTX(void*, char* into) { return nothing(into); }
EXPORTED int nvrtcGetCUBINSize(void*, std::size_t* bytes) { return one_byte(bytes); }
EXPORTED int nvrtcGetCUBIN(void*, char* into) { return nothing(into); }
EXPORTED int nvrtcGetProgramLogSize(void*, std::size_t* bytes) { return one_byte(bytes); }
EXPORTED int nvrtcGetProgramLog(void*, char* into) { return nothing(into); }
