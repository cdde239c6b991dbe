// PyTorch's CPU tensors, served by a client. libtorch is not here but in the companion (mempool/torch/companion.cpp),
// which is built against the user's own and calls the functions of c_api.h.
#pragma once

#include "hook.hpp"

namespace mempool::torch_cpu {

Hook& hook() noexcept;

}  // namespace mempool::torch_cpu
