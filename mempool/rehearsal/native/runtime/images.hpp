// Compiled kernels of a program: the architectures that its fat binaries have code for.
#pragma once

#include <cstddef>
#include <vector>

namespace standin {

// The architecture (10 * major + minor) whose code a device of the settings' capability runs for a kernel, as CUDA chooses:
// the newest machine code of the same major version that is not newer than the device, else the newest PTX that is not
// newer. 0: none, so that a launch fails. Kernels of unknown origin run.
int architecture_of(const void* kernel);

struct KernelTraits {
  const char* name = "a kernel";
  const std::vector<std::size_t>* arguments = nullptr;  // bytes of each; null: unknown
  int written = -1;  // number of the pointer that the kernel writes to, among all in its arguments; -1: unknown
  int output = -1;   // number of the argument whose first pointer the kernel writes to; -1: unknown
};
// Names are those of PyTorch's templates.
KernelTraits traits_of_kernel(const void* kernel);

}  // namespace standin
