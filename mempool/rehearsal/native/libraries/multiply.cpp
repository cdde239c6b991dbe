// cuBLAS and cuBLASLt: handles and the settings that PyTorch reads back. Products themselves compute nothing, so that all
// other functions are generated. PyTorch sets the stream of a handle of cuBLAS for each product, and passes the stream to cuBLASLt.
#include <cstring>
#include <map>

#include "driver/call.hpp"
#include "settings.hpp"

namespace {

constexpr std::size_t kHeuristicResult = 96;  // bytes of cublasLtMatmulHeuristicResult_t: without workspace, and valid

struct Multiplier {  // of the C interface
  fake::Handle stream = 0;
  int pointer_mode = 0, math_mode = 0;
};

int make_opaque(void** into) {
  *into = new char[256]();
  return 0;
}
int drop_opaque(void* opaque) {
  delete[] static_cast<char*>(opaque);
  return 0;
}

}  // namespace

EXPORTED int cublasCreate_v2(Multiplier** handle) {
  *handle = new Multiplier;
  return 0;
}
EXPORTED int cublasDestroy_v2(Multiplier* handle) {
  delete handle;
  return 0;
}
EXPORTED int cublasSetStream_v2(Multiplier* handle, fake::Handle stream) {
  handle->stream = stream;
  return fake::launch_unseen(stream);
}
EXPORTED int cublasGetStream_v2(Multiplier* handle, fake::Handle* stream) {
  *stream = handle->stream;
  return 0;
}
EXPORTED int cublasSetPointerMode_v2(Multiplier* handle, int mode) {
  handle->pointer_mode = mode;
  return 0;
}
EXPORTED int cublasGetPointerMode_v2(Multiplier* handle, int* mode) {
  *mode = handle->pointer_mode;
  return 0;
}
EXPORTED int cublasSetMathMode(Multiplier* handle, int mode) {
  handle->math_mode = mode;
  return 0;
}
EXPORTED int cublasGetMathMode(Multiplier* handle, int* mode) {
  *mode = handle->math_mode;
  return 0;
}
EXPORTED int cublasGetVersion_v2(void*, int* version) {
  *version = standin::settings().runtime / 1000 * 10000;
  return 0;
}
EXPORTED const char* cublasGetStatusName(int) { return "CUBLAS_STATUS_SUCCESS"; }
EXPORTED const char* cublasGetStatusString(int) { return "success"; }

EXPORTED std::size_t cublasLtGetVersion() { return static_cast<std::size_t>(standin::settings().runtime / 1000 * 10000); }
EXPORTED int cublasLtCreate(void** handle) { return make_opaque(handle); }
EXPORTED int cublasLtDestroy(void* handle) { return drop_opaque(handle); }
EXPORTED int cublasLtMatmulDescCreate(void** made, int, int) { return make_opaque(made); }
EXPORTED int cublasLtMatmulDescDestroy(void* made) { return drop_opaque(made); }
EXPORTED int cublasLtMatrixLayoutCreate(void** made, int, std::uint64_t, std::uint64_t, std::int64_t) { return make_opaque(made); }
EXPORTED int cublasLtMatrixLayoutDestroy(void* made) { return drop_opaque(made); }
EXPORTED int cublasLtMatmulPreferenceCreate(void** made) { return make_opaque(made); }
EXPORTED int cublasLtMatmulPreferenceDestroy(void* made) { return drop_opaque(made); }
EXPORTED int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, char* results, int* found) {
  *found = wanted > 0 ? 1 : 0;
  std::memset(results, 0, static_cast<std::size_t>(*found) * kHeuristicResult);
  return 0;
}
EXPORTED int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*,
                            void*, const void*, void*, std::size_t, fake::Handle stream) {
  return fake::launch_unseen(stream);
}
