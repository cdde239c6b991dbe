// Memory of PyTorch's CPU tensors, served by a client. The libtorch part is in the companion
// (mempool/torch/companion.cpp), which is compiled against the user's libtorch and calls the functions of
// c_api.h.
#pragma once

#include "adapters/hook.hpp"

namespace mempool::torch_cpu {

Hook& hook() noexcept;

}  // namespace mempool::torch_cpu
