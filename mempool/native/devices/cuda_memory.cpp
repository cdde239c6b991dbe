#include "devices/cuda_memory.hpp"

#include "devices/cuda_growing.hpp"
#include "devices/cuda_whole.hpp"

namespace mempool {

CuPart part_of(CudaKind kind) noexcept {
  switch (kind) {
    case CudaKind::growing: return CuPart::pages;
    case CudaKind::managed: return CuPart::managed;
    case CudaKind::pinned: return CuPart::host;
    default: return CuPart::always;
  }
}

std::unique_ptr<CudaMemory> CudaMemory::make(CudaKind kind, const CudaCalls& calls) {
  switch (kind) {
    case CudaKind::growing: return std::make_unique<CudaGrowing>(calls);
    case CudaKind::managed: return std::make_unique<CudaManaged>(calls);
    case CudaKind::pinned: return std::make_unique<CudaPinned>(calls);
    default: return std::make_unique<CudaPlain>(calls);
  }
}

}  // namespace mempool
