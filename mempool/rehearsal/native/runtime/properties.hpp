// Properties of a device in the layouts of CUDA 12 and 13.
#pragma once

#include <map>

#include "settings.hpp"

namespace standin {

// Values of cudaDeviceGetAttribute by number, which the driver's attributes share.
std::map<int, int> attributes(const Settings& set);

// Write a cudaDeviceProp for device `device` (an index) to `into`, in the layout of CUDA 13 or of CUDA 12.
void write_properties(void* into, const Settings& set, int device, bool of_13);

}  // namespace standin
