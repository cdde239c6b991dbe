#include "runtime/properties.hpp"

#include <cstdio>
#include <cstring>

namespace standin {

namespace {

constexpr int kThreadsPerBlock = 1024, kRegisters = 65536, kWarp = 32, kL2 = 50 << 20, kShared = 48 << 10;
constexpr int kMost = 0x7fffffff, kClock = 1980000, kMemoryClock = 2619000, kBus = 5120;

int threads_per_processor(const Settings& set) {
  const int capability = 10 * set.major + set.minor;
  if (capability == 75) return 1024;
  return capability == 86 || capability == 89 || capability >= 120 ? 1536 : 2048;
}
std::size_t shared_of_a_block(const Settings& set) { return set.shared_per_processor() - (1 << 10); }

// Writes fields of a cudaDeviceProp by their place, in bytes, in the headers of CUDA 12 and CUDA 13.
class Fields {
 public:
  Fields(void* into, bool of_13) : into_(static_cast<char*>(into)), of_13_(of_13) {
    std::memset(into, 0, of_13 ? 1008 : 1032);
  }
  void put(std::size_t in_12, std::size_t in_13, int value) { std::memcpy(at(in_12, in_13), &value, sizeof value); }
  void put_size(std::size_t in_12, std::size_t in_13, std::size_t value) {
    std::memcpy(at(in_12, in_13), &value, sizeof value);
  }
  char* at(std::size_t in_12, std::size_t in_13) { return into_ + (of_13_ ? in_13 : in_12); }

 private:
  char* const into_;
  const bool of_13_;
};

}  // namespace

std::map<int, int> attributes(const Settings& set) {
  const int shared = static_cast<int>(shared_of_a_block(set));
  const int shared_per_processor = static_cast<int>(set.shared_per_processor());
  return {{1, kThreadsPerBlock}, {2, 1024}, {3, 1024}, {4, 64}, {5, kMost}, {6, 65535}, {7, 65535}, {8, kShared},
          {9, kRegisters}, {10, kWarp}, {11, kMost}, {12, kRegisters}, {13, kClock}, {14, 512}, {16, set.processors},
          {19, 1}, {31, 1}, {36, kMemoryClock}, {37, kBus}, {38, kL2}, {39, threads_per_processor(set)}, {40, 3}, {41, 1},
          {75, set.major}, {76, set.minor}, {78, 1}, {79, 1}, {80, 1}, {81, shared_per_processor}, {82, kRegisters},
          {83, 1}, {87, 2}, {89, 1}, {90, 1}, {91, 1}, {95, 1}, {97, shared}, {99, 1}, {102, 1}, {106, 32}, {111, 1 << 10},
          {115, 1}, {120, set.major >= 9}};
}

void write_properties(void* into, const Settings& set, int device, bool of_13) {
  Fields fields(into, of_13);
  std::snprintf(fields.at(0, 0), 256, "%s", set.name.c_str());
  std::snprintf(fields.at(256, 256), 16, "stand-in-%d", device);
  fields.put_size(288, 288, set.memory);
  fields.put_size(296, 296, kShared);
  fields.put(304, 304, kRegisters);
  fields.put(308, 308, kWarp);
  fields.put_size(312, 312, kMost);
  fields.put(320, 320, kThreadsPerBlock);
  const int block[] = {1024, 1024, 64}, grid[] = {kMost, 65535, 65535};
  std::memcpy(fields.at(324, 324), block, sizeof block);
  std::memcpy(fields.at(336, 336), grid, sizeof grid);
  fields.put_size(352, 352, kRegisters);       // constant memory
  fields.put(360, 360, set.major);
  fields.put(364, 364, set.minor);
  fields.put_size(368, 368, 512);              // alignment of textures
  fields.put_size(376, 376, 32);               // and of their rows
  fields.put(388, 384, set.processors);
  fields.put(400, 392, 1);                     // maps host memory
  fields.put_size(568, 552, 512);              // alignment of surfaces
  fields.put(576, 560, 1);                     // concurrent kernels
  fields.put(584, 568, device + 1);            // PCI bus
  fields.put(600, 584, 3);                     // copy engines
  fields.put(604, 588, 1);                     // unified addresses
  fields.put(612, 592, kBus);
  fields.put(616, 596, kL2);
  fields.put(624, 604, threads_per_processor(set));
  fields.put(628, 608, 1);                     // priorities of streams
  fields.put_size(640, 624, set.shared_per_processor());
  fields.put(648, 632, kRegisters);            // per processor
  fields.put(652, 636, 1);                     // managed memory
  fields.put(676, 656, 1);                     // managed memory used by host and device at once
  fields.put(680, 660, 1);                     // preemption
  fields.put(688, 668, 1);                     // cooperative launch
  fields.put_size(696, 672, shared_of_a_block(set));
  fields.put(712, 688, 32);                    // blocks per processor
  fields.put_size(720, 696, 1 << 10);          // reserved shared memory
  fields.put(728, 704, 1);                     // registers host memory
  fields.put(744, 720, 1);                     // memory pools
  fields.put(772, 748, set.major >= 9);        // launches clusters
  fields.put(776, 752, 1);                     // unified function pointers
  if (!of_13) {
    const std::size_t clock = 348, memory_clock = 608;
    fields.put(clock, clock, kClock);
    fields.put(memory_clock, memory_clock, kMemoryClock);
  }
}

}  // namespace standin
