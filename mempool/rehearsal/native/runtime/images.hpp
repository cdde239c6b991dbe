// Compiled kernels of a program: the architectures that its fat binaries have code for.
#pragma once

namespace standin {

// The architecture (10 * major + minor) whose code a device of the settings' capability runs for a kernel, as CUDA chooses:
// the newest machine code of the same major version that is not newer than the device, else the newest PTX that is not
// newer. 0: none, so that a launch fails. Kernels of unknown origin run.
int architecture_of(const void* kernel);

}  // namespace standin
