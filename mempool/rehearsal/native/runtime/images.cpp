// Registration of fat binaries. Their layout, as cuobjdump lists it: a wrapper that points at a header, then entries with
// kind, sizes and architecture.
#include "runtime/images.hpp"

#include <cxxabi.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "driver/call.hpp"
#include "settings.hpp"

namespace {

struct Wrapper {
  std::uint32_t magic, version;
  const char* data;
};
struct Header {
  std::uint32_t magic;
  std::uint16_t version, header_bytes;
  std::uint64_t bytes;
};
struct Entry {
  std::uint16_t kind, version;
  std::uint32_t header_bytes;
  std::uint64_t bytes;
  std::uint32_t compressed, unused;
  std::uint16_t minor, major;
  std::uint32_t architecture;
};
constexpr std::uint32_t kWrapper = 0x466243b1, kHeader = 0xba55ed50;
constexpr int kMachineCode = 2;

struct Image {
  std::vector<int> machine, portable;  // architectures of machine code and of PTX
};

std::mutex mutex;
std::vector<std::unique_ptr<Image>>& images() {
  static auto* const made = new std::vector<std::unique_ptr<Image>>;  // never destroyed: libraries unload late
  return *made;
}
struct Kernel {
  const Image* image = nullptr;
  const char* name = nullptr;
  std::unique_ptr<standin::KernelTraits> traits = nullptr;  // made at the first launch: few kernels are launched
};
std::unordered_map<const void*, Kernel>& kernels() {
  static auto* const made = new std::unordered_map<const void*, Kernel>;
  return *made;
}

using Table = std::unordered_map<std::string, std::vector<std::size_t>>;

// Lines of the file: a kernel's name and the bytes of each of its arguments, as `mempool.rehearsal.kernel_arguments` writes
// them.
Table read_arguments() {
  Table table;
  std::ifstream file(standin::settings().arguments);
  for (std::string line, name; std::getline(file, line);) {
    std::istringstream words(line);
    words >> name;
    std::vector<std::size_t>& sizes = table[name];
    for (std::size_t bytes = 0; words >> bytes;) sizes.push_back(bytes);
  }
  return table;
}

standin::KernelTraits traits_of(const char* name) {
  static const auto* const table = new Table(read_arguments());
  const auto has = [&](const char* part) { return std::strstr(name, part) != nullptr; };
  standin::KernelTraits traits;
  if (name == nullptr) return traits;
  char* const readable = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
  traits.name = readable != nullptr ? readable : name;  // kept: works and faults name it
  traits.written = has("elementwise_kernel") ? 0 : has("13reduce_kernel") ? 1 : -1;
  traits.output = has("vectorized_elementwise_kernel") || has("unrolled_elementwise_kernel") ? 2 : traits.written == 0 ? 1 : -1;
  // The table of tensors of a multi-tensor kernel has stale addresses behind its last entry.
  if (const auto found = table->find(name); found != table->end() && !has("multi_tensor_apply")) traits.arguments = &found->second;
  return traits;
}

std::unique_ptr<Image> read(const Wrapper* wrapper) {
  auto image = std::make_unique<Image>();
  Header header{};
  if (wrapper == nullptr || wrapper->magic != kWrapper || wrapper->data == nullptr) return image;
  std::memcpy(&header, wrapper->data, sizeof header);
  if (header.magic != kHeader) return image;
  const char* const end = wrapper->data + header.header_bytes + header.bytes;
  for (const char* at = wrapper->data + header.header_bytes; at + sizeof(Entry) <= end;) {
    Entry entry{};
    std::memcpy(&entry, at, sizeof entry);
    if (entry.header_bytes == 0) break;
    (entry.kind == kMachineCode ? image->machine : image->portable).push_back(static_cast<int>(entry.architecture));
    at += entry.header_bytes + entry.bytes;
  }
  return image;
}

}  // namespace

int standin::architecture_of(const void* kernel) {
  const int own = 10 * settings().major + settings().minor;
  const std::lock_guard<std::mutex> guard(mutex);
  const auto found = kernels().find(kernel);
  if (found == kernels().end() || (found->second.image->machine.empty() && found->second.image->portable.empty())) return own;
  int best = 0;
  for (const int code : found->second.image->machine) {
    if (code / 10 == own / 10 && code <= own && code > best) best = code;
  }
  for (const int code : best == 0 ? found->second.image->portable : std::vector<int>{}) {
    if (code <= own && code > best) best = code;
  }
  return best;
}

standin::KernelTraits standin::traits_of_kernel(const void* kernel) {
  const std::lock_guard<std::mutex> guard(mutex);
  const auto found = kernels().find(kernel);
  if (found == kernels().end()) return {};
  Kernel& known = found->second;
  if (known.traits == nullptr) known.traits = std::make_unique<KernelTraits>(traits_of(known.name));
  return *known.traits;
}

EXPORTED void** __cudaRegisterFatBinary(const Wrapper* wrapper) {
  const std::lock_guard<std::mutex> guard(mutex);
  images().push_back(read(wrapper));
  return reinterpret_cast<void**>(images().back().get());
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED void __cudaRegisterFunction(void** image, const void* kernel, char*, const char* name, int, void*, void*, void*, void*, int*) {
  const std::lock_guard<std::mutex> guard(mutex);
  kernels()[kernel] = {reinterpret_cast<const Image*>(image), name};
}
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
EXPORTED void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, std::size_t, int, int) {}
EXPORTED char __cudaInitModule(void**) { return 1; }
