// cuFFT, without work areas of its own, and NVRTC, which compiles to a program that nothing runs.
#include <cstring>

#include "driver/call.hpp"
#include "settings.hpp"

EXPORTED int cufftCreate(int* plan) {
  *plan = 1;
  return 0;
}
EXPORTED int cufftSetAutoAllocation(int, int) { return 0; }
EXPORTED int cufftXtMakePlanMany(int, int, void*, void*, long long, long long, int, void*, long long, long long, int, long long,
                                 std::size_t* work_bytes, int) {
  *work_bytes = 0;
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
