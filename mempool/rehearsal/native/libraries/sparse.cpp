// cuSPARSE: handles, descriptors and workspaces. Functions that only compute are generated.
//
// Products of a sparse with a dense matrix ask for no workspace in the model: in CSR the default algorithm needs none, and in
// COO some KiB. A product of two sparse matrices has as many elements as the kernels find, which is unknown without them; the
// model takes one of each row of the first factor's entries, so as many as the first factor has.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "driver/call.hpp"

namespace {

constexpr std::size_t kEntry = 12;  // bytes of an entry while entries are sorted or multiplied: column and value

struct Matrix {
  std::int64_t rows = 0, columns = 0, entries = 0;
};

int make(void** into) {
  *into = new Matrix;
  return 0;
}
int make(void** into, std::int64_t rows, std::int64_t columns, std::int64_t entries) {
  *into = new Matrix{rows, columns, entries};
  return 0;
}
int drop(void* made) {
  delete static_cast<Matrix*>(made);
  return 0;
}
template <class Size>
int tell(Size* bytes, std::size_t value) {
  *bytes = static_cast<Size>(value);
  return 0;
}
std::size_t entries(const void* matrix) { return static_cast<std::size_t>(static_cast<const Matrix*>(matrix)->entries); }

}  // namespace

#define OPAQUE(create, destroy)                                 \
  EXPORTED int cusparse##create(void** made) { return make(made); } \
  EXPORTED int cusparse##destroy(void* made) { return drop(made); }
OPAQUE(Create, Destroy)
OPAQUE(CreateMatDescr, DestroyMatDescr)
OPAQUE(CreateBsrsv2Info, DestroyBsrsv2Info)
OPAQUE(CreateBsrsm2Info, DestroyBsrsm2Info)
OPAQUE(SpSV_createDescr, SpSV_destroyDescr)
OPAQUE(SpSM_createDescr, SpSM_destroyDescr)
OPAQUE(SpGEMM_createDescr, SpGEMM_destroyDescr)

EXPORTED int cusparseCreateCsr(void** made, std::int64_t rows, std::int64_t columns, std::int64_t entries, ...) {
  return make(made, rows, columns, entries);
}
EXPORTED int cusparseCreateCoo(void** made, std::int64_t rows, std::int64_t columns, std::int64_t entries, ...) {
  return make(made, rows, columns, entries);
}
EXPORTED int cusparseCreateDnMat(void** made, std::int64_t rows, std::int64_t columns, ...) {
  return make(made, rows, columns, rows * columns);
}
EXPORTED int cusparseCreateDnVec(void** made, std::int64_t size, ...) { return make(made, size, 1, size); }
EXPORTED int cusparseDestroySpMat(void* made) { return drop(made); }
EXPORTED int cusparseDestroyDnMat(void* made) { return drop(made); }
EXPORTED int cusparseDestroyDnVec(void* made) { return drop(made); }
EXPORTED int cusparseSpMatGetSize(const Matrix* matrix, std::int64_t* rows, std::int64_t* columns, std::int64_t* entries) {
  *rows = matrix->rows;
  *columns = matrix->columns;
  *entries = matrix->entries;
  return 0;
}
EXPORTED const char* cusparseGetErrorString(int) { return "unsupported by the stand-in"; }

EXPORTED int cusparseSpMM_bufferSize(void*, int, int, const void*, const void*, const void*, const void*, void*, int, int,
                                     std::size_t* bytes) {
  return tell(bytes, 0);
}
EXPORTED int cusparseSpMV_bufferSize(void*, int, const void*, const void*, const void*, const void*, void*, int, int,
                                     std::size_t* bytes) {
  return tell(bytes, 0);
}
EXPORTED int cusparseSDDMM_bufferSize(void*, int, int, const void*, const void*, const void*, const void*, void*, int, int,
                                      std::size_t* bytes) {
  return tell(bytes, 0);
}
// Solvers analyse the matrix first, and keep the order of its entries.
EXPORTED int cusparseSpSV_bufferSize(void*, int, const void*, const void* matrix, const void*, void*, int, int, void*,
                                     std::size_t* bytes) {
  return tell(bytes, kEntry * entries(matrix));
}
EXPORTED int cusparseSpSM_bufferSize(void*, int, int, const void*, const void* matrix, const void*, void*, int, int, void*,
                                     std::size_t* bytes) {
  return tell(bytes, kEntry * entries(matrix));
}
EXPORTED int cusparseSpGEMM_workEstimation(void*, int, int, const void*, const void* left, const void*, const void*, Matrix* result,
                                           int, int, void*, std::size_t* bytes, void*) {
  result->entries = static_cast<const Matrix*>(left)->entries;
  return tell(bytes, kEntry * entries(left));
}
EXPORTED int cusparseSpGEMM_compute(void*, int, int, const void*, const void* left, const void*, const void*, void*, int, int,
                                    void*, std::size_t* bytes, void*) {
  return tell(bytes, kEntry * entries(left));
}
EXPORTED int cusparseXcoosort_bufferSizeExt(void*, int, int, int entries, const int*, const int*, std::size_t* bytes) {
  return tell(bytes, kEntry * static_cast<std::size_t>(entries));
}
EXPORTED int cusparseXcsrsort_bufferSizeExt(void*, int, int, int entries, const int*, const int*, std::size_t* bytes) {
  return tell(bytes, kEntry * static_cast<std::size_t>(entries));
}
EXPORTED int cusparseXcsrgeam2Nnz(void*, int, int, const void*, int left, const int*, const int*, const void*, int right, const int*,
                                  const int*, const void*, int*, int* entries, void*) {
  return tell(entries, static_cast<std::size_t>(std::max(left, right)));
}

#define OF_EACH_TYPE(T)                                                                                                       \
  EXPORTED int cusparse##T##csrgeam2_bufferSizeExt(void*, int, int, const void*, const void*, int, const void*, const int*,   \
                                                   const int*, const void*, const void*, int, const void*, const int*,        \
                                                   const int*, const void*, const void*, const int*, const int*,              \
                                                   std::size_t* bytes) {                                                      \
    return tell(bytes, 0);                                                                                                    \
  }                                                                                                                           \
  EXPORTED int cusparse##T##bsrsv2_bufferSize(void*, int, int, int, int blocks, const void*, const void*, const int*,         \
                                              const int*, int, void*, int* bytes) {                                           \
    return tell(bytes, kEntry * static_cast<std::size_t>(blocks));                                                            \
  }                                                                                                                           \
  EXPORTED int cusparse##T##bsrsm2_bufferSize(void*, int, int, int, int, int, int blocks, const void*, const void*,           \
                                              const int*, const int*, int, void*, int* bytes) {                               \
    return tell(bytes, kEntry * static_cast<std::size_t>(blocks));                                                            \
  }
OF_EACH_TYPE(S)
OF_EACH_TYPE(D)
OF_EACH_TYPE(C)
OF_EACH_TYPE(Z)
EXPORTED int cusparseXbsrsv2_zeroPivot(void*, void*, int* position) { return tell(position, static_cast<std::size_t>(-1)); }
EXPORTED int cusparseXbsrsm2_zeroPivot(void*, void*, int* position) { return tell(position, static_cast<std::size_t>(-1)); }

// cuSPARSELt: a matrix in which two of four neighbours are zero keeps half of its values, and two bits for each kept one.
EXPORTED int cusparseLtSpMMACompressedSize2(const void*, const std::int64_t* matrix, std::size_t* bytes, std::size_t* buffer) {
  const auto values = static_cast<std::size_t>(matrix[0] * matrix[1]) / 2, wide = static_cast<std::size_t>(matrix[2]);
  *buffer = 0;
  return tell(bytes, values * wide + values / 4);
}
EXPORTED int cusparseLtStructuredDescriptorInit(const void*, std::int64_t* into, std::int64_t rows, std::int64_t columns,
                                                std::int64_t, std::uint32_t, int type, int, int) {
  constexpr int kFloat = 0, kInt32 = 10, kBytes[] = {3, 8, 28, 29};  // values of cudaDataType; 8 and 28 on: one byte
  into[0] = rows;
  into[1] = columns;
  const bool narrow = std::find(std::begin(kBytes), std::end(kBytes), type) != std::end(kBytes);
  into[2] = type == kFloat || type == kInt32 ? 4 : narrow ? 1 : 2;
  return 0;
}
EXPORTED int cusparseLtMatmulGetWorkspace(const void*, const void*, std::size_t* bytes) { return tell(bytes, 0); }
EXPORTED int cusparseLtMatmulAlgGetAttribute(const void*, const void*, int, void* value, std::size_t bytes) {
  std::fill_n(static_cast<char*>(value), bytes, '\0');
  return 0;
}
EXPORTED int cusparseLtMatmulAlgSelectionInit(const void*, void*, const void*, int) { return 0; }
EXPORTED int cusparseLtMatmulSearch(...) { return 0; }
