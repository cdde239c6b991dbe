// Settings of the stand-in, read once from the environment when the library is loaded.
#pragma once

#include <cstddef>
#include <string>

namespace standin {

// Contents that a program reads from device memory, unless the program copied the same small range there.
enum class Values { zero, random, copied };  // `copied`: copies move bytes, so that a test sees its own data again

struct Settings {
  int devices = 1;
  std::string name = "NVIDIA H100 80GB HBM3";
  std::size_t memory = std::size_t{81008} << 20;  // bytes that the device reports in all
  std::size_t context = 0;                        // bytes that a process's context takes from each device that it uses
  int major = 9, minor = 0;                       // compute capability
  int processors = 132;                           // streaming multiprocessors
  int runtime = 13000;                            // version of CUDA, as 1000 * major + 10 * minor
  std::string driver;                             // version of the driver, for NVML
  int cudnn = 92000;                              // version of cuDNN, as 10000 * major + 100 * minor + patch
  Values values = Values::zero;
  std::string arguments;  // file with the sizes of kernels' arguments; empty: uses of memory by kernels are unknown
  bool late = false;  // queued work is done only when somebody waits for the work

  // Largest shared memory of a multiprocessor in bytes, by compute capability.
  std::size_t shared_per_processor() const;
};

// The settings of the variable MEMPOOL_STANDIN: "devices=2,memory=85899345920,capability=9.0,name=...". An unknown key or
// a value that is no number ends the process with a line that names the key.
const Settings& settings();

}  // namespace standin
