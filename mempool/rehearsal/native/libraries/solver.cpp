// cuSOLVER, and those functions of cuBLAS that answer on the host: handles and workspaces. Functions that only compute are
// generated; the information that they write to the device reads as zero, which is success.
//
// NVIDIA publishes no sizes of workspaces. The model answers with LAPACK's optimal workspace of the routine of the same
// name, with blocks of 64 columns; Jacobi methods, which LAPACK lacks, get a copy of the matrix and of its vectors.
// Functions of the 64-bit interface ask for no host memory.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "driver/call.hpp"

namespace {

using Count = std::int64_t;  // of elements
constexpr Count kBlock = 64;

Count cholesky(Count n) { return kBlock * n; }
Count lu(Count m, Count) { return kBlock * m; }
Count qr(Count, Count n) { return kBlock * n; }
Count apply_q(int side, Count m, Count n) { return kBlock * (side == 0 ? n : m); }
Count svd(Count m, Count n) { return 2 * std::min(m, n) + kBlock * (m + n); }
Count jacobi_svd(Count m, Count n, Count batch = 1) { return batch * (m * n + std::min(m, n) * (m + n)); }
Count symmetric(bool vectors, Count n) { return vectors ? 1 + 6 * n + 2 * n * n : 1 + (kBlock + 2) * n; }
Count jacobi_symmetric(Count n, Count batch = 1) { return batch * (n * n + 2 * n); }
Count general_eigenvalues(Count n) { return (kBlock + 2) * n + 2 * n * n; }

int tell(int* elements, Count count) {
  constexpr Count kMost = 0x7fffffff;
  *elements = static_cast<int>(std::min(count, kMost));
  return 0;
}
// `type`: a cudaDataType.
int tell(std::size_t* on_device, std::size_t* on_host, int type, Count count) {
  constexpr int kDouble = 1, kComplex = 4, kDoubleComplex = 5;
  const std::size_t bytes = type == kDoubleComplex ? 16 : type == kDouble || type == kComplex ? 8 : 4;
  *on_device = bytes * static_cast<std::size_t>(count);
  *on_host = 0;
  return 0;
}

int make_opaque(void** into) {
  *into = new char;
  return 0;
}
int drop_opaque(void* opaque) {
  delete static_cast<char*>(opaque);
  return 0;
}

}  // namespace

#define OPAQUE(name)                                                             \
  EXPORTED int cusolverDnCreate##name(void** made) { return make_opaque(made); } \
  EXPORTED int cusolverDnDestroy##name(void* made) { return drop_opaque(made); }
OPAQUE()
OPAQUE(Params)
OPAQUE(SyevjInfo)
OPAQUE(GesvdjInfo)

using Matrix = const void*;

#define OF_EACH_TYPE(T)                                                                                                        \
  EXPORTED int cusolverDn##T##potrf_bufferSize(void*, int, int n, Matrix, int, int* work) { return tell(work, cholesky(n)); }  \
  EXPORTED int cusolverDn##T##getrf_bufferSize(void*, int m, int n, Matrix, int, int* work) { return tell(work, lu(m, n)); }   \
  EXPORTED int cusolverDn##T##geqrf_bufferSize(void*, int m, int n, Matrix, int, int* work) { return tell(work, qr(m, n)); }   \
  EXPORTED int cusolverDn##T##sytrf_bufferSize(void*, int n, Matrix, int, int* work) { return tell(work, kBlock * n); }        \
  EXPORTED int cusolverDn##T##gesvd_bufferSize(void*, int m, int n, int* work) { return tell(work, svd(m, n)); }               \
  EXPORTED int cusolverDn##T##gesvdj_bufferSize(void*, int, int, int m, int n, Matrix, int, Matrix, Matrix, int, Matrix, int, int* work, \
                                                void*) {                                                                       \
    return tell(work, jacobi_svd(m, n));                                                                                       \
  }                                                                                                                            \
  EXPORTED int cusolverDn##T##gesvdjBatched_bufferSize(void*, int, int m, int n, Matrix, int, Matrix, Matrix, int, Matrix, int, \
                                                       int* work, void*, int batch) {                                          \
    return tell(work, jacobi_svd(m, n, batch));                                                                                \
  }                                                                                                                            \
  EXPORTED int cusolverDn##T##gesvdaStridedBatched_bufferSize(void*, int, int, int m, int n, Matrix, int, long long, Matrix,   \
                                                              long long, Matrix, int, long long, Matrix, int, long long,       \
                                                              int* work, int batch) {                                          \
    return tell(work, jacobi_svd(m, n, batch));                                                                                \
  }                                                                                                                            \
  EXPORTED int cublas##T##geqrfBatched(void*, int, int, Matrix, int, Matrix, int* info, int) { return tell(info, 0); }         \
  EXPORTED int cublas##T##getrsBatched(void*, int, int, int, Matrix, int, Matrix, Matrix, int, int* info, int) {               \
    return tell(info, 0);                                                                                                      \
  }                                                                                                                            \
  EXPORTED int cublas##T##gelsBatched(void*, int, int, int, int, Matrix, int, Matrix, int, int* info, Matrix, int) {           \
    return tell(info, 0);                                                                                                      \
  }
#define OF_EACH_KIND(T, symmetric_name, q)                                                                                     \
  OF_EACH_TYPE(T)                                                                                                              \
  EXPORTED int cusolverDn##T##symmetric_name##d_bufferSize(void*, int vectors, int, int n, Matrix, int, Matrix, int* work) {   \
    return tell(work, symmetric(vectors != 0, n));                                                                             \
  }                                                                                                                            \
  EXPORTED int cusolverDn##T##symmetric_name##j_bufferSize(void*, int, int, int n, Matrix, int, Matrix, int* work, void*) {    \
    return tell(work, jacobi_symmetric(n));                                                                                    \
  }                                                                                                                            \
  EXPORTED int cusolverDn##T##symmetric_name##jBatched_bufferSize(void*, int, int, int n, Matrix, int, Matrix, int* work,      \
                                                                  void*, int batch) {                                          \
    return tell(work, jacobi_symmetric(n, batch));                                                                             \
  }                                                                                                                            \
  EXPORTED int cusolverDn##T##q##gqr_bufferSize(void*, int m, int n, int, Matrix, int, Matrix, int* work) {                    \
    return tell(work, qr(m, n));                                                                                               \
  }                                                                                                                            \
  EXPORTED int cusolverDn##T##q##mqr_bufferSize(void*, int side, int, int m, int n, int, Matrix, int, Matrix, Matrix, int,     \
                                                int* work) {                                                                   \
    return tell(work, apply_q(side, m, n));                                                                                    \
  }
OF_EACH_KIND(S, syev, or)
OF_EACH_KIND(D, syev, or)
OF_EACH_KIND(C, heev, un)
OF_EACH_KIND(Z, heev, un)

EXPORTED int cusolverDnXpotrf_bufferSize(void*, void*, int, Count n, int type, Matrix, Count, int, std::size_t* on_device,
                                         std::size_t* on_host) {
  return tell(on_device, on_host, type, cholesky(n));
}
EXPORTED int cusolverDnXgeqrf_bufferSize(void*, void*, Count m, Count n, int type, Matrix, Count, int, Matrix, int,
                                         std::size_t* on_device, std::size_t* on_host) {
  return tell(on_device, on_host, type, qr(m, n));
}
EXPORTED int cusolverDnXgetrf_bufferSize(void*, void*, Count m, Count n, int type, Matrix, Count, int, std::size_t* on_device,
                                         std::size_t* on_host) {
  return tell(on_device, on_host, type, lu(m, n));
}
EXPORTED int cusolverDnXsytrs_bufferSize(void*, int, Count n, Count columns, int type, Matrix, Count, Matrix, int, Matrix, Count,
                                         std::size_t* on_device, std::size_t* on_host) {
  return tell(on_device, on_host, type, n * columns);
}
EXPORTED int cusolverDnXsyevd_bufferSize(void*, void*, int vectors, int, Count n, int type, Matrix, Count, int, Matrix, int,
                                         std::size_t* on_device, std::size_t* on_host) {
  return tell(on_device, on_host, type, symmetric(vectors != 0, n));
}
EXPORTED int cusolverDnXsyevBatched_bufferSize(void*, void*, int, int, Count n, int type, Matrix, Count, int, Matrix, int,
                                               std::size_t* on_device, std::size_t* on_host, Count batch) {
  return tell(on_device, on_host, type, jacobi_symmetric(n, batch));
}
EXPORTED int cusolverDnXgeev_bufferSize(void*, void*, int, int, Count n, int type, Matrix, Count, int, Matrix, int, Matrix, Count,
                                        int, Matrix, Count, int, std::size_t* on_device, std::size_t* on_host) {
  return tell(on_device, on_host, type, general_eigenvalues(n));
}
